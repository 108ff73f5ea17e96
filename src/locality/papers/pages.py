"""docs/results.md, made from the records under results/.

`python -m locality.papers.pages` writes it; folder and page may be given as arguments.

Nothing in it is written by hand but the remarks, which lie beside the records in `remarks.yaml`:
experiment → what does not reproduce, and the likeliest reason.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from locality.errors import UserError
from locality.files import write_atomic
from locality.papers import claims
from locality.papers.claims import FAILS, HOLDS, NOT_RUN, UNDECIDED
from locality.papers.records import Record
from locality.papers.specs import experiments
from locality.papers.tables import markdown, markdown_table
from locality.runner.cost import span

_VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN)


def read_records(folder: Path) -> list[Record]:
    """The records of one scale, in the papers' order.

    Raises:
        UserError: if there are none.
    """
    found = {}
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        found[record["name"]] = record
    if not found:
        raise UserError(f"{folder} holds no results; `locality reproduce all` writes them")
    return [found[name] for name in experiments() if name in found]


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
    parts = [_opening(records), _how_to_read(records[0]), _overview(records)]
    parts += [_not_reproduced(records, remarks)]
    for record in records:
        parts.append(_section(record, remarks.get(record["name"]), link))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _opening(records: Sequence[Record]) -> str:
    counted = {
        verdict: sum(claim["verdict"] == verdict for r in records for claim in r["claims"])
        for verdict in _VERDICTS
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


def _how_to_read(record: Record) -> str:
    rule = inspect.getdoc(claims) or ""
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
                *(str(verdicts.count(verdict) or "") for verdict in _VERDICTS),
            ]
        )
    titles = ["", "what", "runs", "time, one at a time", *_VERDICTS]
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
    data = " · ".join(f"[{kind}]({link}/{name}.{kind})" for kind in ("csv", "html", "json"))
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
