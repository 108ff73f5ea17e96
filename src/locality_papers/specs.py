"""What an experiment is: rows and columns, or panels and series, and the questions it answers."""

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
    """One column: what it shows and in which unit ("%" also for differences, in points)."""

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
    """Columns that most tables have: of "parameters", "flops" and "top1"."""
    return {metric: _STANDARD_COLUMNS[metric] for metric in metrics}


Cells = dict[str, dict[str, Quantity]]
"""Label of a row → metric of a column → our number."""


def printed_row(label: str, rows: Mapping[str, str] = {}) -> str:
    """The paper's name of a row: what stands before its label's colon unless `rows` has another."""
    return rows.get(label, label.partition(":")[0])


def as_printed(place: str, cells: Cells, rows: Mapping[str, str] = {}) -> Cells:
    """Our numbers, each knowing what the paper prints in its place, if it does.

    What is computed from them, an effect above all, then knows the paper's too.

    Args:
        place: "convit/table-2".
        cells: by the metrics that the published numbers have.
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
    """What an experiment shows at a scale, and which questions it answers.

    Attributes:
        about: what is compared, and under which protocol at this scale.
        questions: place in a paper that answers yes (section, page, table or figure; "" for our
            own questions) → question → effect, above 0 if the answer here is yes, such as
            `convit - deit`. The words are the same at every scale; where one cannot ask, the effect
            is `absent` and says why before anything runs. An effect of printed numbers knows its
            size in the paper; `Quantity.stated` gives the size that a text or a figure states.
    """

    about: str
    questions: Mapping[str, Mapping[str, Quantity]] = field(default_factory=dict)

    @property
    def shown(self) -> list[Quantity]:
        """What it shows, in order."""
        raise NotImplementedError

    @property
    def quantities(self) -> list[Quantity]:
        """All that it shows or answers with."""
        return [*self.shown, *(effect for of in self.questions.values() for effect in of.values())]

    @property
    def runs(self) -> list[Run]:
        """All runs it needs, each once."""
        return list({run.folder: run for each in self.quantities for run in each.runs}.values())


@dataclass(frozen=True)
class Table(Spec):
    """A table as it is to be filled; the paper's numbers are found by its name, row and column.

    Attributes:
        cells: its rows.
        columns: by the metric that the published numbers have in it.
        rows: label → the paper's name of the row, if that is not what stands before its colon.
    """

    cells: Cells
    columns: Mapping[str, Column]
    rows: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> list[Quantity]:
        return [quantity for of in self.cells.values() for quantity in of.values()]


@dataclass(frozen=True)
class Series:
    """One line of a panel.

    Attributes:
        label: in the legend.
        quantity: per seed, a dictionary {"x": […], "y": […]} with the same x for all seeds.
        colour: of the line; a name of a model family, or any matplotlib colour.
        dashed: how the line is drawn.
        band: draw the interval too.
    """

    label: str
    quantity: Quantity
    colour: str = ""
    dashed: bool = False
    band: bool = True


def shaded(lines: Mapping[str, Quantity], colours: Mapping[str, str] = {}) -> tuple[Series, ...]:
    """Lines in colours from dark to light, by label; some may have one of their own."""
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
    """A figure as it is to be drawn: panels of curves, or a picture that is no curve.

    Attributes:
        panels: sets of axes, side by side.
        draw: instead of panels: what draws it from the finished runs of `drawn`.
        drawn: runs.
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
        name: "convit/table-3".
        title: what it shows.
        build: what it asks for at a scale.
    """

    name: str
    title: str
    build: Callable[[Scale], Spec]


REGISTRY: dict[str, Experiment] = {}
"""All tables, figures and other experiments, by name."""

Build = TypeVar("Build", bound=Callable[[Scale], Spec])


def experiment(name: str, title: str) -> Callable[[Build], Build]:
    """Register the function that builds an experiment at a scale.

    Args:
        name: "convit/table-3".
        title: what it shows.
    """

    def register(build: Build) -> Build:
        REGISTRY[name] = Experiment(name, title, build)
        return build

    return register


def papers_order(name: str) -> tuple[bool, bool, bool, int, str]:
    """Sorts experiments: ConViT, CvT, what is beyond them; tables before figures, by number."""
    paper, _, place = name.partition("/")
    what, _, number = place.partition("-")
    digits = "".join(filter(str.isdigit, number))
    return paper != "convit", paper != "cvt", what != "table", int(digits or 0), number
