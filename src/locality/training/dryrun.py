"""A run without running it: everything checked and counted, nothing computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from locality import checks, machine
from locality.errors import UserError
from locality.training.config import RunConfig
from locality.training.logs import duration
from locality.training.runs import RunFolder
from locality.training.setup import Preview, build_model, preview


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
