"""Measures of finished runs, and the quantities per seed that experiments compute from them.

A quantity without a value is empty, with a reason that is shown in its place.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from locality.analysis.recording import measure_trajectory
from locality.analysis.statistics import Estimate, estimate
from locality.checkpoints import load, open_model
from locality.data.config import DATASETS
from locality.errors import UserError
from locality.files import read_json, write_atomic
from locality.runner.runs import Run
from locality.runs import RunFolder
from locality.training.config import RunConfig, ScheduleConfig
from locality.training.cost import image_counts
from locality.training.devices import resolve_accelerator
from locality.training.evaluation import evaluate_opened
from locality.training.optim import make_plan

NOT_RUN = "not run yet"

MEASURED = "experiments.json"
"""The file in a run folder that caches its measures."""

Failures = Mapping[Path, str]
"""Why runs failed, by folder."""

# Batch size of the speeds in ConViT's paper.
_SPEED_BATCH, _SPEED_ROUNDS = 128, 7
_TRAJECTORY_IMAGES = 256


EMPTY = UserError, FileNotFoundError
"""Errors of a quantity without a value; the message is the reason."""


class Untestable(UserError):
    """A quantity that does not exist at a scale, known before anything runs."""


@dataclass(frozen=True)
class Measure:
    """A measure of a finished run.

    Attributes:
        name: the key of the cached value; has to name everything that the value depends on.
        function: run → number, or a list or dictionary of numbers for a curve.
        cached: cache the value in the run folder, because it needs forward passes.
        timed: a duration, to be measured on an otherwise idle machine.
        unit: unit of its differences.
        accuracy: whether it is an accuracy in per cent of the evaluated images.
    """

    name: str
    function: Callable[[Run], Any] = field(compare=False)
    cached: bool = True
    timed: bool = False
    unit: str = "points"
    accuracy: bool = False

    def __call__(self, run: Run) -> Any:
        """The value for a finished run, measured or cached."""
        if not self.cached:
            return self.function(run)
        return cached_value(run.folder / MEASURED, self.name, lambda: self.function(run))


def cached_value(path: Path, name: str, take: Callable[[], Any]) -> Any:
    """The value cached in a file under a name; computed and added if missing."""

    def read() -> dict[str, Any]:
        return read_json(path) if path.exists() else {}

    known = read()
    if name not in known:
        value = take()
        # Read again, as another value may have been added meanwhile.
        known = read() | {name: value}
        write_atomic(path, json.dumps(known, allow_nan=False) + "\n")
    return known[name]


@dataclass(frozen=True)
class Term:
    """An accuracy that a number depends on, measured on the same images for all seeds.

    Attributes:
        right: the accuracy as a fraction, mean over seeds.
        slope: derivative of the number with respect to the accuracy in points.
        images: number of images.
    """

    right: float
    slope: float
    images: int


@dataclass(frozen=True)
class Values:
    """The values of a quantity.

    Attributes:
        by_seed: seed → value.
        problems: why seeds are missing, one sentence each.
        constant: the same for all seeds; `by_seed` then has seed 0 only.
        terms: accuracies that the quantity depends on, by measure and runs, without those whose
            images differ between seeds.
    """

    by_seed: dict[int, Any]
    problems: tuple[str, ...] = ()
    constant: bool = False
    terms: Mapping[Any, Term] = field(default_factory=dict)

    def at(self, seed: int) -> Any:
        """The value for a seed."""
        return self.by_seed[0 if self.constant else seed]

    def estimate(self) -> Estimate:
        """Mean and 95% interval over seeds."""
        return estimate(list(self.by_seed.values()))

    def image_error(self) -> float:
        """Upper bound on the standard error due to the choice of evaluated images.

        An accuracy p on N images has variance p (1 − p) / N. For two models with accuracies p and q
        on the same images, the share that both predict correctly is unknown: at most min(p, q), and
        at least p q unless their errors are negatively correlated. The bound that gives the larger
        variance is used.
        """

        def covariance(one: Term, other: Term) -> float:
            p, q = one.right, other.right
            both = min(p, q) if one is other or one.slope * other.slope > 0 else p * q
            return one.slope * other.slope * (both - p * q) / math.sqrt(one.images * other.images)

        terms = list(self.terms.values())
        return 100 * math.sqrt(max(0.0, sum(covariance(a, b) for a in terms for b in terms)))


@dataclass(frozen=True)
class Quantity:
    """A number, or a curve {"x": […], "y": […]}, per seed; differences are paired by seed.

    Attributes:
        evaluate: failures → values; raises one of `EMPTY` with the reason if there are none.
        unit: unit of its differences; points for accuracies.
        measures: the measures it needs, by run.
        paper: the paper's number, published or computed from published numbers.
    """

    evaluate: Callable[[Failures], Values]
    unit: str = "points"
    measures: tuple[tuple[Run, Measure], ...] = ()
    paper: float | None = None

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs it is measured on."""
        return tuple(run for run, _ in self.measures)

    def __sub__(self, other: Quantity) -> Quantity:
        return combined(operator.sub, self, other, unit=self.unit)

    def __truediv__(self, other: Quantity) -> Quantity:
        return combined(operator.truediv, self, other, unit="times")

    def stated(self, paper: float) -> Quantity:
        """The quantity with the paper's number, from a table, the text or a figure."""
        return dataclasses.replace(self, paper=paper)


def why_missing(run: Run, failures: Failures) -> str | None:
    """Why a run has no result, or None if it has one."""
    return failures.get(run.folder) or (None if run.is_finished() else NOT_RUN)


def measured(runs: Iterable[Run], measure: Measure) -> Quantity:
    """A measure of runs that differ only in their seed; unfinished ones are skipped."""
    pairs = tuple((run, measure) for run in runs)

    def evaluate(failures: Failures) -> Values:
        found, problems = {}, {}
        for run, _ in pairs:
            try:
                if reason := why_missing(run, failures):
                    raise UserError(reason)
                found[run.config.seed] = measure(run)
            except EMPTY as error:
                problems[run.name] = str(error)
        sentences = [f"{name}: {reason}" for name, reason in problems.items()]
        if not found:
            common = len(set(problems.values())) == 1
            raise UserError(next(iter(problems.values())) if common else sentences[0])
        terms = {}
        done = [run for run, _ in pairs if run.config.seed in found]
        if measure.accuracy and (images := _shared_images([run.config for run in done])):
            right = math.fsum(found.values()) / len(found) / 100
            terms[measure.name, *(run.folder for run in done)] = Term(right, 1.0, images)
        return Values(found, tuple(sentences), terms=terms)

    return Quantity(evaluate, measure.unit, pairs)


def _shared_images(configs: Sequence[RunConfig]) -> int | None:
    """Number of images that all runs are evaluated on; None if images differ between runs."""
    data = configs[0].data
    split_off = data.val_part is not None or "images" not in DATASETS[data.dataset]
    if split_off and len({each.data.split_seed for each in configs}) > 1:
        return None
    return image_counts(configs[0])[1]


def combined(function: Callable[..., Any], *parts: Quantity, unit: str = "points") -> Quantity:
    """A function of quantities, computed for each seed that all of them have.

    A seed's common effect on all of them (split, order) cancels in a difference.
    """

    def evaluate(failures: Failures) -> Values:
        values = list(_evaluated(parts, failures)[0].values())
        seeds = _seeds(values, set.intersection)
        if not seeds:
            raise UserError("the quantities it is computed from share no seed")
        return Values(
            {seed: function(*(each.at(seed) for each in values)) for seed in seeds},
            tuple(dict.fromkeys(problem for each in values for problem in each.problems)),
            constant=all(each.constant for each in values),
            terms=_terms(function, values, seeds[0]),
        )

    printed = [part.paper for part in parts]
    paper = None if None in printed else function(*printed)
    measures = tuple(pair for part in parts for pair in part.measures)
    return Quantity(evaluate, unit, measures, paper)


def _evaluated(
    parts: Iterable[Quantity], failures: Failures, partial: bool = False
) -> tuple[dict[int, Values], list[Exception]]:
    """The values of parts by index, and the reasons why others are empty.

    Unless `partial` and some have values, one of the reasons is raised: impossible quantities
    before runs that were not executed.
    """
    found: dict[int, Values] = {}
    reasons: list[Exception] = []
    for place, part in enumerate(parts):
        try:
            found[place] = part.evaluate(failures)
        except EMPTY as error:
            reasons.append(error)
    if reasons and not (partial and found):
        raise min(reasons, key=lambda error: not isinstance(error, Untestable))
    return found, reasons


def _seeds(values: Iterable[Values], join: Callable[..., set[int]]) -> list[int]:
    """The intersection or union of the values' seeds; [0] if none depends on the seed."""
    varied = [set(each.by_seed) for each in values if not each.constant]
    return sorted(join(*varied)) if varied else [0]


def over(xs: Iterable[float], parts: Iterable[Quantity]) -> Quantity:
    """Quantities at several x as a curve; each seed has the x at which it was run."""
    points = list(zip(xs, parts, strict=True))

    def evaluate(failures: Failures) -> Values:
        found, reasons = _evaluated((part for _, part in points), failures, partial=True)
        values, by_seed = found.values(), {}
        for seed in _seeds(values, set.union):
            known = {n: each for n, each in found.items() if each.constant or seed in each.by_seed}
            y = [each.at(seed) for each in known.values()]
            by_seed[seed] = {"x": [points[n][0] for n in known], "y": y}
        problems = [*map(str, reasons), *(problem for each in values for problem in each.problems)]
        constant = all(each.constant for each in values)
        return Values(by_seed, tuple(dict.fromkeys(problems)), constant)

    return Quantity(evaluate, measures=tuple(pair for _, part in points for pair in part.measures))


_STEP = 1e-3  # in points


def _terms(function: Callable[..., Any], parts: Sequence[Values], seed: int) -> dict[Any, Term]:
    """The terms of a function of quantities, with numerical slopes at their means over seeds."""
    at = [each.estimate().mean if each.terms else each.at(seed) for each in parts]
    found: dict[Any, Term] = {}
    for n, part in enumerate(parts):
        if not part.terms:
            continue
        low, high = (function(*at[:n], at[n] + step, *at[n + 1 :]) for step in (-_STEP, _STEP))
        if isinstance(low, dict):
            return {}  # a curve
        slope = (high - low) / (2 * _STEP)
        for key, term in part.terms.items():
            known = found[key].slope if key in found else 0.0
            found[key] = dataclasses.replace(term, slope=known + slope * term.slope)
    return found


def computed(function: Callable[[], Any], unit: str = "") -> Quantity:
    """A number that needs no run, such as a model's parameters; the same for all seeds."""
    return Quantity(lambda _: Values({0: function()}, constant=True), unit)


def absent(reason: str) -> Quantity:
    """A quantity that does not exist at a scale, with the reason."""

    def refuse(_: Failures) -> Values:
        raise Untestable(reason)

    return Quantity(refuse)


def relative_gain(convit: Quantity, deit: Quantity) -> Quantity:
    """ConViT's gain over DeiT in per cent of DeiT's accuracy ("gap" in ConViT's Table 2)."""
    unit = "% of DeiT's accuracy"
    return combined(lambda a, b: 100 * (a - b) / b, convit, deit, unit=unit)


def of_result(
    *names: str, per: float = 1.0, unit: str = "points", accuracy: bool = False
) -> Measure:
    """A number in result.json, divided by `per`: 1e6 and `unit` "M" for parameters."""

    def read(run: Run) -> float:
        found: Any = run.result() or {}
        return float(functools.reduce(operator.getitem, names, found)) / per

    return Measure(names[-1], read, cached=False, unit=unit, accuracy=accuracy)


TOP1 = of_result("top1", accuracy=True)
"""Final accuracy in per cent."""
TOP5 = of_result("top5", accuracy=True)


def _evaluations(run: Run) -> list[dict[str, float]]:
    """The rows of metrics.csv."""
    rows = RunFolder(run.folder).curve
    if not rows:
        raise UserError(f"{run.folder} has no evaluations in metrics.csv")
    return rows


def _read_curve(run: Run) -> dict[str, list[float]]:
    curve = _evaluations(run)
    return {"x": [row["epoch"] for row in curve], "y": [row["top1"] for row in curve]}


def _over_fraction(run: Run) -> dict[str, list[float]]:
    curve = _read_curve(run)
    return {"x": [100 * epoch / curve["x"][-1] for epoch in curve["x"]], "y": curve["y"]}


LEARNING_CURVE = Measure("top-1 over epochs", _read_curve, cached=False)
BEST_TOP1 = Measure(
    "best top1", lambda run: max(_read_curve(run)["y"]), cached=False, accuracy=True
)
"""The highest top-1 of all evaluations, for Fig. 11."""
# Comparable between fractions of the data, whose epochs differ in length.
CURVE_OVER_FRACTION = Measure("top-1 over the fraction of training", _over_fraction, cached=False)


def early(schedule: ScheduleConfig) -> float:
    """End of early training: warm-up plus a twentieth of the run (20 of the paper's epochs).

    In the schedule's unit, so the same number of steps for all models of a scale.
    """
    return schedule.warmup + schedule.length / 20


def _first_from(at: float, places: Sequence[float]) -> int:
    """Index of the first of `places` at or after `at`, else of the last."""
    return next((i for i, place in enumerate(places) if place >= at - 1e-6), len(places) - 1)


def top1_at(name: str, when: Callable[[ScheduleConfig], float]) -> Measure:
    """Top-1 at the first evaluation at or after a time in the schedule's unit."""

    def read(run: Run) -> float:
        schedule = run.config.schedule
        curve = _evaluations(run)
        places = [row[schedule.unit.removesuffix("s")] for row in curve]
        return curve[_first_from(when(schedule), places)]["top1"]

    return Measure(f"top1 {name}", read, cached=False, accuracy=True)


TOP1_EARLY = top1_at("early in training", early)


def _trajectory(run: Run) -> dict[str, Any]:
    found = measure_trajectory(run.folder, _TRAJECTORY_IMAGES)
    schedule = run.config.schedule
    return found | {"early": _first_from(early(schedule), found[schedule.unit])}


TRAJECTORY = Measure(f"attention over training, {_TRAJECTORY_IMAGES} images", _trajectory)
"""Nonlocality and gates of each layer over a run's snapshots, and the index of the early one."""


def masked_top1(name: str, mask: Callable[[nn.Module], AbstractContextManager[Any]]) -> Measure:
    """Top-1 of the trained model with part of it masked.

    Args:
        name: name of the mask with its parameters.
        mask: model → context manager.
    """

    def read(run: Run) -> float:
        opened = open_model(run.folder)
        with mask(opened.module()):
            return evaluate_opened(opened, run.config.data, seed=run.config.seed)["top1"]

    return Measure(f"top1, {name}", read, accuracy=True)


def _images_per_second(run: Run) -> float:
    device = torch.device(resolve_accelerator("auto"))
    model = load(run.folder).to(device)
    images = torch.randn(_SPEED_BATCH, 3, *model.img_size, device=device)
    seconds = []
    with torch.inference_mode():
        for _ in range(_SPEED_ROUNDS):
            start = perf_counter()
            model(images).cpu()  # waits for the GPU
            seconds.append(perf_counter() - start)
    return round(_SPEED_BATCH / min(seconds), 1)


INFERENCE_SPEED = Measure(
    "inference images per second", _images_per_second, timed=True, unit="images/s"
)
"""At batch size 128 on this machine, the best of several timings."""


def summed_rate(config: RunConfig) -> Quantity:
    """The sum over a run's steps of the learning rate of v_pos and λ."""

    def value() -> float:
        plan = make_plan(config, image_counts(config)[0])
        peak = config.optim.peak_lr(config.engine.batch_size)
        start, end = config.schedule.warmup_lr, config.schedule.min_lr
        # Linear warm-up, then the cosine of the whole length from the end of the warm-up.
        warm, length = plan.warmup, plan.steps - plan.cooldown
        cosine = length - warm - length / math.pi * math.sin(math.pi * warm / length)
        rising, falling = warm * (start + peak) / 2, (peak - end) / 2 * cosine
        return config.optim.position_lr_factor * (rising + falling + end * (plan.steps - warm))

    return computed(value)
