"""What is minimised, and how: cross entropy, smoothed, mixed, distilled; optimiser and rates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from locality.checkpoints import open_model
from locality.data.config import AugmentConfig, Preprocessing
from locality.errors import UserError, unknown
from locality.models import ImageClassifier
from locality.training.config import ObjectiveConfig, OptimConfig, Plan


class Objective:
    """Mixes batches and measures the loss.

    Args:
        config: the loss.
        augment: its mixup and cutmix.
        num_classes: of the model and the data.
        teacher: for distillation; maps the student's images to logits.
        autocast: the context in which the teacher computes.
        class_weights: (classes,) of each class's images in the labels' loss; None: all alike.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        augment: AugmentConfig,
        num_classes: int,
        teacher: Teacher | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        class_weights: Tensor | None = None,
    ) -> None:
        self.config = config
        self.teacher = teacher
        self.autocast = autocast
        self.class_weights = class_weights
        self._mixup: Mixup | None = None
        if (augment.mixup or augment.cutmix) and augment.mixup_prob:
            self._mixup = Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                prob=augment.mixup_prob,
                switch_prob=augment.mixup_switch_prob,
                label_smoothing=config.label_smoothing,
                num_classes=num_classes,
            )

    def wrap(self, model: ImageClassifier) -> nn.Module:
        """The module that training calls: images → outputs, of which the loss is computed."""
        return model

    def logits(self, outputs: Tensor) -> Tensor:
        """The logits (B, classes) of which the training accuracy is computed."""
        return outputs

    def mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mixup or cutmix, if the run has them, drawing from numpy's generator.

        Returns:
            images, and targets: the labels (B,), or probabilities (B, classes) after mixing.
        """
        return (images, labels) if self._mixup is None else self._mixup(images, labels)

    def loss(self, outputs: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        """The mean loss of a batch, a float32 scalar.

        Args:
            outputs: of the module that `wrap` returned; here logits (B, classes).
            targets, images: as `mix` returned them.
        """
        smoothing = self.config.label_smoothing if targets.ndim == 1 else 0.0
        logits = outputs.float()
        loss = F.cross_entropy(logits, targets, self.class_weights, label_smoothing=smoothing)
        if self.teacher is None:
            return loss
        share = self.config.teacher_share
        return (1 - share) * loss + share * self._distillation(logits, images)

    def _distillation(self, logits: Tensor, images: Tensor) -> Tensor:
        assert self.teacher is not None
        with self.autocast():
            taught = self.teacher(images).float()
        if self.config.distillation == "hard":
            return F.cross_entropy(logits, taught.argmax(dim=1))
        # Gradients of softened probabilities shrink as 1/τ² (Hinton et al., 2015).
        tau = self.config.temperature
        student = F.log_softmax(logits / tau, dim=1)
        target = F.log_softmax(taught / tau, dim=1)
        return F.kl_div(student, target, reduction="batchmean", log_target=True) * tau**2


def class_weights(labels: npt.NDArray[np.int64], num_classes: int) -> Tensor:
    """(classes,): the mean size of a class over the size of each; they average 1 over images."""
    sizes = np.bincount(labels, minlength=num_classes)
    present = np.count_nonzero(sizes)
    return torch.from_numpy(len(labels) / (present * np.maximum(sizes, 1))).float()


class Teacher(nn.Module):
    """A trained model that labels the student's images.

    It sees the same augmented image as the student, at its own normalisation and size.

    Args:
        model: images → logits.
        own: the size and normalisation it was trained with.
        student: those of the student's images.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, own: Preprocessing, student: Preprocessing) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.size = own.size
        # (x·s + m − m′) / s′ as one scale and one shift.
        own_mean, own_std = _channels(own.mean), _channels(own.std)
        scale, shift = _channels(student.std) / own_std, _channels(student.mean) - own_mean
        self.same = own.mean == student.mean and own.std == student.std
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift / own_std, persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) as the student sees them → logits (B, classes)."""
        if not self.same:
            images = images * self.scale + self.shift
        if tuple(images.shape[-2:]) != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return self.model(images)

    def train(self, mode: bool = True) -> Teacher:
        """A teacher is always in evaluation mode."""
        return super().train(False)


def _channels(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def check_teacher(config: ObjectiveConfig) -> None:
    """Check that the teacher exists, without loading it.

    Raises:
        UserError: if it does not.
    """
    if config.teacher is None:
        return
    if config.teacher_weights is not None and not Path(config.teacher_weights).is_file():
        raise UserError(f"objective.teacher_weights: there is no file {config.teacher_weights}")
    if Path(config.teacher).is_dir() or timm.is_model(config.teacher.partition(".")[0]):
        return
    # timm's own ways of naming a model with its weights: a repository on the hub, or a folder.
    source, _, place = config.teacher.partition(":")
    if source in ("hf-hub", "hf_hub") or (source == "local-dir" and Path(place).is_dir()):
        return
    if "/" in config.teacher:
        raise UserError(f"objective.teacher: there is no run folder {config.teacher}")
    raise unknown("teacher", config.teacher, timm.list_models())


def load_teacher(config: ObjectiveConfig, student: Preprocessing, num_classes: int) -> Teacher:
    """The teacher that a configuration names: a run folder's model or timm's.

    Raises:
        UserError: if there is none of that name, or it knows other classes than the student.
    """
    assert config.teacher is not None
    model: nn.Module
    if Path(config.teacher).is_dir():
        opened = open_model(config.teacher)
        model, own = opened.module(), opened.preprocessing
    else:
        model = timm.create_model(
            config.teacher,
            pretrained=config.teacher_weights is None,
            checkpoint_path=config.teacher_weights or "",
        )
        wanted = timm.data.resolve_model_data_config(model)
        own = Preprocessing(
            tuple(wanted["input_size"][-2:]), tuple(wanted["mean"]), tuple(wanted["std"])
        )
    classes = getattr(model, "num_classes", num_classes)
    if classes != num_classes:
        raise UserError(
            f"teacher '{config.teacher}' tells {classes} classes apart and the data has "
            f"{num_classes}; distillation needs a teacher for the same classes"
        )
    return Teacher(model, own, student)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """The trainable parameters in groups: those that weight decay pulls at, and the others.

    Left alone are all vectors and scalars (biases, norms, the gates λ), what the model names in
    `no_weight_decay()` (class token, position embedding) and, unless `decay_positions`, the
    positional vectors v_pos. v_pos and λ have groups of their own where a factor multiplies their
    rate (timm's `lr_scale`), and so has each layer, by timm's count of layers, where
    `layer_decay` ^ (layers above it) does. Every trainable parameter is in exactly one group;
    frozen ones are in none.
    """
    spared: set[str] = getattr(model, "no_weight_decay", set)()
    layers: dict[str, int] = model.layer_ids() if config.layer_decay < 1 else {}  # type: ignore[operator]
    top = max(layers.values(), default=0)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = name.rpartition(".")[2]
        left_alone = parameter.ndim <= 1 or name in spared
        left_alone |= own == "v_pos" and not config.decay_positions
        factor = config.position_lr_factor if own in ("v_pos", "gating") else 1.0
        factor *= config.layer_decay ** (top - layers.get(name, top))
        groups.setdefault((factor, not left_alone), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": config.weight_decay * decayed}
        | ({} if factor == 1 else {"lr_scale": factor})
        for (factor, decayed), parameters in groups.items()
        if parameters
    ]


def check_optimizer(config: OptimConfig) -> None:
    """Check that timm has the optimiser and that it has the settings given.

    Raises:
        UserError: if not.
    """
    names = [str(name) for name in list_optimizers()]
    if config.name not in names:
        raise unknown("optimiser (optim.name)", config.name, names)
    info = get_optimizer_info(config.name)
    for setting, available in (("betas", info.has_betas), ("eps", info.has_eps)):
        if getattr(config, setting) is not None and not available:
            raise UserError(
                f"optimiser '{config.name}' has no {setting}; leave optim.{setting} null"
            )


def create_optimizer(
    model: nn.Module, config: OptimConfig, batch_size: int
) -> torch.optim.Optimizer:
    """timm's optimiser over `parameter_groups`, its rate scaled to the global batch.

    Raises:
        UserError: as `check_optimizer`, or if every parameter is frozen.
    """
    check_optimizer(config)
    groups = parameter_groups(model, config)
    if not groups:
        raise UserError("the model has no trainable parameter")
    device = groups[0]["params"][0].device
    given = {"betas": config.betas, "eps": config.eps}
    extra: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    # One call for all parameters instead of one per operation and parameter: for small models on
    # a processor the loop over parameters costs as much as the backward pass.
    if device.type in ("cpu", "cuda") and _has_fused(config.name):
        extra["fused"] = True
    return create_optimizer_v2(
        groups,
        opt=config.name,
        lr=config.peak_lr(batch_size),
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        **extra,
    )


def _has_fused(name: str) -> bool:
    kind = get_optimizer_class(name, bind_defaults=False)
    return "fused" in inspect.signature(kind).parameters


def create_schedule(optimizer: torch.optim.Optimizer, plan: Plan) -> CosineLRScheduler:
    """timm's cosine schedule, to be asked for every step: `step_update(step)`.

    It has no state of its own: the rate is a function of the step.
    """
    return CosineLRScheduler(
        optimizer,
        t_initial=plan.steps - plan.cooldown,
        lr_min=plan.schedule.min_lr,
        warmup_t=plan.warmup,
        warmup_lr_init=plan.schedule.warmup_lr,
        t_in_epochs=False,
        # Of a second cycle, which there is none of: for one step and a decay of 1 timm warns.
        cycle_decay=0.5,
    )
