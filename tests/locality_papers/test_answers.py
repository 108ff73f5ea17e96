"""Answers to questions: effects over seeds and images, corrected for multiple testing."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from locality.analysis.statistics import estimate
from locality_papers.answers import (
    AT_MOST,
    CANNOT_TELL,
    NO,
    YES,
    answers,
    interval,
    p_value,
    seeds_needed,
    two_sided_t,
    write_answers,
)


def effect(mean, half=None, n=5, *, paper=None, images=0.0, unit="points", where="§4", **others):
    return {
        "text": "Is it?",
        "where": where,
        "unit": unit,
        "paper": paper,
        "empty": None,
        "exact": False,
        "mean": mean,
        "half_width": half,
        "n": n,
        "images": images,
    } | others


def record_of(*questions, scale="digits"):
    return {"name": "convit/figure-5", "scale": scale, "questions": list(questions)}


def answered(*questions):
    return [each["answer"] for each in answers([record_of(*questions)])]


@pytest.mark.parametrize(
    ("mean", "half", "n", "paper", "expected"),
    [
        (2.0, 1.0, 5, None, YES),
        (2.0, 2.0, 5, None, CANNOT_TELL),
        (-2.0, 1.0, 5, None, NO),
        (-2.0, 3.0, 5, 13.0, AT_MOST),
        (0.2, 0.5, 5, None, AT_MOST),  # less than a point
        (0.2, 1.3, 5, 13.0, AT_MOST),  # less than the paper's 13
        (0.2, 1.3, 5, 1.4, CANNOT_TELL),
        (0.2, 1.3, 5, -0.2, CANNOT_TELL),  # a paper's effect of the other sign counts as one point
        (2.0, 1.0, 2, None, CANNOT_TELL),
        (2.0, None, 1, None, CANNOT_TELL),
    ],
)
def test_an_answer_is_a_sign_or_a_bound(mean, half, n, paper, expected):
    assert answered(effect(mean, half, n, paper=paper)) == [expected]


def test_only_what_has_a_size_to_compare_with_can_be_at_most():
    assert answered(effect(0.0, 0.01, unit="tokens")) == [CANNOT_TELL]
    assert answered(effect(0.0, 0.01, unit="tokens", paper=0.5)) == [AT_MOST]


def test_images_that_are_the_same_for_all_seeds_widen_the_interval():
    alone = effect(2.0, 1.0)
    assert interval(alone) == 1.0
    both = alone | {"images": 1.0}
    error = math.hypot(1.0 / two_sided_t(4), 1.0)
    # Satterthwaite's degrees of freedom: many for the images, four for the seeds.
    freedom = 4 * (error / (1.0 / two_sided_t(4))) ** 4
    assert interval(both) == pytest.approx(two_sided_t(freedom) * error)
    assert p_value(both, 0.0) > p_value(alone, 0.0)
    assert (answered(alone), answered(both)) == ([YES], [CANNOT_TELL])
    # A little image variance adds degrees of freedom without shrinking the interval.
    assert p_value(alone | {"images": 0.3}, 0.0) == p_value(alone, 0.0)
    assert interval(alone | {"images": 0.1}) == 1.0
    # Equal seeds leave the image variance.
    assert answered(effect(2.0, 0.0, 20, images=1.5)) == [CANNOT_TELL]
    assert answered(effect(2.0, 0.0, 20, images=0.5)) == [YES]


def test_holm_corrects_within_a_scale_and_apart_for_papers_and_ours():
    clear = effect(2.0, 1.5)  # p = 0.02
    assert answered(clear) == [YES]
    assert answered(clear, clear, clear) == [CANNOT_TELL] * 3
    others = [record_of(clear | {"where": ""}), record_of(clear, scale="fashion")]
    assert [each["answer"] for each in answers([record_of(clear), *others])] == [YES] * 3


def test_noise_is_rarely_answered():
    """Of families of ten questions without an effect, at most 5% get an answer."""
    noise = np.random.default_rng(0).standard_normal((200, 10, 5))
    wrong = 0
    for family in noise:
        found = [vars(estimate(values.tolist())) for values in family]
        wrong += any(each in (YES, NO) for each in answered(*(effect(0.0) | f for f in found)))
    assert wrong <= 18


def test_what_cannot_be_told_says_how_many_seeds_it_would_take():
    (found,) = answers([record_of(effect(2.0, 3.0, 8, paper=3.0))])
    assert found["seeds"] == seeds_needed(8, 3.0, 3.0) == 72
    # With that many, the interval is a third of the effect at the same scatter.
    assert 3.0 * math.sqrt(8 / 72) == pytest.approx(3.0 / 3)
    # More seeds do not reduce the error over images.
    assert seeds_needed(8, 3.0, 3.0, images=0.4) == 188
    half = math.hypot(3.0 * math.sqrt(8 / 188), 1.96 * 0.4)
    assert half == pytest.approx(3.0 / 3, rel=0.01)
    (found,) = answers([record_of(effect(2.0, 3.0, 8, paper=3.0, images=0.6))])
    assert (found["answer"], found["seeds"]) == ("cannot tell", None)


def test_answers_are_a_table(tmp_path):
    found = answers([record_of(effect(-2.0, 1.0, paper=13.0), effect(0.5, None, 1, exact=True))])
    write_answers(tmp_path / "answers.csv", found)
    with (tmp_path / "answers.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert [first[name] for name in ("n", "effect", "low", "high", "paper", "answer")] == [
        "5", "-2", "-3", "-1", "13", "no"
    ]  # fmt: skip
    assert (second["n"], second["low"], second["answer"]) == ("", "", "yes")
