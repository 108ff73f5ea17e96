"""The cost of a run: images, operations, seconds and bytes.

Used by dry runs, comparisons and the study. Speeds are measured on this machine, by loading real
batches and by training steps on random images.
"""

import time
from functools import cache
from typing import Any, NamedTuple

import torch

from locality.data import open_data, train_loader
from locality.data.config import DATASETS, DataConfig
from locality.machine import arithmetic_threads
from locality.models import build, count_macs, count_parameters
from locality.progress import format_bytes, format_duration
from locality.training.config import RunConfig
from locality.training.devices import autocast, resolve_accelerator
from locality.training.job import Job
from locality.training.model import build_model
from locality.training.optim import Plan, create_optimizer, make_plan

STEP_FORWARDS = 3
"""A training step costs one forward pass, and two for the gradients."""

# Multiply-accumulates of a timed step; a larger step is timed on a part of its batch.
_TIMING_MACS = 2e10
_TIMING_STEPS = 3
_LOADING_IMAGES = 16


def time_loading(job: Job) -> float:
    """Seconds to read, decode and augment an image in one process."""
    loader = train_loader(
        job.splits.train,
        job.config.augment,
        job.config.input.at(job.img_size),
        batch_size=_LOADING_IMAGES,
        seed=job.config.seed,
        stop_step=2,
    )
    batches = iter(loader)
    with arithmetic_threads(1):  # as in workers
        next(batches)
        started = time.perf_counter()
        next(batches)
        return (time.perf_counter() - started) / _LOADING_IMAGES


def time_step(
    config: RunConfig, classes: int, macs: int, batch_size: int, precision: str = "fp32"
) -> float:
    """Seconds per image of the fastest of three training steps on random images.

    The fastest is the one least disturbed by other processes.

    Args:
        config: only its model, optimiser and accelerator matter.
        classes: number of classes.
        macs: multiply-accumulates of training on an image.
        batch_size: images per step; large models are timed on fewer.
        precision: a resolved precision.
    """
    device = torch.device(resolve_accelerator(config.engine.accelerator))
    network = build_model(config, classes).to(device).train()
    optimizer = create_optimizer(network, config.optim, config.engine.batch_size)
    images = int(min(batch_size, max(1, _TIMING_MACS // macs)))
    batch = torch.randn(images, 3, *network.img_size, device=device)
    durations: list[float] = []
    for _ in range(1 + _TIMING_STEPS):
        started = time.perf_counter()
        with autocast(device.type, precision):
            loss = network(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the GPU
        durations.append(time.perf_counter() - started)
    return min(durations[1:]) / images


# By model name and CPU threads.
_SPEEDS: dict[tuple[str, int], float] = {}


def training_speed(config: RunConfig, classes: int, threads: int) -> float:
    """Multiply-accumulates per second of training, from a few steps on random images.

    Models of the same name are assumed to be equally fast per multiply-accumulate.
    """
    named = config.model.name, threads
    if named not in _SPEEDS:
        alone, macs = RunConfig(model=config.model), cost(config.model, classes).macs
        with arithmetic_threads(threads):
            seconds = time_step(alone, classes, STEP_FORWARDS * macs, config.engine.batch_size)
        _SPEEDS[named] = STEP_FORWARDS * macs / seconds
    return _SPEEDS[named]


def estimate_cost(config: RunConfig, threads: int) -> tuple[Plan, int, float]:
    """The cost of a run on this machine, without reading its images.

    Returns:
        its plan, multiply-accumulates of training on an image, and seconds in all.

    Raises:
        UserError: as `image_counts`.
    """
    train, val, classes = image_counts(config)
    plan, macs = make_plan(config, train), STEP_FORWARDS * cost(config.model, classes).macs
    seconds = macs / training_speed(config, classes, threads)
    return plan, macs, seconds * _images(plan, val)


def _images(plan: Plan, val: int) -> float:
    """Images trained on, with evaluations; evaluating one takes a third of training on it."""
    return plan.images + plan.evaluations * val / STEP_FORWARDS


def image_counts(config: RunConfig) -> tuple[int, int, int]:
    """The number of training images, validation images and classes of a run.

    Datasets of known size are not opened.

    Raises:
        UserError: if the dataset has no known size and cannot be opened.
    """
    data = config.data
    known = DATASETS[data.dataset].images
    if known is not None:
        images, classes, evaluated = known[0], known[2], float(known[1])
        share = data.part[1] - data.part[0]
        if data.val_part is not None:
            evaluated = images * (data.val_part[1] - data.val_part[0])
        elif data.fold is not None:
            evaluated = images / data.fold[1]
        return round(images * share * data.train_share), round(evaluated * share), classes
    return _opened(data, config.seed)


@cache
def _opened(data: DataConfig, seed: int) -> tuple[int, int, int]:
    splits = open_data(data, seed)
    return len(splits.train), len(splits.val), len(splits.classes)


class Cost(NamedTuple):
    """Parameters of a model, and multiply-accumulates of one image's forward pass."""

    parameters: int
    macs: int


@cache
def cost(architecture: Any, classes: int | None = None) -> Cost:
    """The cost of an architecture, counted on the meta device."""
    with torch.device("meta"):
        model = build(architecture, num_classes=classes)
    return Cost(count_parameters(model), count_macs(model))


def dry_run(job: Job) -> str:
    """Check a run and estimate its cost, as text; of ImageNet also without its images.

    Raises:
        UserError: if `train` would refuse the run; nothing is written.
    """
    config = job.config
    info = DATASETS[config.data.dataset]
    if config.data.root is None and info.needs_root and info.images:
        plan, _, time_here = estimate_cost(config, config.engine.threads)
        return (
            f"length  {plan.steps:,} steps of {plan.batch_size:,} images\n"
            f"time    {format_duration(time_here)} without reading images; with --data.root, "
            f"reading and memory are measured, too"
        )
    job.open().check_start(all_images=True)
    reading = max(1, config.data.workers * job.world_size) / time_loading(job)
    with arithmetic_threads(config.engine.threads):
        classes, macs = len(job.splits.classes), STEP_FORWARDS * job.macs
        seconds = time_step(config, classes, macs, job.micro_batch, job.precision)
    computing = job.world_size / seconds
    # Without workers, reading and computing take turns.
    rate = min(reading, computing) if config.data.workers else 1 / (1 / reading + 1 / computing)
    if config.optim.freeze:
        time, images = (len(job.splits.train) + len(job.splits.val)) / STEP_FORWARDS / rate, 0.0
    elif config.schedule.minutes is None:
        time, images = _images(job.plan, len(job.splits.val)) / rate, float(job.plan.images)
    else:
        time, images = 60 * config.schedule.minutes, 60 * config.schedule.minutes * rate
    memory = {"activations": job.activation_bytes} | job.state
    slower = "reading images" if reading < computing else "the model"
    return (
        f"{job}\n"
        f"memory  {format_bytes(sum(memory.values()))} per process: "
        f"{', '.join(f'{what} {format_bytes(count)}' for what, count in memory.items())}\n"
        f"disk    {format_bytes(job.checkpoint_bytes)} per checkpoint\n"
        f"time    {format_duration(time)}, {images / len(job.splits.train):.3g} passes\n"
        f"speed   {reading:.4g} images/s read, {computing:.4g} trained on: {slower} is the "
        f"bottleneck"
    )
