"""Runs that belong together, and the comparisons that can be made between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from locality.analysis.kinds import INCIDENTAL, in_words, kind, unlike
from locality.analysis.statistics import Estimate, estimate, paired_difference
from locality.errors import UserError
from locality.figures.style import FAMILY_NAMES, colour_of, marker_of
from locality.models import VARIANTS
from locality.report.runs import Run
from locality.training.settings import flatten

# Counts of parameters that differ by less are called equal: gates and positional vectors, which a
# DeiT has not, are well below.
_EQUAL_SIZE = 0.03


@dataclass(frozen=True)
class Series:
    """Runs of one model with one set of settings, over fractions and seeds.

    Attributes:
        label: what to call it on a page; unique there.
        runs: all of them.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def model(self) -> str:
        return self.runs[0].model

    @property
    def family(self) -> str:
        return self.runs[0].family

    @property
    def dataset(self) -> str:
        return self.runs[0].dataset

    @property
    def colour(self) -> str:
        return colour_of(self.family)

    @property
    def marker(self) -> str:
        return marker_of(self.family)

    @property
    def fractions(self) -> list[float]:
        return sorted({run.fraction for run in self.runs})

    def at(self, fraction: float) -> list[Run]:
        """Its runs on this share of the training images, by seed."""
        chosen = [run for run in self.runs if run.fraction == fraction]
        return sorted(chosen, key=lambda run: run.seed)

    def top1(self, fraction: float) -> dict[int, float]:
        """Final accuracy by seed."""
        return {run.seed: run.top1 for run in self.at(fraction)}


@dataclass(frozen=True)
class Comparison:
    """Two series on the same share of the training images.

    Attributes:
        fraction, images: that share, and how many images it is.
        first, second: their accuracies over seeds, in percent.
        difference: first − second, paired by seed; None without a common seed.
    """

    fraction: float
    images: int
    first_series: Series
    second_series: Series
    first: Estimate
    second: Estimate
    difference: Estimate | None

    @property
    def equally_large(self) -> bool:
        """Whether both models learn equally many parameters, within a few per cent."""
        one, other = (
            int(each.at(self.fraction)[0].result["parameters"])
            for each in (self.first_series, self.second_series)
        )
        return abs(one - other) <= _EQUAL_SIZE * max(one, other)

    def other_differences(self) -> list[str]:
        """Settings beside the model's in which runs of the same seed differ, by dotted name."""
        first, second = (
            {run.seed: flatten(run.config) for run in each.at(self.fraction)}
            for each in (self.first_series, self.second_series)
        )
        pairs = [(first[seed], second[seed]) for seed in first if seed in second]
        names = dict.fromkeys(name for one, other in pairs for name in (*one, *other))
        return [
            name
            for name in names
            if not name.startswith("model.")
            and name not in INCIDENTAL - {"data.subset_seed"}  # which images, at one fraction
            and any(one.get(name) != other.get(name) for one, other in pairs)
        ]


def group(runs: Sequence[Run]) -> list[Series]:
    """Sort runs into series, ConViT first, then DeiT, then the others, in order of appearance.

    Raises:
        UserError: if two runs of a series have the same fraction and seed.
    """
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault((run.dataset, run.model, kind(run.config)), []).append(run)
    for members in groups.values():
        seen: dict[Any, Run] = {}
        for run in members:
            other = seen.setdefault((run.fraction, run.seed), run)
            if other is not run:
                raise UserError(
                    f"{other.folder} and {run.folder} are the same run (seed {run.seed}, fraction "
                    f"{run.fraction:g}); give one of them"
                )
    order = list(FAMILY_NAMES)
    members_in_order = sorted(
        groups.values(),
        key=lambda part: order.index(part[0].family) if part[0].family in order else len(order),
    )
    labels = _labels(members_in_order)
    return [
        Series(label, tuple(part)) for label, part in zip(labels, members_in_order, strict=True)
    ]


def _labels(groups: list[list[Run]]) -> list[str]:
    """A short name for each group: the family where that is enough, else the model, else also the
    settings in which groups of one model differ."""
    families = [part[0].family for part in groups]
    models = [part[0].model for part in groups]
    labels = []
    for part, family, model in zip(groups, families, models, strict=True):
        if family in FAMILY_NAMES and families.count(family) == 1:
            labels.append(FAMILY_NAMES[family])
        elif models.count(model) == 1:
            labels.append(model)
        else:
            rivals = [other[0].config for other in groups if other[0].model == model]
            labels.append(f"{model} ({in_words(part[0].config, unlike(rivals))})")
    return labels


def twins(series: Sequence[Series]) -> Iterator[tuple[Series, Series]]:
    """Pairs (ConViT, DeiT) on the same dataset that the table of variants compares."""
    for first in series:
        for second in series:
            pair = (first.family, second.family) == ("convit", "deit")
            if pair and first.dataset == second.dataset and _are_twins(first.model, second.model):
                yield first, second


def _are_twins(one: str, other: str) -> bool:
    return VARIANTS[one].twin == other or VARIANTS[other].twin == one


def compare(first: Series, second: Series) -> list[Comparison]:
    """The two series at every fraction that both have."""
    return [
        Comparison(
            fraction,
            int(first.at(fraction)[0].result["train_images"]),
            first,
            second,
            estimate(list(first.top1(fraction).values())),
            estimate(list(second.top1(fraction).values())),
            paired_difference(first.top1(fraction), second.top1(fraction)),
        )
        for fraction in first.fractions
        if fraction in second.fractions
    ]
