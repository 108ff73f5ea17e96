"""The page of `locality compare`."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from locality.analysis.baselines import ADVICE, read_baseline_pixels
from locality.analysis.runs import (
    RunGroup,
    baselines_at,
    check_same_images,
    fewest_passes,
    group,
    read_runs,
)
from locality.analysis.statistics import Estimate, estimate, holm
from locality.errors import UserError
from locality.figures import charts
from locality.report.page import FILTERS, format_share, join_names
from locality.templates import render, write_page

# Models trained from scratch are undertrained with fewer epochs.
_MIN_PASSES = 20


@dataclass(frozen=True)
class Row:
    """A model in the table.

    Attributes:
        group: its runs.
        accuracy: top-1 on all images in per cent.
        behind: the best model's accuracy less this one's, paired by run and image; None for the
            best, and without a common run.
        significant: whether the difference is, with Holm's correction for all rows.
    """

    group: RunGroup
    accuracy: Estimate
    behind: Estimate | None = None
    significant: bool = False


def rows_of(groups: Sequence[RunGroup]) -> list[Row]:
    """The rows of the table, most accurate model first."""
    ranked = sorted(groups, key=lambda one: -one.over_runs(1.0).mean)
    best, *others = [(one, _right(one)) for one in ranked]
    behind = []
    for _, right in others:
        both = sorted(best[1].keys() & right.keys())
        gaps = [best[1][repeat] - right[repeat] for repeat in both]
        behind.append(estimate(gaps, best[0].shared) if gaps else None)
    significant = holm([1.0 if gap is None else gap.p_value() for gap in behind])
    accuracies = [_accuracy(one, 1.0) for one in ranked]
    compared = zip(ranked, accuracies, [None, *behind], [False, *significant], strict=True)
    return [Row(*values) for values in compared]


def _accuracy(one: RunGroup, fraction: float) -> Estimate:
    """Top-1 in per cent over runs and their images."""
    return estimate([*_right(one, fraction).values()], one.shared)


def _right(one: RunGroup, fraction: float = 1.0) -> dict[tuple[int, ...], npt.NDArray[np.floating]]:
    """Per run: 100 for each image predicted correctly, else 0; folds' means."""
    right = {run.repeat: 100.0 * run.predictions().right for run in one.at(fraction)}
    if one.shared:  # folds differ in their images
        return {repeat: values.mean(keepdims=True) for repeat, values in right.items()}
    return right


def conclusion(rows: Sequence[Row]) -> str:
    """A sentence on the most accurate model."""
    best = f"{rows[0].group.label} has the highest accuracy, {format_share(rows[0].accuracy)}%"
    beaten = join_names([row.group.label for row in rows if row.significant])
    level = join_names([row.group.label for row in rows[1:] if not row.significant], "or")
    best += f", significantly above {beaten}" * bool(beaten)
    return best + f"; the difference from {level} is not significant" * bool(level) + "."


def build_comparison(folders: Sequence[Path], output: Path | str) -> tuple[Path, str]:
    """Write the comparison page of finished runs, from their recorded files.

    Args:
        folders: the run folders.
        output: the file to write.

    Returns:
        the page's path and what it concludes.

    Raises:
        UserError: fewer than two models have finished a run on all images, or the images differ.
    """
    runs = read_runs(folders)
    check_same_images(runs)
    groups = [one for one in group(runs) if one.at(1.0)]
    if len(groups) < 2:
        raise UserError("fewer than two models have finished a run on all images")
    rows = rows_of(groups)
    best = rows[0].group
    baselines = baselines_at(groups, 1.0)
    below = best.below(1.0, baselines)
    passes = fewest_passes(run for one in groups for run in one.at(1.0))
    chosen = max(best.at(1.0), key=lambda run: float(run.result["top1"]))
    said = conclusion(rows)
    remarks = [
        f"Even the best model, {below}: {ADVICE}." * bool(below),
        f"Some runs saw each image only {passes:.2g} times; longer ones may rank otherwise."
        * (passes < _MIN_PASSES),
    ]
    html = render(
        "locality.report",
        "comparison.html",
        FILTERS,
        title=f"Which model for {runs[0].dataset}?",
        said=said,
        remarks=remarks,
        rows=rows,
        baselines=baselines,
        pixels=read_baseline_pixels(runs[0].path),
        word="folds" if best.shared else "seeds",
        several=any(len(one.fractions) > 1 for one in groups),
        command=shlex.join(["locality", "predict", str(chosen.path)]),
        folder=os.path.commonpath(folders),
        accuracy=charts.chart(charts.draw_accuracy, groups, _accuracy),
    )
    return write_page(output, html), " ".join(filter(None, [said, *remarks]))
