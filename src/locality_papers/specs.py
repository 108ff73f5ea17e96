"""Specifications of experiments: tables or figures, and the questions they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from locality.runner.runs import Run
from locality_papers.measures import Quantity
from locality_papers.published import PUBLISHED
from locality_papers.scales import Scale

if TYPE_CHECKING:
    from locality.figures.style import Figure as Canvas


@dataclass(frozen=True)
class Column:
    """A column with its unit ("%" also for differences in points)."""

    name: str
    unit: str = "%"
    digits: int = 1
    signed: bool = False


_STANDARD_COLUMNS = {
    "parameters": Column("parameters (M)", "M", 2),
    "flops": Column("GMACs", "G", 3),
    "top1": Column("top-1"),
}


def standard_columns(*metrics: str) -> dict[str, Column]:
    """Columns of most tables: any of "parameters", "flops" and "top1"."""
    return {metric: _STANDARD_COLUMNS[metric] for metric in metrics}


Cells = dict[str, dict[str, Quantity]]
"""Row label → column's metric → our number."""


def printed_row(label: str, rows: Mapping[str, str] = {}) -> str:
    """The paper's name of a row: given by `rows`, else the part of the label before its colon."""
    return rows.get(label, label.partition(":")[0])


def as_printed(place: str, cells: Cells, rows: Mapping[str, str] = {}) -> Cells:
    """Our numbers with the paper's attached, where published.

    Effects computed from them then have the paper's effect too.

    Args:
        place: table of the paper, such as "convit/table-2".
        cells: our numbers, by the metrics of the published ones.
        rows: see `Table`.
    """

    def known(label: str, metric: str, quantity: Quantity) -> Quantity:
        printed = PUBLISHED.get((place, printed_row(label, rows), metric))
        return quantity if printed is None else quantity.stated(printed.value)

    return {
        label: {metric: known(label, metric, quantity) for metric, quantity in of.items()}
        for label, of in cells.items()
    }


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The specification of an experiment at a scale.

    Attributes:
        about: what is compared, and the protocol at this scale.
        questions: place in a paper that answers yes (section, page, table or figure; "" for our
            own questions) → question → effect, above 0 if the answer is yes, such as
            `convit - deit`. Questions have the same words at all scales; if a scale cannot answer
            one, the effect is `absent`. Effects of published numbers have the paper's effect;
            `Quantity.stated` adds one from its text or a figure.
    """

    about: str
    questions: Mapping[str, Mapping[str, Quantity]] = field(default_factory=dict)

    @property
    def shown(self) -> list[Quantity]:
        """All quantities shown, in order."""
        raise NotImplementedError

    @property
    def quantities(self) -> list[Quantity]:
        """All quantities shown or needed for answers."""
        return [*self.shown, *(effect for of in self.questions.values() for effect in of.values())]

    @property
    def runs(self) -> list[Run]:
        """All needed runs, without duplicates."""
        return list({run.folder: run for each in self.quantities for run in each.runs}.values())


@dataclass(frozen=True)
class Table(Spec):
    """A table; the paper's numbers are found by experiment name, row and column.

    Attributes:
        cells: the rows.
        columns: columns by the metric of the published numbers.
        rows: label → the paper's name of the row, if it is not the label's part before the colon.
    """

    cells: Cells
    columns: Mapping[str, Column]
    rows: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> list[Quantity]:
        return [quantity for of in self.cells.values() for quantity in of.values()]


@dataclass(frozen=True)
class Series:
    """A line in a panel.

    Attributes:
        label: label in the legend.
        quantity: a curve {"x": […], "y": […]} per seed.
        colour: see `locality.figures.curves.resolve_colour`.
        dashed: draw a dashed line.
        band: draw the interval too.
    """

    label: str
    quantity: Quantity
    colour: str = ""
    dashed: bool = False
    band: bool = True


def shaded(lines: Mapping[str, Quantity], colours: Mapping[str, str] = {}) -> tuple[Series, ...]:
    """Lines in colours from dark to light by label, unless given in `colours`."""
    return tuple(
        Series(label, quantity, colours.get(label, f"depth:{index / len(lines)}"))
        for index, (label, quantity) in enumerate(lines.items())
    )


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    scatter: bool = False


@dataclass(frozen=True)
class Figure(Spec):
    """A figure: panels of curves, or another drawing.

    Attributes:
        panels: sets of axes, side by side.
        draw: instead of panels, draws the figure from the finished runs `drawn`.
        drawn: runs needed by `draw`.
    """

    panels: tuple[Panel, ...] = ()
    draw: Callable[[], Canvas] | None = None
    drawn: tuple[Run, ...] = ()

    @property
    def shown(self) -> list[Quantity]:
        return [series.quantity for panel in self.panels for series in panel.series]

    @property
    def runs(self) -> list[Run]:
        return list({run.folder: run for run in (*super().runs, *self.drawn)}.values())


@dataclass(frozen=True)
class Experiment:
    """A table or figure by name.

    Attributes:
        name: such as "convit/table-3".
        title: what it shows.
        build: scale → specification.
    """

    name: str
    title: str
    build: Callable[[Scale], Spec]


REGISTRY: dict[str, Experiment] = {}
"""All tables, figures and other experiments, by name."""

Build = TypeVar("Build", bound=Callable[[Scale], Spec])


def experiment(name: str, title: str) -> Callable[[Build], Build]:
    """Register a function that builds an experiment at a scale.

    Args:
        name: such as "convit/table-3".
        title: what it shows.
    """

    def register(build: Build) -> Build:
        REGISTRY[name] = Experiment(name, title, build)
        return build

    return register


def papers_order(name: str) -> tuple[bool, bool, bool, int, str]:
    """Sort key of experiments: ConViT, CvT, beyond; tables before figures; by number."""
    paper, _, place = name.partition("/")
    what, _, number = place.partition("-")
    digits = "".join(filter(str.isdigit, number))
    return paper != "convit", paper != "cvt", what != "table", int(digits or 0), number
