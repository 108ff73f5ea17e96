"""The cost of a run: images, operations, seconds and bytes.

Used by dry runs, `autofit`, comparisons and the study. Speeds are measured on this machine, by
loading real batches and by training steps on random images.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from locality import checks, machine
from locality.data import BatchLoader, open_data, train_loader
from locality.data.config import DATASETS, DataConfig
from locality.layers.cpu import arithmetic_threads
from locality.models import count_macs, count_parameters
from locality.training.config import ModelConfig, RunConfig, check_places
from locality.training.devices import autocast, resolve_accelerator
from locality.training.model import meta_model
from locality.training.optim import create_optimizer
from locality.training.resolved_run import ResolvedRun
from locality.training.run_folder import RunFolder

STEP_FORWARDS = 3
"""A training step costs one forward pass, and two for the gradients."""

# Training images, validation images and classes, as in `datasets.yaml`.
_IMAGENET_22K = (14_197_122, 70_986, 21_841)
# Baselines: maximum images, numbers per image, and multiply-accumulates per second.
_BASELINE_IMAGES, _BASELINE_PIXELS, _BASELINE_MACS = 20_000, 3072, 1e10
_REGRESSION_STEPS = 200
# Maximum evaluations of a run on custom images, and their maximum share of its time.
_MAX_EVALUATIONS, _EVALUATION_SHARE = 10, 0.15
# Multiply-accumulates of a timed step; a larger step is timed on a part of its batch.
_TIMING_MACS = 2e10
_TIMING_STEPS = 3
_TIMING_SECONDS = 2.0
# Images are loaded in batches of 16, at most 8 and for at most about 1 second.
_LOADING_IMAGES, _LOADING_BATCHES, _LOADING_SECONDS = 16, 8, 1.0


@dataclass(frozen=True)
class Cost:
    """The cost of training a model on a dataset; times are seconds per image.

    Attributes:
        train, val, classes: numbers of training images, validation images and classes.
        macs: multiply-accumulates of one image's forward pass.
        loading: to read, decode and augment an image in one process; only to augment it if decoded
            images are cached.
        computing: to train on an image, over all devices.
        workers: loading processes of the run.
        on_processor: whether the model runs on the CPU, whose cores loading shares.
        decoding: extra time of loading an image for the first time, in every process.
    """

    train: int
    val: int
    classes: int
    macs: int
    loading: float
    computing: float
    workers: int = 0
    on_processor: bool = True
    decoding: float = 0.0

    @property
    def training(self) -> float:
        """Seconds to load an image and train on it."""
        return self._together(self.computing)

    @property
    def evaluating(self) -> float:
        """Seconds to load and evaluate an image: a forward pass costs a third of a step."""
        return self._together(self.computing / STEP_FORWARDS)

    @property
    def cores(self) -> int:
        """Cores needed to read images as fast as the model trains on them."""
        return math.ceil(self.loading / self.computing)

    @property
    def bottleneck(self) -> str:
        """The rates of loading and training, and which is slower."""
        reading, model = max(1, self.workers) / self.loading, 1 / self.computing
        who = f"{self.workers} workers" if self.workers else "the training process"
        slower = (
            f"reading images is the bottleneck; {self.cores:,} cores, and as many data.workers "
            f"over all processes, would keep up"
            if reading < model
            else "the model is the bottleneck"
        )
        return f"{reading:.4g} images/s read by {who}, {model:.4g} trained on: {slower}"

    def operations(self, images: float) -> float:
        """Operations of training on `images`, two per multiply-accumulate."""
        return 2 * STEP_FORWARDS * self.macs * images

    def seconds(self, images: float, evaluations: float) -> float:
        """Seconds to train on `images`, with this many evaluations."""
        return images * self.training + self._overhead(evaluations)

    def images(self, seconds: float, evaluations: float) -> float:
        """Images that can be trained on in `seconds`, with this many evaluations."""
        return max(0.0, (seconds - self._overhead(evaluations)) / self.training)

    def evaluations(self, seconds: float) -> int:
        """Number of evaluations of a run on custom images that lasts `seconds`."""
        affordable = _EVALUATION_SHARE * seconds / (self.val * self.evaluating)
        return int(min(max(affordable, 1), _MAX_EVALUATIONS))

    def passes(self, seconds: float) -> float:
        """Passes over the images in `seconds`, including `evaluations`."""
        return self.images(seconds, self.evaluations(seconds)) / self.train

    def enough(self, passes: float) -> float:
        """Seconds needed for this many `passes`."""
        # More time may allow more evaluations, up to this share of it.
        return self.seconds(passes * self.train, 1) / (1 - _EVALUATION_SHARE)

    @property
    def baselines(self) -> float:
        """Approximate seconds of the baselines on pixels."""
        train, val = (min(images, _BASELINE_IMAGES) for images in (self.train, self.val))
        macs = train * _BASELINE_PIXELS * (val + 3 * _REGRESSION_STEPS * self.classes)
        return (train + val) * (self.loading + self.decoding) + macs / _BASELINE_MACS

    def _overhead(self, evaluations: float) -> float:
        """Seconds to evaluate, and to decode every image for the first time."""
        processes = max(1, self.workers) * self._share if self.on_processor else 1
        evaluating = self.val * (self.loading + self.decoding + evaluations * self.evaluating)
        return evaluating + self.train * self.decoding * processes

    def _together(self, computing: float) -> float:
        if not self.workers:
            return computing + self.loading
        if self.on_processor:
            return computing + self.loading * self._share
        return max(computing, self.loading / self.workers)

    @property
    def _share(self) -> float:
        """Slowdown from workers sharing cores.

        The threads of a step wait for the one whose core a worker occupies: with two cores workers
        gain nothing.
        """
        return min(1, 2 / machine.processors()) if self.workers else 1


def measure_cost(run: ResolvedRun, images_per_second: float | None = None) -> Cost:
    """Measure the cost of a run on this machine, in a few seconds.

    Args:
        run: the run.
        images_per_second: training speed over all processes; measured unless given.
    """
    config = run.config
    if images_per_second is None:
        batch, classes = run.micro_batch, len(run.splits.classes)
        with arithmetic_threads(config.engine.threads):
            times = time_steps(config, classes, batch, run.precision, _TIMING_SECONDS)
        images_per_second = run.world_size / statistics.fmean(times)
    loader = train_loader(
        run.splits.train,
        config.augment,
        config.input.at(run.img_size),
        batch_size=_LOADING_IMAGES,
        seed=config.seed,
        stop_step=1 + _LOADING_BATCHES,
    )
    with arithmetic_threads(1):  # as in workers; on busy cores several wait for each other
        first = _loading_times(loader, _LOADING_BATCHES)
        loading = statistics.median(_loading_times(loader, len(first)))
    return Cost(
        *run.counts,
        loading,
        1 / images_per_second,
        config.data.workers * run.world_size,
        run.device_type == "cpu",
        max(0.0, statistics.median(first) - loading),
    )


def _loading_times(loader: BatchLoader, most: int) -> list[float]:
    """Seconds per image of up to `most` batches after the first."""
    times: list[float] = []
    batches = iter(loader)
    next(batches)
    while len(times) < most and sum(times) * _LOADING_IMAGES < _LOADING_SECONDS:
        started = time.perf_counter()
        next(batches)
        times.append((time.perf_counter() - started) / _LOADING_IMAGES)
    return times


def time_steps(
    config: RunConfig, classes: int, batch_size: int, precision: str = "fp32", seconds: float = 0.0
) -> list[float]:
    """Seconds per image of training steps on random images, after a warm-up step.

    Args:
        config: only its model, optimiser and accelerator matter.
        classes: number of classes.
        batch_size: images per step; large models are timed on fewer.
        precision: a resolved precision.
        seconds: minimum total time, with at least one step; three steps if 0.
    """
    device = torch.device(resolve_accelerator(config.engine.accelerator))
    # The values do not affect speed, and the model's own initialisation may be slower than a step.
    network = meta_model(config, classes).to_empty(device=device).train()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.ndim > 1:
            nn.init.uniform_(tensor, -0.05, 0.05)
        elif tensor.is_floating_point():
            nn.init.ones_(tensor)  # avoids subnormal numbers, which are slow
    optimizer = create_optimizer(network, config.optim, config.engine.batch_size)
    macs = STEP_FORWARDS * forward_macs(config.model, classes)
    images = int(min(batch_size, max(1, _TIMING_MACS // macs)))
    batch = torch.randn(images, 3, *network.img_size, device=device)
    durations: list[float] = []
    steps = 1 if seconds else _TIMING_STEPS  # a step may be long by itself
    while len(durations) <= steps or sum(durations[1:]) < seconds:
        started = time.perf_counter()
        with autocast(device.type, precision):
            loss = network(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the GPU
        durations.append(time.perf_counter() - started)
    return [duration / images for duration in durations[1:]]


# By model name and CPU threads.
_SPEEDS: dict[tuple[str, int], float] = {}


def training_speed(config: RunConfig, classes: int, threads: int) -> float:
    """Multiply-accumulates per second of training, from a few steps on random images.

    Models of the same name are assumed to be equally fast per multiply-accumulate.
    """
    named = config.model.name, threads
    if named not in _SPEEDS:
        alone = RunConfig(model=config.model)
        with arithmetic_threads(threads):
            # The fastest step is the one least disturbed by other processes.
            fastest = min(time_steps(alone, classes, config.engine.batch_size))
        _SPEEDS[named] = STEP_FORWARDS * forward_macs(config.model, classes) / fastest
    return _SPEEDS[named]


def estimate_cost(config: RunConfig, threads: int) -> Cost:
    """The cost of a run on small images, whose loading time is neglected.

    Raises:
        UserError: as `image_counts`.
    """
    train, val, classes = image_counts(config)
    macs = forward_macs(config.model, classes)
    computing = STEP_FORWARDS * macs / training_speed(config, classes, threads)
    return Cost(train, val, classes, macs, 0.0, computing)


def image_counts(config: RunConfig) -> tuple[int, int, int]:
    """The number of training images, validation images and classes of a run.

    Datasets of known size are not opened.

    Raises:
        UserError: if the dataset has no known size and cannot be opened.
    """
    data = config.data
    known = DATASETS[data.dataset].get("images")
    known = _IMAGENET_22K if config.recipe == "cvt_22k" else known
    if known is not None:
        images, evaluated, classes = known
        kept = min(data.first_classes or classes, classes) - data.skip_classes
        share = kept / classes * (data.part[1] - data.part[0])
        if data.val_part is not None:
            evaluated = images * (data.val_part[1] - data.val_part[0])
        elif data.fold is not None:
            evaluated = images / data.fold[1]
        return round(images * share * data.train_share), round(evaluated * share), kept
    return _opened(data, config.seed)


@cache
def _opened(data: DataConfig, seed: int) -> tuple[int, int, int]:
    splits = open_data(data, seed)
    return len(splits.train), len(splits.val), len(splits.classes)


def parameters(model: ModelConfig, classes: int) -> int:
    """The number of parameters of a model."""
    return _size(model, classes)[0]


def forward_macs(model: ModelConfig, classes: int) -> int:
    """Multiply-accumulates of one image's forward pass."""
    return _size(model, classes)[1]


_SIZES: dict[str, tuple[int, int]] = {}


def _size(model: ModelConfig, classes: int) -> tuple[int, int]:
    named = repr((model.name, model.fields, classes))
    if named not in _SIZES:
        network = meta_model(RunConfig(model=model), classes)
        _SIZES[named] = count_parameters(network), count_macs(network)
    return _SIZES[named]


def format_duration(seconds: float) -> str:
    """Format a duration: "19 s", "4 min", "2.5 h", "12 d"."""
    for unit, length in (("d", 86400), ("h", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def format_bytes(count: float) -> str:
    """Format a number of bytes: "17.2 MB", "1.3 TB"."""
    unit, size = next((u, s) for u, s in (("TB", 1e12), ("GB", 1e9), ("MB", 0)) if count >= s)
    return f"{count / (size or 1e6):.3g} {unit}"


@dataclass(frozen=True)
class DryRun:
    """The cost of a run before it starts.

    Attributes:
        run: its data, plan, parameters, MACs and memory.
        cost: the cost of loading and training.
        images_per_second: training speed over all processes, including loading; None if measured
            here.
        file_bytes: size of all image files.
    """

    run: ResolvedRun
    cost: Cost
    images_per_second: float | None = None
    file_bytes: int = 0

    @property
    def _total(self) -> Cost:
        if self.images_per_second is None:
            return self.cost
        return dataclasses.replace(self.cost, loading=0.0, decoding=0.0)

    @property
    def rate(self) -> float:
        """Images per second over all processes."""
        return 1 / self._total.training

    @property
    def hours(self) -> float:
        """Hours of training and evaluation."""
        return self._total.seconds(self.run.plan.images, self.run.plan.evaluations) / 3600

    @property
    def step_seconds(self) -> float:
        """Seconds of an update."""
        return self.run.plan.batch_size / self.rate

    @property
    def wire_bytes(self) -> int:
        """Bytes of gradients that each process sends per update, in a ring all-reduce."""
        others = self.run.world_size - 1
        return 2 * others * self.run.state["gradients"] // self.run.world_size

    def __str__(self) -> str:
        run = self.run
        here = "" if self.images_per_second else ", measured here"
        memory = {"activations": run.activation_bytes} | run.state
        files = f", {format_bytes(self.file_bytes)} of images" if self.file_bytes else ""
        wire = (
            f"wire    {format_bytes(self.wire_bytes)} of gradients sent by each process in every "
            f"step of {self.step_seconds:.3g} s: "
            f"{format_bytes(self.wire_bytes / self.step_seconds)}/s\n"
        )
        return (
            f"{run}\n"
            f"memory  {format_bytes(sum(memory.values()))} per process: "
            f"{', '.join(f'{what} {format_bytes(count)}' for what, count in memory.items())}\n"
            f"disk    {format_bytes(run.checkpoint_bytes)} per checkpoint{files}\n"
            f"cost    {self.cost.operations(run.plan.images):.3g} operations\n"
            f"{wire if self.wire_bytes else ''}"
            f"time    {format_duration(3600 * self.hours)} at {self.rate:.4g} images/s{here} "
            f"({self.hours:.3g} h)\n"
            f"speed   {self.cost.bottleneck}"
        )


def dry_run(
    config: RunConfig,
    folder: Path | str | None = None,
    images_per_second: float | None = None,
    cost: Cost | None = None,
) -> DryRun:
    """Check a run and estimate its cost.

    Args:
        config: the run.
        folder: the run's folder, checked if it exists; nothing is written.
        images_per_second: training speed over all processes; measured here unless given.
        cost: the run's cost, if already measured; not used if a speed is given.

    Raises:
        UserError: if `train` would refuse the run.
    """
    if images_per_second is not None:
        checks.typed("images_per_second", images_per_second, checks.Positive)
    recorded: list[str] = []
    if folder is not None:
        check_places(config, Path(folder))
        recorded = RunFolder(folder).recorded_classes()
    run = ResolvedRun(config, classes=recorded)
    run.check_start()
    if cost is None or images_per_second is not None:
        cost = measure_cost(run, images_per_second)
    return DryRun(run, cost, images_per_second, run.splits.file_bytes())
