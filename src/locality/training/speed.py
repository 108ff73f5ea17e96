"""The speed of training on this machine, and a dry run: what a run will cost at that speed.

Real batches are loaded and steps made on random images."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from locality import checks, machine
from locality.data import train_loader
from locality.training.config import RunConfig
from locality.training.devices import (
    autocast,
    resolve_accelerator,
)
from locality.training.model import meta_model
from locality.training.optim import create_optimizer
from locality.training.resolved_run import ResolvedRun
from locality.training.run_folder import RunFolder

# Multiply-accumulates of a timed step; a larger step is timed on a part of its batch.
_TIMING_MACS = 2e10
_TIMING_STEPS = 3
_TIMING_SECONDS = 2.0
_LOADING_IMAGES = 8


@dataclass(frozen=True)
class Speed:
    """Seconds per image.

    Attributes:
        loading: to read, decode and augment it in one process.
        computing: to train on it, over all devices.
        workers: loading processes of the run.
        on_processor: whether the model computes on the CPU, whose cores loading shares.
    """

    loading: float
    computing: float
    workers: int
    on_processor: bool

    @property
    def training(self) -> float:
        """To load an image and train on it."""
        return self._together(self.computing)

    @property
    def evaluating(self) -> float:
        """To load and evaluate it: a forward pass costs a third of a step."""
        return self._together(self.computing / 3)

    @property
    def bottleneck(self) -> str:
        """The rates of loading and training, and which is slower."""
        reading, model = max(1, self.workers) / self.loading, 1 / self.computing
        who = f"{self.workers} workers" if self.workers else "the training process"
        slower = (
            "reading images is the bottleneck; raise data.workers"
            if reading < model
            else "the model is the bottleneck"
        )
        return f"{reading:.4g} images/s read by {who}, {model:.4g} trained on: {slower}"

    def _together(self, computing: float) -> float:
        if not self.workers:
            return computing + self.loading
        if self.on_processor:
            # The threads of a step wait for the one whose core a worker occupies: with two cores
            # workers gain nothing.
            return computing + self.loading * min(1, 2 / machine.processors())
        return max(computing, self.loading / self.workers)


def measure_speed(run: ResolvedRun) -> Speed:
    """Measure the speed of a run on this machine, which takes a few seconds."""
    config = run.config
    images = timing_batch_size(run.micro_batch, 3 * run.macs)
    steps = time_steps(
        config, len(run.splits.classes), images, run.precision, seconds=_TIMING_SECONDS
    )
    batches = iter(
        train_loader(
            run.splits.train,
            config.augment,
            config.input.at(run.img_size),
            batch_size=_LOADING_IMAGES,
            seed=config.seed,
            stop_step=2,
        )
    )
    next(batches)  # warm-up
    started = time.perf_counter()
    next(batches)
    return Speed(
        (time.perf_counter() - started) / _LOADING_IMAGES,
        sum(steps) / len(steps) / images / run.world_size,
        config.data.workers * run.world_size,
        run.device_type == "cpu",
    )


def timing_batch_size(batch_size: int, macs: float) -> int:
    """How many images of a batch to time a step on, given the multiply-accumulates of each."""
    return int(min(batch_size, max(1, _TIMING_MACS // macs)))


def time_steps(
    config: RunConfig, classes: int, images: int, precision: str = "fp32", seconds: float = 0.0
) -> list[float]:
    """Seconds of training steps on random images, after a warm-up step.

    Args:
        config: its model, optimiser and device count.
        classes: number of classes.
        images: batch size.
        precision: resolved.
        seconds: how long to go on, for one step at least; for three steps unless given.
    """
    device = torch.device(resolve_accelerator(config.engine.accelerator))
    # All weights cost the same, and the model's own initialisation may take longer than a step.
    network = meta_model(config, classes).to_empty(device=device).train()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.ndim > 1:
            nn.init.uniform_(tensor, -0.05, 0.05)
        elif tensor.is_floating_point():
            nn.init.ones_(tensor)  # avoids subnormal numbers, which are slow
    optimizer = create_optimizer(network, config.optim, config.engine.batch_size)
    batch = torch.randn(images, 3, *network.img_size, device=device)
    seconds_: list[float] = []
    steps = 1 if seconds else _TIMING_STEPS  # a step may be long by itself
    while len(seconds_) <= steps or sum(seconds_[1:]) < seconds:
        started = time.perf_counter()
        with autocast(device.type, precision):
            loss = network(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the GPU
        seconds_.append(time.perf_counter() - started)
    return seconds_[1:]


def format_duration(seconds: float) -> str:
    """Format a duration: "19 s", "4 min", "2.5 h", "12 d"."""
    for unit, length in (("d", 86400), ("h", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


@dataclass(frozen=True)
class DryRun:
    """What a run will cost.

    Attributes:
        run: its data, plan, parameters, MACs and memory.
        images_per_second: training speed over all processes.
        speed: set if it was measured on this machine.
    """

    run: ResolvedRun
    images_per_second: float
    speed: Speed | None = None

    @property
    def hours(self) -> float:
        """Training time without evaluations."""
        return self.run.plan.images / self.images_per_second / 3600

    def __str__(self) -> str:
        run = self.run
        here = "" if self.speed is None else ", measured here"
        rates = "" if self.speed is None else f"\nspeed   {self.speed.bottleneck}"
        time = (
            f"{format_duration(3600 * self.hours)} at {self.images_per_second:.4g} images/s{here} "
            f"({self.hours:.3g} h)"
        )
        return (
            f"{run}\n"
            f"memory  {run.activation_bytes / 1e9:.3g} GB of activations and "
            f"{run.state_bytes / 1e9:.3g} GB of weights and moments per process\n"
            f"disk    {run.checkpoint_bytes / 1e9:.3g} GB per checkpoint\n"
            f"cost    {6 * run.macs * run.plan.images:.3g} operations\n"
            f"time    {time}{rates}"
        )


def dry_run(
    config: RunConfig, folder: Path | str | None = None, images_per_second: float | None = None
) -> DryRun:
    """Check a run and estimate its cost.

    Args:
        config: the run.
        folder: the run's folder, checked if it exists; nothing is written.
        images_per_second: training speed over all processes; measured here unless given.

    Raises:
        UserError: whatever `train` would refuse.
    """
    if images_per_second is not None:
        checks.number("images_per_second", images_per_second, 0, above=True)
    run_folder = None if folder is None else RunFolder(folder)
    run = ResolvedRun(config, resumes=run_folder is not None and run_folder.has_progress())
    if run_folder is not None:
        run_folder.check(config)
    run.check_memory()
    if images_per_second is None:
        speed = measure_speed(run)
        return DryRun(run, 1 / speed.training, speed)
    return DryRun(run, images_per_second)
