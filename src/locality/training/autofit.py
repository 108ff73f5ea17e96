"""Model, image size and length of a run on custom images, for the images, machine and time.

The recipes `photos` and `finetune` set the rest. The choices become part of the run's
configuration, so that the run can be repeated and resumed on machines of any speed.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from locality import checks, machine
from locality.data import DataSplits, open_data
from locality.data.sources import BadImage, ImageSource
from locality.errors import UserError
from locality.models.variants import family_of
from locality.training.config import RunConfig
from locality.training.cost import Cost, format_duration, forward_macs, measure_cost
from locality.training.devices import launched_externally
from locality.training.optim import make_plan
from locality.training.recipes import is_small, recipe
from locality.training.resolved_run import ResolvedRun

# Models to train from scratch, by cost, with their image and patch sizes: grids of 7×7 or 8×8
# patches, the last of 14×14. In three minutes on two cores convit_nano reached 76.6% on 448
# photographs of clothes of 28 pixels, and cvt_nano, four times as slow, 71.6%.
_MODEL_SIZES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "convit_nano": ((28, 4), (32, 4)),
    "convit_micro": ((32, 4), (64, 8)),
    "convit_mini": ((64, 8), (128, 16)),
    "convit_tiny": ((224, 16),),
}
_MODEL_SETTINGS = ("model.name", "model.img_size", "model.patch_size")
MIN_EPOCHS = 10
"""Runs with fewer passes over the images learn little."""
# Sizes of models that are not chosen, but may be given; a DeiT has those of its ConViT.
_OTHER_SIZES = {"cvt_nano": ((28, None), (32, None))}
# A larger model needs this many passes, and this many images in all. On 450 photographs of clothes
# convit_micro reached 55% after 41,000 images.
_LARGER_EPOCHS, _LARGER_IMAGES = 100, 150_000
# Runs are no longer than the larger of these.
_MAX_EPOCHS, _MAX_IMAGES = 400, 200_000
_MAX_EPOCHS_FINETUNED = 50
# Small photographs are mixed (mixup, cutmix) only in runs that see more of them: without mixing,
# convit_nano is 4 to 10 points better after 300 steps of 64 on three sets, and level after 800.
_MIXED_IMAGES = 50_000
# Fine-tuning on fewer images uses neither mixup nor cutmix.
MIXUP_MIN_IMAGES = 5000
_SAMPLED_IMAGES = 32
SLACK = 1.2
"""Safety factor for the minutes suggested if a run is too short."""


@dataclass(frozen=True)
class AutoFit:
    """Settings that fit the images, the machine and the time.

    Attributes:
        config: the complete run.
        reasons: the choices and their reasons, one per line.
        cost: the cost on this machine, from which the length was chosen; None if that was given.
        replan: as for `train`; None if the length was given.
    """

    config: RunConfig
    reasons: tuple[str, ...]
    cost: Cost | None = None
    replan: Callable[[int, float], RunConfig] | None = None

    def __str__(self) -> str:
        return "\n".join(self.reasons)


Measured = tuple[dict[str, Any], Cost]
"""A run's settings by dotted name, except the schedule, and its cost on this machine."""


def fit(
    name: str, changes: Mapping[str, Any], cost: Cost, seconds: float, begun: int = 0
) -> tuple[RunConfig, float]:
    """The run that fits the time, with at least one step, and its estimated seconds.

    Args:
        name: the recipe.
        changes: settings by dotted name, except the schedule.
        cost: the run's cost.
        seconds: the available time.
        begun: steps already made, which were those of warm-up.
    """
    config, evaluations = recipe(name, changes), cost.evaluations(seconds)
    batch, most = config.engine.batch_size, _most_images(name, config, cost)
    images = min(cost.images(seconds, evaluations), most - begun * batch)
    steps = begun + max(1, round(images / batch))
    every = math.ceil(steps / evaluations)
    length = {"schedule.steps": steps, "schedule.warmup": begun or steps // 10}
    length |= {"schedule.eval_every": every}
    # Patience keeps the best weights; fine-tuning large models also stops early.
    length |= {"schedule.patience": 3 * every if _tunes_large(name, config) else steps}
    took = cost.seconds((steps - begun) * batch, evaluations)
    return recipe(name, length | dict(changes)), took


def _replan(
    name: str, changes: Mapping[str, Any], cost: Cost, end: float, steps: int, seconds: float
) -> RunConfig:
    """The run with the length that fits the time left, which may be shorter.

    Warm-up does not depend on the length, so a run whose length changes at the end of warm-up
    equals a run that had this length from the first step.

    Args:
        name, changes, cost: as for `fit`.
        end: the deadline, by `time.perf_counter`.
        steps: steps so far, which are those of warm-up.
        seconds: their duration.
    """
    per_image = seconds / (steps * recipe(name, changes).engine.batch_size)
    factor = per_image / cost.training
    loading, computing = factor * cost.loading, factor * cost.computing
    cost = replace(cost, loading=loading, computing=computing, decoding=0.0)
    return fit(name, changes, cost, end - perf_counter(), steps)[0]


def _tunes_large(name: str, config: RunConfig) -> bool:
    """Whether weights of a large model are fine-tuned; small ones train as from scratch."""
    return name == "finetune" and not _small(config)


def _most_images(name: str, config: RunConfig, cost: Cost) -> int:
    if _tunes_large(name, config):
        return _MAX_EPOCHS_FINETUNED * cost.train
    return max(_MAX_EPOCHS * cost.train, _MAX_IMAGES)


def measured(name: str, changes: Mapping[str, Any], splits: DataSplits | None = None) -> Measured:
    """Measure the speed of a run on custom images.

    Args:
        name: "photos" or "finetune".
        changes: settings by dotted name.
        splits: its images, if already open.

    Raises:
        UserError: if the run cannot work as configured, or torchrun or srun started several
            processes.
    """
    run = ResolvedRun(recipe(name, changes), splits)
    if run.world_size > 1 and launched_externally():
        raise UserError(
            "several processes would choose different settings; first run `locality train … "
            "--print_config > run.yaml` in one process, then start all with --config run.yaml"
        )
    cost = measure_cost(run)
    if "data.workers" in changes or cost.loading <= cost.computing / 4:
        return dict(changes), cost
    workers = min(machine.processors(), 8)
    return {**changes, "data.workers": workers}, replace(cost, workers=workers * run.world_size)


def _measured_fastest(name: str, changes: Mapping[str, Any], splits: DataSplits) -> Measured:
    """As `measured`, with the fastest number of threads: torch's own, half of it, and so on.

    Fewer are faster for small models, or if the processors are busy.
    """
    found = measured(name, changes, splits)
    count = torch.get_num_threads()
    if "engine.threads" in changes or not found[1].on_processor:
        return found
    while (count := count // 2) >= 1:
        other = measured(name, dict(changes) | {"engine.threads": count}, splits)
        if other[1].training >= found[1].training:
            break
        found = other
    return found


def autofit(name: str, given: Mapping[str, Any], minutes: float | None) -> AutoFit:
    """Choose the settings of a run on custom images that takes about `minutes` on this machine.

    Args:
        name: "photos" or "finetune".
        given: settings to keep, by dotted name, including `data.root`.
        minutes: total time, including this choice, evaluation and baselines. None if `given` sets
            the length: nothing is measured, and the choice is the same on every machine.

    Raises:
        UserError: if the data cannot be used, the time is too short to see each image once, or as
            `recipe`.
    """
    if minutes is not None:
        checks.typed("minutes", minutes, checks.Positive)
    started, budget = perf_counter(), 60 * (minutes or 0)
    tuned = name == "finetune"
    config = recipe(name, given)
    splits = open_data(config.data, config.seed)
    opening = perf_counter() - started  # the run opens the data again
    images, side = len(splits.train), median_shorter_side(splits.train)
    mixed = {"augment.mixup": 0.8, "augment.cutmix": 1.0} if images >= MIXUP_MIN_IMAGES else {}
    about = (
        f"images  {images:,} for training and {len(splits.val):,} for validation, of "
        f"{len(splits.classes):,} classes, about {side} pixels on the shorter side"
    )

    def at(size: Mapping[str, Any]) -> dict[str, Any]:
        changes = dict(size) | dict(given)
        sized = recipe(name, changes)
        batch = batch_size(images, small=_small(sized))
        return {"engine.batch_size": batch} | (mixed if _tunes_large(name, sized) else {}) | changes

    def measure(size: Mapping[str, Any]) -> tuple[dict[str, Any], Cost | None]:
        return (at(size), None) if minutes is None else _measured_fastest(name, at(size), splits)

    def left(cost: Cost) -> float:
        """Seconds left for training and evaluation."""
        return budget - (perf_counter() - started) - opening - cost.baselines

    def seen(changes: Mapping[str, Any]) -> float:
        """Images that a run sees, at the same speed per multiply-accumulate as `cost`."""
        sized = recipe(name, changes)
        if cost is None:
            return make_plan(sized, images).images
        macs = forward_macs(sized.model, cost.classes)
        slower = replace(cost, macs=macs, computing=cost.computing * macs / cost.macs)
        return slower.passes(left(cost)) * images

    asked = given.keys() & set(_MODEL_SETTINGS)
    smallest, *larger = [{}] if tuned else _candidate_sizes(side, asked, config.model.name)
    size, (changes, cost) = smallest, measure(smallest)
    why = "that of the weights" if tuned else "as given" if asked else "the smallest"
    span = "a run of this length" if cost is None else f"{minutes:g} minutes on this machine"
    for other in larger:
        if seen(at(other)) < max(_LARGER_EPOCHS * images, _LARGER_IMAGES):
            break
        size, why = other, f"the largest that can learn in {span}"
    if size != smallest:
        changes, cost = measure(size)
    off = _unmixed(name, changes, seen(changes))
    changes |= off
    if cost is None or minutes is None:
        run = ResolvedRun(recipe(name, changes), splits)
        return AutoFit(run.config, (about, *_chosen(run, why, off)))

    remaining = left(cost)
    passes, beside = cost.passes(remaining), budget - remaining
    short = ""
    if passes < MIN_EPOCHS:
        enough = SLACK * (cost.enough(MIN_EPOCHS) + beside) / 60
        short = _too_short(ResolvedRun(recipe(name, changes), splits), passes, minutes, enough)
    if passes < 1:
        raise UserError(short)
    config, seconds = fit(name, changes, cost, remaining)
    run, threads = ResolvedRun(config, splits), config.engine.threads
    first = (
        f" ({1000 * cost.decoding:.3g} ms more per image the first time)"
        if cost.decoding > cost.loading
        else ""
    )
    limited = f" with {threads} of {torch.get_num_threads()} threads" if threads else ""
    longest = run.plan.images >= _most_images(name, config, cost) - run.plan.batch_size
    reasons = (
        about,
        *_chosen(run, why, off),
        f"speed   {1 / cost.training:.3g} images/s{limited}; {cost.bottleneck}{first}",
        f"time    about {format_duration(seconds + beside)} in all, with this choice, evaluations "
        "and baselines; the length is adjusted after warm-up to the speed so far",
        "keeps   the best and the last weights; the accuracy of the best of many evaluations is "
        "optimistic, so test on other images (data.val_part)",
        *([f"short   {short}"] if short else []),
        *_advice(name, minutes, longest, config.data.root),
    )
    return AutoFit(config, reasons, cost, partial(_replan, name, changes, cost, started + budget))


def _too_short(run: ResolvedRun, passes: float, minutes: float, enough: float) -> str:
    """The sentence for a run that sees each image fewer than `MIN_EPOCHS` times."""
    height, width = run.img_size
    often = "less than once" if passes < 1 else f"{passes:.2g} times"
    return (
        f"in {minutes:g} minutes {run.config.model.name} at {height}×{width} would see each of "
        f"{len(run.splits.train):,} images {often} on this machine, and learns little in fewer "
        f"than {MIN_EPOCHS}; give --minutes {math.ceil(enough)}, or a smaller model or "
        f"--model.img_size"
    )


def _unmixed(name: str, changes: Mapping[str, Any], seen: float) -> dict[str, float]:
    """Mixup and cutmix off, unless given, for small photographs of which so few are seen."""
    if seen >= _MIXED_IMAGES or not _small(recipe(name, changes)):
        return {}
    return {name: 0.0 for name in ("augment.mixup", "augment.cutmix") if name not in changes}


def _chosen(run: ResolvedRun, why: str, off: Mapping[str, float]) -> list[str]:
    """Lines on the model, whether `explore --live` supports it, what is off, and the length."""
    model, (height, width), plan = run.config.model.name, run.img_size, run.plan
    lines = [f"model   {model} at {height}×{width}: {why}"]
    if family_of(model) == "cvt":
        lines.append("page    explore --live does not support CvT; give --model convit_nano")
    if off:
        names = " or ".join(name.removeprefix("augment.") for name in off)
        lines.append(f"augment no {names}, which would cost so short a run accuracy")
    often = f"each image {plan.epoch(plan.steps):.3g} times"
    return [*lines, f"length  {plan.steps:,} steps of {plan.batch_size} images, {often}"]


def _small(config: RunConfig) -> bool:
    return is_small(config.model.name, config.model.img_size)


def batch_size(images: int, small: bool) -> int:
    """The batch size for this many training images; small ones have up to `SMALL_SIDE` pixels."""
    if images >= 20_000:
        return 128
    return 64 if small or images >= 2000 else 32


def _candidate_sizes(side: int, asked: Set[str], model: str) -> list[dict[str, Any]]:
    """Candidate models and sizes by cost.

    Each model has the largest of its image sizes that the images reach; all its sizes have about
    the same grid of patches.

    Args:
        side: shorter side of the images in pixels.
        asked: model settings that are given and stay.
        model: the model's name, if given.
    """
    models = dict(_MODEL_SIZES)
    if "model.name" in asked:
        known = (models | _OTHER_SIZES).get(re.sub("^deit_", "convit_", model))
        models = {} if known is None else {model: known}
    if not models or asked - {"model.name"}:
        return [{}]
    sizes = [
        (name, *fitting[-1])
        for name, of in models.items()
        if (fitting := [size for size in of if size[0] <= side])
    ]
    first = next(iter(models))
    sizes = sizes or [(first, *models[first][0])]
    return [dict(zip(_MODEL_SETTINGS, size, strict=True)) for size in sizes]


def _advice(name: str, minutes: float, longest: bool, root: str | None) -> list[str]:
    more = "longer  no use: more passes over so few images do not help; more images would"
    if not longest:
        more = f"longer  --minutes {6 * minutes:g} allows more passes over the images"
        more += ", and perhaps a larger model" if name == "photos" else ""
    if name == "finetune":
        return [more]
    return [
        "first   pretrained weights help small datasets most: locality finetune "
        f"{root} --from FILE, or a public name such as convit_tiny.fb_in1k or timm/resnet18",
        more,
    ]


def median_shorter_side(source: ImageSource) -> int:
    """The median shorter side of a sample of images, in pixels."""
    sides = []
    for index in np.linspace(0, len(source) - 1, min(_SAMPLED_IMAGES, len(source))).astype(int):
        try:
            sides.append(min(source.read(int(index)).size))
        except BadImage:
            continue
    if not sides:
        raise UserError(f"none of the sampled images can be read, such as {source.describe(0)}")
    return round(statistics.median(sides))
