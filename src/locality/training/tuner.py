"""Settings found by measuring: size and length for the images and the machine, the learning rate.

The recipes `photos` and `finetune` say how to train. Model size, image size and length depend on
the images and the machine. What `autofit` chooses becomes part of the run's configuration, so that
the run can be repeated and resumed on machines of any speed. `lr_find` is the learning-rate range
test (Smith, 2017) that fastai and Lightning call so.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from locality import checks, machine
from locality.data import DataSplits, open_data
from locality.data.sources import BadImage, ImageSource
from locality.errors import NonFiniteLoss, UserError
from locality.models import count_macs
from locality.training.config import RunConfig
from locality.training.devices import create_fabric, launched_externally
from locality.training.loop import Loop
from locality.training.model import initialize_model, meta_model
from locality.training.processes import SignalHandler
from locality.training.recipes import adjusted
from locality.training.recorder import Recorder
from locality.training.resolved_run import ResolvedRun
from locality.training.speed import Speed, format_duration, measure_speed
from locality.training.state import Components, TrainState

# Models to train from scratch, by cost, with image and patch size: grids of 8×8 patches, the last
# of 14×14.
_MODEL_SIZES = (
    ("convit_micro", 32, 4),
    ("convit_micro", 64, 8),
    ("convit_mini", 64, 8),
    ("convit_mini", 128, 16),
    ("convit_tiny", 224, 16),
)
_MODEL_SETTINGS = ("model.name", "model.img_size", "model.patch_size")
# A larger model has to train for the former; no model trains for longer than the latter.
_MIN_EPOCHS, _MAX_EPOCHS = 100, 400
_MAX_EPOCHS_FINETUNED = 50
# Evaluations, and the share of the time they may take.
_MAX_EVALUATIONS, _EVALUATION_SHARE = 10, 0.15
# Fine-tuning on fewer images does without mixup and cutmix.
MIXUP_MIN_IMAGES = 5000
# Share of the time for start-up and saving, and for steps that take longer in a run than alone (12%
# on two cores).
_RESERVE = 0.15
_SAMPLED_IMAGES = 32


@dataclass(frozen=True)
class AutoFit:
    """Settings that fit the images, the machine and the time.

    Attributes:
        config: the whole run.
        images_per_second: training speed on this machine, as measured.
        seconds: estimated time on this machine, evaluations included.
        reasons: what was chosen and why, a line each.
    """

    config: RunConfig
    images_per_second: float
    seconds: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def autofit(name: str, given: Mapping[str, Any], minutes: float) -> AutoFit:
    """Choose the settings of a run on custom images that takes about `minutes` on this machine.

    Args:
        name: "photos" or "finetune".
        given: settings by dotted name that are not changed; `data.root` is one of them.
        minutes: for training and evaluation.

    Raises:
        UserError: if the data cannot be used, or as `recipes.adjusted`.
    """
    checks.number("minutes", minutes, 0, above=True)
    tuned = name == "finetune"
    config = adjusted(name, given)
    splits = open_data(config.data, config.seed)
    images, side = len(splits.train), median_shorter_side(splits.train)
    batch = 32 if images < 2000 else 64 if images < 20_000 else 128
    chosen: dict[str, Any] = {"engine.batch_size": batch}
    if tuned and images >= MIXUP_MIN_IMAGES:
        chosen |= {"augment.mixup": 0.8, "augment.cutmix": 1.0}

    def at(size: Mapping[str, Any]) -> RunConfig:
        return adjusted(name, chosen | dict(size) | dict(given))

    asked = given.keys() & set(_MODEL_SETTINGS)
    chosen_size, *larger = [{}] if tuned or asked else _candidate_sizes(side)
    run = ResolvedRun(at(chosen_size), splits)
    if run.world_size > 1 and launched_externally():
        raise UserError(
            "several processes would choose different settings; choose them in one, `locality "
            "train … --print_config > run.yaml`, and start the others with --config run.yaml"
        )
    speed = measure_speed(run)
    if speed.loading > speed.computing / 4:
        chosen["data.workers"] = min(machine.processors(), 8)
    speed = dataclasses.replace(speed, workers=at(chosen_size).data.workers * run.world_size)
    why = "as the weights are" if tuned else "as given" if asked else "the fastest"
    for size in larger:
        macs = count_macs(meta_model(at(size), len(splits.classes)))
        slower = dataclasses.replace(speed, computing=speed.computing * macs / run.macs)
        if _affordable_images(slower, splits, minutes) < _MIN_EPOCHS * images:
            break
        chosen_size = size
        why = f"the largest that sees every image {_MIN_EPOCHS} times in {minutes:g} minutes here"
    chosen |= chosen_size
    if chosen_size in larger:
        run = ResolvedRun(at({}), splits)
        speed = measure_speed(run)
    most = images * (_MAX_EPOCHS_FINETUNED if tuned else _MAX_EPOCHS)
    batch = run.config.engine.batch_size
    steps = max(1, round(min(_affordable_images(speed, splits, minutes), most) / batch))
    every = math.ceil(steps / _num_evaluations(speed, splits, minutes))
    chosen |= {"schedule.steps": steps, "schedule.warmup": steps // 10}
    chosen |= {"schedule.eval_every": every}
    if tuned:
        chosen["schedule.patience"] = 3 * every
    seconds = (steps * batch * speed.training + _overhead_seconds(speed, splits, minutes)) / (
        1 - _RESERVE
    )
    height, width = run.img_size
    by_workers = f" by each of {speed.workers} processes" if speed.workers else ""
    reasons = (
        f"images  {images:,} to train on and {len(splits.val):,} to evaluate on, of "
        f"{len(splits.classes):,} classes, about {side} pixels on the shorter side",
        f"model   {run.config.model.name} at {height}×{width}: {why}",
        f"speed   {1 / speed.training:.3g} images/s: {1000 * speed.loading:.3g} ms to load one"
        f"{by_workers}, {1000 * speed.computing:.3g} ms to compute",
        f"length  {steps:,} steps of {batch} images, each image {steps * batch / images:.3g} "
        f"times: about {format_duration(seconds)} with its evaluations",
        _advice(name, minutes, steps * batch >= most - batch),
    )
    return AutoFit(at({}), 1 / speed.training, seconds, reasons)


def _candidate_sizes(side: int) -> list[dict[str, Any]]:
    """Models for images of this shorter side in pixels, by cost."""
    sizes = [size for size in _MODEL_SIZES if size[1] <= side] or [_MODEL_SIZES[0]]
    return [dict(zip(_MODEL_SETTINGS, size, strict=True)) for size in sizes[1:] or sizes]


def _advice(name: str, minutes: float, enough: bool) -> str:
    if enough:
        return "longer  no use: more passes over so few images teach nothing; more images would"
    better = "sees the images more often"
    if name == "photos":
        better += ", in a larger model where there is time; few images gain most from weights: "
        better += "locality finetune"
    return f"longer  --minutes {6 * minutes:g} {better}"


def _affordable_images(speed: Speed, splits: DataSplits, minutes: float) -> float:
    """How many images can be trained on in `minutes`."""
    left = (1 - _RESERVE) * 60 * minutes - _overhead_seconds(speed, splits, minutes)
    return left / speed.training


def _num_evaluations(speed: Speed, splits: DataSplits, minutes: float) -> int:
    """How many evaluations the time allows."""
    affordable = _EVALUATION_SHARE * 60 * minutes / (len(splits.val) * speed.evaluating)
    return int(min(max(affordable, 1), _MAX_EVALUATIONS))


def _overhead_seconds(speed: Speed, splits: DataSplits, minutes: float) -> float:
    """Seconds for decoding and evaluating the validation images."""
    times = _num_evaluations(speed, splits, minutes)
    return len(splits.val) * (speed.loading + times * speed.evaluating)


def median_shorter_side(source: ImageSource) -> int:
    """The median shorter side of a sample of images, in pixels."""
    sides = []
    for index in np.linspace(0, len(source) - 1, min(_SAMPLED_IMAGES, len(source))).astype(int):
        try:
            sides.append(min(source.read(int(index)).size))
        except BadImage:
            continue
    if not sides:
        raise UserError(f"none of the first images can be read, such as {source.describe(0)}")
    return round(statistics.median(sides))


STEPS = 200
LOWEST, HIGHEST = 1e-6, 1.0
"""Of `optim.lr`, from the first step to the last."""

_SMOOTHING = 0.9
_NEAR, _DIVERGED = 1.01, 4.0  # times the least loss


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """The loss of steps at rising learning rates.

    Attributes:
        rates: `optim.lr` of each step.
        losses: of each step's images, before its update.
        smoothed: the moving average of them.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]

    @property
    def suggested(self) -> float:
        """A tenth of the highest rate at which the smoothed loss was least, or near it.

        This is fastai's `minimum`; "near" keeps it from following the noise of a loss that has
        hardly fallen.
        """
        least = _NEAR * min(self.smoothed)
        return self.rates[max(np.flatnonzero(np.array(self.smoothed) <= least))] / 10


def lr_find(config: RunConfig) -> RangeTest:
    """Train as `config` says while the learning rate rises exponentially, and keep no weights.

    Ends after `STEPS` steps, or when the loss diverges. On one device.

    Raises:
        UserError: if the run cannot work as configured, or has several processes.
        NonFiniteLoss: if the first loss is not finite.
    """
    engine = dataclasses.replace(config.engine.on_one_device(), max_bad_losses=0)
    config = dataclasses.replace(config, engine=engine)
    run = ResolvedRun(config)
    run.plan = dataclasses.replace(run.plan, steps=STEPS)
    fabric = create_fabric(config.engine)
    if fabric.world_size > 1:
        raise UserError("a learning-rate range test is one process; start it without a launcher")
    run.check_memory()
    fabric.launch()
    model, _ = initialize_model(config, len(run.splits.classes))
    parts, state = Components(fabric, run, model), TrainState()
    rates = np.geomspace(LOWEST, HIGHEST, STEPS)
    scaled = rates * config.optim.peak_lr(config.engine.batch_size) / config.optim.lr

    def set_rate(step: int) -> None:
        for group in parts.optimizer.param_groups:
            group["lr"] = scaled[step].item() * group.get("lr_scale", 1.0)

    parts.schedule = set_rate
    loop = Loop(fabric, run, parts, Recorder(None, run, state), SignalHandler(), state)
    batches = loop.train_batches()
    losses: list[float] = []
    smoothed: list[float] = []
    average = 0.0
    while state.step < STEPS and (not losses or smoothed[-1] <= _DIVERGED * min(smoothed)):
        before = state.loss_sum
        try:
            loop.train_step(batches)
        except NonFiniteLoss:
            if not losses:
                raise
            break
        losses.append((state.loss_sum - before) / run.plan.batch_size)
        average += (1 - _SMOOTHING) * (losses[-1] - average)
        smoothed.append(average / (1 - _SMOOTHING**state.step))
    return RangeTest(rates[: len(losses)].tolist(), losses, smoothed)
