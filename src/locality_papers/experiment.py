"""What an experiment is: cells, effects computed from them, questions; and its evaluation.

An experiment is a function that fills an `Experiment` at a scale. An effect is a function of the
cells, `lambda v: v["5%", "ConViT-S"] - v["5%", "DeiT-S"]`, written once and applied to the values
by seed (a pandas Series for each cell), to the paper's numbers, and to the means.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from locality.analysis.statistics import Estimate, estimate, mean_curve
from locality.errors import UserError
from locality.runner.runs import Request
from locality_papers.published import PUBLISHED, Published
from locality_papers.runs import Scale
from locality_papers.table import EMPTY, NOT_RUN, Cell, Key, Measure, Recorded, Values

Effect = Callable[[Any], Any]
A_POINT = 1.0
"""The smallest difference of accuracies that counts, where a paper gives none."""


class Column(NamedTuple):
    """A column with its unit ("%" also for differences in points)."""

    name: str
    unit: str = "%"
    digits: int = 1
    signed: bool = False


STANDARD = {
    "parameters": Column("parameters (M)", "M", 2),
    "flops": Column("GMACs", "G", 3),
    "top1": Column("top-1"),
}


class Question(NamedTuple):
    """A question whose answer is yes if its effect is above a threshold.

    Attributes:
        text: the question.
        where: the place in a paper that answers yes; "" for our own.
        effect: the effect.
        unit: its unit.
        paper: the paper's effect; by default that of the published numbers.
        task: why small images cannot show it, if they cannot.
        threshold: the threshold.
        side: −1 if the answer is yes below it.
        says: the paper's answer.
    """

    text: str
    where: str
    effect: Effect
    unit: str = "points"
    paper: float | None = None
    task: str = ""
    threshold: float = 0.0
    side: int = 1
    says: str = "yes"


@dataclass
class Experiment:
    """A table or figure at a scale.

    Attributes:
        name, title: such as "convit/table-3", and what it shows.
        scale: the scale.
        about: what is compared, and the protocol at this scale.
        where: the place in a paper that its questions are from; "" for our own.
        columns: the columns of a table by key; none of a figure.
        printed: row → the paper's name of it, if not the part before its colon.
        cells: numbers by row and column.
        derived: more of them, computed from cells.
        questions: see `Question`.
        panels: axes of a figure, see `panel`.
        draw: draws a figure instead, from the finished runs `drawn`.
    """

    name: str
    title: str
    scale: Scale
    about: str = ""
    where: str = ""
    columns: dict[str, Column] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)
    cells: dict[Key, Cell] = field(default_factory=dict)
    derived: dict[Key, Effect] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    panels: list[Any] = field(default_factory=list)
    draw: Callable[[], Any] | None = None
    drawn: tuple[Request, ...] = ()

    def run(self, row: str, column: str, measure: Measure, role: str, **choices: Any) -> Key:
        """Add a measure of a role's runs; see `Scale.runs` for `choices`."""
        try:
            return self.add(row, column, measure, self.scale.runs(role, **choices))
        except UserError as error:
            return self.missing(row, column, str(error))

    def add(self, row: str, column: str, measure: Measure, runs: Iterable[Request]) -> Key:
        """Add a measure of runs that differ in their seed."""
        return self._set(row, column, Cell(tuple(runs), measure))

    def fixed(self, row: str, column: str, value: float | Callable[[], float]) -> Key:
        """Add a number that needs no runs."""
        return self._set(row, column, Cell(value=value))

    def missing(self, row: str, column: str, reason: str) -> Key:
        """Add a number that does not exist at this scale."""
        return self._set(row, column, Cell(absent=reason))

    def _set(self, row: str, column: str, cell: Cell) -> Key:
        self.cells[row, column] = cell
        return row, column

    def derive(self, row: str, column: str, effect: Effect) -> Key:
        """Add a number computed from others."""
        self.derived[row, column] = effect
        return row, column

    def ask(self, text: str, effect: Effect | Key, less: Key | None = None, **others: Any) -> None:
        """Add a question on an effect, on a cell, or on a cell less another; see `Question`."""
        if isinstance(effect, tuple):
            effect = at(effect) if less is None else minus(effect, less)
        self.questions.append(Question(text, effect=effect, **{"where": self.where} | others))

    def panel(self, title: str, x: str, y: str, *lines: Any, **axes: bool) -> None:
        """Add axes with lines made by `line`; `axes` are `log_x` and `scatter`."""
        labels = {"title": title, "x_label": x, "y_label": y}
        self.panels.append(labels | axes | {"series": lines})

    def published(self, row: str, column: str) -> Published | None:
        """The paper's number of a cell."""
        printed = self.printed.get(row, row.partition(":")[0])
        return PUBLISHED.get((self.name, printed, column))

    @property
    def rows(self) -> list[str]:
        """The rows of the table."""
        both = (*self.cells, *self.derived)
        return list(dict.fromkeys(row for row, column in both if column in self.columns))

    @property
    def runs(self) -> list[Request]:
        """All needed runs, without duplicates."""
        measured = (run for cell in self.cells.values() for run in cell.runs)
        return list({run.folder: run for run in (*measured, *self.drawn)}.values())


def line(
    label: str, at: Key | Mapping[Any, Key], colour: str = "", dashed: bool = False,
    band: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """A line of a panel: a measured curve, or cells by their x (a number or a function)."""
    return {"label": label, "colour": colour, "dashed": dashed, "band": band, "at": at}


def shaded(lines: Mapping[str, Any], colours: Mapping[str, str] = {}) -> list[dict[str, Any]]:
    """Lines in colours from dark to light by label, unless given in `colours`."""
    return [
        line(label, at, colours.get(label, f"depth:{index / len(lines)}"))
        for index, (label, at) in enumerate(lines.items())
    ]


def at(key: Key) -> Effect:
    """The effect that is a cell itself."""
    return lambda v: v[key]


def minus(first: Key, second: Key) -> Effect:
    """The effect "first − second"."""
    return lambda v: v[first] - v[second]


class _At:
    """Cells at given values, which notes those that are used."""

    def __init__(self, experiment: Experiment, values: Mapping[Key, Any]) -> None:
        self._experiment, self._values = experiment, values
        self.used: dict[Key, None] = {}

    def __getitem__(self, key: Key) -> Any:
        if key in self._experiment.derived:
            return self._experiment.derived[key](self)
        self.used[key] = None
        value = self._values[key]
        return value() if callable(value) else value


class Evaluated(NamedTuple):
    """The estimate of an effect, or why there is none.

    Attributes:
        estimate: over seeds; None if empty.
        by_seed: the values.
        exact: whether it needs no runs.
        images: how the choice of images counts: "own" to each seed, "paired", "unpaired" if only
            accuracies are known, or "" if the effect does not depend on them.
        planned: seeds that were planned.
        empty: why there is none.
        problems: why seeds are missing.
    """

    estimate: Estimate | None = None
    by_seed: Mapping[int, float] = {}
    exact: bool = False
    images: str = ""
    planned: int = 0
    empty: str = ""
    problems: Sequence[str] = ()


class Results:
    """An experiment's values: effects, cells and panels.

    Args:
        experiment: the experiment.
        recorded: where its runs are found.
        failures: why runs failed, by folder.
    """

    def __init__(
        self, experiment: Experiment, recorded: Recorded, failures: Mapping[Path, str] = {}
    ) -> None:
        self.experiment = experiment
        self.values = Values(experiment.cells, recorded, failures)
        self.recorded = recorded

    def paper(self, effect: Effect) -> float | None:
        """An effect of the paper's numbers."""
        printed = {key: self.experiment.published(*key) for key in self.experiment.cells}
        numbers = {key: number.value for key, number in printed.items() if number is not None}
        try:
            return float(effect(_At(self.experiment, numbers)))
        except KeyError:  # one of them is not published
            return None

    def cell(self, row: str, column: str) -> Evaluated | None:
        """A number of the table; None if it has none there."""
        key = row, column
        if key not in self.experiment.cells and key not in self.experiment.derived:
            return None
        return self.effect(at(key))

    def effect(self, effect: Effect) -> Evaluated:
        """An effect by seed, with its interval over seeds and images."""
        cells = _At(self.experiment, self.values.columns)
        try:
            by_seed = effect(cells)
        except KeyError as error:
            key = error.args[0]
            reasons = self.values.problems.get(key, [NOT_RUN])
            return Evaluated(empty=self.experiment.cells[key].absent or reasons[0])
        except EMPTY as error:
            return Evaluated(empty=str(error))
        problems = [text for key in cells.used for text in self.values.problems.get(key, ())]
        if not isinstance(by_seed, pd.Series):
            return Evaluated(estimate([by_seed]), {0: float(by_seed)}, exact=True)
        by_seed = by_seed.dropna().astype(float)
        if by_seed.empty:
            common = [text for text in problems if text != NOT_RUN] or [NOT_RUN]
            return Evaluated(empty=common[0], problems=problems)
        planned = max(len(self.experiment.cells[key].runs) for key in cells.used)
        found, images = self._estimate(effect, by_seed, cells.used)
        return Evaluated(found, by_seed.to_dict(), False, images, planned, "", problems)

    def start(self, effect: Effect) -> float | None:
        """A measured effect at the end of training before the first step; None of others."""
        ends = _At(self.experiment, self.values.columns)
        effect(ends)
        cells = {}
        for key in ends.used:
            cell = self.experiment.cells[key]
            if cell.measure is None or cell.measure.before is None:
                return None
            cells[key] = replace(cell, measure=cell.measure.before)
        starts = _At(self.experiment, Values(cells, self.recorded).columns)
        return float(effect(starts).mean())

    @cached_property
    def _shared(self) -> float:
        """Validation images per training image, if every seed divides the same images again."""
        if not self.experiment.scale.splits_by_seed:
            return 0.0
        share = self.experiment.runs[0].config.data.val_fraction
        return share / (1 - share)

    def _estimate(
        self, effect: Effect, by_seed: pd.Series, used: Iterable[Key]
    ) -> tuple[Estimate, str]:
        if self.experiment.scale.splits_by_seed:
            return estimate(by_seed, shared=self._shared), "own"
        cells = self.experiment.cells
        accuracies = [key for key in used if (m := cells[key].measure) is not None and m.accuracy]
        if not accuracies or len(by_seed) < 2:
            return estimate(by_seed), ""
        slopes = self._slopes(effect, by_seed.index, accuracies)
        right = [self.values.right(key, by_seed.index) for key in slopes]
        known = [table for table in right if table is not None]
        if len(known) < len(right):
            return estimate(by_seed, images=self._unpaired(slopes, by_seed.index)), "unpaired"
        table = np.tensordot(list(slopes.values()), known, axes=1)
        # Exact by seed; by image to first order.
        table += (by_seed.to_numpy() - table.mean(axis=1))[:, None]
        return estimate(table), "paired"

    def _slopes(self, effect: Effect, seeds: Any, keys: Sequence[Key]) -> dict[Key, float]:
        """Derivatives of an effect with respect to accuracies, at their means over seeds."""
        means = {key: float(self.values.columns[key][seeds].mean()) for key in keys}
        first = {key: x[seeds[0]] for key, x in self.values.columns.items() if hasattr(x, "index")}
        values = self.values.columns | first | means

        def near(changed: Key, step: float) -> float:
            return float(effect(_At(self.experiment, values | {changed: means[changed] + step})))

        return {key: (near(key, 1e-3) - near(key, -1e-3)) / 2e-3 for key in keys}

    def _unpaired(self, slopes: Mapping[Key, float], seeds: Any) -> float:
        """An upper bound on the standard error over images, if only accuracies are known.

        An accuracy p on N images has variance p (1 − p) / N. Of two that add up, all that can be
        is right in both; two that are subtracted count as independent.
        """
        terms = []
        for key, slope in slopes.items():
            records = map(self.recorded.find, self.experiment.cells[key].runs)
            images = next(record["result"]["val_images"] for record in records if record)
            share = float(self.values.columns[key][seeds].mean()) / 100
            terms.append((share, slope, images))
        variance = sum(
            a * b * ((min(p, q) if a * b > 0 else p * q) - p * q) / math.sqrt(n * m)
            for p, a, n in terms
            for q, b, m in terms
        )
        return 100 * math.sqrt(max(0.0, variance))

    @cached_property
    def drawn_panels(self) -> list[dict[str, Any]]:
        """The panels with their values, for `locality_papers.panels.draw`."""
        panels = []
        for panel in self.experiment.panels:
            if callable(panel):
                for of in panel(self):
                    panels.append(of | {"series": list(map(self._over_splits, of["series"]))})
            else:
                panels.append(panel | {"series": [self._series(of) for of in panel["series"]]})
        return panels

    def _series(self, series: Mapping[str, Any]) -> dict[str, Any]:
        place, drawn = series["at"], {name: x for name, x in series.items() if name != "at"}
        if isinstance(place, tuple):
            curves = self.by_seed(place)
            empty = "" if curves else (self.values.problems.get(place) or [NOT_RUN])[0]
            return self._over_splits(drawn | {"empty": empty} | mean_curve(curves, partial=True))
        points = {x: self.effect(at(key)) for x, key in place.items()}
        known = {x: of.estimate for x, of in points.items() if of.estimate is not None}
        empty = "" if known else next(iter(points.values())).empty
        values: dict[str, Any] = {"x": [x() if callable(x) else x for x in known]}
        for name in ("mean", "half_width", "n"):
            values[name] = [getattr(of, name) for of in known.values()]
        return drawn | {"empty": empty} | values

    def _over_splits(self, series: Mapping[str, Any]) -> dict[str, Any]:
        """A curve with intervals that, like those of effects, count that splits share images."""
        pairs = zip(series["half_width"], series["n"], strict=True)
        wide = [half and half * math.sqrt(1 + n * self._shared) for half, n in pairs]
        return {**series, "half_width": wide}

    def by_seed(self, key: Key) -> list[Any]:
        """A cell's values, such as curves, in the order of their seeds."""
        return list(self.values.columns[key].dropna()) if key in self.values.columns else []


Build = Callable[[Experiment, Scale], None]
REGISTRY: dict[str, tuple[str, Build]] = {}
"""Title and function of all tables, figures and other experiments, by name."""


def experiment(name: str, title: str) -> Callable[[Build], Build]:
    """Register a function that fills an experiment at a scale.

    Args:
        name: such as "convit/table-3".
        title: what it shows.
    """

    def register(build: Build) -> Build:
        REGISTRY[name] = title, build
        return build

    return register


def built(name: str, scale: Scale) -> Experiment:
    """An experiment at a scale."""
    title, build = REGISTRY[name]
    made = Experiment(name, title, scale)
    build(made, scale)
    return made


def relative_gain(convit: Key, deit: Key) -> Effect:
    """ConViT's gain over DeiT in per cent of DeiT's accuracy ("gap" in ConViT's Table 2)."""
    return lambda v: 100 * (v[convit] - v[deit]) / v[deit]


def largest(*values: Any) -> Any:
    """The largest of numbers, or seed by seed; missing where any is."""
    return reduce(np.maximum, values)
