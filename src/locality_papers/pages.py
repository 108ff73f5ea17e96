"""Pages from the records in `results/SCALE`: `python -m locality_papers.pages`, or `make pages`.

Writes all questions and answers to `docs/findings.md`, one page per experiment to `docs/results/`,
all numbers to `results/answers.csv`, and the main answers between the marks in the README. Only the
remarks are written by hand, in `results/SCALE/remarks.yaml`: experiment → what does not reproduce,
and the most likely reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from locality.errors import UserError
from locality.files import read_json, read_yaml, write_atomic
from locality.templates import render
from locality_papers import answers as rule
from locality_papers.answers import AT_MOST, CANNOT_TELL, Answer, answers, write_answers
from locality_papers.records import Record
from locality_papers.specs import papers_order
from locality_papers.tables import Notes, filled, usual_n

SHOWN = ("digits", "fashion", "fashion14")
"""Scales with records in the repository."""
_FINDINGS = re.compile("(?<=<!-- findings -->\n).*?(?=<!-- /findings -->)", re.DOTALL)


def read_records(folder: Path) -> list[Record]:
    """The records of one scale, in the papers' order."""
    found = [read_json(path) for path in folder.glob("*.json")]
    if not found:
        raise UserError(f"no results in {folder}; `locality reproduce all` writes them")
    return sorted(found, key=lambda record: papers_order(record["name"]))


def write_all(root: Path) -> None:
    """Write all pages of a repository's results.

    Args:
        root: root of the repository.

    Raises:
        UserError: a scale has remarks on an experiment without results.
    """
    folders = {scale: root / "results" / scale for scale in SHOWN}
    by_scale = {scale: read_records(folder) for scale, folder in folders.items() if folder.is_dir()}
    every = list(chain(*by_scale.values()))
    found = answers(every)
    write_answers(root / "results" / "answers.csv", found)
    docs = root / "docs"
    (docs / "results").mkdir(parents=True, exist_ok=True)
    write_atomic(docs / "findings.md", findings(by_scale, found))
    remarks = {scale: _remarks(folders[scale], of) for scale, of in by_scale.items()}
    for name in {record["name"]: None for record in every}:
        records = [record for record in every if record["name"] == name]
        own = {record["scale"]: remarks[record["scale"]].get(name, "") for record in records}
        text = page(records, found, own, "../../results/")
        write_atomic(docs / "results" / f"{name.replace('/', '-')}.md", text)
    readme = root / "README.md"
    if readme.exists():
        filled_in = _FINDINGS.sub(lambda _: headlines(found), readme.read_text("utf-8"))
        write_atomic(readme, filled_in)


def _remarks(folder: Path, records: Sequence[Record]) -> Mapping[str, str]:
    path = folder / "remarks.yaml"
    said: dict[str, str] = read_yaml(path) if path.exists() else {}
    if unknown := sorted(set(said) - {record["name"] for record in records}):
        raise UserError(f"{path} has remarks on {', '.join(unknown)}, which has no results")
    return said


def page(
    records: Sequence[Record],
    found: Iterable[Answer],
    remarks: Mapping[str, str] = {},
    folder: str | None = None,
) -> str:
    """One experiment as Markdown, with a section for each scale.

    Args:
        records: its records, one per scale.
        found: answers, also of other experiments.
        remarks: scale → remark.
        folder: relative path from the page to the scales' folders; None for a page inside one.
    """
    parts = []
    for record in records:
        notes: Notes = {}
        headings, lines = filled(record, notes) if record["kind"] == "table" else ([], [])
        series = [each for panel in record.get("panels", []) for each in panel["series"]]
        missing = {f"{each['label']} ({each['empty']})": None for each in series if each["empty"]}
        place = "" if folder is None else f"{folder}{record['scale']}/"
        parts.append(
            {
                "record": record,
                "seeds": usual_n(record),
                "tables": list(_tables(headings, lines)),
                "notes": list(notes),
                "missing": list(missing),
                "picture": record.get("picture") and place + record["picture"],
                "remark": " ".join(remarks.get(record["scale"], "").split()),
                "answers": [
                    each
                    for each in found
                    if (each["experiment"], each["scale"]) == (record["name"], record["scale"])
                ],
            }
        )
    title = records[0]["title"]
    return _rendered("experiment.md", name=records[0]["name"], title=title, parts=parts)


def _tables(
    headings: list[str], lines: list[list[str]]
) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Split a table into parts that fit the page, each with the row labels."""
    step = 6 if len(headings) > 9 else 9
    for first in range(1, len(headings), step):
        columns = slice(first, first + step)
        yield [headings[0], *headings[columns]], [[line[0], *line[columns]] for line in lines]


def _by_question(found: Iterable[Answer]) -> dict[tuple[str, str], dict[str, Answer]]:
    """Experiment and question → scale → answer."""
    grouped: dict[tuple[str, str], dict[str, Answer]] = {}
    for each in found:
        grouped.setdefault((each["experiment"], each["question"]), {})[each["scale"]] = each
    return grouped


def findings(by_scale: Mapping[str, list[Record]], found: Sequence[Answer]) -> str:
    """All questions with their answers at each scale, as Markdown for docs/."""
    sections: dict[str, list[Any]] = {"The papers' questions": [], "Our own questions": []}
    for at in _by_question(found).values():
        question = next(iter(at.values()))
        sections["The papers' questions" if question["where"] else "Our own questions"].append(
            question | {"at": at}
        )
    every = list(chain(*by_scale.values()))
    return _rendered(
        "findings.md",
        scales={scale: records[0]["scale_about"] for scale, records in by_scale.items()},
        sections={title: of for title, of in sections.items() if of},
        pictures=[
            {
                "title": record["title"],
                "scale": record["scale"],
                "path": f"../results/{record['scale']}/{record['picture']}",
            }
            for record in every
            if record["name"] == "beyond/fractions" and record.get("picture")
        ],
        rule=(rule.__doc__ or "").partition("\n\n")[2].strip(),
        experiments={record["name"]: record["title"] for record in every},
    )


HEADLINES = {
    "With 5% of the images, is ConViT above DeiT?": "convit/table-2",
    "With 100% of the images, is ConViT above DeiT?": "convit/table-2",
    "Do ConViT's gated layers leave locality?": "convit/figure-5",
    "Do gates of the deeper half fall?": "convit/figure-6",
    "Does masking content cost more than masking position?": "convit/table-6",
    "Without its position embedding, does DeiT lose more than ConViT?": "convit/table-5",
}
"""The README's questions, and the experiments that answer them."""


def headlines(found: Iterable[Answer]) -> str:
    """The README's table of findings."""
    lines = ["| question | paper | here |", "| :-- | :-- | :-- |"]
    grouped = _by_question(found)
    for question, experiment in HEADLINES.items():
        if at := grouped.get((experiment, question)):
            paper = papers(next(iter(at.values())))
            lines.append(f"| {question} | {paper} | {everywhere(at)} |")
    return "\n".join(lines) + "\n"


def everywhere(at: Mapping[str, Answer]) -> str:
    """The answers at all scales, in one cell."""
    return "; ".join(f"{scale}: {said(answer)}" for scale, answer in at.items())


def said(answer: Answer) -> str:
    """An answer as text: "yes, +5.2 (+3.1 to +7.3)"."""
    unit = "" if answer["unit"] == "points" else f" {answer['unit']}".rstrip()
    more = f" {_number(answer, 'high')}" if answer["answer"] == AT_MOST else ""
    if answer["answer"] == CANNOT_TELL and answer["seeds"]:
        more = f" (needs {answer['seeds']} seeds)"
    text = f"{answer['answer']}{more}, {_number(answer, 'effect')}{unit}"
    if answer["low"] is not None:
        text += f" ({_number(answer, 'low')} to {_number(answer, 'high')})"
    return text


def papers(answer: Answer) -> str:
    """The paper's effect, or "yes" if it gives none; "not asked" for our own questions."""
    if answer["paper"] is None:
        return "yes" if answer["where"] else "not asked"
    return _signed(answer["paper"])


def _number(answer: Answer, name: str) -> str:
    """A number of an answer, rounded to two significant digits of its interval."""
    half = 0.0 if answer["low"] is None else (answer["high"] - answer["low"]) / 2
    if half < 1e-9:  # equal up to rounding errors
        return _signed(answer[name])
    decimals = max(0, 1 - math.floor(math.log10(half)))
    return f"{answer[name]:+.{decimals}f}".replace("-", "−")


def _signed(value: float) -> str:
    # Remove rounding errors, so that 0.1 + 0.2 − 0.3 shows as 0.
    return f"{round(value, 9):+.3g}".replace("-", "−")


def _rendered(template: str, **content: Any) -> str:
    filters: dict[str, Callable[..., Any]] = {
        "cell": lambda text: text.replace("|", "\\|"),
        "hardware": _hardware,
        "papers": papers,
        "everywhere": everywhere,
        "said": said,
        "sentence": lambda text: f"{text[0].upper()}{text[1:].rstrip('.')}.",
    }
    text = render("locality_papers", template, filters, **content)
    # Empty blocks leave empty lines.
    return re.sub("\n{3,}", "\n\n", text).strip() + "\n"


def _hardware(made: Record) -> list[str]:
    """Processors and GPUs in a record's provenance, where GPUs are listed per machine."""
    return [*made["processors"], *chain(*made["gpus"])]


if __name__ == "__main__":
    write_all(Path.cwd())
