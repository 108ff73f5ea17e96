"""What an experiment is: rows and columns, or panels and series, and the claims made with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locality.papers.measures import Quantity, all_runs
from locality.papers.scales import Scale
from locality.runner.runs import Run

if TYPE_CHECKING:
    from locality.figures.style import Figure as Canvas


@dataclass(frozen=True)
class Column:
    """One column: what it shows and in which unit ("%" also for differences, in points)."""

    name: str
    unit: str = "%"
    digits: int = 1
    signed: bool = False


COLUMNS = {
    "parameters": Column("parameters (M)", "M", 2),
    "flops": Column("GMACs", "G", 3),
    "speed": Column("images/s, inference", "", 0),
    "top1": Column("top-1"),
    "top5": Column("top-5"),
    "real": Column("ReaL"),
    "v2": Column("V2"),
}
"""What several tables show, by the metric that published numbers have in it."""


def columns(*metrics: str) -> dict[str, Column]:
    """Those of `COLUMNS` with these names."""
    return {metric: COLUMNS[metric] for metric in metrics}


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        label: shown before it.
        cells: our number of each column that has one.
        printed: the paper's name of the row; what stands before the label's colon unless given.
    """

    label: str
    cells: Mapping[str, Quantity]
    printed: str = ""

    @property
    def printed_row(self) -> str:
        return self.printed or self.label.partition(":")[0]


def by_label(columns: Mapping[str, Mapping[str, Quantity]]) -> tuple[Row, ...]:
    """The rows of columns that all have the same labels."""
    labels = next(iter(columns.values()))
    return tuple(Row(label, {name: of[label] for name, of in columns.items()}) for label in labels)


@dataclass(frozen=True)
class Claim:
    """What a paper says, in our words, and the quantity that decides it.

    Attributes:
        text: what it says; with the experiment's name, which claim it is at every scale.
        where: the section and page, table or figure that says it; "" for a question of our own.
        quantity: what has to be above 0 or, with a margin, within ± the margin. Where a scale
            cannot test the claim it is `absent`, which says why before anything runs.
        margin: in the quantity's unit; None for a claim that something is above 0.
    """

    text: str
    where: str
    quantity: Quantity
    margin: float | None = None


Claimed = dict[str, Quantity | tuple[Quantity, float]]
"""Text → what has to be above 0, or what has to be 0 within a margin."""


def said(where: str, claims: Mapping[str, Quantity | tuple[Quantity, float]]) -> tuple[Claim, ...]:
    """The claims of one place."""
    return tuple(
        Claim(text, where, *found) if isinstance(found, tuple) else Claim(text, where, found)
        for text, found in claims.items()
    )


@dataclass(frozen=True)
class Table:
    """A table as it is to be filled; the paper's numbers are found by its name, row and column.

    Attributes:
        about: what is compared, and under which protocol at this scale.
        columns: by the metric that the published numbers have in it.
        rows: its cells.
        claims: what the paper concludes from it.
    """

    about: str
    columns: Mapping[str, Column]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()

    @property
    def quantities(self) -> list[Quantity]:
        """All that it shows or decides by."""
        cells = [quantity for row in self.rows for quantity in row.cells.values()]
        return [*cells, *(claim.quantity for claim in self.claims)]

    @property
    def runs(self) -> list[Run]:
        """All runs it needs, each once."""
        return all_runs(self.quantities)


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


def shaded(lines: Mapping[str, Quantity], **choices: Any) -> tuple[Series, ...]:
    """Lines in colours from dark to light, by label; `choices` are further fields of `Series`."""
    return tuple(
        Series(label, quantity, f"depth:{index / len(lines)}", **choices)
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
class Drawing:
    """A picture that is no curve: attention maps. Drawn from runs by a function."""

    runs: tuple[Run, ...]
    draw: Callable[[list[Path]], Canvas]


@dataclass(frozen=True)
class Figure:
    """A figure as it is to be drawn: panels of curves, or a drawing.

    Attributes:
        about: as for a table.
        panels: sets of axes, side by side.
        drawing: instead of panels.
        claims: what the paper concludes from it.
    """

    about: str
    panels: tuple[Panel, ...] = ()
    drawing: Drawing | None = None
    claims: tuple[Claim, ...] = ()

    @property
    def quantities(self) -> list[Quantity]:
        """All that it shows or decides by."""
        lines = [series.quantity for panel in self.panels for series in panel.series]
        return [*lines, *(claim.quantity for claim in self.claims)]

    @property
    def runs(self) -> list[Run]:
        """All runs it needs, each once."""
        runs = all_runs(self.quantities)
        drawn = self.drawing.runs if self.drawing is not None else ()
        return list({run.folder: run for run in (*runs, *drawn)}.values())


Spec = Table | Figure


@dataclass(frozen=True)
class Experiment:
    """A table or figure by name.

    Attributes:
        name: "convit/table-3".
        title: what it shows.
        build: the spec at a scale.
    """

    name: str
    title: str
    build: Callable[[Scale], Spec]

    @property
    def file_name(self) -> str:
        """The name without a slash, for files."""
        return self.name.replace("/", "-")


REGISTRY: dict[str, Experiment] = {}
"""All tables, figures and other experiments, by name."""


def experiment(name: str, title: str) -> Callable[[Callable[[Scale], Spec]], Callable]:
    """Register a function as the experiment `name`."""

    def register(build: Callable[[Scale], Spec]) -> Callable[[Scale], Spec]:
        REGISTRY[name] = Experiment(name, title, build)
        return build

    return register


def papers_order(name: str) -> tuple[bool, bool, bool, int, str]:
    """Sorts experiments: ConViT, CvT, what is beyond them; tables before figures, by number."""
    paper, _, place = name.partition("/")
    what, _, number = place.partition("-")
    digits = "".join(filter(str.isdigit, number))
    return paper != "convit", paper != "cvt", what != "table", int(digits or 0), number
