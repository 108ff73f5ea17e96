"""Answers to questions: the sign of an effect, a bound, and corrections for many questions."""

import csv
from pathlib import Path

import numpy as np
import pytest

import locality_papers.reproduce
from locality.analysis.statistics import Estimate, estimate
from locality.files import read_yaml
from locality_papers.answers import (
    CANNOT_TELL,
    LESS,
    NO,
    YES,
    answers,
    protocol,
    write_answers,
)
from locality_papers.experiment import Evaluated, Experiment, Question, built
from locality_papers.runs import get_scale
from locality_papers.text import said

PROTOCOL = Path(locality_papers.__file__).with_name("protocol.yaml")


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

    def start(self, effect):
        return None


def effect(found, *, paper=None, unit="points", where="§4", exact=False, text="Is it?", **more):
    if found is None:
        return Question(text, where, lambda v: v), Evaluated()
    if not isinstance(found, Estimate):
        found = Estimate(*found)
    evaluated = Evaluated(found, dict.fromkeys(range(found.n), 1.0), exact, "", found.n)
    return Question(text, where, lambda v: v, unit, paper, **more), evaluated


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
        Given(clear, scale="fashion14"),
        Given(clear, name="convit/figure-6"),
    ]
    assert [each["answer"] for each in answers([Given(clear), *others])] == [YES] * 4


@pytest.mark.parametrize(
    ("more", "mean", "expected"),
    [
        ({"threshold": 1.5}, 2.0, CANNOT_TELL),
        ({"threshold": 0.5}, 2.0, YES),
        ({"threshold": 3.5}, 2.0, NO),
        ({"threshold": 3.5, "side": -1}, 2.0, YES),
        ({"threshold": -3.0, "paper": -1.0}, -2.9, LESS),  # a distance of 0.1 instead of 2
    ],
)
def test_an_effect_is_compared_with_the_threshold_of_its_question(more, mean, expected):
    (answer,) = answers([Given(effect((mean, 1.0, 5), **more))])
    assert answer["answer"] == expected
    assert (answer["effect"], answer["threshold"]) == (mean, more["threshold"])


FIVE = [f"With {part} of the images, is ConViT above DeiT?" for part in ("1%", "5%", "20%")]
FIVE += ["With 1% of the images, is ConViT's top-5 above DeiT's?",
         "Is ConViT's relative gain larger with few images than with many?"]  # fmt: skip


def planned(half, n=8, missing=(), more=()):
    """Answers about photographs' Table 2: an effect of 2 ± `half` in the first question."""
    found = [effect((2.0, half, n), text=FIVE[0])]
    found += [effect(None if text in missing else (0.1, 9.0, 8), text=text) for text in FIVE[1:]]
    return answers([Given(*found, *more, scale="photographs", name="convit/table-2")])


def test_a_protocols_family_is_what_it_lists_and_is_answered_once_all_of_it_has_runs():
    for half, expected in ((1.6, CANNOT_TELL), (1.1, YES)):  # p = 0.02, 0.004
        for missing in ((), FIVE[1:], FIVE[4:]):
            first, *rest = planned(half, missing=missing)
            assert first["answer"] == (CANNOT_TELL if missing else expected)
            assert len(rest) == 4 - len(missing)
            assert ("(other planned runs are missing)" in said(first)) == bool(missing)
            assert first["protocol"] == "planned" and (first["n"], first["planned"]) == (8, 8)


@pytest.mark.parametrize("n", [3, 7, 9])
def test_without_exactly_the_planned_seeds_nothing_is_answered(n):
    first, *_ = planned(0.01, n)
    assert first["answer"] == CANNOT_TELL and first["p"] == 1.0
    assert said(first).startswith(f"cannot tell ({n} of 8 seeds), +2.0")
    assert first["effect"] == 2.0


def test_a_question_that_a_protocol_does_not_list_is_asked_later_and_counts_apart():
    later = [effect((2.0, 1.6, 8), text=f"Is it {n}?") for n in range(2)]
    *before, first, second = planned(1.1, more=later)
    assert before == planned(1.1)
    assert first["protocol"] == "asked later" and first["answer"] == YES  # 2 × 0.02
    assert said(second).endswith(", asked later")


@pytest.mark.parametrize("name", read_yaml(PROTOCOL))
def test_a_protocol_lists_questions_and_seeds_of_its_scale(name):
    scale, decided = get_scale(name, Path("runs")), read_yaml(PROTOCOL)[name]
    for experiment, questions in decided["families"].items():
        assert set(questions) <= {each.text for each in built(experiment, scale).questions}
        assert len(set(questions)) == len(questions)
        assert protocol(built(experiment, scale)).seeds == tuple(scale.seeds)
    # Of an older scale other experiments keep the rule of their time.
    assert (protocol(built("convit/table-1", scale)) is None) == ("older" in decided)


def test_noise_is_rarely_answered():
    """Of families of ten questions without an effect, at most 5% get an answer."""
    noise = np.random.default_rng(0).standard_normal((200, 10, 5))
    wrong = 0
    for family in noise:
        found = answered(*(effect(estimate(values)) for values in family))
        wrong += any(each in (YES, NO) for each in found)
    assert wrong <= 18


def test_answers_are_a_table(tmp_path):
    found = answers([Given(effect((-2.0, 1.0, 5), paper=13.0), effect((0.5, None, 1), exact=True))])
    write_answers(tmp_path / "answers.csv", found)
    with (tmp_path / "answers.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert [first[name] for name in ("n", "effect", "low", "high", "paper", "answer")] == [
        "5", "-2", "-3", "-1", "13", "no"
    ]  # fmt: skip
    assert (second["n"], second["low"], second["answer"]) == ("", "", "yes")
