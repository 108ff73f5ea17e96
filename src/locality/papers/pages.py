"""Records as Markdown, CSV and HTML, and docs/results.md, the page of a scale's records.

`python -m locality.papers.pages` writes that page; folder and page may be given as arguments.

Nothing in it is written by hand but the remarks, which lie beside the records in `remarks.yaml`:
experiment → what does not reproduce, and the most likely reason.
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from locality.errors import UserError
from locality.files import render, write_atomic
from locality.papers.published import COMPUTED
from locality.papers.records import FAILS, HOLDS, NOT_RUN, UNDECIDED, VERDICTS, Record, verdict
from locality.papers.specs import papers_order
from locality.training.preview import span

MARKS = {HOLDS: "✓", FAILS: "✗", UNDECIDED: "?", NOT_RUN: "–"}
EMPTY = "—"


def number(value: float, column: Record, signed: bool = False) -> str:
    """A number with a column's digits, and its sign where that matters.

    Counts in millions and billions keep three significant digits: models are small at some scales.
    """
    digits = column["digits"]
    if column["unit"] in ("M", "G") and 0 < abs(value) < 1:
        digits = max(digits, 2 - math.floor(math.log10(abs(value))))
    sign = "+" if signed or column["signed"] else ""
    return f"{value:{sign}.{digits}f}".replace("-", "−")


class Notes:
    """Footnotes, each reason once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """The mark of a note, added if it is new."""
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"


def filled(record: Record, notes: Notes) -> tuple[list[str], list[list[str]]]:
    """A table's headings and lines as text, the row's label first.

    A column has the paper's and our numbers where the paper prints any, ours alone elsewhere.
    """
    printed = [
        any(cell is not None and cell["paper"] is not None for cell in cells)
        for cells in zip(*(row["cells"] for row in record["rows"]), strict=True)
    ]
    columns = list(zip(record["columns"], printed, strict=True))
    compared = record["comparable"]
    titles = [""]
    for column, both in columns:
        name = column["name"]
        titles += [f"{name}, paper", f"{name}, here"] if both else [name]
        titles += ["here − paper"] if both and compared else []
    lines = []
    for row in record["rows"]:
        line = [row["label"]]
        for cell, (column, both) in zip(row["cells"], columns, strict=True):
            line += [_papers(cell, column, notes)] if both else []
            line.append(_ours(cell, column, usual_n(record), notes))
            line += [_difference(cell, column)] if both and compared else []
        lines.append(line)
    return titles, lines


def _papers(cell: Record | None, column: Record, notes: Notes) -> str:
    if cell is None or cell["paper"] is None:
        return ""
    printed = cell["paper"]
    note = printed["note"]
    if note == COMPUTED or (column["unit"] == "%" and not column["signed"]):
        value = number(printed["value"], column)
    else:
        # As printed: a table that says 10 says neither 10.0 nor 10.00.
        value = f"{printed['value']:{'+' if column['signed'] else ''}g}".replace("-", "−")
    return value if note in ("", COMPUTED) else f"{value} {notes.mark(f'paper: {note}')}"


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
    return number(cell["mean"] - cell["paper"]["value"], column, signed=True)


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
        parts.append(markdown_table(*filled(record, notes)))
    elif record.get("files"):
        image = next(name for name in record["files"] if name.endswith(".png"))
        parts.append(f"![{record['title']}]({image})")
    if record.get("empty"):
        parts.append(f"Not drawn: {record['empty']}.")
    parts += [_missing_series(record), _how_seeds_count(record)]
    parts.append("\n".join(f"{i}. {text}" for i, text in enumerate(notes.texts, 1)))
    if record["claims"]:
        lines = [[claim["text"], _evidence(claim), claim["verdict"]] for claim in record["claims"]]
        titles = [_who_claims(record), "here", "verdict"]
        parts.append(markdown_table(titles, lines, texts=(0, 1, 2)))
    parts.append(origin(record))
    return "\n\n".join(filter(None, parts)) + "\n"


def _missing_series(record: Record) -> str:
    missing = [
        f"{series['label']} ({series['empty']})"
        for panel in record.get("panels", [])
        for series in panel["series"]
        if series["empty"]
    ]
    return f"Missing: {'; '.join(dict.fromkeys(missing))}." if missing else ""


def _how_seeds_count(record: Record) -> str:
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


def _who_claims(record: Record) -> str:
    return "question" if record["name"].startswith("beyond/") else "claim of the paper"


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
    if not made["runs"]:
        return f"No training run is behind this at scale `{record['scale']}`."
    text = f"Scale `{record['scale']}`{about}. {made['finished']} of {made['runs']} runs finished"
    if made["finished"]:
        packages = made["packages"][0] if made["packages"] else {}
        machine = ", ".join(made["processors"] + [gpu for gpus in made["gpus"] for gpu in gpus])
        threads = "/".join(str(count) for count in made["threads"]) or "?"
        text += (
            f", {made['training_seconds'] / 3600:.2f} hours of training on {machine or 'unknown'}"
            f" ({threads} thread{'s' if threads != '1' else ''} per run), "
            f"torch {packages.get('torch')}, timm {packages.get('timm')}, "
            f"commit {', '.join(commit[:10] for commit in made['commits']) or 'unknown'}"
        )
    return text + f". `locality reproduce {record['name']} --scale {record['scale']}` repeats it."


def to_csv(record: Record) -> str:
    """One line per cell or point, everything in it."""
    table = record["kind"] == "table"
    what = "row column unit paper" if table else "panel series x"
    rest = " difference by_seed empty" if table else " empty"
    names = f"experiment scale {what} mean half_width_95 n{rest}".split()
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    common = {"experiment": record["name"], "scale": record["scale"]}
    for line in _cells(record) if table else _points(record):
        writer.writerow(common | line)
    return buffer.getvalue()


def _cells(record: Record) -> Iterator[dict[str, Any]]:
    for row in record["rows"]:
        for column, cell in zip(record["columns"], row["cells"], strict=True):
            if cell is None:
                continue
            paper = None if cell["paper"] is None else cell["paper"]["value"]
            line = {"row": row["label"], "column": column["name"], "unit": column["unit"]}
            line |= {"paper": paper, "empty": cell["empty"]}
            if cell["empty"] is None:
                by_seed = (f"{seed}:{value:.10g}" for seed, value in cell["by_seed"].items())
                line |= {
                    "mean": cell["mean"],
                    "half_width_95": cell["half_width"],
                    "n": cell["n"],
                    "difference": None if paper is None else cell["mean"] - paper,
                    "by_seed": " ".join(by_seed),
                }
            yield line


def _points(record: Record) -> Iterator[dict[str, Any]]:
    for panel in record["panels"]:
        for series in panel["series"]:
            line = {"panel": panel["title"], "series": series["label"], "empty": series["empty"]}
            if series["empty"]:
                yield line
                continue
            points = zip(series["x"], series["mean"], series["half_width"], strict=True)
            for x, mean, half_width in points:
                yield line | {"x": x, "mean": mean, "half_width_95": half_width, "n": series["n"]}


def to_html(record: Record) -> str:
    """A page of its own: table or figure, claims, origin."""
    notes = Notes()
    titles, lines = filled(record, notes) if record["kind"] == "table" else ([], [])
    return render(
        "locality.papers",
        "experiment.html",
        record={"empty": None, **record},
        headings=titles[1:],
        lines=lines,
        notes=notes.texts,
        reading=_how_seeds_count(record),
        missing=_missing_series(record),
        who_claims=_who_claims(record),
        claims=[
            {**claim, "evidence": _evidence(claim), "mark": MARKS[claim["verdict"]]}
            for claim in record["claims"]
        ],
        origin=origin(record).replace("`", ""),
        image=next((name for name in record.get("files", []) if name.endswith(".svg")), None),
    )


def read_records(folder: Path) -> list[Record]:
    """The records of one scale, in the papers' order.

    Raises:
        UserError: if there are none.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    if not found:
        raise UserError(f"{folder} holds no results; `locality reproduce all` writes them")
    return sorted(found, key=lambda record: papers_order(record["name"]))


def results_page(folder: Path, page: Path) -> str:
    """The page of one scale's results as Markdown.

    Args:
        folder: `results/SCALE`.
        page: where the text will lie; pictures are linked from there.
    """
    records = read_records(folder)
    path = folder / "remarks.yaml"
    remarks = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    unknown = sorted(set(remarks) - {record["name"] for record in records})
    if unknown:
        raise UserError(f"{path} has remarks on {', '.join(unknown)}, which has no results")
    link = Path(os.path.relpath(folder, page.parent)).as_posix()
    parts = [_opening(records), _how_to_read(), _overview(records)]
    parts += [_not_reproduced(records, remarks)]
    for record in records:
        parts.append(_section(record, remarks.get(record["name"]), link))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _opening(records: Sequence[Record]) -> str:
    counted = {
        verdict: sum(claim["verdict"] == verdict for r in records for claim in r["claims"])
        for verdict in VERDICTS
    }
    made = [record["provenance"] for record in records]
    machines = sorted({name for each in made for name in each["processors"]})
    commits = sorted({commit[:10] for each in made for commit in each["commits"]})
    return f"""# Results

Every table and figure of both papers, and one experiment beyond them, as measured here at scale
`{records[0]["scale"]}`: {records[0]["scale_about"]}. The papers' numbers are from ImageNet; theirs
and ours stand side by side for the direction and the size of effects, not for the accuracies.

Of {sum(counted.values())} claims, **{counted[HOLDS]} hold**, {counted[FAILS]} do not hold,
{counted[UNDECIDED]} cannot be told at this scale{
        f", {counted[NOT_RUN]} were not run" if counted[NOT_RUN] else ""
    }. Hardware: {"; ".join(machines) or "unknown"}. Commit{"s" if len(commits) > 1 else ""}:
{", ".join(commits) or "unknown"}.

This page is generated from `results/` by `python -m locality.papers.pages`. How to repeat it,
also at the papers' size: [reproducing.md](reproducing.md)."""


def _how_to_read() -> str:
    rule = inspect.getdoc(verdict) or ""
    return "## How claims are decided\n\n" + "\n\n".join(rule.split("\n\n")[1:])


def _overview(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        made = record["provenance"]
        verdicts = [claim["verdict"] for claim in record["claims"]]
        anchor = f"[{record['name']}](#{_anchor(record)})"
        lines.append(
            [
                anchor,
                record["title"],
                f"{made['finished']} of {made['runs']}" if made["runs"] else "none needed",
                span(made["training_seconds"]) if made["finished"] else "",
                *(str(verdicts.count(verdict) or "") for verdict in VERDICTS),
            ]
        )
    titles = ["", "what", "runs", "time, one at a time", *VERDICTS]
    return "## Overview\n\n" + markdown_table(titles, lines, texts=(0, 1))


def _anchor(record: Record) -> str:
    """What GitHub makes of a section's heading."""
    heading = f"{record['name']}: {record['title']}".lower()
    kept = (c if c.isalnum() or c in "-_ " else "" for c in heading)
    return "".join(kept).replace(" ", "-")


def _not_reproduced(records: Sequence[Record], remarks: dict[str, str]) -> str:
    parts = []
    for record in records:
        failed = [claim for claim in record["claims"] if claim["verdict"] == FAILS]
        if not failed and record["name"] not in remarks:
            continue
        lines = [f"- {record['name']}: “{claim['text']}”" for claim in failed]
        if record["name"] in remarks:
            lines.append(f"{'  ' if failed else '- ' + record['name'] + ': '}"
                         f"{' '.join(remarks[record['name']].split())}")  # fmt: skip
        parts.append("\n".join(lines))
    return "## What does not reproduce\n\n" + "\n".join(parts) if parts else ""


def _section(record: Record, remark: str | None, link: str) -> str:
    files = [f"{link}/{name}" for name in record.get("files", [])]
    # The page's opening says what the scale is.
    text = markdown({**record, "files": files, "scale_about": ""}).strip()
    name = record["name"].replace("/", "-")
    data = " · ".join(f"[{suffix}]({link}/{name}.{suffix})" for suffix in ("csv", "html", "json"))
    return "\n\n".join(filter(None, (text, remark and f"*{' '.join(remark.split())}*", data)))


def write_results_page(folder: Path | str, page: Path | str) -> Path:
    """Write the page of `results/SCALE` to `page`.

    Raises:
        UserError: if there are no results, or remarks on what has none.
    """
    page = Path(page)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, results_page(Path(folder), page))
    return page


if __name__ == "__main__":
    given = [*sys.argv[1:], *("results/digits", "docs/results.md")[len(sys.argv) - 1 :]]
    print(write_results_page(given[0], given[1]))
