"""What decides a claim: an effect that counts, over seeds and images, and how often asked."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from locality.analysis.statistics import estimate, two_sided_t
from locality_papers.measures import Measure, Quantity, Values, absent, computed, measured
from locality_papers.records import (
    CONTRADICTED,
    HOLDS,
    NOT_REPRODUCED,
    NOT_RUN,
    UNDECIDED,
    UNTESTABLE,
    asked,
    corrected,
    deciding,
    interval,
    judge,
    p_value,
)
from locality_papers.specs import Claim, stated


def part(mean, half, n=5, least=0.0, images=0.0, name=""):
    return {
        "part": name,
        "exact": False,
        "mean": mean,
        "half_width": half,
        "n": n,
        "images": images,
        "paper": None,
        "least": least,
    }


def claimed(*parts, margin=None, look=1):
    return {
        "expects": "above" if margin is None else "equal",
        "margin": margin or 0.0,
        "asked": len(parts),
        "empty": None,
        "testable": True,
        "parts": list(parts),
        "look": look,
    }


@pytest.mark.parametrize(
    ("mean", "half", "n", "least", "expected"),
    [
        (2.0, 1.0, 5, 0.0, HOLDS),
        (2.0, 2.0, 5, 0.0, UNDECIDED),
        (-2.0, 1.0, 5, 0.0, CONTRADICTED),
        (-2.0, 3.0, 5, 0.0, UNDECIDED),
        (2.0, 1.0, 2, 0.0, UNDECIDED),
        (2.0, None, 1, 0.0, UNDECIDED),
        # With a smallest effect that counts:
        (2.0, 1.0, 5, 0.5, HOLDS),
        (2.0, 1.0, 5, 1.5, UNDECIDED),
        (0.1, 0.2, 5, 0.5, NOT_REPRODUCED),  # nothing of it
        (0.2, 0.1, 5, 0.5, NOT_REPRODUCED),  # surely above 0, and too little
        (-0.2, 0.1, 5, 0.5, NOT_REPRODUCED),  # surely below 0, and too little
        (-2.0, 1.0, 5, 0.5, CONTRADICTED),
        (-0.6, 0.3, 5, 0.5, NOT_REPRODUCED),
        (-0.6, 3.0, 5, 0.5, UNDECIDED),
    ],
)
def test_above_needs_an_effect_that_counts(mean, half, n, least, expected):
    assert judge(claimed(part(mean, half, n, least))) == expected


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [
        (0.3, 0.5, HOLDS),
        (0.8, 0.5, UNDECIDED),
        (2.0, 0.5, CONTRADICTED),
        (-2.0, 0.5, CONTRADICTED),
        (0.0, 4.0, UNDECIDED),
    ],
)
def test_equal_holds_if_the_whole_interval_is_within_the_margin(mean, half, expected):
    assert judge(claimed(part(mean, half), margin=1.0)) == expected


def test_the_smallest_effect_is_a_tenth_of_the_papers_unless_the_claim_names_a_value():
    def least(paper, **choices):
        number = run_of(fixed(s0=1.0))
        number = number if paper is None else stated(number, paper)
        (found,) = asked(Claim("x", "§1", number, **choices), {})["parts"]
        assert found["paper"] == paper
        return found["least"]

    assert least(1.5) == pytest.approx(0.15)
    assert least(None) == least(-1.5) == 0
    assert least(1.5, least=0) == 0 and least(None, least=0.3) == 0.3


def test_images_that_are_the_same_for_all_seeds_widen_the_interval():
    alone = part(2.0, 1.0, 5)
    assert interval(alone) == pytest.approx(1.0)
    both = alone | {"images": 1.0}
    error = math.hypot(1.0 / two_sided_t(4), 1.0)
    # Satterthwaite's degrees of freedom: many for the images, four for the seeds.
    freedom = 4 * (error / (1.0 / two_sided_t(4))) ** 4
    assert interval(both) == pytest.approx(two_sided_t(freedom) * error)
    assert judge(claimed(alone)) == HOLDS and p_value(claimed(both)) > p_value(claimed(alone))
    assert judge(claimed(both)) == UNDECIDED
    # A little of it brings degrees of freedom, and still takes nothing from what the seeds say.
    assert p_value(claimed(alone | {"images": 0.3})) == p_value(claimed(alone))
    assert interval(alone | {"images": 0.1}) == 1.0
    # Seeds that all say the same leave the images.
    alike = part(2.0, 0.0, 20, images=1.5)
    assert judge(claimed(alike)) == UNDECIDED and judge(claimed(alike | {"images": 0.5})) == HOLDS


def test_a_look_takes_its_share_of_the_level():
    def p(look):
        return p_value(claimed(part(2.0, 1.0), look=look))

    shares = [p(1) / 1.25 / p(look) for look in range(1, 5)]
    assert shares == pytest.approx([0.8, 0.1, 0.2 / 6, 0.2 / 12])
    assert 0.8 + sum(0.2 / (k * (k - 1)) for k in range(2, 5000)) < 1


def test_holm_decides_in_order_and_stops_at_the_first_that_is_too_large():
    # Half-widths over five seeds whose p-values are 0.001, 0.02, 0.02 and 0.6, at a first look.
    claims = [claimed(part(1.0, half)) for half in (0.2774 / 0.8610, 0.7412, 0.7412, 4.9)]
    p_values = [p_value(c) / 1.25 for c in claims]
    assert p_values == pytest.approx([0.001, 0.02, 0.02, 0.6], rel=0.01)
    assert [judge(claim) for claim in claims] == [HOLDS, HOLDS, HOLDS, UNDECIDED]
    # 0.05/4 > 0.001 · 1.25, but 0.05/3 < 0.02 · 1.25.
    assert corrected(claims) == [HOLDS, UNDECIDED, UNDECIDED, UNDECIDED]
    assert corrected(claims[:2]) == [HOLDS, HOLDS]
    exact = claimed(part(-1.0, None, 1) | {"exact": True})
    assert corrected([*claims[:2], exact]) == [HOLDS, HOLDS, CONTRADICTED]


def fixed(**values):
    """A quantity with given values."""
    found = {int(seed[1:]): value for seed, value in values.items()}
    return Quantity(lambda _: Values(found))


def run_of(quantity):
    """As if it had been measured on runs."""
    return dataclasses.replace(quantity, measures=((object(), object()),))


def claim(*quantities):
    """That each of some quantities is above 0."""
    numbers = {f"part {n}": each for n, each in enumerate(quantities, 1)}
    return asked(Claim("x", "", numbers), {})


def test_a_claim_about_several_numbers_holds_if_each_does():
    clear = run_of(fixed(s0=2.0, s1=2.1, s2=1.9, s3=2.2))
    less_clear = run_of(fixed(s0=0.2, s1=0.5, s2=0.6, s3=0.3))
    found = claim(clear, less_clear, clear)
    assert (judge(found), deciding(found)["part"], found["asked"]) == (HOLDS, "part 2", 3)
    assert p_value(found) == p_value(claim(less_clear))  # nothing to correct for
    noisy = run_of(fixed(s0=1.0, s1=-0.5, s2=1.4, s3=-0.3))
    found = claim(clear, less_clear, noisy)
    assert (judge(found), deciding(found)["part"]) == (UNDECIDED, "part 3")


def test_a_claim_about_several_numbers_fails_if_one_does_corrected_for_their_number():
    clear = run_of(fixed(s0=2.0, s1=2.1, s2=1.9, s3=2.2))
    below = run_of(fixed(s0=-0.3, s1=-0.5, s2=-0.6, s3=-0.4))
    found = claim(clear, below)
    assert (judge(found), deciding(found)["part"]) == (CONTRADICTED, "part 2")
    assert p_value(found) == pytest.approx(2 * p_value(claim(below)))
    # Alone it would be told, at p = 0.006; not as one of eight.
    assert judge(claim(*[clear] * 7, below)) == UNDECIDED


def test_noise_alone_does_not_speak_against_a_claim_about_several_numbers():
    """The least of five numbers without any effect is below 0 in almost every seed."""
    noise = np.random.default_rng(0).standard_normal((200, 5, 5))
    verdicts = [
        judge(claim(*(run_of(fixed(**{f"s{n}": v for n, v in enumerate(p)})) for p in each)))
        for each in noise
    ]
    wrong = sum(verdict != UNDECIDED for verdict in verdicts)
    assert wrong <= 15  # 5% of 200 are 10; judged by the least in each seed it would be 174


def test_a_claim_without_runs_was_not_run_and_one_that_no_run_decides_is_untestable(
    tmp_path, tiny_run
):
    waiting = measured((tiny_run(tmp_path),), Measure("x", lambda run: 1.0))
    found = claim(waiting - absent("no such model"))
    assert (judge(found), found["empty"]) == (UNTESTABLE, "no such model")
    found = claim(waiting)
    assert (judge(found), found["empty"]) == (NOT_RUN, "not run yet")


def test_an_estimate_is_students_t_over_seeds():
    (found,) = claim(run_of(fixed(s0=1.0, s1=2.0, s2=3.0)))["parts"]
    assert found["mean"] == 2.0 and found["by_seed"] == {"0": 1.0, "1": 2.0, "2": 3.0}
    # t(0.975, 2) = 4.3027 times s/√n = 1/√3.
    assert found["half_width"] == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert judge(claim(run_of(fixed(s0=1.0, s1=2.0, s2=3.0)))) == UNDECIDED
    assert judge(claim(computed(lambda: 2.0))) == HOLDS


def test_a_number_that_needs_no_run_goes_with_every_seed():
    (found,) = claim(run_of(fixed(s0=2.0, s1=3.0, s2=4.0)) - computed(lambda: 1.0))["parts"]
    assert found["by_seed"] == {"0": 1.0, "1": 2.0, "2": 3.0} and not found["exact"]
    (found,) = claim(computed(lambda: 2.0) - computed(lambda: 1.0))["parts"]
    assert found["exact"]


def test_values_that_are_all_alike_have_the_p_value_of_the_sign_test():
    """Three seeds that all count one layer more say little; t would be sure of it."""
    found = claim(run_of(fixed(s0=1, s1=1, s2=1)))
    assert (judge(found), p_value(found)) == (UNDECIDED, 0.25 * 1.25)
    assert p_value(claim(run_of(fixed(s0=0, s1=0, s2=0)))) == 1.0


def test_seeds_that_are_added_until_a_claim_is_decided_decide_few_wrongly():
    """An effect just as large as counts, looked at with ever more seeds: every verdict is wrong."""
    noise = 1.0 + np.random.default_rng(0).standard_normal((400, 40))

    def wrong(spent):
        stopped = 0
        for values in noise:
            for look, seeds in enumerate((5, 8, 12, 20, 40), 1):
                found = estimate(values[:seeds].tolist())
                measured = part(found.mean, found.half_width, seeds, least=1.0)
                if judge(claimed(measured, look=look if spent else 1)) != UNDECIDED:
                    stopped += 1
                    break
        return stopped / len(noise)

    assert wrong(spent=True) <= 0.05
    assert wrong(spent=False) > 0.1
