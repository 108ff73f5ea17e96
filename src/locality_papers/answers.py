"""The rule that answers each question from the recorded measurements.

**yes**: the effect is significantly above 0. **no**: it is significantly below 0, contradicting
the question. **at most**: neither, but significantly smaller than the paper's effect, or than one
point of accuracy if the paper gives none; the answer is the upper end of the interval. **cannot
tell**: everything else, and any effect with fewer than three seeds.

Tests are Student's t over seeds at 5%, on differences paired by seed. Holm's correction covers all
questions of a scale, the papers' and our own separately: first testing for effects that differ from
0, then, among the rest, for effects smaller than the paper's.

If all seeds are evaluated on the same images, the variance over images is added, at most
p (1 − p) / N for an accuracy p on N images; the larger p-value and the wider interval count. If
each seed draws its own images, the spread over seeds already includes it. Quantities computed from
the models alone need no seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scipy.special import stdtr, stdtrit

from locality.analysis.statistics import Estimate, holm
from locality.files import csv_text, write_atomic
from locality_papers.records import Record

YES, NO, AT_MOST, CANNOT_TELL = "yes", "no", "at most", "cannot tell"
COLUMNS = (
    *("question", "where", "experiment", "scale", "unit", "n"),
    *("effect", "low", "high", "paper", "answer", "seeds"),
)
LEAST_SEEDS = 3
A_POINT = 1.0

Answer = dict[str, Any]
"""A question's `COLUMNS`: `n` seeds, `effect` with its 95% interval, the paper's effect, and, for
"cannot tell", the `seeds` needed to tell."""


def answers(records: Iterable[Record]) -> list[Answer]:
    """Answers to all measured questions, in the order of the records."""
    found: list[tuple[Answer, Record]] = []
    families: dict[tuple[str, bool], list[tuple[Answer, Record]]] = {}
    for record in records:
        for question in record["questions"]:
            if question["empty"] is None:
                pair = _unanswered(record, question), question
                found.append(pair)
                families.setdefault((record["scale"], bool(question["where"])), []).append(pair)
    for family in families.values():
        _answer(family)
    return [answer for answer, _ in found]


def write_answers(path: Path, found: Iterable[Answer]) -> None:
    """Write answers as CSV, one per line."""
    lines = [[_rounded(each[name]) for name in COLUMNS] for each in found]
    write_atomic(path, csv_text([COLUMNS, *lines]))


def _unanswered(record: Record, question: Record) -> Answer:
    half = interval(question)
    mean = question["mean"]
    return {
        "question": question["text"],
        "where": question["where"],
        "experiment": record["name"],
        "scale": record["scale"],
        "unit": question["unit"],
        "n": None if question["exact"] else question["n"],
        "effect": mean,
        "low": None if half is None else mean - half,
        "high": None if half is None else mean + half,
        "paper": question["paper"],
        "answer": CANNOT_TELL,
        "seeds": None,
    }


def _answer(family: list[tuple[Answer, Record]]) -> None:
    """Answer the questions of a family, in place."""
    differ = holm([p_value(question, 0.0) for _, question in family])
    for (answer, _), found in zip(family, differ, strict=True):
        if found:
            answer["answer"] = YES if answer["effect"] > 0 else NO
    rest = [
        (answer, question, bound)
        for (answer, question), found in zip(family, differ, strict=True)
        if not found and (bound := _bound(question)) is not None
    ]
    short = holm([p_value(q, bound) if q["mean"] < bound else 1.0 for _, q, bound in rest])
    for (answer, question, bound), found in zip(rest, short, strict=True):
        if found:
            answer["answer"] = AT_MOST
        elif half := question["half_width"]:
            reached = max(bound, abs(answer["effect"]))
            seeds = seeds_needed(question["n"], half, reached, question["images"])
            answer["seeds"] = seeds if seeds and seeds > question["n"] else None


def _bound(question: Record) -> float | None:
    """The effect to test against: the paper's, or one point of accuracy."""
    paper: float | None = question["paper"]
    if paper is not None and paper > 0:
        return paper
    return A_POINT if question["unit"] == "points" else None


def seeds_needed(n: int, half_width: float, effect: float, images: float = 0.0) -> int | None:
    """Seeds needed for a half-width of about a third of `effect`, given that of `n` seeds.

    None if the standard error over `images`, which more seeds do not reduce, is too large.
    """
    left = 1 - (3 * two_sided_t(_LARGE) * images / effect) ** 2
    return math.ceil(n * (3 * half_width / effect) ** 2 / left) if left > 0 else None


def p_value(question: Record, at: float) -> float:
    """Two-sided p-value of "the effect is `at`", over seeds and images."""
    if question["exact"]:
        return float(question["mean"] == at)
    if question["n"] < LEAST_SEEDS:
        return 1.0
    over_seeds = Estimate(question["mean"], question["half_width"], question["n"]).p_value(at)
    if not question["images"]:
        return over_seeds
    error, freedom = _error(question)
    return max(over_seeds, two_sided_p((question["mean"] - at) / error, freedom))


def interval(question: Record) -> float | None:
    """Half-width of the 95% interval over seeds and images; None for a single seed."""
    half: float | None = question["half_width"]
    if half is None or not question["images"]:
        return half
    error, freedom = _error(question)
    return max(half, two_sided_t(freedom) * error)


_LARGE = 1000.0  # degrees of freedom from which t is practically normal


def _error(question: Record) -> tuple[float, float]:
    """The standard error over seeds and images, and its degrees of freedom (Satterthwaite's).

    Images add degrees of freedom, so with little variance over images this p-value can be below the
    seeds'.
    """
    freedom = question["n"] - 1
    of_seeds = (question["half_width"] / two_sided_t(freedom)) ** 2
    whole = of_seeds + question["images"] ** 2
    combined = freedom * (whole / of_seeds) ** 2 if of_seeds else _LARGE
    return math.sqrt(whole), min(combined, max(freedom, _LARGE))


def two_sided_t(df: float) -> float:
    return float(stdtrit(df, 0.975))


def two_sided_p(t: float, df: float) -> float:
    return float(2 * stdtr(df, -abs(t)))


def _rounded(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
