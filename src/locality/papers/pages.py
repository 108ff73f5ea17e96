"""Records as pages: one for each experiment, and docs/results.md and .html for all of them.

`python -m locality.papers.pages` writes the latter two from the scales' folders, the best evidence
first; folders and the page's path may be given as arguments.

Nothing in them is written by hand but the remarks, which lie beside the records in `remarks.yaml`:
experiment → what does not reproduce, and the most likely reason.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import Any

import yaml

from locality.errors import UserError
from locality.files import csv_text
from locality.papers import records
from locality.papers.published import COMPUTED
from locality.papers.records import Record
from locality.papers.specs import papers_order
from locality.templates import render, write_page

EMPTY = "—"
SCALES = ("fashion14", "fashion", "digits")
"""The scales of the page of results, the best evidence first."""
_MANY_SEEDS = 24  # a line of a table holds about so many numbers


# -- tables ----------------------------------------------------------------------------------------


def number(value: float, column: Record, signed: bool = False) -> str:
    """A number with a column's digits, and its sign where that matters.

    Counts in millions and billions keep three significant digits: models are small at some scales.
    """
    digits = column["digits"]
    if column["unit"] in ("M", "G") and 0 < abs(value) < 1:
        digits = max(digits, 2 - math.floor(math.log10(abs(value))))
    sign = "+" if signed or column["signed"] else ""
    return f"{value:{sign}.{digits}f}".replace("-", "−")


Notes = dict[str, int]
"""Footnotes and their numbers, each reason once."""


def _mark(notes: Notes, text: str) -> str:
    """The mark of a note, added if it is new."""
    return f"[{notes.setdefault(text, len(notes) + 1)}]"


def filled(record: Record, notes: Notes) -> tuple[list[str], list[list[str]]]:
    """A table's headings and lines as text, the row's label first.

    A column has the paper's and our numbers where the paper prints any, ours alone elsewhere.
    """
    columns = []
    for column, cells in zip(
        record["columns"], zip(*(row["cells"] for row in record["rows"]), strict=True), strict=True
    ):
        both = any(cell and cell["paper"] for cell in cells)
        columns.append((column, (both, True, both and record["comparable"])))
    titles, usual = [""], usual_n(record)
    for column, shown in columns:
        name = column["name"]
        here = f"{name}, here" if shown[0] else name
        titles += compress((f"{name}, paper", here, "here − paper"), shown)
    lines = []
    for row in record["rows"]:
        line = [row["label"]]
        for cell, (column, shown) in zip(row["cells"], columns, strict=True):
            line += compress(_texts(cell, column, usual, notes), shown)
        lines.append(line)
    return titles, lines


def _texts(
    cell: Record | None, column: Record, usual: int | None, notes: Notes
) -> tuple[str, str, str]:
    """The paper's number, ours, and how far that is above the paper's."""
    if cell is None:
        return "", "", ""
    printed = cell["paper"]
    paper = "" if printed is None else _papers(printed, column, notes)
    if cell["empty"] is not None:
        return paper, f"{EMPTY} {_mark(notes, cell['empty'])}", ""
    text = number(cell["mean"], column)
    if cell["half_width"] is not None:
        text += f" ± {cell['half_width']:.{column['digits']}f}"
    if cell["n"] not in (1, usual):
        text += f" (n = {cell['n']})"
    for reason in dict.fromkeys(problem.partition(": ")[2] for problem in cell["problems"]):
        text += f" {_mark(notes, f'other seeds: {reason}')}"
    above = printed and number(cell["mean"] - printed["value"], column, signed=True)
    return paper, text, above or ""


def _papers(printed: Record, column: Record, notes: Notes) -> str:
    note = printed["note"]
    if note == COMPUTED or (column["unit"] == "%" and not column["signed"]):
        value = number(printed["value"], column)
    else:
        # As printed: a table that says 10 says neither 10.0 nor 10.00.
        value = f"{printed['value']:{'+' if column['signed'] else ''}g}".replace("-", "−")
    return value if note in ("", COMPUTED) else f"{value} {_mark(notes, f'paper: {note}')}"


def usual_n(record: Record) -> int | None:
    """The number of seeds that most cells have."""
    counts = [
        cell["n"]
        for row in record.get("rows", [])
        for cell in row["cells"]
        if cell is not None and cell["empty"] is None and cell["n"] > 1
    ]
    return max(set(counts), key=counts.count) if counts else None


def to_csv(record: Record) -> str:
    """One line per cell or point, everything in it."""
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
            points = zip(series["x"], series["mean"], series["half_width"], strict=True)
            for x, mean, half_width in points:
                yield line | {"x": x, "mean": mean, "half_width_95": half_width, "n": series["n"]}


# -- claims ----------------------------------------------------------------------------------------


def shown_claims(found: Sequence[tuple[Record, Record]]) -> list[Record]:
    """Claims as a page shows them, the verdicts on each paper's corrected for their number.

    Args:
        found: each claim with the record that it stands in.
    """
    tested: dict[str, list[Record]] = {}
    for record, claim in found:
        if claim["where"] and claim["empty"] is None:
            tested.setdefault(record["name"].partition("/")[0], []).append(claim)
    together = {
        id(claim): verdict
        for claims in tested.values()
        for claim, verdict in zip(claims, records.corrected(claims), strict=True)
    }
    lines = []
    for record, claim in found:
        measured = claim["empty"] is None
        alone = records.judge(claim)[0] if measured else claim["verdict"]
        verdict = together.get(id(claim), alone)
        several = measured and not claim.get("exact") and claim["n"] > 1
        by_seed = list(claim.get("by_seed", {}).values()) if several else []
        lines.append(
            claim
            | {
                "name": record["name"],
                "anchor": _anchor(record),
                "scale": record["scale"],
                "evidence": _evidence(claim),
                "seeds": _by_seed(by_seed),
                "alone": alone,
                "verdict": verdict,
                "mark": records.MARKS[verdict],
            }
        )
    return lines


def _by_seed(values: Sequence[float]) -> str:
    """A claim's number for each seed, or of many seeds how many are above 0, and their range."""
    if len(values) <= _MANY_SEEDS:
        return " ".join(map(_signed, values))
    above = sum(value > 0 for value in values)
    low, high = _signed(min(values)), _signed(max(values))
    return f"{above} of {len(values)} above 0, from {low} to {high}"


def _signed(value: float) -> str:
    return _short(value, "+", 3).replace("-", "−")


def _short(value: float, sign: str, digits: int) -> str:
    """With so many significant digits, without an exponent where the number is large."""
    text = f"{value:{sign}.{digits}g}"
    return f"{value:{sign},.0f}" if "e+" in text else text


def _evidence(claim: Record) -> str:
    if claim["empty"] is not None:
        return claim["empty"]
    text = _signed(claim["mean"])
    if claim["half_width"] is not None:
        text += f" ± {_short(claim['half_width'], '', 2)}"
    notes = [] if claim.get("exact") else [f"n = {claim['n']}"]
    if claim["expects"] == "equal":
        notes.append(f"wanted within ± {claim['margin']:g}")
    # One seed has no scatter to judge by.
    if claim["half_width"] is not None and records.judge(claim)[0] == records.UNDECIDED:
        needed = records.seeds_needed(claim)
        notes.append(f"{needed or f'more than {records.MOST_SEEDS}'} seeds would decide it")
    if claim.get("parts", 1) > 1:
        text = f"{claim['part']}: {text}"
        notes.append(f"{claim['parts']} of these have to hold")
    return f"{text} {claim['unit']}" + (f" ({', '.join(notes)})" if notes else "")


# -- pages -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """An experiment at all scales that have records of it, the best evidence first."""

    records: list[Record]

    @property
    def best(self) -> Record:
        """The first with something to show of enough seeds, today's definition before others."""
        return max(self.records, key=lambda record: (_content(record), not _earlier(record)))

    def claims(self) -> list[tuple[Record, Record]]:
        """Each claim once, with the first record that tests it as well as any."""
        today = [each for each in self.records if each.get("definition") == records.DEFINITION]
        where = {claim["text"]: claim["where"] for record in today for claim in record["claims"]}
        found: dict[str, tuple[Record, Record]] = {}
        for record in self.records:
            for claim in record["claims"]:
                text = claim["text"]
                if today and (_earlier(record) or text not in where):
                    continue
                if text not in found or _weight(claim) > _weight(found[text][1]):
                    place = where.get(text, "" if record["name"].startswith("beyond/") else "paper")
                    found[text] = record, {**claim, "where": place}
        return list(found.values())


def _earlier(record: Record) -> str:
    """What a record of an earlier definition means otherwise; "" where it means the same."""
    made_by = record.get("definition", 1)
    return "" if made_by == records.DEFINITION else records.REDEFINED.get(record["name"], "")


def _weight(claim: Record) -> int:
    """How much a scale says of a claim, whatever it says: tested by enough seeds, run, not run."""
    if claim["empty"] is not None:
        return 0 if claim["verdict"] == records.UNTESTABLE else 1
    return 3 if claim.get("exact") or claim["n"] >= records.LEAST_SEEDS else 2


def _content(record: Record) -> int:
    """How much a record has to show: nothing, or something of so many seeds, up to enough."""
    made = record["provenance"]
    if record["kind"] == "figure":
        shown = bool(record.get("files"))
    else:
        # What is counted on the models is the same whether anything was run or not.
        shown = bool(made["finished"]) or not made["runs"]
    return 1 + min(len(made.get("seeds", ())), records.LEAST_SEEDS) if shown else 0


def section(
    entry: Entry, remarks: Mapping[tuple[str, str], str] = {}, links: Mapping[str, str] = {}
) -> dict[str, Any]:
    """What a page shows of an experiment.

    Args:
        entry: at all scales.
        remarks: (scale, experiment) → what to say of it.
        links: scale → where its files lie, as seen from the page; beside it unless given.
    """
    record, notes = entry.best, Notes()
    headings, lines = filled(record, notes) if record["kind"] == "table" else ([], [])
    folders = {each["scale"]: f"{links[each['scale']]}/" if links else "" for each in entry.records}
    return {
        "anchor": _anchor(record),
        "seeds": usual_n(record),
        "headings": headings,
        "lines": lines,
        "notes": list(notes),
        "pictures": {
            Path(name).suffix: folders[record["scale"]] + name for name in record.get("files", [])
        },
        "remark": " ".join(remarks.get((record["scale"], record["name"]), "").split()),
        "record": record,
        "earlier": _earlier(record),
        "folders": folders,
    }


def page(kind: str, entry: Entry) -> str:
    """One experiment as a page of its own, "md" or "html"."""
    claims = shown_claims(entry.claims())
    title = entry.best["name"]
    return _rendered(kind, claims, title=title, opening=None, sections=[section(entry)])


def _rendered(kind: str, claims: Sequence[Record], **content: Any) -> str:
    content["papers"] = [claim for claim in claims if claim["where"]]
    content["ours"] = [claim for claim in claims if not claim["where"]]
    content["known_verdicts"], content["untestable"] = list(records.MARKS), records.UNTESTABLE
    content["decisive"] = records.HOLDS, records.FAILS
    filters = {"cell": lambda text: text.replace("|", "\\|"), "hardware": _hardware}
    text = render("locality.papers", f"results.{kind}", filters, **content)
    # Blocks that have nothing to say leave empty lines.
    return re.sub("\n{3,}", "\n\n", text).strip() + "\n"


def _anchor(record: Record) -> str:
    """What GitHub makes of a section's heading."""
    heading = f"{record['name']}: {record['title']}".lower()
    kept = (c if c.isalnum() or c in "-_ " else "" for c in heading)
    return "".join(kept).replace(" ", "-")


def read_records(folder: Path) -> list[Record]:
    """The records of one scale.

    Raises:
        UserError: if there are none.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    if not found:
        raise UserError(f"{folder} holds no results; `locality reproduce all` writes them")
    return found


def results_page(folders: Sequence[Path], place: Path, kind: str) -> str:
    """All results as one page, "md" or "html".

    Args:
        folders: `results/SCALE` each, the best evidence first.
        place: folder that the page will lie in; pictures are linked from there.

    Raises:
        UserError: if a folder has no results, or remarks on what has none.
    """
    entries: dict[str, list[Record]] = {}
    remarks: dict[tuple[str, str], str] = {}
    links, abouts = {}, {}
    for folder in folders:
        found = read_records(folder)
        scale, names = found[0]["scale"], {record["name"] for record in found}
        abouts[scale] = found[0]["scale_about"]
        links[scale] = Path(os.path.relpath(folder, place)).as_posix()
        path = folder / "remarks.yaml"
        said = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
        if unknown := sorted(set(said) - names):
            raise UserError(f"{path} has remarks on {', '.join(unknown)}, which has no results")
        remarks |= {(scale, name): text for name, text in said.items()}
        for record in found:
            entries.setdefault(record["name"], []).append(record)
    ordered = [Entry(entries[name]) for name in sorted(entries, key=papers_order)]
    claims = shown_claims([each for entry in ordered for each in entry.claims()])
    made = [entry.best["provenance"] for entry in ordered]
    rules = [inspect.getdoc(rule) or "" for rule in (records.judge, records.corrected)]
    return _rendered(
        kind,
        claims,
        title="Results",
        opening={
            "scales": abouts,
            "rules": [rule.partition("\n\n")[2] for rule in rules],
            "machines": sorted({name for each in made for name in _hardware(each)}),
            "commits": sorted({commit[:10] for each in made for commit in each["commits"]}),
        },
        sections=[section(entry, remarks, links) for entry in ordered],
    )


def _hardware(made: Record) -> list[str]:
    """The processors and GPUs of a record's provenance, which has a list of GPUs per machine."""
    return [*made["processors"], *chain(*made["gpus"])]


def write_results_pages(folders: Sequence[Path | str], page: Path | str) -> list[Path]:
    """Write the results of some scales to `page` (Markdown) and, beside it, as HTML.

    Raises:
        UserError: as `results_page`.
    """
    page, given = Path(page), [Path(folder) for folder in folders]
    return [
        write_page(page.with_suffix(f".{kind}"), results_page(given, page.parent, kind))
        for kind in ("md", "html")
    ]


if __name__ == "__main__":
    *given, target = sys.argv[1:] or [
        *(f"results/{scale}" for scale in SCALES if Path(f"results/{scale}").is_dir()),
        "docs/results.md",
    ]
    print(*write_results_pages(given, target), sep="\n")
