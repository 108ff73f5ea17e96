"""An experiment's results as Markdown and CSV."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from locality.data.config import DATASETS
from locality.errors import some
from locality.files import csv_text
from locality.templates import render
from locality_papers.answers import CANNOT_TELL, LATER, LESS, PLANNED, Answer, protocol
from locality_papers.experiment import Column, Evaluated, Results, at
from locality_papers.panels import filled
from locality_papers.table import NOT_RUN

EMPTY = "—"


class Part:
    """An experiment at a scale, as text.

    Args:
        results: the experiment's values.
        found: answers, also of other experiments.
        picture: path of its picture, relative to the page; None if it has none.
    """

    def __init__(
        self, results: Results, found: Iterable[Answer], picture: str | None = None
    ) -> None:
        of = self.experiment = results.experiment
        self.results, self.picture = results, picture
        self.protocol = protocol(of)
        self.notes: dict[str, int] = {}
        here = (of.name, of.scale.name)
        self.answers = [each for each in found if (each["experiment"], each["scale"]) == here]
        rows = {row: {key: results.cell(row, key) for key in of.columns} for row in of.rows}
        # Rows and columns with any number of ours; all where accuracies are comparable.
        comparable = of.scale.comparable
        self._cells = {
            row: cells
            for row, cells in rows.items()
            if comparable or any(_filled(cell, not of.runs) for cell in cells.values())
        }
        self._columns = {
            key: column
            for key, column in of.columns.items()
            if comparable or any((c := row[key]) and c.estimate for row in self._cells.values())
        }
        lines = [line for panel in results.drawn_panels for line in panel["series"]]
        names = [row for row in of.rows if row not in self._cells]
        names += [line["label"] for line in lines if line.get("empty")]
        self.left_out = some(list(dict.fromkeys(names))) if names else ""
        counts = [
            c.estimate.n
            for row in self._cells.values()
            for c in row.values()
            if c is not None and c.estimate is not None and c.estimate.n > 1
        ]
        self.seeds = max(set(counts), key=counts.count) if counts else None
        self.tables = list(_split(*self._table())) if of.columns else []

    @property
    def has_values(self) -> bool:
        """Whether any question is answered or, if there are none, anything is measured or drawn."""
        if self.experiment.questions:
            return bool(self.answers)
        measured = any(
            max(line["n"]) > 1 and (panel.get("scatter") or len(line["x"]) > 1)
            for panel in self.results.drawn_panels
            for line in filled(panel)
        )
        free = self.experiment.draw is not None and not self.experiment.runs
        return bool(self._columns or measured or free)

    @property
    def data(self) -> str:
        """The option of the data that `locality reproduce` needs."""
        name = self.experiment.scale.dataset
        return f" --data '{{{name}: DATA}}'" if DATASETS[name].needs_root else ""

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and lines: columns with published numbers show the paper's and ours."""
        headings, lines = [""], [[row] for row in self._cells]
        for key, column in self._columns.items():
            printed = {row: self._printed(row, key) for row in self._cells}
            both = any(printed.values())
            headings += [f"{column.name}, paper", f"{column.name}, here"] if both else [column.name]
            for line, (row, cells) in zip(lines, self._cells.items(), strict=True):
                line += [printed[row]] if both else []
                line.append(self._ours(cells[key], column))
        return headings, lines

    def _printed(self, row: str, key: str) -> str:
        column = self.experiment.columns[key]
        if (number := self.experiment.published(row, key)) is not None:
            text = f"{number.value:{'+' if column.signed else ''}g}".replace("-", "−")
            if column.unit == "%" and not column.signed:
                text = _number(number.value, column)
            return f"{text} {self._mark(f'paper: {number.note}')}" if number.note else text
        value = self.results.paper(at((row, key)))
        return "" if value is None else _number(value, column)

    def _ours(self, cell: Evaluated | None, column: Column) -> str:
        if cell is None:
            return ""
        if cell.estimate is None:
            return EMPTY if cell.empty == NOT_RUN else f"{EMPTY} {self._mark(cell.empty)}"
        found = cell.estimate
        text = _number(found.mean, column)
        if found.half_width is not None:
            text += f" ± {found.half_width:.{column.digits}f}"
        if found.n not in (1, self.seeds):
            text += f" (n = {found.n})"
        for reason in dict.fromkeys(cell.problems):
            if reason != NOT_RUN:  # n tells
                text += f" {self._mark(f'other seeds: {reason}')}"
        return text

    def _mark(self, text: str) -> str:
        """The mark of a footnote, which is added if new."""
        return f"[{self.notes.setdefault(text, len(self.notes) + 1)}]"

    @property
    def made(self) -> dict[str, Any]:
        """Where its runs come from."""
        records = [self.results.recorded.find(run) for run in self.experiment.runs]
        done = [record for record in records if record is not None]
        machines = [record["environment"] for record in done]
        hardware = [name for m in machines for name in (m.get("processor"), *m.get("gpus", ()))]
        return {
            "runs": len(records),
            "finished": len(done),
            "hours": sum(record["result"].get("seconds") or 0.0 for record in done) / 3600,
            "hardware": _distinct(hardware),
            "commits": _distinct(str(m.get("commit", ""))[:10] for m in machines),
            "torch": _distinct(m.get("packages", {}).get("torch") for m in machines),
        }


def _distinct(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value)) or "unknown"


def _filled(cell: Evaluated | None, free: bool) -> bool:
    """Whether a cell has a number; a counted one only if the experiment has no others."""
    return cell is not None and cell.estimate is not None and (free or not cell.exact)


def _number(value: float, column: Column) -> str:
    """A number with the column's digits and, if it is signed, its sign.

    Counts in millions and billions have at least three significant digits, as some models are
    small.
    """
    digits = column.digits
    if column.unit in ("M", "G") and 0 < abs(value) < 1:
        digits = max(digits, 2 - math.floor(math.log10(abs(value))))
    return f"{value:{'+' if column.signed else ''}.{digits}f}".replace("-", "−")


def _split(
    headings: list[str], lines: list[list[str]]
) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Split a table into parts that fit the page, each with the row labels."""
    step = 6 if len(headings) > 9 else 9
    for first in range(1, len(headings) if lines else 0, step):
        columns = slice(first, first + step)
        yield [headings[0], *headings[columns]], [[line[0], *line[columns]] for line in lines]


def page(parts: Sequence[Part], sources: str = "") -> str:
    """One experiment as Markdown, with a section for each scale; `sources`: where code lies."""
    first = parts[0].experiment
    link = f"[protocol]({sources}/protocol.yaml)" if sources else "`locality_papers/protocol.yaml`"
    return rendered("experiment.md", name=first.name, title=first.title, parts=parts, link=link)


def to_csv(results: Results) -> str:
    """CSV with one line per cell or point."""
    of, lines = results.experiment, []
    header = ["experiment", "scale", "row", "column", "x", "paper"]
    header += ["mean", "low", "high", "n", "by_seed", "empty"]
    for row in of.rows:
        for column in of.columns:
            if (cell := results.cell(row, column)) is not None:
                e = cell.estimate
                paper = results.paper(at((row, column)))
                numbers = [None] * 4 if e is None else [e.mean, e.low, e.high, e.n]
                by_seed = " ".join(f"{seed}:{x:.10g}" for seed, x in cell.by_seed.items())
                lines.append([row, column, None, paper, *numbers, by_seed, cell.empty])
    for panel in results.drawn_panels:
        for s in panel["series"]:
            for x, mean, half, n in zip(s["x"], s["mean"], s["half_width"], s["n"], strict=True):
                ends = [None] * 2 if half is None else [mean - half, mean + half]
                lines.append([panel["title"], s["label"], x, None, mean, *ends, n, None, None])
    return csv_text([header, *([of.name, of.scale.name, *line] for line in lines)])


def said(answer: Answer, brief: bool = False) -> str:
    """An answer as text: "yes, +5.2 (+3.1 to +7.3)"; a brief one is for the README."""
    effect, interval = _rounded(answer, "effect"), ""
    if answer["low"] is not None:
        interval = f" ({_rounded(answer, 'low')} to {_rounded(answer, 'high')})"
    unit = "" if brief or answer["unit"] == "points" else f" {answer['unit']}".rstrip()
    n, planned, more = answer["n"], answer["planned"], ""
    seeds = f"{n} of {planned} seeds" if planned and n != planned else ""
    if answer["answer"] == CANNOT_TELL and answer["protocol"] and seeds:
        more, seeds = f" ({seeds})", ""
    elif answer["answer"] == CANNOT_TELL and answer["protocol"] == PLANNED and answer["p"] == 1.0:
        more = " (other planned runs are missing)"
    elif answer["answer"] == LESS and answer["high"] < (answer["threshold"] or 0.0):
        more = " (opposite sign)"
    texts = [f"{answer['answer']}{more}", f"{effect}{unit}{interval}", seeds]
    if answer["start"] is not None:
        texts.append(f"before training {_rounded(answer, 'start')}")
    if answer["images"] == "unpaired" and not brief:
        alone = "" if answer["over_seeds"] is None else f" (over seeds ±{answer['over_seeds']:.2g})"
        texts.append(f"unpaired{alone}")
    return ", ".join(filter(None, [*texts, answer["protocol"] == LATER and LATER]))


def papers(answer: Answer) -> str:
    """The paper's effect, or yes or no if it gives none; "not asked" for our own questions."""
    if answer["paper"] is None or not answer["where"]:
        return answer["says"] if answer["where"] else "not asked"
    return signed(answer["paper"])


def _rounded(answer: Answer, name: str) -> str:
    """A number of an answer, rounded to two significant digits of its interval."""
    half = 0.0 if answer["low"] is None else (answer["high"] - answer["low"]) / 2
    return signed(answer[name], half)


def signed(value: float, half: float = 0.0) -> str:
    """A number with its sign, rounded to two significant digits of half an interval."""
    if half < 1e-9:  # no interval; without rounding errors, so that 0.1 + 0.2 − 0.3 shows as 0
        return f"{round(value, 9):+.3g}".replace("-", "−")
    return f"{value:+.{max(0, 1 - math.floor(math.log10(half)))}f}".replace("-", "−")


def rendered(template: str, **content: Any) -> str:
    filters: dict[str, Callable[..., Any]] = {
        "cell": lambda text: text.replace("|", "\\|"),
        "papers": papers,
        "said": said,
        "sentence": lambda text: f"{text[0].upper()}{text[1:].rstrip('.')}.",
        "file": lambda name: name.replace("/", "-"),
    }
    text = render("locality_papers", template, filters, **content)
    # Empty blocks leave empty lines.
    return re.sub("\n{3,}", "\n\n", text).strip() + "\n"
