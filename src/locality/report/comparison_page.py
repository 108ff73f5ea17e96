"""The page of `locality compare`."""

from __future__ import annotations

import logging
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean
from time import perf_counter

from locality.analysis.baselines import ADVICE, read_baseline_pixels
from locality.analysis.runs import (
    RecordedRun,
    RunGroup,
    baselines_at,
    check_same_images,
    group,
    read_runs,
)
from locality.analysis.statistics import Estimate, estimate, holm, paired_difference
from locality.errors import UserError, one_line
from locality.figures import charts
from locality.predictions import Predictions
from locality.report.page import FILTERS, format_estimate, format_share, join_names
from locality.runner.runs import Outcome, Run
from locality.templates import render, write_page

_log = logging.getLogger("locality")

_MAX_CLASSES = 20
# Share of a comparison's time spent on writing intermediate pages.
_PAGE_SHARE = 0.05
# Models trained from scratch are undertrained with fewer epochs.
_MIN_PASSES = 20
# With two runs, Student's t is 12.7.
_ENOUGH_RUNS = 3


@dataclass(frozen=True)
class Candidate(RunGroup):
    """A model's runs, compared by those on all images.

    Attributes:
        milliseconds: latency of one image; None if not measured.
    """

    milliseconds: float | None

    @cached_property
    def predictions(self) -> list[Predictions]:
        """The predictions of each run on its validation images."""
        return [run.predictions() for run in self.at(1.0)]

    @cached_property
    def right(self) -> dict[str, float]:
        """Accuracy on each image in per cent, over the runs that evaluated it."""
        answers: dict[str, list[float]] = {}
        for found in self.predictions:
            for name, right in zip(found.paths, found.right.tolist(), strict=True):
                answers.setdefault(name, []).append(100.0 * right)
        return {name: fmean(of) for name, of in answers.items()}

    @property
    def passes(self) -> float:
        """Epochs: how many times each image was trained on."""
        return self.at(1.0)[0].passes

    @property
    def accuracy(self) -> Estimate:
        """The mean over runs, with the interval over runs, or over images if runs are few."""
        over_runs = self.over_runs(1.0)
        if over_runs.n >= _ENOUGH_RUNS:
            return over_runs
        return replace(estimate([*self.right.values()]), mean=over_runs.mean)

    @property
    def best(self) -> RecordedRun:
        """The most accurate run."""
        return max(self.at(1.0), key=lambda run: float(run.result["top1"]))

    @property
    def calibration_error(self) -> Estimate:
        """Expected calibration error, in percentage points."""
        errors = [100 * found.calibration()[1] for found in self.predictions]
        return estimate(errors, self.shared)

    def per_class(self) -> list[float | None]:
        """Accuracy of each class in per cent, over all runs; None without images."""
        rows = zip(*(found.per_class() for found in self.predictions), strict=True)
        counts = [(sum(n["right"] for n in of), sum(n["images"] for n in of)) for of in rows]
        return [100 * right / images if images else None for right, images in counts]


@dataclass(frozen=True)
class Pair:
    """The difference of two models on the same images, more accurate model first.

    Attributes:
        first, second: labels.
        over_runs: the difference in points, with the interval over seeds or folds.
        over_images: the same difference with the interval over the evaluated images.
    """

    first: str
    second: str
    over_runs: Estimate
    over_images: Estimate

    @property
    def p_value(self) -> float:
        """The larger of the p-values over runs and over images."""
        return max(self.over_runs.p_value(), self.over_images.p_value())


def pairs_of(candidates: Sequence[Candidate]) -> list[tuple[Pair, bool]]:
    """All pairs of candidates, sorted by accuracy, on the runs and images they share; and whether
    their difference is significant, with Holm's correction for all pairs."""
    pairs = []
    for one, other in combinations(candidates, 2):
        runs = paired_difference(one.top1(1), other.top1(1), shared=one.shared)
        images = paired_difference(one.right, other.right)
        if runs is not None and images is not None:
            pairs.append(Pair(one.label, other.label, runs, images))
    return list(zip(pairs, holm([pair.p_value for pair in pairs]), strict=True))


def conclusion(candidates: Sequence[Candidate], pairs: Sequence[tuple[Pair, bool]]) -> str:
    """A sentence on the most accurate model."""
    best = candidates[0]
    own = [(pair, sure) for pair, sure in pairs if pair.first == best.label]
    beaten = join_names([pair.second for pair, sure in own if sure])
    open_ = [pair for pair, sure in own if not sure]
    reached = f"{best.label} has the highest accuracy, {format_share(best.accuracy)}%"
    if len(best.at(1.0)) < 2:
        return f"{reached}, with one run per model and so no interval over seeds."
    if not open_:
        return f"{reached}, significantly above {beaten} over seeds and over images."
    rest = join_names([pair.second for pair in open_], "or")
    fewest = sum(p.over_runs.p_value() > p.over_images.p_value() for p in open_)
    more = "more runs" if 2 * fewest > len(open_) else "more images to evaluate on"
    above = f" and is above {beaten}, but" if beaten else ", but"
    return f"{reached}{above} the difference from {rest} is not significant; {more} may decide it."


def short_runs_remark(candidates: Sequence[Candidate]) -> str:
    """A remark on short runs; "" if all are long enough."""
    passes = min(each.passes for each in candidates)
    if passes >= _MIN_PASSES:
        return ""
    return (
        f"These runs were short: some saw each image only {passes:.2g} times. Longer runs may "
        f"change the ranking."
    )


def more_images_remark(best: Candidate) -> str:
    """A remark on the gain from more images; "" without several fractions."""
    if len(best.fractions) < 2:
        return ""
    part = best.fractions[-2]
    found = paired_difference(best.top1(1.0), best.top1(part), shared=best.shared)
    if found is None or found.half_width is None:
        return ""
    gain = f"{format_estimate(found, sign=True)} points from {charts.percent(part)} to all images"
    if found.excludes_zero and found.mean > 0:
        return f"{best.label} gains {gain} with equal steps: more images are likely to help."
    return f"{best.label}: {gain} with equal steps, not significant."


class LivePage:
    """The page of a comparison in progress, rewritten as runs finish.

    Args:
        output: the file to write.
        runs: all runs of the comparison.
    """

    def __init__(self, output: Path, runs: Sequence[Run]) -> None:
        self.output = output
        self._runs, self._next = runs, -math.inf

    def after(self, outcome: Outcome) -> None:
        """Write the page once two models can be compared, using at most 5% of the time."""
        now = perf_counter()
        if outcome.error is not None or now < self._next:
            return
        finished = [run for run in self._runs if run.is_finished()]
        if len({run.config.model.name for run in finished if run.config.data.fraction == 1}) > 1:
            folders = [run.folder for run in finished]
            try:
                build_comparison(folders, self.output, {}, len(self._runs) - len(finished))
            except (UserError, OSError) as error:  # do not stop the other runs
                _log.warning("%s was not written: %s", self.output, one_line(error))
            self._next = perf_counter() + (perf_counter() - now) / _PAGE_SHARE


def build_comparison(
    folders: Sequence[Path], output: Path | str, milliseconds: Mapping[str, float], waiting: int = 0
) -> tuple[Path, str]:
    """Write the comparison page of finished runs, from their recorded files.

    Args:
        folders: the run folders.
        output: the file to write.
        milliseconds: inference latency by model name.
        waiting: number of unfinished runs.

    Returns:
        the page's path and its conclusion.

    Raises:
        UserError: fewer than two models have finished a run on all images, or the images differ.
    """
    runs = read_runs(folders)
    check_same_images(runs)
    groups = [one for one in group(runs) if one.at(1.0)]
    if len(groups) < 2:
        raise UserError("fewer than two models have finished a run on all images")
    found = [Candidate(one.label, one.runs, milliseconds.get(one.model)) for one in groups]
    found.sort(key=lambda each: -each.accuracy.mean)
    pairs = pairs_of(found)
    said = conclusion(found, pairs)
    baselines = baselines_at(groups, 1.0)
    below = found[0].below(1.0, baselines)
    drawn = any(len(run.curve) > 1 for run in found[0].at(1.0))  # a curve needs two evaluations
    html = render(
        "locality.report",
        "comparison.html",
        FILTERS,
        title=f"Which model for {groups[0].runs[0].dataset}?",
        said=said,
        baselines=baselines,
        pixels=read_baseline_pixels(groups[0].runs[0].path),
        remarks=[
            f"{waiting} of {waiting + len(folders)} runs have not finished." * bool(waiting),
            f"Even the best model, {below}: {ADVICE}." * bool(below),
            short_runs_remark(found),
            more_images_remark(found[0]),
        ],
        folds=groups[0].runs[0].config["data"].get("fold"),
        few=len(found[0].at(1.0)) < _ENOUGH_RUNS,
        command=shlex.join(["locality", "predict", str(found[0].best.path)]),
        candidates=found,
        result=found[0].at(1.0)[0].result,
        evaluated=len(found[0].right),
        pairs=pairs,
        classes=_classes(found),
        max_classes=_MAX_CLASSES,
        accuracy=charts.chart(charts.draw_accuracy, groups),
        learning=charts.chart(charts.draw_learning, groups, 1.0) if drawn else None,
        fractions=sorted({part for one in groups for part in one.fractions}),
    )
    return write_page(output, html), said


def _classes(candidates: Sequence[Candidate]) -> list[tuple[str, int, tuple[float | None, ...]]]:
    """Name, evaluated images and accuracies of each class, least accurate first."""
    predictions = candidates[0].predictions
    labels = {
        name: label
        for one in predictions
        for name, label in zip(one.paths, one.labels.tolist(), strict=True)
    }
    images = Counter(labels.values())
    accuracies = zip(*(each.per_class() for each in candidates), strict=True)
    rows = [
        (name, images[number], parts)
        for number, (name, parts) in enumerate(zip(predictions[0].classes, accuracies, strict=True))
        if images[number]
    ]
    return sorted(rows, key=lambda row: fmean(part or 0.0 for part in row[2]))[:_MAX_CLASSES]
