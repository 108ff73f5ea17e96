"""Recorded runs, grouped by equal settings across seeds and fractions of the data.

A pair of groups is a ConViT and the DeiT of its size, with their paired differences.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from locality.analysis.baselines import below, read_baselines
from locality.analysis.statistics import Estimate, estimate
from locality.data.sources import recorded_files
from locality.errors import UserError, some
from locality.models.variants import FAMILY_NAMES, VARIANTS
from locality.runs import Run, run_folders
from locality.training.config import identity

ALONE = "seeds alone"
_MAX_SETTINGS = 3  # in the label of a group


def settings_of(run: Run) -> dict[str, Any]:
    """The settings that the runs of a group share, by dotted name."""
    return identity(run.config, "group")


def percent(fraction: float) -> str:
    """A fraction in percent: 5%, 0.5%."""
    return f"{100 * fraction:g}%"


def read_runs(folders: Iterable[Path | str]) -> list[Run]:
    """The runs in these folders; folders that are not run folders are searched for runs.

    Raises:
        FileNotFoundError: a folder does not exist.
        UserError: a folder contains no run, or a configuration cannot be read.
    """
    runs = [Run(folder) for folder in run_folders(folders)]
    for run in runs:
        _ = run.config
    return runs


@dataclass(frozen=True)
class RunGroup:
    """Runs of one model with the same settings, over fractions and seeds.

    Attributes:
        label: display name, unique among groups.
        runs: all runs of the group.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def model(self) -> str:
        return self.runs[0].model_name

    @property
    def family(self) -> str:
        return self.runs[0].family

    @property
    def fractions(self) -> list[float]:
        return sorted({run.fraction for run in self.runs})

    def label_at(self, fraction: float) -> str:
        """The label, with the fraction of the training images unless all runs have all of them."""
        if self.fractions == [1]:
            return self.label
        return f"{self.label}, {percent(fraction)} of the images"

    def at(self, fraction: float) -> list[Run]:
        """Runs on this fraction of the training images, sorted by seed, split and fold."""
        chosen = [run for run in self.runs if run.fraction == fraction]
        return sorted(chosen, key=lambda run: run.repeat)

    @property
    def shared(self) -> float:
        """Test / training images, see `estimate`; 0 unless runs differ by split or fold."""
        if over(self.runs) not in ("folds", "splits"):
            return 0.0
        first = self.runs[0]
        return float(first.fraction * first.result["val_images"] / first.result["train_images"])

    def top1(self, fraction: float) -> dict[tuple[int, ...], float]:
        """Final top-1 accuracy in per cent, by seed, split and fold."""
        return {run.repeat: float(run.result["top1"]) for run in self.at(fraction)}

    def over_runs(self, fraction: float) -> Estimate:
        """Estimate of the final top-1 accuracy in per cent, over what `over` says."""
        return estimate(_accuracies(self.at(fraction)), self.shared)

    def mean(self, fraction: float, name: str) -> float:
        """Mean over runs of a number in `result.json`."""
        return fmean(run.result[name] for run in self.at(fraction))

    def below(self, fraction: float, baselines: Mapping[str, Estimate]) -> str:
        """The baselines above the accuracy on this fraction; see `baselines.below`."""
        means = {name: baseline.mean for name, baseline in baselines.items()}
        passes = fewest_passes(self.at(fraction))
        return below(self.label_at(fraction), self.over_runs(fraction).mean, means, passes)


def over(runs: Sequence[Run]) -> str:
    """What an interval of these runs is over, which is also what differs between them.

    "folds" or "splits" of the images; "seeds and images" if all have predicted the same images; or
    "seeds alone" if some have recorded no predictions.
    """
    if len({run.repeat[1:] for run in runs}) > 1:
        return "folds" if len(runs[0].repeat) > 2 else "splits"
    counts = {None if run.right is None else len(run.right) for run in runs}
    return "seeds and images" if len(counts) == 1 and None not in counts else ALONE


def _accuracies(runs: Sequence[Run]) -> npt.NDArray[np.floating]:
    """Top-1 in per cent by run, (n, 1); by run and image, (n, images), if both are repeated."""
    if over(runs) == "seeds and images":
        return 100.0 * np.array([run.right for run in runs])
    return np.array([[float(run.result["top1"])] for run in runs])


def fewest_passes(runs: Iterable[Run]) -> float:
    """How many times the least trained run saw each image; infinite if all began with a probe."""
    return min((run.passes for run in runs if not run.probes), default=math.inf)


def group(runs: Sequence[Run]) -> list[RunGroup]:
    """Sort runs into groups: ConViT first, then DeiT, then others in order of appearance.

    Raises:
        UserError: two runs of a group have the same fraction, seed, split and fold.
    """
    groups: dict[str, list[Run]] = {}
    seen: dict[Any, Run] = {}
    for run in runs:
        settings = repr(sorted(settings_of(run).items()))
        groups.setdefault(settings, []).append(run)
        other = seen.setdefault((settings, run.fraction, run.repeat), run)
        if other is not run:
            raise UserError(
                f"{other.path} and {run.path} are the same run (seed {run.repeat[0]}, fraction "
                f"{run.fraction:g}); pass only one of them"
            )
    order = [*FAMILY_NAMES, "other"]
    ordered = sorted(groups.values(), key=lambda members: order.index(members[0].family))
    firsts = [members[0] for members in ordered]
    return [RunGroup(_label(one[0], firsts), tuple(one)) for one in ordered]


def check_same_images(runs: Iterable[Run]) -> None:
    """Check that finished runs are on the same built-in dataset, or on images of the same classes.

    Images of one's own may lie elsewhere, but two runs need some of equal name and size.

    Raises:
        UserError: naming a run on each of the datasets.
    """
    finished = [run for run in runs if run.is_finished]
    by_images = {("" if run.custom else run.dataset, *run.classes()): run for run in finished}
    if len(by_images) > 1:
        listed = [
            f"{run.path} is on {run.dataset} ({some(run.classes())})" for run in by_images.values()
        ]
        raise UserError(f"give runs on the same images: {', '.join(listed)}")
    files = [(run, recorded_files(run.images_file)) for run in finished if run.custom]
    for (first, here), (other, there) in pairwise(files):
        if here and there and here.isdisjoint(there):
            raise UserError(
                f"give runs on the same images: {first.path} and {other.path} have the same "
                f"classes, but no image of equal name and size"
            )


def baselines_at(groups: Sequence[RunGroup], fraction: float) -> dict[str, Estimate]:
    """Baseline accuracies for runs on a fraction, by name, over seeds, splits and folds.

    Without an interval if all have the same value.
    """
    by_repeat = {run.repeat: read_baselines(run.path) for one in groups for run in one.at(fraction)}
    estimates: dict[str, Estimate] = {}
    for name in dict.fromkeys(name for baselines in by_repeat.values() for name in baselines):
        values = [baselines[name] for baselines in by_repeat.values() if name in baselines]
        estimates[name] = estimate(values if len(set(values)) > 1 else values[:1], groups[0].shared)
    return estimates


def _label(run: Run, others: Sequence[Run]) -> str:
    """A short unique name: family, else model, else model and differing settings, else folder."""
    rivals = [other for other in others if other.model_name == run.model_name]
    if len(rivals) > 1:
        values = differing_settings([settings_of(other) for other in rivals])
        if len(values) > _MAX_SETTINGS:
            above = os.path.commonpath([other.path.absolute() for other in rivals])
            return os.path.relpath(run.path.absolute(), above)
        return f"{run.model_name} ({_format_settings(settings_of(run), list(values))})"
    alone = [other.family for other in others].count(run.family) == 1
    return FAMILY_NAMES[run.family] if alone and run.family in FAMILY_NAMES else run.model_name


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Settings in which configurations differ: name → values."""
    names = dict.fromkeys(name for one in settings for name in one)
    values = {name: [one.get(name) for one in settings] for name in names}
    return {name: column for name, column in values.items() if len(set(map(repr, column))) > 1}


def _format_settings(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """Settings as text: "lr=0.001, drop_rate=0.1". A teacher is shown as "distilled"; missing
    settings are skipped."""
    shown = {name: f"{name.rpartition('.')[2]}={settings.get(name)}" for name in names}
    taught = settings.get("objective.teacher")
    shown["objective.teacher"] = "distilled" if taught else "no distillation"
    return ", ".join(shown[name] for name in names if name in settings) or "default"


@dataclass(frozen=True)
class BaselinePair:
    """Two groups of runs on the same fraction of the training images.

    Attributes:
        fraction: fraction of the training images.
        first, second: the groups.
    """

    fraction: float
    first: RunGroup
    second: RunGroup

    @property
    def runs(self) -> list[list[Run]]:
        """The runs of both groups."""
        return [self.first.at(self.fraction), self.second.at(self.fraction)]

    @property
    def images(self) -> int:
        """Number of training images of each run."""
        return int(self.runs[0][0].result["train_images"])

    @cached_property
    def over(self) -> str:
        """What the interval of the difference is over."""
        return over([run for runs in self.runs for run in runs])

    @cached_property
    def sides(self) -> list[tuple[RunGroup, Estimate]]:
        """Each group with its accuracy over seeds, in per cent."""
        return [(one, one.over_runs(self.fraction)) for one in (self.first, self.second)]

    @cached_property
    def difference(self) -> Estimate | None:
        """first − second, paired by seed, split, fold and image; None without a common run.

        What affects both (split, order, hard images) cancels.
        """
        first, second = ({run.repeat: run for run in runs} for runs in self.runs)
        both = sorted(first.keys() & second.keys())
        if not both:
            return None
        found = _accuracies([runs[repeat] for runs in (first, second) for repeat in both])
        return estimate(found[: len(both)] - found[len(both) :], self.first.shared)

    @property
    def p_value(self) -> float:
        """Of no difference; 1 without a common run, or if predictions were not recorded.

        The larger of that of `difference` and that over the runs' means alone. With three seeds the
        first is too small for corrected tests: of four equal models, 7% of comparisons claimed one
        to be better, and 2% with both.
        """
        if self.difference is None or self.over == ALONE:
            return 1.0
        first, second = (one.top1(self.fraction) for one in (self.first, self.second))
        means = [first[repeat] - second[repeat] for repeat in first.keys() & second.keys()]
        return max(self.difference.p_value(), estimate(means, self.first.shared).p_value())

    def other_changed_settings(self) -> list[str]:
        """Settings outside `model` in which runs of the same seed differ, by dotted name."""
        first, second = (
            {run.repeat: identity(run.config, "pair") for run in runs} for runs in self.runs
        )
        pairs = [[first[repeat], second[repeat]] for repeat in first if repeat in second]
        names = dict.fromkeys(name for pair in pairs for name in differing_settings(pair))
        return [name for name in names if not name.startswith("model.")]


def baseline_pairs(groups: Sequence[RunGroup]) -> Iterator[BaselinePair]:
    """Each ConViT with its baseline DeiT (see `VARIANTS`), per shared fraction."""
    for first, second in product(groups, repeat=2):
        if (first.family, second.family) == ("convit", "deit"):
            one, other = VARIANTS[first.model].baseline, VARIANTS[second.model].baseline
            if one == second.model or other == first.model:
                shared = [part for part in first.fractions if part in second.fractions]
                yield from (BaselinePair(fraction, first, second) for fraction in shared)
