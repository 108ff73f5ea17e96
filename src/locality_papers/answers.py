"""The rule that answers each question from the recorded runs.

**yes**: the effect is significantly above 0. **no**: it is significantly below 0, contradicting
the question. **less**: no effect was found, and one as large as the paper's (or one point of
accuracy, if the paper gives none) is excluded. **cannot tell**: everything else, and any effect
with fewer than three seeds; "needs n seeds" is for an interval of a third of the effect or the
paper's, "needs more images" for one that no number of seeds gives. Where a question has a
threshold, the effect is the distance from it.

Tests are Student's t over seeds at 5%, on differences paired by seed. Holm's correction covers the
questions of a table or figure at a scale, the papers' and our own separately: first testing for
effects that differ from 0, then, among the rest, for effects smaller than the paper's.

On `digits` every seed divides the same images again, so that test sets share a quarter of their
images and training sets three quarters: intervals are widened by √(1 + n/3), as Nadeau and Bengio
(2003) derive. On `fashion` all seeds share their test images: seeds and images are two samples, and
two models are compared image by image. Where it was not recorded which images a model had right,
its accuracies count as independent over images, which makes intervals wider: those answers are
marked *unpaired*. Quantities computed from the models alone need no seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from locality.analysis.statistics import Estimate, holm
from locality.files import csv_text, write_atomic
from locality_papers.experiment import A_POINT, Evaluated, Question, Results

YES, NO, LESS, CANNOT_TELL = "yes", "no", "less", "cannot tell"
COLUMNS = (
    *("question", "where", "experiment", "scale", "unit", "n", "planned"),
    *("effect", "low", "high", "p", "images", "paper", "answer", "seeds", "task"),
)
LEAST_SEEDS = 3

Answer = dict[str, Any]
"""A question's `COLUMNS`: `n` of the `planned` seeds, `effect` with its 95% interval and p-value of
"it is 0", how `images` count (see `Evaluated`), the paper's effect, for "cannot tell" the `seeds`
needed to tell, and why the `task` cannot show it."""


def answers(results: Iterable[Results]) -> list[Answer]:
    """Answers to all measured questions, in the order of the experiments."""
    found: list[Answer] = []
    families: dict[tuple[str, str, bool], list[tuple[Answer, Estimate, bool]]] = {}
    for of in results:
        for question in of.experiment.questions:
            evaluated = of.effect(question.effect)
            if evaluated.estimate is not None:
                answer = _unanswered(of, question, evaluated)
                found.append(answer)
                family = families.setdefault(
                    (answer["scale"], of.experiment.name, bool(question.where)), []
                )
                family.append((answer, evaluated.estimate, evaluated.exact))
    for family in families.values():
        _answer(family)
    return found


def _unanswered(of: Results, question: Question, evaluated: Evaluated) -> Answer:
    estimate = evaluated.estimate
    assert estimate is not None
    paper = of.paper(question.effect) if question.paper is None else question.paper
    return {
        "question": question.text,
        "where": question.where,
        "experiment": of.experiment.name,
        "scale": of.experiment.scale.name,
        "unit": question.unit,
        "n": None if evaluated.exact else estimate.n,
        "planned": None if evaluated.exact else evaluated.planned,
        "effect": estimate.mean,
        "low": estimate.low,
        "high": estimate.high,
        "p": p_value(estimate, 0.0, evaluated.exact),
        "images": evaluated.images,
        "paper": None if paper is None else round(paper, 6),
        "answer": CANNOT_TELL,
        "seeds": None,
        "task": question.task,
    }


def _answer(family: list[tuple[Answer, Estimate, bool]]) -> None:
    """Answer the questions of a family, in place."""
    differ = holm([answer["p"] for answer, *_ in family])
    rest = []
    for (answer, estimate, exact), differs in zip(family, differ, strict=True):
        if differs:
            answer["answer"] = YES if estimate.mean > 0 else NO
        elif (bound := _bound(answer)) is not None:
            rest.append((answer, estimate, exact, bound))
    below = holm(
        [p_value(e, bound, exact) if e.mean < bound else 1.0 for _, e, exact, bound in rest]
    )
    for (answer, estimate, _, bound), found in zip(rest, below, strict=True):
        if found:
            answer["answer"] = LESS
        elif estimate.half_width:
            answer["seeds"] = seeds_needed(estimate, max(bound, abs(estimate.mean)))


def _bound(answer: Answer) -> float | None:
    """The effect to test against: the paper's, or one point of accuracy."""
    if answer["paper"] is not None and answer["paper"] > 0:
        return float(answer["paper"])
    return A_POINT if answer["unit"] == "points" else None


def seeds_needed(estimate: Estimate, effect: float) -> float:
    """Seeds needed for a half-width of about a third of `effect`; infinite if images limit it."""
    fixed, wanted = estimate.floor**2, (effect / 6) ** 2
    seeds = estimate.n * (estimate.error**2 - fixed)
    if wanted <= fixed:
        return math.inf
    return max(LEAST_SEEDS, estimate.n + 1, math.ceil(seeds / (wanted - fixed)))


def p_value(estimate: Estimate, at: float, exact: bool = False) -> float:
    """Two-sided p-value of "the effect is `at`"; 1 with too few seeds."""
    if exact:
        return float(estimate.mean == at)
    return estimate.p_value(at) if estimate.n >= LEAST_SEEDS else 1.0


def write_answers(path: Path, found: Iterable[Answer]) -> None:
    """Write answers as CSV, one per line."""
    lines = [[_rounded(answer[name]) for name in COLUMNS] for answer in found]
    write_atomic(path, csv_text([COLUMNS, *lines]))


def _rounded(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
