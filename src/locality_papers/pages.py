"""Pages from the records in `results/`: `python -m locality_papers.pages`, or `make pages`.

Writes all questions and answers to `docs/findings.md`, one page per experiment to `docs/results/`,
all numbers to `results/answers.csv`, and the main answers between the marks in the README. The page
of superseded runs stays as it was written. Pictures that exist are kept, as another version of
matplotlib draws other pixels; delete one to redraw it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locality.files import write_atomic
from locality_papers import answers as rule
from locality_papers.answers import Answer, answers, write_answers
from locality_papers.experiment import Results, built
from locality_papers.reproduce import names, write_picture
from locality_papers.runs import get_scale
from locality_papers.table import NOT_RUN, Recorded
from locality_papers.text import Part, page, papers, rendered, said

SHOWN = {
    "photographs": "photographs",
    "digits": "digits",
    "fashion": "clothes",
    "fashion14": "clothes, 14×14",
}
"""Scales whose records may be in the repository, and what their images show."""
_FINDINGS = re.compile("(?<=<!-- findings -->\n).*?(?=<!-- /findings -->)", re.DOTALL)


def write_all(root: Path) -> None:
    """Write all pages of a repository's results.

    Args:
        root: root of the repository.
    """
    every: dict[str, dict[str, Results]] = {}
    for scale in SHOWN:
        path = root / "results" / f"{scale}.runs.jsonl.gz"
        if not path.exists():
            continue
        chosen, recorded = get_scale(scale, root / "runs" / scale), Recorded(path)
        for name in names():
            of = Results(built(name, chosen), recorded)
            if of.experiment.runs or scale == "digits":
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


def _most_telling(at: Mapping[str, Answer]) -> Answer:
    """Of a question's answers by scale, one with the paper's effect, if any has it."""
    return max(at.values(), key=lambda of: of["paper"] is not None)


def findings(
    every: Mapping[str, Mapping[str, Results]],
    found: Sequence[Answer],
    pages: Mapping[str, Mapping[str, str | None]],
) -> str:
    """All questions of the papers and their answers, as Markdown for docs/.

    Args:
        every: name → scale → values.
        found: all answers.
        pages: experiments that have a page: name → scale → its picture.
    """
    asked = _by_question(found)
    sections: dict[str, list[Any]] = {"ConViT": [], "CvT": []}
    counted: dict[str, Counter[str]] = {}
    for (name, _), at in asked.items():
        question = _most_telling(at)
        if question["where"] and question["n"] is None and len(at) == 1:
            counted.setdefault(name, Counter())[question["answer"]] += 1
        elif question["where"]:
            sections["ConViT" if name.startswith("convit") else "CvT"].append(question | {"at": at})
    tasks = list(dict.fromkeys(each["task"] for each in found if each["task"]))
    untested = {}
    for name, by_scale in every.items():
        questions = {each.text for of in by_scale.values() for each in of.experiment.questions}
        if left := {text for text in questions if (name, text) not in asked}:
            untested[name] = len(left), _reasons(by_scale, left)
    return rendered(
        "findings.md",
        scales={scale: of.experiment.scale.about for scale, of in every["convit/table-2"].items()},
        shown=SHOWN,
        sections=[
            (
                title,
                [scale for scale in SHOWN if any(scale in of["at"] for of in questions)],
                questions,
            )
            for title, questions in sections.items()
        ],
        tasks=tasks,
        counted=counted,
        untested=untested,
        titles={name: next(iter(of.values())).experiment.title for name, of in every.items()},
        pages=pages,
        rule=(rule.__doc__ or "").partition("\n\n")[2].strip(),
    )


def _reasons(by_scale: Mapping[str, Results], texts: Iterable[str]) -> str:
    """Why questions have no answer at a scale."""
    reasons: dict[str, dict[str, None]] = {}
    for scale, of in by_scale.items():
        if scale != "fashion14":  # of Table 2 only
            for question in of.experiment.questions:
                empty = of.effect(question.effect).empty
                if question.text in texts and empty != NOT_RUN:
                    reasons.setdefault(empty, {})[scale] = None
    grouped: dict[str, list[str]] = {}
    for reason, scales in reasons.items():
        grouped.setdefault(", ".join(SHOWN[scale] for scale in scales), []).append(reason)
    return "; ".join(f"{scales}: {', '.join(of)}" for scales, of in grouped.items())


HEADLINES = {
    "With 5% of the images, is ConViT above DeiT?": "convit/table-2",
    "With 20% of the images, is ConViT above DeiT?": "convit/table-2",
    "With 100% of the images, is ConViT above DeiT?": "convit/table-2",
    "Is CvT-13 above DeiT-S?": "cvt/table-3",
    "Does masking position embeddings cost DeiT more than ConViT?": "convit/table-5",
    "Trained without position embedding, does DeiT lose more than CvT?": "cvt/table-5",
    "Do gates of the deeper half fall?": "convit/figure-6",
    "Does masking content cost more than masking position?": "convit/table-6",
    "Patches each in its own order: do gates fall?": "beyond/shuffled",
}
"""The README's questions, and the experiments that answer them."""


def headlines(found: Iterable[Answer]) -> str:
    """The README's table of findings: a column for photographs, digits and clothes."""
    grouped = _by_question(found)
    rows = {text: grouped.get((name, text), {}) for text, name in HEADLINES.items()}
    scales = [
        scale
        for scale in SHOWN
        if scale != "fashion14" and any(scale in at for at in rows.values())
    ]
    lines = [
        ["question", "paper", *(SHOWN[scale] for scale in scales)],
        [":--"] * (len(scales) + 2),
    ]
    for question, at in rows.items():
        if at:
            cells = [said(at[scale], brief=True) if scale in at else "" for scale in scales]
            lines.append([question, papers(_most_telling(at)), *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    write_all(Path.cwd())
