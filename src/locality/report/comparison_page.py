"""The page of `locality compare`."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from locality.analysis.baselines import ADVICE, read_baseline_pixels
from locality.analysis.runs import (
    BaselinePair,
    RunGroup,
    baselines_at,
    check_same_images,
    fewest_passes,
    group,
    over,
    read_runs,
)
from locality.analysis.statistics import Estimate, holm
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
        significant: whether the difference is, with Holm's correction for all pairs of rows.
    """

    group: RunGroup
    accuracy: Estimate
    behind: Estimate | None = None
    significant: bool = False


def rows_of(groups: Sequence[RunGroup]) -> list[Row]:
    """The rows of the table, most accurate model first."""
    ranked = sorted(groups, key=lambda one: -one.over_runs(1.0).mean)
    pairs = [BaselinePair(1.0, ranked[0], one) for one in ranked[1:]]
    # Each model could have been the best, so all n (n − 1) / 2 pairs count, not n − 1.
    significant = holm([pair.p_value for pair in pairs], 0.05 * 2 / len(ranked))
    accuracies, behind = [one.over_runs(1.0) for one in ranked], [pair.difference for pair in pairs]
    compared = zip(ranked, accuracies, [None, *behind], [False, *significant], strict=True)
    return [Row(*values) for values in compared]


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
        over=over(best.at(1.0)),
        several=any(len(one.fractions) > 1 for one in groups),
        command=shlex.join(["locality", "predict", str(chosen.path)]),
        folder=os.path.commonpath(folders),
        accuracy=charts.chart(charts.draw_accuracy, groups),
    )
    return write_page(output, html), " ".join(filter(None, [said, *remarks]))
