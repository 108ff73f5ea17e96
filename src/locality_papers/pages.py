"""Records as pages: one for each experiment, and one for all of them.

`python -m locality_papers.pages` writes all of them from the records in `results/SCALE`, the best
evidence first: Markdown, CSV and HTML beside each record, and `docs/results.md` and
`results/index.html` of all.

Nothing in them is written by hand but the remarks, which lie beside the records in `remarks.yaml`:
experiment → what does not reproduce, and the most likely reason.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from locality.errors import UserError
from locality.templates import render, write_page
from locality_papers import records
from locality_papers.records import Record
from locality_papers.specs import papers_order
from locality_papers.tables import Notes, filled, to_csv, usual_n

SCALES = ("fashion14", "fashion", "digits")
"""The scales of the page of results, the best evidence first."""
_MANY_SEEDS = 24  # a line of a table holds about so many numbers


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
    return _significant(value, "+", 3).replace("-", "−")


def _significant(value: float, sign: str, digits: int) -> str:
    """With so many significant digits, without an exponent where the number is large."""
    text = f"{value:{sign}.{digits}g}"
    return f"{value:{sign},.0f}" if "e+" in text else text


def _evidence(claim: Record) -> str:
    if claim["empty"] is not None:
        return claim["empty"]
    text = _signed(claim["mean"])
    if claim["half_width"] is not None:
        text += f" ± {_significant(claim['half_width'], '', 2)}"
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
        """The first with something to show of enough seeds."""
        return max(self.records, key=_content)

    def claims(self) -> list[tuple[Record, Record]]:
        """Each claim once, with the first record that tests it as well as any."""
        found: dict[str, tuple[Record, Record]] = {}
        for record in self.records:
            for claim in record["claims"]:
                text = claim["text"]
                if text not in found or _weight(claim) > _weight(found[text][1]):
                    found[text] = record, claim
        return list(found.values())


def _weight(claim: Record) -> int:
    """How much a scale says of a claim, whatever it says: tested by enough seeds, run, not run."""
    if claim["empty"] is not None:
        return 0 if claim["verdict"] == records.UNTESTABLE else 1
    return 3 if claim.get("exact") or claim["n"] >= records.LEAST_SEEDS else 2


def _content(record: Record) -> int:
    """How much a record has to show: nothing, or something of so many seeds, up to enough."""
    made = record["provenance"]
    if record["kind"] == "figure":
        shown = record["picture"] is not None
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
        "picture": record.get("picture") and folders[record["scale"]] + record["picture"],
        "remark": " ".join(remarks.get((record["scale"], record["name"]), "").split()),
        "record": record,
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
    text = render("locality_papers", f"results.{kind}", filters, **content)
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


def write_pages(record: Record, target: Path) -> None:
    """Write one record as `target`.md, .csv and .html."""
    entry = Entry([record])
    write_page(target.with_suffix(".md"), page("md", entry))
    write_page(target.with_suffix(".csv"), to_csv(record))
    write_page(target.with_suffix(".html"), page("html", entry))


def write_all(root: Path) -> None:
    """Write every page of a repository's results.

    Args:
        root: of the repository.

    Raises:
        UserError: as `results_page`.
    """
    results = root / "results"
    folders = [results / scale for scale in SCALES if (results / scale).is_dir()]
    for folder in folders:
        for record in read_records(folder):
            write_pages(record, folder / record["name"].replace("/", "-"))
    for path in (root / "docs" / "results.md", results / "index.html"):
        write_page(path, results_page(folders, path.parent, path.suffix[1:]))


if __name__ == "__main__":
    write_all(Path.cwd())
