"""Pages from the records in `results/`: `python -m locality_papers.pages`, or `make pages`.

Writes all questions and answers to `docs/findings.md`, one page per experiment to `docs/results/`,
all numbers to `results/answers.csv`, and the main answers between the marks in the README. Pictures
that exist are kept, as another version of matplotlib draws other pixels; delete one to redraw it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locality.files import write_atomic
from locality_papers import answers as rule
from locality_papers.answers import Answer, answers, write_answers
from locality_papers.experiment import Results, built, papers_order
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
        if (path := root / "results" / f"{scale}.runs.jsonl.gz").exists():
            chosen, recorded = get_scale(scale, root / "runs" / scale), Recorded(path)
            for name in names():
                every.setdefault(name, {})[scale] = Results(built(name, chosen), recorded)
    found = answers(of for by_scale in every.values() for of in by_scale.values())
    write_answers(root / "results" / "answers.csv", found)
    docs = root / "docs"
    (docs / "results").mkdir(parents=True, exist_ok=True)
    pages = {}
    for name, by_scale in every.items():
        shown = [of for of in by_scale.values() if Part(of, found).has_values]
        shown = shown if shown and shown[0].experiment.runs else shown[:1]
        for of in shown:
            _draw(of, root / "results" / of.experiment.scale.name)
        if shown:
            pages[name] = shown[0].experiment.title
            text = page(shown, found, "../../results/")
            write_atomic(docs / "results" / f"{name.replace('/', '-')}.md", text)
    write_atomic(docs / "findings.md", findings(every, found, pages))
    readme = root / "README.md"
    if readme.exists():
        filled_in = _FINDINGS.sub(lambda _: headlines(found), readme.read_text("utf-8"))
        write_atomic(readme, filled_in)


def _draw(results: Results, folder: Path) -> None:
    """Draw an experiment's picture if it has none yet."""

    path = folder / f"{results.experiment.name.replace('/', '-')}.png"
    if not path.exists():
        write_picture(results, path)


def _by_question(found: Iterable[Answer]) -> dict[tuple[str, str], dict[str, Answer]]:
    """Experiment and question → scale → answer."""
    grouped: dict[tuple[str, str], dict[str, Answer]] = {}
    for each in found:
        grouped.setdefault((each["experiment"], each["question"]), {})[each["scale"]] = each
    return grouped


def findings(
    every: Mapping[str, Mapping[str, Results]], found: Sequence[Answer], pages: Mapping[str, str]
) -> str:
    """All questions with their answers at each scale, as Markdown for docs/.

    Args:
        every: name → scale → values.
        found: all answers.
        pages: experiments that have a page: name → title.
    """
    sections: dict[str, list[Any]] = {"The papers' questions": [], "Our own questions": []}
    asked = _by_question(found)
    for at in asked.values():
        question = next(iter(at.values()))
        title = "The papers' questions" if question["where"] else "Our own questions"
        sections[title].append(question | {"at": at})
    scales = {scale: of.experiment.scale.about for scale, of in next(iter(every.values())).items()}
    open_questions = {
        (of.experiment.name, question.text): None
        for name, by_scale in sorted(every.items(), key=lambda pair: papers_order(pair[0]))
        for of in by_scale.values()
        for question in of.experiment.questions
        if question.where and (name, question.text) not in asked
    }
    pictures = [
        {"scale": scale, "name": name, "title": of.experiment.title, "path": f"../results/{path}"}
        for name in ("beyond/shuffled-dial", "beyond/fractions")
        for scale, of in every[name].items()
        if name in pages and Part(of, found).has_values
        for path in [f"{scale}/{name.replace('/', '-')}.png"]
    ]
    return rendered(
        "findings.md",
        scales=scales,
        sections={title: of for title, of in sections.items() if of},
        open_questions=list(open_questions),
        pictures=pictures,
        rule=(rule.__doc__ or "").partition("\n\n")[2].strip(),
        experiments=pages,
    )


HEADLINES = {
    "With 5% of the images, is ConViT above DeiT?": "convit/table-2",
    "With 100% of the images, is ConViT above DeiT?": "convit/table-2",
    "Is CvT-13 above DeiT-S?": "cvt/table-3",
    "Do gates of the deeper half fall?": "convit/figure-6",
    "Patches each in its own order: do gates fall?": "beyond/shuffled",
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
            here = "; ".join(f"{scale}: {said(answer)}" for scale, answer in at.items())
            lines.append(f"| {question} | {paper} | {here} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_all(Path.cwd())
