"""Answers to questions: the sign of an effect, a bound, and corrections for many questions."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from locality.analysis.statistics import Estimate, estimate
from locality_papers.answers import (
    CANNOT_TELL,
    LESS,
    NO,
    YES,
    answers,
    seeds_needed,
    write_answers,
)
from locality_papers.experiment import Evaluated, Experiment, Question
from locality_papers.runs import get_scale


class Given:
    """An experiment with given effects."""

    def __init__(self, *effects, scale="digits", name="convit/figure-5"):
        self.experiment = Experiment(name, "", get_scale(scale, Path("runs")))
        self.experiment.questions = [question for question, _ in effects]
        self.evaluated = {id(question.effect): found for question, found in effects}

    def effect(self, effect):
        return self.evaluated[id(effect)]

    def paper(self, effect):
        return None


def effect(found, *, paper=None, unit="points", where="§4", exact=False):
    if not isinstance(found, Estimate):
        found = Estimate(*found)
    evaluated = Evaluated(found, {}, exact, "", found.n)
    return Question("Is it?", where, lambda v: v, unit, paper), evaluated


def answered(*effects):
    return [each["answer"] for each in answers([Given(*effects)])]


@pytest.mark.parametrize(
    ("mean", "half", "n", "paper", "expected"),
    [
        (2.0, 1.0, 5, None, YES),
        (2.0, 2.0, 5, None, CANNOT_TELL),
        (-2.0, 1.0, 5, None, NO),
        (-2.0, 3.0, 5, 13.0, LESS),
        (0.2, 0.5, 5, None, LESS),  # less than a point
        (0.2, 1.3, 5, 13.0, LESS),  # less than the paper's 13
        (0.2, 1.3, 5, 1.4, CANNOT_TELL),
        (0.2, 1.3, 5, -0.2, CANNOT_TELL),  # a paper's effect of the other sign counts as one point
        (2.0, 1.0, 2, None, CANNOT_TELL),
        (2.0, None, 1, None, CANNOT_TELL),
    ],
)
def test_an_answer_is_a_sign_or_a_bound(mean, half, n, paper, expected):
    assert answered(effect((mean, half, n), paper=paper)) == [expected]


def test_only_what_has_a_size_to_compare_with_can_be_at_most():
    assert answered(effect((0.0, 0.01, 5), unit="tokens")) == [CANNOT_TELL]
    assert answered(effect((0.0, 0.01, 5), unit="tokens", paper=0.5)) == [LESS]


def test_holm_corrects_within_an_experiment_and_apart_for_papers_and_ours():
    clear = effect((2.0, 1.5, 5))  # p = 0.02
    assert answered(clear) == [YES]
    assert answered(*(effect((2.0, 1.5, 5)) for _ in range(3))) == [CANNOT_TELL] * 3
    others = [
        Given(effect((2.0, 1.5, 5), where="")),
        Given(clear, scale="fashion"),
        Given(clear, name="convit/figure-6"),
    ]
    assert [each["answer"] for each in answers([Given(clear), *others])] == [YES] * 4


def test_noise_is_rarely_answered():
    """Of families of ten questions without an effect, at most 5% get an answer."""
    noise = np.random.default_rng(0).standard_normal((200, 10, 5))
    wrong = 0
    for family in noise:
        found = answered(*(effect(estimate(values)) for values in family))
        wrong += any(each in (YES, NO) for each in found)
    assert wrong <= 18


def test_what_cannot_be_told_says_how_many_seeds_it_would_take():
    found = estimate(np.arange(8.0))
    needed = seeds_needed(found, 1.5)
    spread = np.arange(8).std(ddof=1)
    assert 2 * spread / math.sqrt(needed) == pytest.approx(1.5 / 3, rel=0.01)
    # More seeds do not reduce the error over images, or of images that all divide.
    assert needed < seeds_needed(estimate(np.arange(8.0), images=0.2), 1.5) < math.inf
    assert seeds_needed(estimate(np.arange(8.0), images=0.3), 1.5) == math.inf
    assert seeds_needed(estimate(np.arange(8.0), shared=1 / 3), 1.5) == math.inf


def test_answers_are_a_table(tmp_path):
    found = answers([Given(effect((-2.0, 1.0, 5), paper=13.0), effect((0.5, None, 1), exact=True))])
    write_answers(tmp_path / "answers.csv", found)
    with (tmp_path / "answers.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert [first[name] for name in ("n", "effect", "low", "high", "paper", "answer")] == [
        "5", "-2", "-3", "-1", "13", "no"
    ]  # fmt: skip
    assert (second["n"], second["low"], second["answer"]) == ("", "", "yes")
