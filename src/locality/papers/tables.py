"""Records as Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from locality.files import render
from locality.papers.claims import FAILS, HOLDS, NOT_RUN, UNDECIDED
from locality.papers.records import Record

MARKS = {HOLDS: "✓", FAILS: "✗", UNDECIDED: "?", NOT_RUN: "–"}
EMPTY = "—"


def number(value: float, column: Record) -> str:
    """A number with a column's digits, and its sign where that matters.

    Counts in millions and billions keep three significant digits: models are small at some scales.
    """
    digits = column["digits"]
    if column["unit"] in ("M", "G") and 0 < abs(value) < 1:
        digits = max(digits, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:+.{digits}f}" if column["signed"] else f"{value:.{digits}f}"
    return text.replace("-", "−")


class Notes:
    """Footnotes, each reason once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """The mark of a note, added if it is new."""
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"


def headings(record: Record) -> list[str]:
    """Column headings: the paper's and ours where the paper prints any, ours alone elsewhere."""
    titles = []
    for index, column in enumerate(record["columns"]):
        if _printed(record, index):
            titles += [f"{column['name']}, paper", f"{column['name']}, here"]
            if record["comparable"]:
                titles.append("here − paper")
        else:
            titles.append(column["name"])
    return titles


def _printed(record: Record, index: int) -> bool:
    cells = (row["cells"][index] for row in record["rows"])
    return any(cell is not None and cell["paper"] is not None for cell in cells)


def body(record: Record, notes: Notes) -> list[list[str]]:
    """The table's lines as text, the row's label first."""
    lines = []
    for row in record["rows"]:
        line = [row["label"]]
        for index, (column, cell) in enumerate(zip(record["columns"], row["cells"], strict=True)):
            ours = _ours(cell, column, usual_n(record), notes)
            if not _printed(record, index):
                line.append(ours)
                continue
            line += [_papers(cell, column, notes), ours]
            if record["comparable"]:
                line.append(_difference(cell, column))
        lines.append(line)
    return lines


def _papers(cell: Record | None, column: Record, notes: Notes) -> str:
    if cell is None or cell["paper"] is None:
        return ""
    printed = cell["paper"]
    note = printed["note"]
    computed = note.startswith("computed")
    if computed or (column["unit"] == "%" and not column["signed"]):
        value = number(printed["value"], column)
    else:
        # As printed: a table that says 10 says neither 10.0 nor 10.00.
        value = f"{printed['value']:{'+' if column['signed'] else ''}g}".replace("-", "−")
    return value if computed or not note else f"{value} {notes.mark(f'paper: {note}')}"


def _ours(cell: Record | None, column: Record, n: int | None, notes: Notes) -> str:
    if cell is None:
        return ""
    if cell["empty"] is not None:
        return f"{EMPTY} {notes.mark(cell['empty'])}"
    text = number(cell["mean"], column)
    if cell["half_width"] is not None:
        text += f" ± {cell['half_width']:.{column['digits']}f}"
    if cell["n"] not in (1, n):
        text += f" (n = {cell['n']})"
    for problem in cell["problems"]:
        text += f" {notes.mark(problem)}"
    return text


def _difference(cell: Record | None, column: Record) -> str:
    if cell is None or cell["paper"] is None or cell["empty"] is not None:
        return ""
    return number(cell["mean"] - cell["paper"]["value"], {**column, "signed": True})


def usual_n(record: Record) -> int | None:
    """The number of seeds that most cells have."""
    counts = [
        cell["n"]
        for row in record.get("rows", [])
        for cell in row["cells"]
        if cell is not None and cell["empty"] is None and cell["n"] > 1
    ]
    return max(set(counts), key=counts.count) if counts else None


def markdown(record: Record) -> str:
    """A record as a section of Markdown, figures by the names of their files."""
    notes = Notes()
    parts = [f"## {record['name']}: {record['title']}", record["about"]]
    if record["kind"] == "table":
        parts.append(markdown_table(["", *headings(record)], body(record, notes)))
    elif record.get("files"):
        image = next(name for name in record["files"] if name.endswith(".png"))
        parts.append(f"![{record['title']}]({image})")
    if record.get("empty"):
        parts.append(f"Not drawn: {record['empty']}.")
    parts += [line for line in (_missing_series(record), _reading(record)) if line]
    if notes.texts:
        parts.append("\n".join(f"{i}. {text}" for i, text in enumerate(notes.texts, 1)))
    if record["claims"]:
        parts.append(claims_table(record))
    parts.append(origin(record))
    return "\n\n".join(parts) + "\n"


def _missing_series(record: Record) -> str:
    missing = [
        f"{series['label']} ({series['empty']})"
        for panel in record.get("panels", [])
        for series in panel["series"]
        if series["empty"]
    ]
    return f"Missing: {'; '.join(dict.fromkeys(missing))}." if missing else ""


def _reading(record: Record) -> str:
    n = usual_n(record)
    if n is None:
        return ""
    said = f"Here: mean ± 95% interval over {n} seeds; differences and gaps are paired by seed."
    if record["comparable"]:
        return said
    return (
        f"{said} The data and the models are not the paper's, so compare directions and gaps, not "
        f"accuracies."
    )


def markdown_table(
    titles: Sequence[str], lines: Sequence[Sequence[str]], texts: Sequence[int] = (0,)
) -> str:
    """A pipe table; the columns numbered in `texts` to the left, the others to the right."""
    rule = [":--" if index in texts else "--:" for index in range(len(titles))]
    rows = [titles, rule, *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    )


def claims_table(record: Record) -> str:
    """The claims of a record with what decides them."""
    lines = [[claim["text"], _evidence(claim), claim["verdict"]] for claim in record["claims"]]
    first = "question" if _own(record) else "claim of the paper"
    return markdown_table([first, "here", "verdict"], lines, texts=(0, 1, 2))


def _own(record: Record) -> bool:
    return record["name"].startswith("beyond/")


def _evidence(claim: Record) -> str:
    if claim["empty"] is not None:
        return claim["empty"]
    text = f"{claim['mean']:+.3g}".replace("-", "−")
    if claim["half_width"] is not None:
        text += f" ± {claim['half_width']:.2g}"
    wanted = f", wanted within ± {claim['margin']:g}" if claim["expects"] == "equal" else ""
    return f"{text} {claim['unit']} (n = {claim['n']}{wanted})"


def origin(record: Record) -> str:
    """Where the numbers come from, in a line or two."""
    made = record["provenance"]
    about = f": {record['scale_about']}" if record["scale_about"] else ""
    where = f"Scale `{record['scale']}`{about}."
    if not made["runs"]:
        return f"No training run is behind this at scale `{record['scale']}`."
    text = f"{where} {made['finished']} of {made['runs']} runs finished"
    if made["finished"]:
        packages = made["packages"][0] if made["packages"] else {}
        machine = ", ".join(made["processors"] + [gpu for gpus in made["gpus"] for gpu in gpus])
        text += (
            f", {made['training_seconds'] / 3600:.2f} hours of training on {machine or 'unknown'}"
            f" ({_threads(made)}), torch {packages.get('torch')}, timm {packages.get('timm')}, "
            f"commit {', '.join(commit[:10] for commit in made['commits']) or 'unknown'}"
        )
    return text + f". `locality reproduce {record['name']} --scale {record['scale']}` repeats it."


def _threads(made: Record) -> str:
    counts = "/".join(str(count) for count in made["threads"]) or "?"
    return f"{counts} thread{'s' if counts != '1' else ''} per run"


def to_csv(record: Record) -> str:
    """One line per cell or point, everything in it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    if record["kind"] == "table":
        writer.writerow(
            ["experiment", "scale", "row", "column", "unit", "paper", "mean", "half_width_95",
             "n", "difference", "by_seed", "empty"]
        )  # fmt: skip
        for row in record["rows"]:
            for column, cell in zip(record["columns"], row["cells"], strict=True):
                if cell is not None:
                    writer.writerow(_csv_cell(record, row["label"], column, cell))
    else:
        writer.writerow(
            ["experiment", "scale", "panel", "series", "x", "mean", "half_width_95", "n", "empty"]
        )
        for panel in record["panels"]:
            for series in panel["series"]:
                writer.writerows(_csv_points(record, panel["title"], series))
    return buffer.getvalue()


def _csv_cell(record: Record, label: str, column: Record, cell: Record) -> list[Any]:
    head = [record["name"], record["scale"], label, column["name"], column["unit"]]
    printed = None if cell["paper"] is None else cell["paper"]["value"]
    if cell["empty"] is not None:
        return [*head, printed, None, None, None, None, None, cell["empty"]]
    difference = None if printed is None else cell["mean"] - printed
    by_seed = " ".join(f"{seed}:{value:.10g}" for seed, value in cell["by_seed"].items())
    return [*head, printed, cell["mean"], cell["half_width"], cell["n"], difference, by_seed, None]


def _csv_points(record: Record, panel: str, series: Record) -> list[list[Any]]:
    head = [record["name"], record["scale"], panel, series["label"]]
    if series["empty"]:
        return [[*head, None, None, None, None, series["empty"]]]
    points = zip(series["x"], series["mean"], series["half_width"], strict=True)
    return [[*head, x, mean, half, series["n"], None] for x, mean, half in points]


def to_html(record: Record) -> str:
    """A page of its own: table or figure, claims, origin."""
    notes = Notes()
    table = body(record, notes) if record["kind"] == "table" else []
    return render(
        "locality.papers", "experiment.html",
        record=record,
        headings=headings(record) if record["kind"] == "table" else [],
        lines=table,
        notes=notes.texts,
        reading=_reading(record),
        missing=_missing_series(record),
        claims=[{**claim, "evidence": _evidence(claim), "mark": MARKS[claim["verdict"]]}
                for claim in record["claims"]],
        origin=origin(record).replace("`", ""),
        image=next((name for name in record.get("files", []) if name.endswith(".svg")), None),
    )  # fmt: skip
