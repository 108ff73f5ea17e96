"""What an experiment is: rows and columns, or panels and series, and the claims made with them.

What is said of it stands in `experiments.yaml`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from locality.files import read_yaml
from locality.papers.measures import Quantity, absent, all_runs
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


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an experiment shows at a scale, and what is concluded from it.

    Attributes:
        named: quantities beside the shown ones that claims are about.
        values: what `experiments.yaml` leaves open in what it says.
        about: what is compared, and under which protocol at this scale; `Experiment` sees to it.
        claims: likewise.
    """

    named: Mapping[str, Quantity] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    claims: tuple[Claim, ...] = ()

    @property
    def shown(self) -> list[Quantity]:
        """What it shows, in order."""
        raise NotImplementedError

    @property
    def quantities(self) -> list[Quantity]:
        """All that it shows or decides by."""
        return [*self.shown, *(claim.quantity for claim in self.claims)]

    @property
    def runs(self) -> list[Run]:
        """All runs it needs, each once."""
        return all_runs(self.quantities)


@dataclass(frozen=True)
class Table(Spec):
    """A table as it is to be filled; the paper's numbers are found by its name, row and column.

    Attributes:
        rows: its cells.
        columns: by the metric that the published numbers have in it; those of `experiments.yaml`
            follow.
    """

    rows: tuple[Row, ...]
    columns: Mapping[str, Column] = field(default_factory=dict)

    @property
    def shown(self) -> list[Quantity]:
        return [quantity for row in self.rows for quantity in row.cells.values()]


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
class Figure(Spec):
    """A figure as it is to be drawn: panels of curves, or a picture that is no curve.

    Attributes:
        panels: sets of axes, side by side.
        draw: instead of panels: what draws it, given the folders of `drawn`.
        drawn: runs.
    """

    panels: tuple[Panel, ...] = ()
    draw: Callable[[list[Path]], Canvas] | None = None
    drawn: tuple[Run, ...] = ()

    @property
    def shown(self) -> list[Quantity]:
        return [series.quantity for panel in self.panels for series in panel.series]

    @property
    def runs(self) -> list[Run]:
        return list({run.folder: run for run in (*super().runs, *self.drawn)}.values())


@dataclass(frozen=True)
class Experiment:
    """A table or figure by name: what is said of it, and the function that fills it.

    Attributes:
        name: "convit/table-3".
        fill: what it shows at a scale, which `build` completes.
        title: what it shows.
        about: what is compared; {scale.…} and the names of `Spec.values` are put in.
        where: the place in the paper that makes the claims, likewise; "" for our own questions.
        rows: of some tables: label → what `Scale.runs` is to be given.
        columns: of a table: metric → the fields of its `Column`.
        claims: text → what has to hold between cells, "row/column", and what `Spec.named` has:
            "a/top1 > b/top1 - c/top1" or "a/top1 = b/top1 ± 1"; or {if: such a sentence, else: why
            it cannot be tested without them}. Other claims on what is not there are not made.
        each: claims made of every column, its metric in the place of {column}, its name of {name}.
    """

    name: str
    fill: Callable[[Scale], Spec]
    title: str
    about: str
    where: str = ""
    rows: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    columns: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    claims: Mapping[str, Any] = field(default_factory=dict)
    each: Mapping[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The name without a slash, for files."""
        return self.name.replace("/", "-")

    def build(self, scale: Scale) -> Spec:
        """What it asks for at a scale."""
        spec = self.fill(scale)
        claims, known = dict(self.claims), dict(spec.named)
        if isinstance(spec, Table):
            told = {metric: Column(**fields) for metric, fields in self.columns.items()}
            spec = dataclasses.replace(spec, columns={**spec.columns, **told})
            for row in spec.rows:
                known |= {f"{row.printed_row}/{metric}": of for metric, of in row.cells.items()}
            claims |= {
                text.format(column=metric, name=column.name): holds.format(column=metric)
                for metric, column in spec.columns.items()
                for text, holds in self.each.items()
            }
        where = self.where.format(**spec.values)
        return dataclasses.replace(
            spec,
            about=self.about.format(scale=scale, **spec.values),
            claims=tuple(_claims(claims, where, known)),
        )


def _claims(
    claims: Mapping[str, Any], where: str, known: Mapping[str, Quantity]
) -> Iterator[Claim]:
    for text, told in claims.items():
        holds, reason = (
            (told, None) if isinstance(told, str) else (told.get("if", ""), told["else"])
        )
        try:
            yield Claim(text, where, *_compared(holds, known))
        except KeyError:
            if reason is not None:
                yield Claim(text, where, absent(reason))


def _compared(holds: str, known: Mapping[str, Quantity]) -> tuple[Quantity, float | None]:
    """What has to be above 0, or within a margin of it, for "a - b > c" or "a = b ± 1" to hold."""
    first, _, rest = holds.partition(" > " if " > " in holds else " = ")
    second, _, margin = rest.partition(" ± ")
    left, right = (
        functools.reduce(operator.sub, (_term(each, known) for each in side.split(" - ")))
        for side in (first, second)
    )
    return left - right, float(margin) if margin else None


def _term(text: str, known: Mapping[str, Quantity]) -> Any:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else known[text]


REGISTRY: dict[str, Experiment] = {}
"""All tables, figures and other experiments, by name."""

_TOLD = read_yaml(Path(__file__).with_name("experiments.yaml"))


Fill = TypeVar("Fill", bound=Callable[[Scale], Spec])


def experiment(name: str, **told: Any) -> Callable[[Fill], Fill]:
    """Register a function that fills the experiment `name`.

    Args:
        name: "convit/table-3".
        told: the fields of `Experiment` that `experiments.yaml` does not give.
    """

    def register(fill: Fill) -> Fill:
        REGISTRY[name] = Experiment(name, fill, **_TOLD.get(name, {}), **told)
        return fill

    return register


def papers_order(name: str) -> tuple[bool, bool, bool, int, str]:
    """Sorts experiments: ConViT, CvT, what is beyond them; tables before figures, by number."""
    paper, _, place = name.partition("/")
    what, _, number = place.partition("-")
    digits = "".join(filter(str.isdigit, number))
    return paper != "convit", paper != "cvt", what != "table", int(digits or 0), number
