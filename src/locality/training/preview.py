"""A run before its first step: everything checked and counted, nothing computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from locality import checks, machine
from locality.data import DataSplits, open_data
from locality.data.folder import some
from locality.errors import UserError
from locality.models import count_macs, count_parameters
from locality.training.config import RunConfig
from locality.training.distributed import choose_precision, count_processes, resolve_accelerator
from locality.training.load import build_model, check_teacher, check_weights, meta_model
from locality.training.optim import check_optimizer
from locality.training.plan import Plan, make_plan
from locality.training.recorder import duration
from locality.training.runs import RunFolder


@dataclass(frozen=True)
class Preview:
    """What is known of a run before its first step.

    Attributes:
        splits: the data.
        plan: steps, and when something is due.
        world_size: processes.
        micro_batch: images per process and pass.
        precision: resolved.
        parameters: of the model; `trainable` of them are trained.
        macs: multiply-accumulates of one image's forward pass.
        buffers: bytes of the model's buffers.
        notes: what is worth knowing about the data before training on it.
    """

    splits: DataSplits
    plan: Plan
    world_size: int
    micro_batch: int
    precision: str
    device_type: str
    parameters: int
    trainable: int
    macs: int
    buffers: int
    img_size: tuple[int, int]
    notes: list[str]

    def checkpoint_bytes(self, config: RunConfig) -> int:
        """About the size of a checkpoint: weights, average, and two moments of the gradients."""
        weights = 4 * self.parameters + self.buffers
        copies = 1 if config.engine.ema_decay is None else 2
        return weights * copies + 8 * self.trainable + (1 << 20)


def preview(config: RunConfig, splits: DataSplits | None = None, resumes: bool = False) -> Preview:
    """Open the data and build the model on the meta device, checking all that can be checked.

    Args:
        config: the run.
        splits: its data, if they are open already.
        resumes: it goes on from a checkpoint, and no longer needs the weights it started from.

    Raises:
        UserError: if the run cannot work as it is configured.
    """
    # Whatever is wrong with the settings shows before a large dataset is read.
    check_optimizer(config.optim)
    check_teacher(config.objective)
    if not resumes:
        check_weights(config.model.weights)
    meta_model(config, num_classes=1)
    splits = open_data(config.data, config.seed) if splits is None else splits
    if not len(splits.val):
        raise UserError(f"dataset '{config.data.dataset}' has no images to evaluate on")
    plan = make_plan(config, len(splits.train))
    notes = look_at_classes(splits, plan)
    model = meta_model(config, len(splits.classes))
    device_type = resolve_accelerator(config.engine.accelerator)
    world_size = count_processes(config.engine, device_type)
    micro_batch = config.engine.micro_batch(world_size)
    if config.mixes and micro_batch % 2:
        raise UserError(
            f"mixup and cutmix mix pairs, so each process needs an even number of images per pass, "
            f"not {micro_batch}; change engine.batch_size or engine.accumulate"
        )
    macs = count_macs(model)
    return Preview(
        splits=splits,
        plan=plan,
        world_size=world_size,
        micro_batch=micro_batch,
        precision=choose_precision(config.engine.precision, torch.device(device_type), macs),
        device_type=device_type,
        parameters=count_parameters(model),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        macs=macs,
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        img_size=model.img_size,
        notes=notes,
    )


def look_at_classes(splits: DataSplits, plan: Plan) -> list[str]:
    """What is odd about classes and batches, in sentences.

    Raises:
        UserError: if there is nothing to tell apart.
    """
    if len(splits.classes) < 2:
        raise UserError(
            f"dataset '{splits.name}' has {len(splits.classes)} class; a classifier needs at "
            f"least two: one folder of images per class"
        )
    notes = []
    for source, what in ((splits.train, "training"), (splits.val, "validation")):
        counts = np.bincount(source.labels, minlength=len(splits.classes))
        if empty := [splits.classes[label] for label in np.flatnonzero(counts == 0)]:
            notes.append(
                f"{len(empty)} of {len(splits.classes):,} classes have no {what} images: "
                f"{some(empty)}"
            )
    if plan.batch_size > len(splits.train):
        notes.append(
            f"a batch of {plan.batch_size:,} is larger than the training set: every step sees "
            f"images of {len(splits.train):,} more than once"
        )
    return notes


@dataclass(frozen=True)
class DryRun:
    """What a run comes to.

    Attributes:
        preview: data, plan, parameters and MACs.
        activation_bytes: held for the backward pass by each process.
        state_bytes: weights, gradients, moments and average, in each process.
        checkpoint_bytes: of one checkpoint file.
        images_per_second: as given, over all processes.
    """

    config: RunConfig
    preview: Preview
    activation_bytes: int
    state_bytes: int
    checkpoint_bytes: int
    images_per_second: float | None

    @property
    def hours(self) -> float | None:
        """Training time, if the speed is known; evaluations come on top."""
        if self.images_per_second is None:
            return None
        return self.preview.plan.images / self.images_per_second / 3600

    def __str__(self) -> str:
        seen, plan, splits = self.preview, self.preview.plan, self.preview.splits
        flops = 6 * seen.macs * plan.images
        time = "give images_per_second to have it estimated"
        if self.hours is not None:
            time = (
                f"{duration(3600 * self.hours)} at {self.images_per_second:g} images/s "
                f"({self.hours:.3g} h)"
            )
        rows = [
            ("model", f"{self.config.model.name}, images of {seen.img_size[0]}×{seen.img_size[1]}"),
            ("parameters", f"{seen.parameters:,} ({seen.trainable:,} trained)"),
            ("forward pass", f"{seen.macs / 1e9:.4g} GMACs per image"),
            ("classes", f"{len(splits.classes):,}"),
            ("training images", f"{len(splits.train):,}"),
            ("validation images", f"{len(splits.val):,}"),
            ("steps", f"{plan.steps:,} of {plan.batch_size:,} images"),
            ("images seen", f"{plan.images:,}, {plan.epoch(plan.steps):.4g} epochs"),
            ("warm-up, cool-down", f"{plan.warmup:,}, {plan.cooldown:,} steps"),
            ("learning rate", f"{self.config.optim.peak_lr(plan.batch_size):.3g}"),
            (
                "processes",
                f"{seen.world_size} × {seen.device_type}, {seen.precision}, "
                f"{seen.micro_batch} images per pass",
            ),
            ("activations", f"{self.activation_bytes / 1e9:.3g} GB per process"),
            ("weights and moments", f"{self.state_bytes / 1e9:.3g} GB per process"),
            ("checkpoint", f"{self.checkpoint_bytes / 1e9:.3g} GB"),
            ("arithmetic", f"{flops:.3g} operations"),
            ("time", time),
            *(("note", note) for note in seen.notes),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def dry_run(
    config: RunConfig, folder: Path | str | None = None, images_per_second: float | None = None
) -> DryRun:
    """Check a run and count what it will cost, without data in any tensor.

    Args:
        config: the run.
        folder: checked for belonging to this configuration, if it exists. Nothing is written.
        images_per_second: training speed over all processes, for the estimate of time.

    Raises:
        UserError: whatever `train` would refuse.
    """
    if images_per_second is not None:
        checks.number("images_per_second", images_per_second, 0, above=True)
    run = None if folder is None else RunFolder(folder)
    seen = preview(config, resumes=run is not None and run.has_begun())
    if run is not None:
        run.check(config)
    activations = saved_activations(config, seen)
    _refuse_too_large(config, seen, activations)
    return DryRun(
        config,
        seen,
        activation_bytes=activations,
        state_bytes=_state_bytes(config, seen),
        checkpoint_bytes=seen.checkpoint_bytes(config),
        images_per_second=images_per_second,
    )


def check_memory(config: RunConfig, seen: Preview) -> None:
    """Check that a run fits this machine's memory.

    Activations are only counted where they could be too many: a layer saves no more bytes than it
    does multiplications, by a wide margin.

    Raises:
        UserError: if it does not.
    """
    if seen.macs * seen.micro_batch > machine.memory(seen.device_type):
        _refuse_too_large(config, seen, saved_activations(config, seen))


def _refuse_too_large(config: RunConfig, seen: Preview, activations: int) -> None:
    there = machine.memory(seen.device_type)
    # The processes of one machine share its memory; GPUs have their own.
    sharing = seen.world_size // config.engine.num_nodes if seen.device_type == "cpu" else 1
    needed = sharing * (activations + _state_bytes(config, seen))
    if needed > there:
        raise UserError(
            f"a step on {seen.micro_batch:,} images at once needs {needed / 1e9:.3g} GB and there "
            f"are {there / 1e9:.3g} GB of memory; lower engine.batch_size, raise "
            f"engine.accumulate, or set engine.grad_checkpointing"
        )


def _state_bytes(config: RunConfig, seen: Preview) -> int:
    return seen.checkpoint_bytes(config) + 4 * seen.trainable


def saved_activations(config: RunConfig, seen: Preview) -> int:
    """Bytes that one process holds between a forward and its backward pass, weights left out.

    Measured on one real pass over tensors without data: every tensor that autograd saves, each
    storage once.
    """
    storages: dict[int, tuple[int, Tensor]] = {}
    parameters: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            # The tensor is kept so that no other storage gets its address.
            storages[storage._cdata] = (storage.nbytes(), tensor)
        return tensor

    kind = "cuda" if seen.device_type == "cuda" else "cpu"
    with torch.device("meta"):
        model = build_model(config, len(seen.splits.classes)).train()
    # Fake tensors choose the kernels of a real device, which decide what is saved; initialising
    # weights asks for numbers, which fake tensors have not, so that is done before.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(kind):
        model.to_empty(device=kind)
        parameters |= {p.untyped_storage()._cdata for p in model.parameters()}
        images = torch.empty(seen.micro_batch, 3, *seen.img_size)
        labels = torch.zeros(seen.micro_batch, dtype=torch.int64)
        mixed = seen.precision == "bf16-mixed"
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast(kind, torch.bfloat16, enabled=mixed),
        ):
            loss = F.cross_entropy(model(images).float(), labels)
        del loss
    return sum(size for size, _ in storages.values())
