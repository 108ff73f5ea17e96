"""Model size, image size and length of a run on custom images, chosen for images, machine and time.

The recipes `photos` and `finetune` say how to train. What `autofit` chooses becomes part of the
run's configuration, so that the run can be repeated and resumed on machines of any speed.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
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
from locality.training.optim import Plan, make_plan
from locality.training.recipes import adjusted, is_small
from locality.training.resolved_run import ResolvedRun

# Models to train from scratch, by cost, with the image sizes that they are for and their patches:
# grids of 8×8 patches, the last of 14×14. In three minutes on two cores convit_nano had 76.6% on
# photographs of clothes of 28 pixels, 448 to train on, and cvt_nano 71.6%, four times as slow.
_MODEL_SIZES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "convit_nano": ((28, 4), (32, 4)),
    "convit_micro": ((32, 4), (64, 8)),
    "convit_mini": ((64, 8), (128, 16)),
    "convit_tiny": ((224, 16),),
}
_MODEL_SETTINGS = ("model.name", "model.img_size", "model.patch_size")
MIN_EPOCHS = 10
"""A run that sees each image less often learns little."""
# Of a model that is given, but not chosen; DeiTs have those of their ConViT.
_OTHER_SIZES = {"cvt_nano": ((28, None), (32, None))}
# A larger model has to see each image so often, and so many images in all. On 450 photographs of
# clothes convit_micro had 55% after 41,000 images.
_LARGER_EPOCHS, _LARGER_IMAGES = 100, 150_000
# No model trains for longer than the larger of these.
_MAX_EPOCHS, _MAX_IMAGES = 400, 200_000
_MAX_EPOCHS_FINETUNED = 50
# Fine-tuning on fewer images does without mixup and cutmix.
MIXUP_MIN_IMAGES = 5000
_SAMPLED_IMAGES = 32
SLACK = 1.2
"""A refusal names a time that also does where the machine is this much slower."""


@dataclass(frozen=True)
class AutoFit:
    """Settings that fit the images, the machine and the time.

    Attributes:
        config: the whole run.
        images_per_second: training speed on this machine; None where it was not measured.
        seconds: estimated time on this machine: choosing them, training, evaluations, baselines; 0
            where that was not measured.
        passes: how often each image is trained on.
        reasons: what was chosen and why, a line each.
        name, changes: recipe and settings, those of the schedule aside.
        cost: by which the length was chosen; None where that was given.
        end: when the time is over, by `time.perf_counter`.
    """

    config: RunConfig
    images_per_second: float | None
    seconds: float
    passes: float
    reasons: tuple[str, ...]
    name: str
    changes: Mapping[str, Any]
    cost: Cost | None = None
    end: float = 0.0

    def __str__(self) -> str:
        return "\n".join(self.reasons)

    def lengthened(self, steps: int, seconds: float) -> RunConfig:
        """The run at the length that the time left is enough for; it may be a shorter one.

        Warm-up does not depend on the length, so a run whose length changes at its end is the run
        that had that length from the first step.

        Args:
            steps: made so far, which are those of warm-up.
            seconds: what they took.
        """
        if self.cost is None:
            return self.config
        per_image = seconds / (steps * self.config.engine.batch_size)
        factor = per_image / self.cost.training
        loading, computing = factor * self.cost.loading, factor * self.cost.computing
        cost = replace(self.cost, loading=loading, computing=computing, decoding=0.0)
        return fit(self.name, self.changes, cost, self.end - perf_counter(), steps)[0]


Measured = tuple[Mapping[str, Any], ResolvedRun, Cost]
"""Settings of a run by dotted name, those of its schedule aside; the run; its cost here."""


def fit(
    name: str, changes: Mapping[str, Any], cost: Cost, seconds: float, begun: int = 0
) -> tuple[RunConfig, float]:
    """The run that takes this time, or of one step where that is too little, and its seconds.

    Args:
        name: its recipe.
        changes: its settings by dotted name, those of the schedule aside.
        cost: of it.
        seconds: the time.
        begun: steps made before, which were all of warm-up.
    """
    config, evaluations = adjusted(name, changes), cost.evaluations(seconds)
    batch, most = config.engine.batch_size, _most_images(name, config, cost)
    images = min(cost.images(seconds, evaluations), most - begun * batch)
    steps = begun + max(1, round(images / batch))
    every = math.ceil(steps / evaluations)
    length = {"schedule.steps": steps, "schedule.warmup": begun or steps // 10}
    length |= {"schedule.eval_every": every}
    # The best weights are kept; fine-tuning also ends where they do not get better.
    length |= {"schedule.patience": 3 * every if name == "finetune" else steps}
    took = cost.seconds((steps - begun) * batch, evaluations)
    return adjusted(name, length | dict(changes)), took


def _most_images(name: str, config: RunConfig, cost: Cost) -> int:
    if name == "finetune" and not _small(config):
        return _MAX_EPOCHS_FINETUNED * cost.train
    return max(_MAX_EPOCHS * cost.train, _MAX_IMAGES)


def measured(name: str, changes: Mapping[str, Any], splits: DataSplits | None = None) -> Measured:
    """Measure the speed of a run on custom images.

    Args:
        name: "photos" or "finetune".
        changes: settings by dotted name.
        splits: its images, if they are open already.

    Raises:
        UserError: if the run cannot work as configured.
    """
    run = ResolvedRun(adjusted(name, changes), splits)
    if run.world_size > 1 and launched_externally():
        raise UserError(
            "several processes would choose different settings; choose them in one, `locality "
            "train … --print_config > run.yaml`, and start the others with --config run.yaml"
        )
    cost = measure_cost(run)
    if cost.loading > cost.computing / 4:
        changes = {"data.workers": min(machine.processors(), 8)} | dict(changes)
    workers = adjusted(name, changes).data.workers * run.world_size
    return changes, run, replace(cost, workers=workers)


def _measured_fastest(name: str, changes: Mapping[str, Any], splits: DataSplits) -> Measured:
    """As `measured`, with as many threads as are fastest: torch's own, half of them, and so on.

    On processors that are busy with something else, or for a small model, fewer are faster.
    """
    found = measured(name, changes, splits)
    count = torch.get_num_threads()
    if "engine.threads" in changes or found[1].device_type != "cpu":
        return found
    while (count := count // 2) >= 1:
        other = measured(name, dict(changes) | {"engine.threads": count}, splits)
        if other[2].training >= found[2].training:
            break
        found = other
    return found


def autofit(name: str, given: Mapping[str, Any], minutes: float | None) -> AutoFit:
    """Choose the settings of a run on custom images that takes about `minutes` on this machine.

    Args:
        name: "photos" or "finetune".
        given: settings by dotted name that are not changed; `data.root` is one of them.
        minutes: for everything: the choice itself, training, evaluation, baselines; None where
            `given` says how long to train.

    Raises:
        UserError: if the data cannot be used, the time is too short to see each image once, or as
            `recipes.adjusted`.
    """
    if minutes is not None:
        checks.typed("minutes", minutes, checks.Positive)
    started = perf_counter()
    tuned = name == "finetune"
    config = adjusted(name, given)
    splits = open_data(config.data, config.seed)
    opening = perf_counter() - started  # which the run does again
    images, side = len(splits.train), median_shorter_side(splits.train)
    mixed = {"augment.mixup": 0.8, "augment.cutmix": 1.0} if images >= MIXUP_MIN_IMAGES else {}

    def at(size: Mapping[str, Any]) -> dict[str, Any]:
        changes = dict(size) | dict(given)
        batch = batch_size(images, small=_small(adjusted(name, changes)))
        return {"engine.batch_size": batch} | (mixed if tuned else {}) | changes

    asked = given.keys() & set(_MODEL_SETTINGS)
    smallest, *larger = [{}] if tuned else _candidate_sizes(side, asked, config.model.name)
    size: Mapping[str, Any] = smallest
    why = "as the weights are" if tuned else "as given" if asked else "the smallest"
    needed = max(_LARGER_EPOCHS * images, _LARGER_IMAGES)
    about = (
        f"images  {images:,} to train on and {len(splits.val):,} to evaluate on, of "
        f"{len(splits.classes):,} classes, about {side} pixels on the shorter side"
    )
    if minutes is None:  # nothing is measured: the same choice on every machine
        for other in larger:
            if make_plan(adjusted(name, at(other)), images).images >= needed:
                size, why = other, "the largest that so long a run is enough for"
        config = adjusted(name, at(size))
        run = ResolvedRun(config, splits)
        seen = run.plan.images / images
        reasons = (about, *_chosen(run, why), _length(run.plan))
        return AutoFit(config, None, 0.0, seen, reasons, name, at(size))

    changes, run, cost = _measured_fastest(name, at(smallest), splits)

    def left() -> float:
        """Seconds of the time that remain for training and evaluation."""
        beside = opening + cost.baselines
        return 60 * minutes - (perf_counter() - started) - beside

    for other in larger:
        # As fast per multiply-accumulate.
        macs = forward_macs(adjusted(name, at(other)).model, cost.classes)
        slower = replace(cost, macs=macs, computing=cost.computing * macs / cost.macs)
        if slower.passes(left()) * images < needed:
            break
        size, why = other, f"the largest that has the time to learn in {minutes:g} minutes here"
    if size != smallest:
        changes, run, cost = _measured_fastest(name, at(size), splits)
    remaining = left()
    passes, beside = cost.passes(remaining), 60 * minutes - remaining
    short = []
    if passes < MIN_EPOCHS:
        enough = SLACK * (cost.enough(MIN_EPOCHS) + beside) / 60
        short = [_too_short(run, passes, minutes, math.ceil(enough))]
        if passes < 1:
            raise UserError(short[0])
    config, seconds = fit(name, changes, cost, remaining)
    threads = config.engine.threads
    by_workers = f" by each of {cost.workers} processes" if cost.workers else ""
    if cost.decoding > cost.loading:
        by_workers += f" ({1000 * cost.decoding:.3g} ms more the first time)"
    plan = make_plan(config, images)
    longest = plan.images >= _most_images(name, config, cost) - plan.batch_size
    reasons = (
        about,
        *_chosen(run, why),
        f"speed   {1 / cost.training:.3g} images/s: {1000 * cost.loading:.3g} ms to load one"
        f"{by_workers}, {1000 * cost.computing:.3g} ms to compute"
        + (f" with {threads} of {torch.get_num_threads()} threads" if threads else ""),
        f"{_length(plan)}: about {format_duration(seconds + beside)} in all, with this choice, "
        "evaluations and baselines; chosen again after warm-up, by the speed so far",
        "keeps   the weights of the best evaluation, and the last; the accuracy of the best of "
        "many is flattered, other images say more (data.val_part)",
        *(f"short   {sentence}" for sentence in short),
        *_advice(name, minutes, longest, config.data.root),
    )
    passes, end = plan.images / images, started + 60 * minutes
    return AutoFit(
        config, 1 / cost.training, seconds + beside, passes, reasons, name, changes, cost, end
    )


def _chosen(run: ResolvedRun, why: str) -> list[str]:
    """The model and its image size, and which page of it there will not be."""
    model, (height, width) = run.config.model.name, run.img_size
    lines = [f"model   {model} at {height}×{width}: {why}"]
    if family_of(model) == "cvt":
        lines.append(
            "page    explore --live cannot compute a CvT; --model convit_nano is one it can"
        )
    return lines


def _length(plan: Plan) -> str:
    return (
        f"length  {plan.steps:,} steps of {plan.batch_size} images, each image "
        f"{plan.epoch(plan.steps):.3g} times"
    )


def _small(config: RunConfig) -> bool:
    return is_small(config.model.name, config.model.img_size)


def batch_size(images: int, small: bool) -> int:
    """The batch for so many training images; `small` are those of at most `SMALL_SIDE` pixels."""
    if images >= 20_000:
        return 128
    return 64 if small or images >= 2000 else 32


def _candidate_sizes(side: int, asked: Set[str], model: str) -> list[dict[str, Any]]:
    """Models for images of this shorter side in pixels, by cost.

    Each is at the largest of its sizes that the images have, since its grid of patches is the same.

    Args:
        side: of the images.
        asked: which settings of the model are given; they stand.
        model: its name, if that is among them.
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


def _too_short(run: ResolvedRun, passes: float, minutes: float, enough: int) -> str:
    """The message for a run that is too short, with the minutes that would do."""
    height, width = run.img_size
    often = "less than once" if passes < 1 else f"{passes:.2g} times"
    return (
        f"in {minutes:g} minutes {run.config.model.name} at {height}×{width} would see each "
        f"of {len(run.splits.train):,} images {often} on this machine, and learns little in fewer "
        f"than {MIN_EPOCHS}; give --minutes {enough}, or a smaller model or --model.img_size"
    )


def _advice(name: str, minutes: float, longest: bool, root: str | None) -> list[str]:
    more = "longer  no use: more passes over so few images teach nothing; more images would"
    if not longest:
        more = f"longer  --minutes {6 * minutes:g} sees the images more often"
        more += ", in a larger model where there is time" if name == "photos" else ""
    if name == "finetune":
        return [more]
    return [
        "first   few images gain most from weights that were trained on many: locality finetune "
        f"{root} --from FILE, or a public name, as convit_tiny.fb_in1k and timm/resnet18",
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
        raise UserError(f"none of the first images can be read, such as {source.describe(0)}")
    return round(statistics.median(sides))
