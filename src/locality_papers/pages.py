"""Records as pages: one for each experiment, and one for all of them.

`python -m locality_papers.pages` writes all of them from the records in `results/SCALE`: Markdown,
CSV and HTML beside each record, and `docs/results.md` and
`results/index.html` of all.

Nothing in them is written by hand but the remarks, which lie beside the records in `remarks.yaml`:
experiment → what does not reproduce, and the most likely reason.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup

from locality.errors import UserError
from locality.files import read_json, read_yaml, write_atomic
from locality.templates import render
from locality_papers import records
from locality_papers.records import Record
from locality_papers.specs import papers_order
from locality_papers.tables import Notes, filled, to_csv, usual_n

SHOWN = ("digits", "fashion", "fashion14")
"""The scales of the page of results."""
_MANY_SEEDS = 24  # a line of a table holds about so many numbers


# -- claims ----------------------------------------------------------------------------------------


def shown_claims(found: Sequence[Record]) -> list[Record]:
    """The claims of some records as a page shows them.

    Verdicts are corrected for the number of each paper's claims, or of our own questions, at each
    scale.
    """
    lines = [_line(record, claim) for record in found for claim in records.claims_of(record)]
    families: dict[tuple[str, str], list[Record]] = {}
    for line in lines:
        if line["empty"] is None:
            paper = line["name"].partition("/")[0] if line["where"] else ""
            families.setdefault((line["scale"], paper), []).append(line)
    for family in families.values():
        for line, verdict in zip(family, records.corrected(family), strict=True):
            line["verdict"], line["mark"] = verdict, records.MARKS[verdict]
    return lines


def _line(record: Record, claim: Record) -> Record:
    """A claim with what a page says of it, and its verdict taken alone."""
    alone = records.judge(claim)
    line = claim | {
        "name": record["name"],
        "anchor": _anchor(record),
        "scale": record["scale"],
        "kind": _kind(claim),
        "evidence": claim["empty"],
        "seeds": "",
        "paper": "",
        "alone": alone,
        "verdict": alone,
        "mark": records.MARKS[alone],
    }
    if claim["empty"] is None:
        part = records.deciding(claim)
        line["evidence"], line["notes"] = _evidence(part), _notes(claim, part)
        line["paper"] = "" if part["paper"] is None else _signed(part["paper"])
        if not part["exact"] and part["n"] > 1:
            line["seeds"] = _by_seed(list(part["by_seed"].values()))
    return line


TRAINED, COUNTED, OURS, UNTESTED = "trained", "counted", "ours", "untestable"
"""Kinds of claims, which pages show apart."""


def _kind(claim: Record) -> str:
    if not claim["where"]:
        return OURS
    if not claim["testable"]:
        return UNTESTED
    return COUNTED if claim["parts"] and records.is_exact(claim) else TRAINED


def _by_seed(values: Sequence[float]) -> str:
    """A claim's number for each seed, or of many seeds how many are above 0, and their range."""
    if len(values) <= _MANY_SEEDS:
        return " ".join(map(_signed, values))
    above = sum(value > 0 for value in values)
    low, high = _signed(min(values)), _signed(max(values))
    return f"{above} of {len(values)} above 0, from {low} to {high}"


def _signed(value: float) -> str:
    # The rounding errors of percentages are no number to show: 0.1 + 0.2 − 0.3 is 0.
    return _significant(round(value, 9), "+", 3).replace("-", "−")


def _significant(value: float, sign: str, digits: int) -> str:
    """With so many significant digits, without an exponent where the number is large."""
    text = f"{value:{sign}.{digits}g}"
    return f"{value:{sign},.0f}" if "e+" in text else text


def _evidence(part: Record) -> str:
    """The mean with its interval, both to the interval's second significant digit."""
    half = records.interval(part)
    if not half:
        return _signed(part["mean"]) + ("" if half is None else " ± 0")
    decimals = max(0, 1 - math.floor(math.log10(half)))
    return f"{part['mean']:+,.{decimals}f} ± {half:,.{decimals}f}".replace("-", "−")


def _notes(claim: Record, part: Record) -> str:
    """What else there is to know of a number: unit, part, seeds, and the bound."""
    notes = [claim["unit"]]
    if claim["asked"] > 1:
        notes.append(f"{part['part']}, one of {claim['asked']}")
    if not part["exact"]:
        notes.append(f"n = {part['n']}" + (f", look {claim['look']}" if claim["look"] > 1 else ""))
    if part["images"] and part["half_width"] is not None:
        notes.append(f"± {_significant(part['half_width'], '', 2)} over seeds alone")
    if claim["expects"] == "equal":
        notes.append(f"within ± {claim['margin']:g}")
    elif part["least"]:
        notes.append(f"smallest effect {_significant(part['least'], '', 2)}")
    return "; ".join(filter(None, notes))


@dataclass(frozen=True)
class Grid:
    """Claims of a kind by scale.

    Attributes:
        scales: the columns.
        groups: experiment → its claims; each has what it says, the paper's effect, and its line at
            every scale that has one.
    """

    scales: Sequence[str]
    groups: dict[str, list[Record]]

    def counts(self) -> dict[str, list[int]]:
        """Scale → how many claims were run, and how many have each verdict that running gives."""
        found: dict[str, list[int]] = {}
        for scale in self.scales:
            given = [
                row["lines"][scale]["verdict"]
                for rows in self.groups.values()
                for row in rows
                if scale in row["lines"]
            ]
            run = [verdict for verdict in given if verdict in RUN]
            if run:
                found[scale] = [len(run), *(run.count(verdict) for verdict in RUN)]
        return found


RUN = (records.HOLDS, records.CONTRADICTED, records.NOT_REPRODUCED, records.UNDECIDED)
"""The verdicts on what was run."""


def grid(lines: Sequence[Record], kind: str, scales: Sequence[str]) -> Grid:
    """The claims of a kind at all scales that have one."""
    groups: dict[str, dict[str, Record]] = {}
    for line in lines:
        if line["kind"] == kind:
            rows = groups.setdefault(line["name"], {})
            row = rows.setdefault(line["text"], {key: line[key] for key in ("text", "where")})
            row.setdefault("lines", {})[line["scale"]] = line
    for row in (row for rows in groups.values() for row in rows.values()):
        own = list(row["lines"].values())
        row["anchor"], row["unit"] = own[0]["anchor"], own[0]["unit"]
        row["paper"] = " / ".join(dict.fromkeys(line["paper"] for line in own if line["paper"]))
    found = {name: list(rows.values()) for name, rows in groups.items()}
    claims = [row for rows in found.values() for row in rows]
    return Grid([scale for scale in scales if any(scale in row["lines"] for row in claims)], found)


# -- pages -----------------------------------------------------------------------------------------


def part_of(record: Record, remark: str = "", folder: str = "") -> dict[str, Any]:
    """What a page shows of an experiment at one scale.

    Args:
        record: of it.
        remark: what to say of it.
        folder: with its files, as seen from the page, with a slash at its end.
    """
    notes = Notes()
    headings, lines = filled(record, notes) if record["kind"] == "table" else ([], [])
    return {
        "record": record,
        "seeds": usual_n(record),
        "headings": headings,
        "lines": lines,
        "notes": list(notes),
        "picture": record.get("picture") and folder + record["picture"],
        "remark": " ".join(remark.split()),
        "files": folder + record["name"].replace("/", "-"),
    }


def page(kind: str, record: Record) -> str:
    """One experiment at one scale as a page of its own, "md" or "html"."""
    lines = shown_claims([record])
    section = {"title": record["title"], "lines": lines, "parts": [part_of(record)]}
    return _rendered(kind, title=record["name"], opening=None, sections={record["name"]: section})


def _rendered(kind: str, **content: Any) -> str:
    style = files("locality_papers").joinpath("templates/claims.css").read_text("utf-8")
    filters: dict[str, Callable[..., Any]] = {
        "cell": lambda text: text.replace("|", "\\|"),
        "linked": _linked,
        "hardware": _hardware,
    }
    script = files("locality.report").joinpath("templates/save.js").read_text("utf-8")
    looks = {"style": style, "script": Markup(script)}
    text = render("locality_papers", f"results.{kind}", filters, **looks, **content)
    # Blocks that have nothing to say leave empty lines.
    return re.sub("\n{3,}", "\n\n", text).strip() + "\n"


def _linked(text: str) -> Markup:
    """Markdown's links to places of the same page, in HTML."""
    return Markup(re.sub(r"\[(.+?)\]\((#.+?)\)", r'<a href="\2">\1</a>', str(text)))


def _anchor(record: Record) -> str:
    """What GitHub makes of a heading: name and title."""
    heading = f"{record['name']}: {record['title']}".lower()
    kept = (c if c.isalnum() or c in "-_ " else "" for c in heading)
    return "".join(kept).replace(" ", "-")


def read_records(folder: Path) -> list[Record]:
    """The records of one scale, in the papers' order.

    Raises:
        UserError: if there are none.
    """
    found = [read_json(path) for path in folder.glob("*.json")]
    if not found:
        raise UserError(f"{folder} holds no results; `locality reproduce all` writes them")
    return sorted(found, key=lambda record: papers_order(record["name"]))


def results_page(folders: Sequence[Path], place: Path, kind: str) -> str:
    """All results as one page, "md" or "html".

    Args:
        folders: `results/SCALE` each, the best evidence first.
        place: folder that the page will lie in; pictures are linked from there.

    Raises:
        UserError: if a folder has no results, or remarks on what has none.
    """
    every: list[Record] = []
    abouts: dict[str, str] = {}
    parts: dict[str, list[dict[str, Any]]] = {}
    for folder in folders:
        found = read_records(folder)
        every += found
        abouts[found[0]["scale"]] = found[0]["scale_about"]
        path = folder / "remarks.yaml"
        said = read_yaml(path) if path.exists() else {}
        if unknown := sorted(set(said) - {record["name"] for record in found}):
            raise UserError(f"{path} has remarks on {', '.join(unknown)}, which has no results")
        link = Path(os.path.relpath(folder, place)).as_posix() + "/"
        for record in found:
            remark = said.get(record["name"], "")
            parts.setdefault(record["name"], []).append(part_of(record, remark, link))
    lines = shown_claims(every)
    sections = {
        name: {
            "title": parts[name][0]["record"]["title"],
            "anchor": _anchor(parts[name][0]["record"]),
            "lines": [line for line in lines if line["name"] == name],
            "parts": parts[name],
        }
        for name in sorted(parts, key=papers_order)
    }
    by_experiment = [line for section in sections.values() for line in section["lines"]]
    made = [record["provenance"] for record in every]
    rules = [inspect.getdoc(rule) or "" for rule in (records.judge, records.corrected)]
    return _rendered(
        kind,
        title="Results",
        opening={
            "scales": abouts,
            "grids": {
                each: grid(by_experiment, each, list(abouts)) for each in (TRAINED, COUNTED, OURS)
            },
            "untestable": _untestable(by_experiment),
            "verdicts": RUN,
            "marks": records.MARKS,
            "rules": [rule.partition("\n\n")[2] for rule in rules],
            "machines": sorted({name for each in made for name in _hardware(each)}),
            "commits": sorted({commit[:10] for each in made for commit in each["commits"]}),
        },
        sections=sections,
    )


def _untestable(lines: Sequence[Record]) -> list[Record]:
    """The papers' claims that no scale can test, each once."""
    tested = {(line["name"], line["text"]) for line in lines if line["kind"] != UNTESTED}
    found = {(line["name"], line["text"]): line for line in lines}
    return [line for key, line in found.items() if key not in tested]


def _hardware(made: Record) -> list[str]:
    """The processors and GPUs of a record's provenance, which has a list of GPUs per machine."""
    return [*made["processors"], *chain(*made["gpus"])]


def write_pages(record: Record, target: Path) -> None:
    """Write one record as `target`.md, .csv and .html."""
    write_atomic(target.with_suffix(".md"), page("md", record))
    write_atomic(target.with_suffix(".csv"), to_csv(record))
    write_atomic(target.with_suffix(".html"), page("html", record))


def write_all(root: Path) -> None:
    """Write every page of a repository's results.

    Args:
        root: of the repository.

    Raises:
        UserError: as `results_page`.
    """
    results = root / "results"
    folders = [results / scale for scale in SHOWN if (results / scale).is_dir()]
    for folder in folders:
        for record in read_records(folder):
            write_pages(record, folder / record["name"].replace("/", "-"))
    (root / "docs").mkdir(exist_ok=True)
    for path in (root / "docs" / "results.md", results / "index.html"):
        write_atomic(path, results_page(folders, path.parent, path.suffix[1:]))


if __name__ == "__main__":
    write_all(Path.cwd())
