"""From a configuration to the parts of a run: model, processes, and what is known beforehand."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy

from locality.data import DataSplits, open_data
from locality.data.folder import some
from locality.errors import UserError
from locality.models import ImageClassifier, build, count_macs, count_parameters
from locality.training.config import EngineConfig, RunConfig
from locality.training.objective import check_teacher
from locality.training.optim import check_optimizer
from locality.training.plan import Plan, make_plan
from locality.training.precision import choose_precision
from locality.training.randomness import seed_initial_weights
from locality.training.warm_start import check_weights, start_from

# How Fabric calls what `engine.strategy` says.
_START_METHODS = {"ddp_spawn": "spawn", "ddp_fork": "fork"}
_FABRIC_PRECISION = {"fp32": "32-true", "bf16-mixed": "bf16-mixed"}

# Fabric announces on every start what a run prints itself.
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Preview:
    """What is known of a run before its first step.

    Attributes:
        splits: the data.
        plan: steps and calendar.
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


def build_model(config: RunConfig, num_classes: int) -> ImageClassifier:
    """The architecture of a run, with the weights its seed draws.

    Raises:
        UserError: if the model cannot be built.
    """
    seed_initial_weights(config.seed)
    model = build(
        config.model.name,
        num_classes=num_classes,
        in_chans=3,
        img_size=config.model.img_size,
        patch_size=config.model.patch_size,
        **config.model.overrides,
    )
    if config.engine.grad_checkpointing:
        model.set_grad_checkpointing(True)
    return model


def starting_model(config: RunConfig, num_classes: int) -> tuple[ImageClassifier, list[str]]:
    """The model of a run as its first step finds it, and what was noticed on the way.

    Raises:
        UserError: if the model cannot be built, or `model.weights` are another architecture's.
    """
    model = build_model(config, num_classes)
    if config.model.weights is None:
        return model, []
    return model, start_from(model, config.model.weights)


def meta_model(config: RunConfig, num_classes: int) -> ImageClassifier:
    """The model of a run without data in its tensors.

    Raises:
        UserError: if the model cannot be built.
    """
    with torch.device("meta"):
        return build_model(config, num_classes)


def resolve_accelerator(wanted: str) -> str:
    """ "auto" resolved: CUDA if there is a GPU, then Apple's, then the processor.

    Raises:
        UserError: if the one asked for is not there.
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available()}
    available["mps"] = torch.backends.mps.is_available()
    if wanted == "auto":
        return next(name for name in ("cuda", "mps", "cpu") if available[name])
    if not available[wanted]:
        raise UserError(
            f"engine.accelerator is '{wanted}', which this machine does not have; "
            f"available: {', '.join(name for name in available if available[name])}"
        )
    return wanted


def launched_from_outside() -> bool:
    """Whether torchrun or srun has started this process, and the others if there are any."""
    return TorchElasticEnvironment.detect() or SLURMEnvironment.detect()


def count_processes(engine: EngineConfig, device_type: str) -> int:
    """Processes over all machines."""
    devices, nodes = _layout(engine, device_type)
    return devices * nodes


def _layout(engine: EngineConfig, device_type: str) -> tuple[int, int]:
    """Processes per machine, and machines; torchrun and srun know better than the settings.

    Raises:
        UserError: if there are fewer devices than asked for.
    """
    if TorchElasticEnvironment.detect():
        local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        return local, world // local
    if SLURMEnvironment.detect():
        tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
        return tasks // nodes, nodes
    there = torch.cuda.device_count() if device_type == "cuda" else 1
    if device_type == "cuda" and engine.devices > there:
        raise UserError(f"engine.devices is {engine.devices} and there are {there} GPUs")
    return engine.devices or there, engine.num_nodes


def create_fabric(engine: EngineConfig, precision: str) -> Fabric:
    """Lightning Fabric for the devices, processes and precision of a run.

    Args:
        engine: the settings.
        precision: resolved.
    """
    device_type = resolve_accelerator(engine.accelerator)
    devices, nodes = _layout(engine, device_type)
    strategy: Any = "auto"
    if devices * nodes > 1 or engine.strategy != "auto":
        strategy = DDPStrategy(
            start_method=_START_METHODS.get(engine.strategy, "popen"),  # type: ignore[arg-type]
            gradient_as_bucket_view=True,
        )
    if device_type == "cpu" and not torch.cuda.is_available():
        # torch's optimisers ask for GPUs on every step. Where there are none, looking for NVIDIA's
        # library each time costs 2% of a small model's step; told that none is visible, they ask
        # no further.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    if engine.deterministic:
        # Read when CUDA starts; without it cuBLAS may choose another algorithm each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return Fabric(
        accelerator=device_type,
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        precision=_FABRIC_PRECISION[precision],  # type: ignore[arg-type]
    )
