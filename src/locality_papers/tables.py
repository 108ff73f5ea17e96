"""A record's numbers as text: a table with the paper's and our numbers, and CSV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import compress
from typing import Any

from locality.files import csv_text
from locality_papers.measures import NOT_RUN
from locality_papers.published import COMPUTED
from locality_papers.records import Record

EMPTY = "—"


def number(value: float, column: Record, signed: bool = False) -> str:
    """A number with the column's digits and, if it is signed, its sign.

    Counts in millions and billions have at least three significant digits, as some models are
    small.
    """
    digits = column["digits"]
    if column["unit"] in ("M", "G") and 0 < abs(value) < 1:
        digits = max(digits, 2 - math.floor(math.log10(abs(value))))
    sign = "+" if signed or column["signed"] else ""
    return f"{value:{sign}.{digits}f}".replace("-", "−")


Notes = dict[str, int]
"""Footnote → its number."""


def _mark(notes: Notes, text: str) -> str:
    """The mark of a footnote, which is added if new."""
    return f"[{notes.setdefault(text, len(notes) + 1)}]"


def filled(record: Record, notes: Notes) -> tuple[list[str], list[list[str]]]:
    """A table's headings and lines as text, row label first.

    Columns with published numbers show the paper's and ours, other columns only ours.
    """
    columns, titles, usual, lines = [], [""], usual_n(record), []
    for place, column in enumerate(record["columns"]):
        cells, name = [row["cells"][place] for row in record["rows"]], column["name"]
        both = any(cell and cell["paper"] for cell in cells)
        shown = (both, True, both and record["comparable"])
        columns.append((column, shown))
        here = f"{name}, here" if both else name
        titles += compress((f"{name}, paper", here, "here − paper"), shown)
    for row in record["rows"]:
        line = [row["label"]]
        for cell, (column, shown) in zip(row["cells"], columns, strict=True):
            line += compress(_texts(cell, column, usual, notes), shown)
        lines.append(line)
    return titles, lines


def _texts(
    cell: Record | None, column: Record, usual: int | None, notes: Notes
) -> tuple[str, str, str]:
    """The paper's number, ours, and ours minus the paper's."""
    if cell is None:
        return "", "", ""
    printed = cell["paper"]
    paper = "" if printed is None else _published_text(printed, column, notes)
    if cell["empty"] is not None:
        return paper, f"{EMPTY} {_mark(notes, cell['empty'])}", ""
    text = number(cell["mean"], column)
    if cell["half_width"] is not None:
        text += f" ± {cell['half_width']:.{column['digits']}f}"
    if cell["n"] not in (1, usual):
        text += f" (n = {cell['n']})"
    for reason in dict.fromkeys(problem.partition(": ")[2] for problem in cell["problems"]):
        if reason != NOT_RUN:  # n tells
            text += f" {_mark(notes, f'other seeds: {reason}')}"
    above = printed and number(cell["mean"] - printed["value"], column, signed=True)
    return paper, text, above or ""


def _published_text(printed: Record, column: Record, notes: Notes) -> str:
    note = printed["note"]
    if note == COMPUTED or (column["unit"] == "%" and not column["signed"]):
        value = number(printed["value"], column)
    else:
        # As printed: 10, not 10.0.
        value = f"{printed['value']:{'+' if column['signed'] else ''}g}".replace("-", "−")
    return value if note in ("", COMPUTED) else f"{value} {_mark(notes, f'paper: {note}')}"


def usual_n(record: Record) -> int | None:
    """The most common number of seeds of a cell."""
    counts = [
        cell["n"]
        for row in record.get("rows", [])
        for cell in row["cells"]
        if cell is not None and cell["empty"] is None and cell["n"] > 1
    ]
    return max(set(counts), key=counts.count) if counts else None


def to_csv(record: Record) -> str:
    """CSV with one line per cell or point."""
    table = record["kind"] == "table"
    what = "row column unit paper" if table else "panel series x"
    rest = " difference by_seed empty" if table else " empty"
    names = f"experiment scale {what} mean half_width_95 n{rest}".split()
    common = {"experiment": record["name"], "scale": record["scale"]}
    lines = (common | line for line in (_cells(record) if table else _points(record)))
    return csv_text([names, *([line.get(name) for name in names] for line in lines)])


def _cells(record: Record) -> Iterator[dict[str, Any]]:
    for row in record["rows"]:
        for column, cell in zip(record["columns"], row["cells"], strict=True):
            if cell is None:
                continue
            paper = None if cell["paper"] is None else cell["paper"]["value"]
            by_seed = (f"{seed}:{value:.10g}" for seed, value in cell.get("by_seed", {}).items())
            line = {"row": row["label"], "column": column["name"], "unit": column["unit"]}
            line |= cell | {"paper": paper, "half_width_95": cell.get("half_width")}
            if paper is not None and cell["empty"] is None:
                line["difference"] = cell["mean"] - paper
            yield line | {"by_seed": " ".join(by_seed)}


def _points(record: Record) -> Iterator[dict[str, Any]]:
    for panel in record["panels"]:
        for series in panel["series"]:
            line = {"panel": panel["title"], "series": series["label"], "empty": series["empty"]}
            if series["empty"]:
                yield line
                continue
            of = ("x", "mean", "half_width", "n")
            for x, mean, half_width, n in zip(*(series[name] for name in of), strict=True):
                yield line | {"x": x, "mean": mean, "half_width_95": half_width, "n": n}
