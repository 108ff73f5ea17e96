"""What an experiment is: rows and columns, or panels and series, and the claims made with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from locality.errors import unknown
from locality.papers.published import Published
from locality.papers.quantities import Quantity, all_runs
from locality.runner.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from locality.papers.scales import Scale


@dataclass(frozen=True)
class Cell:
    """One number of a table: ours, and the paper's if it prints one."""

    quantity: Quantity
    published: Published | None = None


@dataclass(frozen=True)
class Column:
    """One column: what it shows and in which unit ("%" also for differences, in points)."""

    name: str
    unit: str = "%"
    digits: int = 1
    signed: bool = False


@dataclass(frozen=True)
class Row:
    """One line of a table, with a cell (or None for nothing) per column."""

    label: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that a quantity decides.

    Attributes:
        text: what the paper says.
        quantity: for "above": what has to be above 0. For "equal": what has to lie within
            ± `margin`.
        expects: which of the two.
        margin: of "equal", in the quantity's unit.
        unit: of the quantity.
    """

    text: str
    quantity: Quantity
    expects: Literal["above", "equal"] = "above"
    margin: float = 0.0
    unit: str = "points"


@dataclass(frozen=True)
class Table:
    """A table as it is to be filled.

    Attributes:
        about: what is compared, and under which protocol at this scale.
        columns, rows: its cells.
        claims: what the paper concludes from it.
    """

    about: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()

    @property
    def runs(self) -> list[Run]:
        """All runs it needs, each once."""
        cells = [cell.quantity for row in self.rows for cell in row.cells if cell is not None]
        return all_runs([*cells, *(claim.quantity for claim in self.claims)])


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
    def runs(self) -> list[Run]:
        """All runs it needs, each once."""
        lines = [series.quantity for panel in self.panels for series in panel.series]
        runs = all_runs([*lines, *(claim.quantity for claim in self.claims)])
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


_REGISTRY: dict[str, Experiment] = {}


def experiment(name: str, title: str) -> Callable[[Callable[[Scale], Spec]], Callable]:
    """Register a function as the experiment `name`."""

    def register(build: Callable[[Scale], Spec]) -> Callable[[Scale], Spec]:
        _REGISTRY[name] = Experiment(name, title, build)
        return build

    return register


def experiments() -> dict[str, Experiment]:
    """All experiments by name, in the papers' order."""
    from locality.papers import (  # noqa: F401
        beyond,
        convit,
        convit_attention,
        convit_curves,
        cvt,
    )

    return dict(sorted(_REGISTRY.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[bool, bool, bool, int, str]:
    """ConViT, CvT, what is beyond them; tables before figures, by number."""
    paper, _, place = name.partition("/")
    kind, _, number = place.partition("-")
    digits = "".join(filter(str.isdigit, number))
    return paper != "convit", paper != "cvt", kind != "table", int(digits or 0), number


def find(name: str) -> list[Experiment]:
    """The experiment called `name`, or all of a paper ("convit", "cvt"), or "all".

    Raises:
        UserError: if there is none, with the nearest names.
    """
    known = experiments()
    if name == "all":
        return list(known.values())
    chosen = [item for key, item in known.items() if name in (key, key.partition("/")[0])]
    if not chosen:
        raise unknown("experiment", name, [*known, "all"])
    return chosen
