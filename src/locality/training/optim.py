"""A run's plan in steps, optimiser with parameter groups, and learning-rate schedule."""

import inspect
import math
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, cast

import timm.optim.muon as reference
import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from timm.scheduler import CosineLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.optim.adamw import adamw

from locality.errors import UserError, unknown, wrap_errors
from locality.training.config import OptimConfig, RunConfig, ScheduleConfig

UNDECIDED = 10**12
"""More steps than any run makes."""


@dataclass(frozen=True)
class Plan:
    """A run's length and schedule in steps (updates of the weights).

    Step numbers count finished updates: 0 is before the first, `steps` after the last.

    Attributes:
        schedule: the settings, with intervals in epochs or steps.
        steps: total updates; `UNDECIDED` in a run of minutes until its decay begins.
        epoch_images: images that count as one epoch.
        batch_size: images per update.
        unit: updates per unit (epoch or step) of the schedule.
        warmup: updates of the warm-up.
        patience: updates without a better evaluation after which to stop; None never stops.
        probes: whether the run begins with a probe, which is evaluated.
    """

    schedule: ScheduleConfig
    steps: int
    epoch_images: float
    batch_size: int
    unit: float
    warmup: int
    patience: float | None
    probes: bool

    @property
    def keeps_best(self) -> bool:
        """Whether the weights of an earlier evaluation may be the run's."""
        return self.patience is not None or self.probes

    @property
    def images(self) -> int:
        """Images seen in the whole run."""
        return self.steps * self.batch_size

    def epoch(self, step: int) -> float:
        """Epochs finished after `step` updates."""
        return step * self.batch_size / self.epoch_images

    def due(self, step: int, every: float) -> bool:
        """Whether `step` is the last, or nearest to a multiple of `every` schedule units."""
        gap = max(1.0, every * self.unit)
        return step == self.steps or (step > 0 and round(round(step / gap) * gap) == step)

    def evaluates(self, step: int) -> bool:
        """Whether the model is evaluated after `step` updates."""
        if step == 0:
            return self.probes
        if self.schedule.minutes is None or step == self.steps:
            return self.due(step, self.schedule.eval_every)
        # The interval doubles, as nobody knows how many steps there will be.
        doublings, rest = divmod(step, max(1, round(self.schedule.eval_every)))
        return not rest and doublings.bit_count() == 1

    @property
    def evaluations(self) -> int:
        """Number of evaluations in the whole run."""
        gap = max(1.0, self.unit * self.schedule.eval_every)
        return math.ceil(self.steps / gap) + self.probes

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is written after `step` updates."""
        if self.keeps_best and self.evaluates(step):
            return True  # it may become the best
        if self.schedule.save_every is None:
            return self.evaluates(step)
        return self.due(step, self.schedule.save_every)

    def snapshots(self, step: int) -> bool:
        """Whether a snapshot of the weights is kept after `step` updates; 0 is before the first."""
        every = self.schedule.snapshot_every
        return every is not None and (step == 0 or self.due(step, every))


def make_plan(config: RunConfig, train_images: int) -> Plan:
    """The plan of a run on a training set of `train_images` images (the fraction kept).

    Raises:
        UserError: if there are no training images, or the run is shorter than one step.
    """
    if train_images < 1:
        raise UserError(f"dataset '{config.data.dataset}' has no images to train on")
    schedule, batch = config.schedule, config.engine.batch_size
    # With constant_images an epoch is as long as a pass over the whole set, which passes a fraction
    # f of it 1/f times (ConViT Table 2).
    fraction = config.data.fraction if schedule.constant_images else 1.0
    epoch_images = train_images / fraction
    unit = 1.0 if schedule.epochs is None else epoch_images / batch
    steps = round(schedule.length * unit)
    if config.optim.freeze is not None:
        steps = 0
    elif schedule.minutes is not None:
        steps = UNDECIDED if schedule.decay is None else schedule.decay[1]
    elif steps < 1:
        raise UserError(
            f"schedule.epochs is {schedule.length:g}, less than one step of {batch} images with "
            f"{train_images} training images; train longer or lower engine.batch_size"
        )
    warmup = min(round(schedule.warmup * unit), steps)
    patience = None if schedule.patience is None else schedule.patience * unit
    probes = config.optim.probes
    return Plan(schedule, steps, epoch_images, batch, unit, warmup, patience, probes)


_MUON = ("muon", "adamuon")


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay, and with their own learning rates.

    No weight decay: vectors and scalars (biases, norms, the gates λ), parameters in the model's
    `no_weight_decay()` (class token, position embedding) and, unless `decay_positions`, the
    positional vectors v_pos. `position_lr_factor` scales the learning rate of v_pos and λ (timm's
    `lr_scale`), `layer_decay` ^ (layers above it) that of each layer, by timm's count of layers.
    Every trainable parameter is in exactly one group; frozen ones are in none.

    For "muon" and "adamuon", `use_muon` marks the groups that these update (`is_matrix`, with
    weight decay): attention and MLP weights, convolution kernels, the classifier. AdamW updates all
    others at the same rate: biases, norms, λ, v_pos, class token, position embeddings and depthwise
    kernels.
    """
    no_decay: set[str] = getattr(model, "no_weight_decay", set)()
    layers: dict[str, int] = model.layer_ids() if config.layer_decay < 1 else {}  # type: ignore[operator]
    top = max(layers.values(), default=0)
    muon = config.name in _MUON
    groups: dict[Any, list[nn.Parameter]] = {(1.0, True, muon): [], (1.0, False, False): []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = name.rpartition(".")[2]
        undecayed = parameter.ndim <= 1 or any(fnmatch(name, each) for each in no_decay)
        positional = own == "v_pos" or name.endswith(".pos_proj.weight")  # the latter in timm
        undecayed |= positional and not config.decay_positions
        gate = own in ("gating", "gating_param")
        factor = config.position_lr_factor if positional or gate else 1.0
        if layers:
            factor *= config.layer_decay ** (top - layers[name])
        matrix = muon and not undecayed and is_matrix(parameter)
        groups.setdefault((factor, not undecayed, matrix), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": config.weight_decay * decayed}
        | ({} if factor == 1 else {"lr_scale": factor})
        | ({"use_muon": matrix} if muon else {})
        for (factor, decayed, matrix), parameters in groups.items()
        if parameters
    ]


def check_optimizer(config: OptimConfig) -> None:
    """Check that timm has the optimiser on this machine, with the given settings."""
    names = [str(name) for name in list_optimizers()]
    if config.name not in names:
        raise unknown("optimiser (optim.name)", config.name, names)
    # Some need other packages, or a GPU.
    with wrap_errors(f"optimiser '{config.name}' cannot be used here", AssertionError, ImportError):
        get_optimizer_class(config.name, bind_defaults=False)
    info = get_optimizer_info(config.name)
    if info.second_order:
        raise UserError(
            f"optimiser '{config.name}' needs second derivatives, which training does not compute; "
            f"choose another, such as adamw"
        )
    for setting, available in (("betas", info.has_betas), ("eps", info.has_eps)):
        if getattr(config, setting) is not None and not available:
            raise UserError(f"optimiser '{config.name}' has no {setting}; leave it null")


def create_optimizer(
    model: nn.Module, config: OptimConfig, batch_size: int
) -> torch.optim.Optimizer:
    """timm's optimiser over `parameter_groups`, its learning rate scaled to the global batch.

    "muon" and "adamuon" are `Muon`, a faster version of timm's.

    Raises:
        UserError: if every parameter is frozen, or the optimiser refuses a setting.
    """
    groups = parameter_groups(model, config)
    if not groups:
        raise UserError("the model has no trainable parameter")
    device = groups[0]["params"][0].device
    given = {name: getattr(config, name) for name in ("betas", "eps", "weight_decay", "momentum")}
    extra: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    extra["lr"] = config.peak_lr(batch_size)
    kind = Muon if config.name in _MUON else get_optimizer_class(config.name, bind_defaults=False)
    # For small models on a CPU an unfused optimiser takes as long as the backward pass.
    if device.type in ("cpu", "cuda") and "fused" in inspect.signature(kind).parameters:
        extra["fused"] = True
    if kind is Muon:
        return Muon(groups, algo=config.name, **extra)
    with wrap_errors(f"optimiser '{config.name}' and its settings", ValueError, IndexError):
        return create_optimizer_v2(groups, opt=config.name, **extra)


def create_schedule(optimizer: torch.optim.Optimizer, plan: Plan) -> Scheduler:
    """The schedule of a plan; `step_update(step)` sets the learning rate of a step.

    It has no state: the rate is a function of the step.
    """
    if plan.schedule.minutes is not None:
        return WarmupStableDecay(optimizer, plan)
    return CosineLRScheduler(
        optimizer,
        t_initial=max(1, plan.steps),
        lr_min=plan.schedule.min_lr,
        warmup_t=plan.warmup,
        warmup_lr_init=plan.schedule.warmup_lr,
        t_in_epochs=False,
        # There is only one cycle; with a decay of 1 timm warns about runs of one step.
        cycle_decay=0.5,
    )


class WarmupStableDecay(Scheduler):
    """Linear warm-up, constant, and, once the plan has a last step, linear decay to `min_lr`."""

    def __init__(self, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        super().__init__(optimizer, "lr", t_in_epochs=False)
        self.plan = plan

    def _get_lr(self, t: int) -> list[float]:
        schedule, warmup = self.plan.schedule, self.plan.warmup
        low, share = (schedule.warmup_lr, t / warmup) if t < warmup else (schedule.min_lr, 1.0)
        if schedule.decay is not None:
            first, last = schedule.decay
            share = min(share, (last - t) / (last - first))
        return [low + share * (value - low) for value in self.base_values]


def is_matrix(parameter: Tensor) -> bool:
    """timm's rule for what Muon may update: matrices, and kernels flattened to (out, in·h·w).

    Excludes vectors, depthwise kernels, embeddings (1, N, C) and matrices with fewer than four rows
    or columns, such as v_pos.
    """
    return bool(reference._is_suitable_for_muon(parameter))


class Muon(reference.Muon):
    """timm's Muon and AdaMuon: the same update and state, but faster.

    Matrices of one shape are orthogonalised as one batch: in bfloat16 on CUDA, as timm does
    everywhere, and in their own precision elsewhere, since most CPUs emulate bfloat16.

    Args:
        groups: parameter groups, updated by Muon or, if `use_muon` is false, by AdamW.
        fused: use torch's fused AdamW.
        settings: arguments of timm's class.
    """

    def __init__(self, groups: list[dict[str, Any]], fused: bool = False, **settings: Any) -> None:
        super().__init__([{"fused": fused} | group for group in groups], **settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not group["use_muon"]:
                self._adamw(parameters, group)
                continue
            shapes = defaultdict(list)
            for parameter in parameters:
                # Orthogonalising commutes with transposing.
                shapes[tuple(sorted(parameter.flatten(1).shape))].append(parameter)
            for same in shapes.values():
                self._muon(same, group)
        return loss

    def _moments(self, parameters: list[Tensor], *names: str) -> list[list[Tensor]]:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] |= {name: torch.zeros_like(parameter) for name in names}
        return [[self.state[p][name] for p in parameters] for name in names]

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        means, squares = self._moments(parameters, "exp_avg", "exp_avg_sq")
        for p in parameters:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), device=p.device if group["fused"] else None)
        gradients: Any = [p.grad for p in parameters]
        steps = [self.state[p]["step"] for p in parameters]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "fused")}
        beta1, beta2 = group["betas"]
        options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        adamw(parameters, gradients, means, squares, [], steps, **options)

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape or its transpose."""
        lr, eps, adaptive = group["lr"], group["eps"], group["algo"] == "adamuon"
        momenta, *squares = self._moments(parameters, "momentum_buffer", *["exp_avg_sq"] * adaptive)
        gradients = [cast(Tensor, p.grad) for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        updates = _orthogonalised(momenta, group)
        if adaptive:
            beta2 = group["betas"][1]
            torch._foreach_mul_(squares[0], beta2)
            torch._foreach_addcmul_(squares[0], updates, updates, 1 - beta2)
            roots = torch._foreach_sqrt(squares[0])
            torch._foreach_add_(roots, eps)
            torch._foreach_div_(updates, roots)
            norms = torch._foreach_norm(updates)
            torch._foreach_add_(norms, eps)
            torch._foreach_div_(updates, norms)
            size = parameters[0].numel()
        else:
            size = max(parameters[0].flatten(1).shape)
        # An orthogonal matrix times 0.2 √(longer side) has the root mean square of Adam's updates.
        torch._foreach_add_(parameters, updates, alpha=-lr * 0.2 * size**0.5)


def _orthogonalised(matrices: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Approximately U Vᵀ of each matrix U S Vᵀ, by timm's Newton-Schulz iteration on a batch."""
    flat = [matrix.flatten(1) for matrix in matrices]
    wide = torch.stack([m.mT if m.shape[0] > m.shape[1] else m for m in flat])
    found = reference.zeropower_via_newtonschulz(
        wide,
        group["ns_steps"],
        reference.resolve_ns_coefficients(group["ns_coefficients"], reference._COEFFICIENTS),
        eps=group["eps"],
        dtype=torch.bfloat16 if wide.is_cuda else wide.dtype,
    ).to(wide.dtype)
    return [
        (new if new.shape == old.shape else new.mT).reshape(matrix.shape)
        for new, old, matrix in zip(found, flat, matrices, strict=True)
    ]
