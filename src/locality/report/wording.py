"""Numbers in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from locality.analysis.statistics import Estimate, estimate
from locality.report.runs import Run
from locality.report.series import Comparison


def percent(fraction: float) -> str:
    """A share as people write it: 5%, 0.5%."""
    return f"{100 * fraction:g}%"


def with_interval(found: Estimate, sign: bool = False) -> str:
    """69.0 ± 2.1, or 69.0 alone where one seed says nothing about spread."""
    mean = f"{found.mean:+.1f}" if sign else f"{found.mean:.1f}"
    return mean if found.half_width is None else f"{mean} ± {found.half_width:.1f}"


def estimate_of(runs: Sequence[Run], name: str) -> Estimate:
    """One of the final results over the seeds of some runs."""
    return estimate([float(run.result[name]) for run in runs])


def share_of_images(comparison: Comparison) -> str:
    """ "5% of the training images (67)"; "all 1,348 training images"."""
    if comparison.fraction == 1:
        return f"all {comparison.images:,} training images"
    return f"{percent(comparison.fraction)} of the training images ({comparison.images:,})"


def sentence(comparison: Comparison) -> str:
    """What one comparison shows, in a sentence that claims no more than the interval does."""
    first, second = comparison.first_series.label, comparison.second_series.label
    opening = f"With {share_of_images(comparison)}, {first} reaches {comparison.first.mean:.1f}%"
    opening += f" and {second} {comparison.second.mean:.1f}%"
    found = comparison.difference
    if found is None:
        return f"{opening}; no seed is common to both, so there is no paired difference."
    if found.half_width is None:
        return (
            f"{opening}: {_points(found.mean)}, on a single seed, which says nothing about chance."
        )
    interval = f"95% interval {found.low:+.1f} to {found.high:+.1f} over {found.n} seeds"
    if found.excludes_zero:
        return f"{opening}: {_points(found.mean)} ({interval})."
    return f"{opening}; these seeds cannot tell the difference from zero ({interval})."


def _points(difference: float) -> str:
    word = "more" if difference > 0 else "fewer"
    return f"{abs(difference):.1f} percentage points {word}"


def headline(comparisons: Sequence[Comparison]) -> str:
    """The one line at the top of a report; it claims something only of a single pair."""
    pairs = {(each.first_series.label, each.second_series.label) for each in comparisons}
    if not pairs:
        return "Training runs"
    if len(pairs) > 1:
        return f"Training runs: {len(pairs)} pairs of models compared"
    first, second = pairs.pop()
    known = {each.fraction: each.difference for each in comparisons if each.difference}
    if not any(found.half_width is not None for found in known.values()):
        return _single_seed(min(comparisons, key=lambda each: each.fraction))
    ahead = [part for part, found in known.items() if found.excludes_zero and found.mean > 0]
    behind = [part for part, found in known.items() if found.excludes_zero and found.mean < 0]
    if ahead and behind:
        return f"{first} and {second} each win on some amounts of data"
    size = _size(comparisons[0])
    if not ahead and not behind:
        return f"{first} and {size}{second}: no difference that these runs can show"
    winner, loser = (first, second) if ahead else (second, first)
    claim, won = f"{winner} beats {size}{loser}", ahead or behind
    if len(won) < len(known):
        return f"{claim} with {' and '.join(map(percent, won))} of the data"
    if len(known) > 1 and abs(known[min(known)].mean) > abs(known[max(known)].mean):
        return f"{claim}, most of all on little data"
    return claim


def _size(comparison: Comparison) -> str:
    """What may be said of the other model's size."""
    return "an equally large " if comparison.equally_large else ""


def _single_seed(comparison: Comparison) -> str:
    """Without a second seed there is no interval, and so nothing but the numbers to tell."""
    first, second = comparison.first_series.label, comparison.second_series.label
    return (
        f"With {percent(comparison.fraction)} of the data {first} reaches "
        f"{comparison.first.mean:.0f}%, {_size(comparison)}{second} {comparison.second.mean:.0f}%"
    )
