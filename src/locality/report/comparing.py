"""Comparisons that can be made between runs, and sentences that claim no more than they show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from locality.analysis.runs import INCIDENTAL, RecordedRun, RunGroup, differing
from locality.analysis.statistics import Estimate, estimate, paired_difference
from locality.figures.charts import percent
from locality.models import VARIANTS
from locality.settings import flatten

# Counts of parameters that differ by less are called equal: gates and positional vectors, which a
# DeiT has not, are well below.
_EQUAL_SIZE = 0.03


@dataclass(frozen=True)
class GroupPair:
    """Two groups of runs on the same fraction of the training images.

    Attributes:
        fraction: of the training images.
        first, second: the groups.
    """

    fraction: float
    first: RunGroup
    second: RunGroup

    @property
    def runs(self) -> list[list[RecordedRun]]:
        """Of both groups."""
        return [self.first.at(self.fraction), self.second.at(self.fraction)]

    @property
    def images(self) -> int:
        """How many training images that is."""
        return int(self.runs[0][0].result["train_images"])

    @property
    def sides(self) -> list[tuple[RunGroup, Estimate]]:
        """Each group and its accuracy over seeds, in per cent."""
        groups = (self.first, self.second)
        return [(one, estimate(list(one.top1(self.fraction).values()))) for one in groups]

    @property
    def difference(self) -> Estimate | None:
        """first − second, paired by seed; None without a common seed."""
        return paired_difference(self.first.top1(self.fraction), self.second.top1(self.fraction))

    @property
    def equally_large(self) -> bool:
        """Whether both models learn equally many parameters, within a few per cent."""
        one, other = (int(runs[0].result["parameters"]) for runs in self.runs)
        return abs(one - other) <= _EQUAL_SIZE * max(one, other)

    def other_differences(self) -> list[str]:
        """Settings beside the model's in which runs of the same seed differ, by dotted name."""
        incidental = INCIDENTAL - {"data.subset_seed"}  # which images, at one fraction
        first, second = ({run.seed: flatten(run.config) for run in runs} for runs in self.runs)
        pairs = [[first[seed], second[seed]] for seed in first if seed in second]
        names = dict.fromkeys(name for pair in pairs for name in differing(pair))
        return [n for n in names if not n.startswith("model.") and n not in incidental]


def compare(groups: Sequence[RunGroup]) -> Iterator[GroupPair]:
    """Every ConViT against the DeiT that the table of variants compares it with, on one data set,
    at every fraction that both have."""
    for first, second in product(groups, repeat=2):
        if (first.family, second.family) == ("convit", "deit") and first.dataset == second.dataset:
            one, other = VARIANTS[first.model].baseline, VARIANTS[second.model].baseline
            if one == second.model or other == first.model:
                shared = [part for part in first.fractions if part in second.fractions]
                yield from (GroupPair(fraction, first, second) for fraction in shared)


def with_interval(found: Estimate, sign: bool = False) -> str:
    """69.0 ± 2.1, or 69.0 alone where one seed says nothing about spread."""
    mean = f"{found.mean:+.1f}" if sign else f"{found.mean:.1f}"
    return mean if found.half_width is None else f"{mean} ± {found.half_width:.1f}"


def _images(comparison: GroupPair) -> str:
    """ "5% of the training images (67)"; "all 1,348 training images"."""
    if comparison.fraction == 1:
        return f"all {comparison.images:,} training images"
    return f"{percent(comparison.fraction)} of the training images ({comparison.images:,})"


def sentence(comparison: GroupPair) -> str:
    """What one comparison shows, in a sentence that claims no more than the interval does."""
    (first, ours), (second, theirs) = comparison.sides
    opening = f"With {_images(comparison)}, {first.label} reaches {ours.mean:.1f}%"
    opening += f" and {second.label} {theirs.mean:.1f}%"
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


def headline(groups: Sequence[RunGroup], comparisons: Sequence[GroupPair]) -> str:
    """The one line at the top of a report; it claims something only of a single pair."""
    pairs = {(each.first.label, each.second.label) for each in comparisons}
    if len(groups) == 1:
        (one,) = groups
        reached = estimate(list(one.top1(one.fractions[-1]).values()))
        return f"{one.label} on {one.dataset}: {with_interval(reached)}% top-1 accuracy"
    if not pairs:
        return f"Training runs of {len(groups)} models or settings"
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


def _size(comparison: GroupPair) -> str:
    """What may be said of the other model's size."""
    return "an equally large " if comparison.equally_large else ""


def _single_seed(comparison: GroupPair) -> str:
    """Without a second seed there is no interval, and so nothing but the numbers to tell."""
    (first, ours), (second, theirs) = comparison.sides
    return (
        f"With {percent(comparison.fraction)} of the data {first.label} reaches "
        f"{ours.mean:.0f}%, {_size(comparison)}{second.label} {theirs.mean:.0f}%"
    )
