"""Pages from the records in `results/`: `python -m locality_papers.pages`, or `make pages`.

Writes all questions and answers to `docs/findings.md`, one page per experiment to `docs/results/`,
all numbers to `results/answers.csv`, and the main answers between the marks in the README. The page
of superseded runs stays as it was written. Pictures that exist are kept, as another version of
matplotlib draws other pixels; delete one to redraw it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locality.files import write_atomic
from locality_papers import answers as rule
from locality_papers.answers import CANNOT_TELL, LESS, NO, YES, Answer, answers, write_answers
from locality_papers.experiment import Results, built
from locality_papers.reproduce import names, write_picture
from locality_papers.runs import get_scale
from locality_papers.table import Recorded
from locality_papers.text import Part, page, papers, rendered, said

SHOWN = ("digits", "fashion", "fashion14")
"""Scales with records in the repository."""
_FINDINGS = re.compile("(?<=<!-- findings -->\n).*?(?=<!-- /findings -->)", re.DOTALL)


def write_all(root: Path) -> None:
    """Write all pages of a repository's results.

    Args:
        root: root of the repository.
    """
    every: dict[str, dict[str, Results]] = {}
    for scale in SHOWN:
        path = root / "results" / f"{scale}.runs.jsonl.gz"
        chosen, recorded = get_scale(scale, root / "runs" / scale), Recorded(path)
        for name in names():
            of = Results(built(name, chosen), recorded)
            if of.experiment.runs or scale == SHOWN[0]:
                every.setdefault(name, {})[scale] = of
    found = answers(of for by_scale in every.values() for of in by_scale.values())
    write_answers(root / "results" / "answers.csv", found)
    pages: dict[str, dict[str, str | None]] = {}
    for name, by_scale in every.items():
        parts = []
        for scale, of in by_scale.items():
            part = Part(of, found)
            path = root / "results" / scale / f"{name.replace('/', '-')}.png"
            if part.has_values and not path.exists():
                write_picture(of, path)
            if path.exists():
                part.picture = f"../../results/{scale}/{path.name}"
            if part.has_values or part.picture:
                parts.append(part)
        if parts:
            pages[name] = {part.experiment.scale.name: part.picture for part in parts}
            _write(
                root / "docs" / "results" / f"{name.replace('/', '-')}.md",
                page(parts, "../../src/locality_papers"),
            )
    _write(root / "docs" / "findings.md", findings(every, found, pages))
    readme = root / "README.md"
    table = headlines(found)
    write_atomic(readme, _FINDINGS.sub(lambda _: table, readme.read_text("utf-8")))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def _by_question(found: Iterable[Answer]) -> dict[tuple[str, str], dict[str, Answer]]:
    """Experiment and question → scale → answer."""
    grouped: dict[tuple[str, str], dict[str, Answer]] = {}
    for each in found:
        grouped.setdefault((each["experiment"], each["question"]), {})[each["scale"]] = each
    return grouped


_SECTIONS = {
    YES: "What holds here",
    NO: "What does not hold here",
    LESS: "What is smaller here than in the papers, or absent",
    CANNOT_TELL: "What these runs cannot tell",
}


def findings(
    every: Mapping[str, Mapping[str, Results]],
    found: Sequence[Answer],
    pages: Mapping[str, Mapping[str, str | None]],
) -> str:
    """All questions of the papers by answer, as Markdown for docs/.

    Args:
        every: name → scale → values.
        found: all answers.
        pages: experiments that have a page: name → scale → its picture.
    """
    sections: dict[str, list[Any]] = {title: [] for title in _SECTIONS.values()}
    own: dict[str, Counter[str]] = {}
    asked = _by_question(found)
    for (name, _), at in asked.items():
        question = next(iter(at.values()))
        given = [each["answer"] for each in at.values()]
        if question["where"]:
            title = next(title for answer, title in _SECTIONS.items() if answer in given)
            sections[title].append(question | {"at": at})
        else:
            own.setdefault(name, Counter()).update(given)
    untested = {}
    for name, by_scale in every.items():
        first = next(iter(by_scale.values()))
        texts = [each.text for each in first.experiment.questions if each.where]
        if texts := [text for text in texts if (name, text) not in asked]:
            untested[name] = len(texts), _reasons(by_scale, texts)
    return rendered(
        "findings.md",
        scales={scale: of.experiment.scale.about for scale, of in every["convit/table-2"].items()},
        headlines=headlines(found),
        sections=sections,
        own=own,
        untested=untested,
        titles={name: next(iter(of.values())).experiment.title for name, of in every.items()},
        pages=pages,
        rule=(rule.__doc__ or "").partition("\n\n")[2].strip(),
    )


def _reasons(by_scale: Mapping[str, Results], texts: Sequence[str]) -> str:
    """Why questions have no answer at a scale."""
    reasons: dict[str, dict[str, None]] = {}
    for scale, of in by_scale.items():
        if scale != SHOWN[-1]:  # of Table 2 only
            for question in of.experiment.questions:
                if question.text in texts:
                    reasons.setdefault(of.effect(question.effect).empty, {})[scale] = None
    grouped: dict[str, list[str]] = {}
    for reason, scales in reasons.items():
        grouped.setdefault(", ".join(scales), []).append(reason)
    return "; ".join(f"{scales}: {', '.join(of)}" for scales, of in grouped.items())


HEADLINES = {
    "With 5% of the images, is ConViT above DeiT?": "convit/table-2",
    "With 100% of the images, is ConViT above DeiT?": "convit/table-2",
    "Is CvT-13 above DeiT-S?": "cvt/table-3",
    "Does masking position embeddings cost DeiT more than ConViT?": "convit/table-5",
    "Do gates of the deeper half fall?": "convit/figure-6",
    "Does masking content cost more than masking position?": "convit/table-6",
    "Patches each in its own order: do gates fall?": "beyond/shuffled",
}
"""The README's questions, and the experiments that answer them."""


def headlines(found: Iterable[Answer]) -> str:
    """The README's table of findings: a column for digits, one for Fashion-MNIST."""
    lines = ["| question | paper | digits | Fashion-MNIST |", "| :-- | :-- | :-- | :-- |"]
    grouped = _by_question(found)
    for question, experiment in HEADLINES.items():
        if at := grouped.get((experiment, question)):
            cells = [said(at[scale], brief=True) if scale in at else "" for scale in SHOWN[:2]]
            paper = papers(next(iter(at.values())))
            lines.append(f"| {question} | {paper} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_all(Path.cwd())
