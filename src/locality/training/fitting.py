"""How fast this machine trains; what a run costs on it, and which run fits a custom dataset and it.

The speed is that of a few real batches loaded, and of a few steps on random images.

The recipes `photos` and `finetune` say how to train; how large a model, on how many pixels, for how
long, depends on what there is. What is chosen becomes part of the run's configuration, so that the
run itself can be repeated and resumed anywhere, by machines of any speed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from locality import checks, machine
from locality.checkpoints.registry import detect_kind
from locality.checkpoints.resolve import read
from locality.data import DataSplits, open_data, train_loader
from locality.data.sources import BadImage, ImageSource
from locality.errors import UserError
from locality.models import count_macs
from locality.training.config import RunConfig
from locality.training.distributed import autocast, launched_from_outside, resolve_accelerator
from locality.training.objective import create_optimizer
from locality.training.preview import Preview, check_memory, meta_model, span
from locality.training.recipes import adjusted
from locality.training.runs import RunFolder

# Multiply-accumulates of a timed step: one that would take long is timed on a part of its batch.
_TIMED_MACS = 4e10
_TIMED_STEPS = 3
_TIMED_SECONDS = 2.0
_LOADED = 16


@dataclass(frozen=True)
class Speed:
    """Seconds that an image takes.

    Attributes:
        loading: read, decoded and changed by one process.
        computing: its share of a training step, over all devices.
        workers: of the run.
        on_processor: computing shares its cores with loading.
    """

    loading: float
    computing: float
    workers: int
    on_processor: bool

    @property
    def training(self) -> float:
        """Of a training step, loading included."""
        return self._together(self.computing)

    @property
    def evaluating(self) -> float:
        """Of an evaluation: a forward pass costs a third of a step."""
        return self._together(self.computing / 3)

    @property
    def bottleneck(self) -> str:
        """The two rates, and which of them holds a run up."""
        reading, model = max(1, self.workers) / self.loading, 1 / self.computing
        who = f"{self.workers} workers" if self.workers else "the training process"
        slower = (
            "reading images is the bottleneck; more data.workers read more"
            if reading < model
            else "the model is the bottleneck"
        )
        return f"{reading:.4g} images/s read by {who}, {model:.4g} trained on: {slower}"

    def _together(self, computing: float) -> float:
        if not self.workers:
            return computing + self.loading
        if self.on_processor:
            # The threads of a step wait for the one whose core a worker has: of two cores a run
            # gains nothing by workers.
            return computing + self.loading * min(1, 2 / machine.processors())
        return max(computing, self.loading / self.workers)


def measure(seen: Preview) -> Speed:
    """The speed of a run on this machine, in a few seconds."""
    config = seen.config
    images = timed_images(seen.micro_batch, 3 * seen.macs)
    steps = step_seconds(
        config, len(seen.splits.classes), images, seen.precision, seconds=_TIMED_SECONDS
    )
    batches = iter(
        train_loader(
            seen.splits.train,
            config.augment,
            config.input.at(seen.img_size),
            batch_size=_LOADED,
            seed=config.seed,
            stop_step=2,
        )
    )
    next(batches)  # the first reads libraries too
    started = time.perf_counter()
    next(batches)
    return Speed(
        (time.perf_counter() - started) / _LOADED,
        sum(steps) / len(steps) / images / seen.world_size,
        config.data.workers * seen.world_size,
        seen.device_type == "cpu",
    )


def timed_images(batch_size: int, macs: float) -> int:
    """How many images of a batch to time a step on, each of so many multiply-accumulates."""
    return int(min(batch_size, max(1, _TIMED_MACS // macs)))


def step_seconds(
    config: RunConfig, classes: int, images: int, precision: str = "fp32", seconds: float = 0.0
) -> list[float]:
    """How long training steps on so many random images take, after a first one.

    Args:
        config: its model, optimiser and device count.
        classes: of the model.
        images: of a step.
        precision: resolved.
        seconds: keep on for so long, and for three steps at least.
    """
    device = torch.device(resolve_accelerator(config.engine.accelerator))
    # Any weights cost the same; drawing those of a large network properly takes longer than a step.
    network = meta_model(config, classes).to_empty(device=device).train()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.ndim > 1:
            nn.init.uniform_(tensor, -0.05, 0.05)
        elif tensor.is_floating_point():
            nn.init.ones_(tensor)  # smaller norms would lead to slow, subnormal numbers
    optimizer = create_optimizer(network, config.optim, config.engine.batch_size)
    batch = torch.randn(images, 3, *network.img_size, device=device)
    taken: list[float] = []
    while len(taken) <= _TIMED_STEPS or sum(taken[1:]) < seconds:
        started = time.perf_counter()
        with autocast(device.type, precision):
            loss = network(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # a GPU has finished when its result is here
        taken.append(time.perf_counter() - started)
    return taken[1:]


@dataclass(frozen=True)
class DryRun:
    """What a run comes to.

    Attributes:
        preview: data, plan, parameters, MACs and memory.
        images_per_second: as given or measured, over all processes.
        speed: where it comes from, if it was measured on this machine.
    """

    preview: Preview
    images_per_second: float
    speed: Speed | None = None

    @property
    def hours(self) -> float:
        """Training time; evaluations come on top."""
        return self.preview.plan.images / self.images_per_second / 3600

    def __str__(self) -> str:
        seen = self.preview
        here = "" if self.speed is None else ", measured here"
        rates = "" if self.speed is None else f"\nspeed   {self.speed.bottleneck}"
        time = (
            f"{span(3600 * self.hours)} at {self.images_per_second:.4g} images/s{here} "
            f"({self.hours:.3g} h)"
        )
        return (
            f"{seen}\n"
            f"memory  {seen.activation_bytes / 1e9:.3g} GB of activations and "
            f"{seen.state_bytes / 1e9:.3g} GB of weights and moments per process\n"
            f"disk    {seen.checkpoint_bytes / 1e9:.3g} GB per checkpoint\n"
            f"cost    {6 * seen.macs * seen.plan.images:.3g} operations\n"
            f"time    {time}{rates}"
        )


def dry_run(
    config: RunConfig, folder: Path | str | None = None, images_per_second: float | None = None
) -> DryRun:
    """Check a run and count what it will cost.

    Args:
        config: the run.
        folder: checked for belonging to this configuration, if it exists. Nothing is written.
        images_per_second: training speed over all processes, for the estimate of time; None
            measures it on this machine, in a few seconds.

    Raises:
        UserError: whatever `train` would refuse.
    """
    if images_per_second is not None:
        checks.number("images_per_second", images_per_second, 0, above=True)
    run = None if folder is None else RunFolder(folder)
    seen = Preview(config, resumes=run is not None and run.has_begun())
    if run is not None:
        run.check(config)
    check_memory(seen)
    if images_per_second is None:
        speed = measure(seen)
        return DryRun(seen, 1 / speed.training, speed)
    return DryRun(seen, images_per_second)


# From scratch: models by cost, with image and patch size. All have grids of 8×8 patches but the
# last, of 14×14, and the first is for images that are no larger.
_SIZES = (
    ("convit_micro", 32, 4),
    ("convit_micro", 64, 8),
    ("convit_mini", 64, 8),
    ("convit_mini", 128, 16),
    ("convit_tiny", 224, 16),
)
_MODEL = ("model.name", "model.img_size", "model.patch_size")
# A larger model is taken where it sees every image so often; beyond the most, nothing is learnt.
_PASSES, _MOST_PASSES = 100, 400
_MOST_PASSES_FINETUNED = 50
# Evaluations at most, and the fraction of the time for them.
_EVALUATIONS, _EVALUATING = 10, 0.15
# From so many training images on, fine-tuning mixes them.
MIXED_FROM = 5000
# What begins and ends a run beside its steps, and what a step takes longer in a run than alone (12%
# on two cores), as a fraction of the time.
_RESERVE = 0.15
_LOOKED_AT = 32


@dataclass(frozen=True)
class Fit:
    """A run that fits images, machine and time.

    Attributes:
        config: complete.
        images_per_second: of training on this machine, as measured.
        seconds: that it should take here, evaluations included.
        reasons: what was chosen and why, a line each.
    """

    config: RunConfig
    images_per_second: float
    seconds: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def fit(name: str, given: Mapping[str, Any], minutes: float) -> Fit:
    """The run of a recipe for custom datasets that ends in about so many minutes on this machine.

    Args:
        name: "photos" or "finetune".
        given: settings by dotted name, which stand; `data.root` is one of them.
        minutes: for training and evaluation.

    Raises:
        UserError: if the data cannot be used, or as `recipes.adjusted`.
    """
    checks.number("minutes", minutes, 0, above=True)
    tuned = name == "finetune"
    config = adjusted(name, given)
    splits = open_data(config.data, config.seed)
    images, side = len(splits.train), shorter_side(splits.train)
    batch = 32 if images < 2000 else 64 if images < 20_000 else 128
    chosen: dict[str, Any] = {"engine.batch_size": batch}
    if tuned and images >= MIXED_FROM:
        chosen |= {"augment.mixup": 0.8, "augment.cutmix": 1.0}

    def at(size: Mapping[str, Any]) -> RunConfig:
        return adjusted(name, chosen | dict(size) | dict(given))

    asked = given.keys() & set(_MODEL)
    taken, *larger = [{}] if tuned or asked else _sizes(side)
    seen = Preview(at(taken), splits)
    if seen.world_size > 1 and launched_from_outside():
        raise UserError(
            "several processes would choose different settings; choose them in one, `locality "
            "train … --print_config > run.yaml`, and start the others with --config run.yaml"
        )
    speed = measure(seen)
    if speed.loading > speed.computing / 4:
        chosen["data.workers"] = min(machine.processors(), 8)
    speed = dataclasses.replace(speed, workers=at(taken).data.workers * seen.world_size)
    why = "as the weights are" if tuned else "as given" if asked else "the fastest"
    for size in larger:
        macs = count_macs(meta_model(at(size), len(splits.classes)))
        slower = dataclasses.replace(speed, computing=speed.computing * macs / seen.macs)
        if _images(slower, splits, minutes) < _PASSES * images:
            break
        taken = size
        why = f"the largest that sees every image {_PASSES} times in {minutes:g} minutes here"
    chosen |= taken
    if taken in larger:
        seen = Preview(at({}), splits)
        speed = measure(seen)
    most = images * (_MOST_PASSES_FINETUNED if tuned else _MOST_PASSES)
    batch = seen.config.engine.batch_size
    steps = max(1, round(min(_images(speed, splits, minutes), most) / batch))
    every = math.ceil(steps / _evaluations(speed, splits, minutes))
    chosen |= {"schedule.steps": steps, "schedule.warmup": steps // 10}
    chosen |= {"schedule.eval_every": every}
    if tuned:
        chosen["schedule.patience"] = 3 * every
    seconds = (steps * batch * speed.training + _besides(speed, splits, minutes)) / (1 - _RESERVE)
    height, width = seen.img_size
    reasons = (
        f"images  {images:,} to train on and {len(splits.val):,} to evaluate on, of "
        f"{len(splits.classes):,} classes, about {side} pixels on the shorter side",
        f"model   {seen.config.model.name} at {height}×{width}: {why}",
        f"speed   {1 / speed.training:.3g} images/s: {1000 * speed.loading:.3g} ms to load one"
        + f" by each of {speed.workers} processes" * bool(speed.workers)
        + f", {1000 * speed.computing:.3g} ms to compute",
        f"length  {steps:,} steps of {batch} images, each image {steps * batch / images:.3g} "
        f"times: about {span(seconds)} with its evaluations",
        _longer(name, minutes, steps * batch >= most - batch),
    )
    return Fit(at({}), 1 / speed.training, seconds, reasons)


def _sizes(side: int) -> list[dict[str, Any]]:
    """The models for images whose shorter side has so many pixels, by cost."""
    sizes = [size for size in _SIZES if size[1] <= side] or [_SIZES[0]]
    return [dict(zip(_MODEL, size, strict=True)) for size in sizes[1:] or sizes]


def _longer(name: str, minutes: float, enough: bool) -> str:
    if enough:
        return "longer  no use: more passes over so few images teach nothing; more images would"
    better = "sees the images more often"
    if name == "photos":
        better += ", in a larger model where there is time; few images gain most from weights: "
        better += "locality finetune"
    return f"longer  --minutes {6 * minutes:g} {better}"


def _images(speed: Speed, splits: DataSplits, minutes: float) -> float:
    """How many images can be trained on in so many minutes."""
    left = (1 - _RESERVE) * 60 * minutes - _besides(speed, splits, minutes)
    return left / speed.training


def _evaluations(speed: Speed, splits: DataSplits, minutes: float) -> int:
    """How many evaluations a run should have: as many as its time allows."""
    affordable = _EVALUATING * 60 * minutes / (len(splits.val) * speed.evaluating)
    return int(min(max(affordable, 1), _EVALUATIONS))


def _besides(speed: Speed, splits: DataSplits, minutes: float) -> float:
    """Seconds for decoding the validation images beforehand, and for evaluating them."""
    times = _evaluations(speed, splits, minutes)
    return len(splits.val) * (speed.loading + times * speed.evaluating)


def shorter_side(source: ImageSource) -> int:
    """The shorter side of images, in pixels: the median of some."""
    sides = []
    for index in np.linspace(0, len(source) - 1, min(_LOOKED_AT, len(source))).astype(int):
        try:
            sides.append(min(source.read(int(index)).size))
        except BadImage:
            continue
    if not sides:
        raise UserError(f"none of the first images can be read, such as {source.describe(0)}")
    return round(statistics.median(sides))


def start_from(weights: str) -> dict[str, Any]:
    """The settings of a run that starts from weights: their architecture, their preparation.

    Args:
        weights: whatever `read` takes.

    Raises:
        UserError, FileNotFoundError: as `read`, or if the architecture has no name.
    """
    found = read(weights)
    if found.name is None:
        raise UserError(
            f"{weights} holds an architecture that is not in the table of models; give the nearest "
            f"one as --model, and what differs as --model.overrides"
        )
    settings: dict[str, Any] = {"model.weights": weights, "model.name": found.name}
    if detect_kind(weights) == "run":
        model = RunFolder(weights).config().model
        settings |= {"model.patch_size": model.patch_size, "model.overrides": model.overrides}
    size = found.config.img_size
    if isinstance(size, int) or len(set(size)) == 1:
        settings["model.img_size"] = size if isinstance(size, int) else size[0]
    if found.preprocessing is not None:
        prepared = dataclasses.asdict(found.preprocessing)
        del prepared["img_size"]
        settings |= {f"input.{name}": value for name, value in prepared.items()}
    return settings
