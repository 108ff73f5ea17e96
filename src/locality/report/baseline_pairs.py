"""ConViT beside the DeiT of its size: accuracies, paired differences, and a sentence on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from locality.analysis.runs import IGNORED_SETTINGS, RecordedRun, RunGroup, differing_settings
from locality.analysis.statistics import Estimate, estimate, paired_difference
from locality.figures.charts import percent
from locality.models import VARIANTS
from locality.settings import flatten


@dataclass(frozen=True)
class BaselinePair:
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

    def other_changed_settings(self) -> list[str]:
        """Settings other than the model's in which runs of one seed differ, by dotted name."""
        incidental = IGNORED_SETTINGS - {"data.subset_seed"}  # which images, at one fraction
        first, second = ({run.seed: flatten(run.config) for run in runs} for runs in self.runs)
        pairs = [[first[seed], second[seed]] for seed in first if seed in second]
        names = dict.fromkeys(name for pair in pairs for name in differing_settings(pair))
        return [n for n in names if not n.startswith("model.") and n not in incidental]


def baseline_pairs(groups: Sequence[RunGroup]) -> Iterator[BaselinePair]:
    """Every ConViT against the DeiT that the table of variants compares it with, on one data set,
    at every fraction that both have."""
    for first, second in product(groups, repeat=2):
        if (first.family, second.family) == ("convit", "deit") and first.dataset == second.dataset:
            one, other = VARIANTS[first.model].baseline, VARIANTS[second.model].baseline
            if one == second.model or other == first.model:
                shared = [part for part in first.fractions if part in second.fractions]
                yield from (BaselinePair(fraction, first, second) for fraction in shared)


def format_estimate(found: Estimate, sign: bool = False) -> str:
    """69.0 ± 2.1, or 69.0 if there is no interval."""
    mean = f"{found.mean:+.1f}" if sign else f"{found.mean:.1f}"
    return mean if found.half_width is None else f"{mean} ± {found.half_width:.1f}"


def _images(comparison: BaselinePair) -> str:
    """ "5% of the training images (67)"; "all 1,348 training images"."""
    if comparison.fraction == 1:
        return f"all {comparison.images:,} training images"
    return f"{percent(comparison.fraction)} of the training images ({comparison.images:,})"


def sentence(comparison: BaselinePair) -> str:
    """The result of one comparison as a sentence."""
    (first, ours), (second, theirs) = comparison.sides
    opening = f"With {_images(comparison)}, {first.label} reaches {ours.mean:.1f}%"
    opening += f" and {second.label} {theirs.mean:.1f}%"
    found = comparison.difference
    if found is None:
        return f"{opening}; no seed is common to both, so there is no paired difference."
    if found.half_width is None:
        return f"{opening}: {_points(found.mean)}, on a single seed, so without an interval."
    interval = f"95% interval {found.low:+.1f} to {found.high:+.1f} over {found.n} seeds"
    if found.excludes_zero:
        return f"{opening}: {_points(found.mean)} ({interval})."
    return f"{opening}; the difference is not significant ({interval})."


def _points(difference: float) -> str:
    word = "more" if difference > 0 else "fewer"
    return f"{abs(difference):.1f} percentage points {word}"
