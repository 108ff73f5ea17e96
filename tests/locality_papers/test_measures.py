"""Numbers over seeds: measured once, paired by seed, empty with a reason, decided by a rule."""

from __future__ import annotations

import dataclasses
import math
import shutil

import numpy as np
import pytest

from locality.analysis.statistics import two_sided_t
from locality.errors import UserError
from locality.runner.executors import execute
from locality_papers.measures import (
    Empty,
    Measure,
    Quantity,
    Values,
    absent,
    computed,
    measured,
    relative_gain,
)
from locality_papers.records import (
    FAILS,
    HOLDS,
    NOT_RUN,
    UNDECIDED,
    UNTESTABLE,
    corrected,
    decided,
    judge,
    seeds_needed,
)
from locality_papers.specs import Claim


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_run):
    """Where two finished runs of each model lie."""
    root = tmp_path_factory.mktemp("trained")
    for name in ("convit_nano", "deit_nano"):
        for seed in (0, 1):
            execute(tiny_run(root, name, seed))
    return root


@pytest.fixture
def finished(trained, tmp_path, tiny_run):
    """Two finished runs of each model, by name."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return {
        name: tuple(tiny_run(tmp_path, name, seed) for seed in (0, 1))
        for name in ("convit_nano", "deit_nano")
    }


def fixed(**values):
    """A quantity with given values."""
    found = {int(seed[1:]): value for seed, value in values.items()}
    return Quantity(lambda _: Values(found))


def test_a_kept_measure_is_taken_once(finished):
    calls = []
    measure = Measure("counted", lambda run: calls.append(run) or 1.5)
    quantity = measured(finished["convit_nano"], measure)
    assert quantity.evaluate({}).by_seed == {0: 1.5, 1: 1.5}
    assert measured(finished["convit_nano"], measure).evaluate({}).by_seed == {0: 1.5, 1: 1.5}
    assert len(calls) == 2
    other = Measure("another", lambda run: 2.5)
    assert other(finished["convit_nano"][0]) == 2.5
    assert measure(finished["convit_nano"][0]) == 1.5


def test_missing_runs_leave_their_reason(tmp_path, finished, tiny_run):
    runs = (*finished["convit_nano"], tiny_run(tmp_path, seed=2), tiny_run(tmp_path, seed=3))
    failures = {runs[3].folder: "it broke"}
    measure = Measure("seed", lambda run: run.config.seed, cached=False)
    values = measured(runs, measure).evaluate(failures)
    assert values.by_seed == {0: 0, 1: 1}
    assert values.problems == ("convit_nano 2: not run yet", "convit_nano 3: it broke")
    with pytest.raises(Empty, match="it broke"):
        measured(runs[3:], measure).evaluate(failures)


def test_a_measure_that_cannot_be_taken_leaves_its_reason(finished):
    def refuse(_):
        raise UserError("no such part")

    with pytest.raises(Empty, match=r"^no such part$"):
        measured(finished["deit_nano"], Measure("x", refuse)).evaluate({})


def test_differences_are_taken_seed_by_seed():
    first, second = fixed(s0=10.0, s1=20.0, s2=33.0), fixed(s0=8.0, s1=17.0, s5=1.0)
    assert (first - second).evaluate({}).by_seed == {0: 2.0, 1: 3.0}
    gains = relative_gain(first, second).evaluate({}).by_seed
    assert gains == {0: 25.0, 1: pytest.approx(100 * 3 / 17)}
    with pytest.raises(Empty, match="no seed is common"):
        (fixed(s0=1.0) - fixed(s1=1.0)).evaluate({})


def test_computed_and_absent():
    assert computed(lambda: 3.5).evaluate({}).estimate().mean == 3.5
    with pytest.raises(Empty, match="because"):
        absent("because").evaluate({})
    with pytest.raises(Empty, match="because"):
        (fixed(s0=1.0) - absent("because")).evaluate({})


def claimed(mean, half, n=5, margin=None):
    expects = "above" if margin is None else "equal"
    return {
        "mean": mean,
        "half_width": half,
        "n": n,
        "expects": expects,
        "margin": margin or 0.0,
    }


@pytest.mark.parametrize(
    ("mean", "half", "n", "expected"),
    [
        (2.0, 1.0, 5, HOLDS),
        (2.0, 2.0, 5, UNDECIDED),
        (-2.0, 1.0, 5, FAILS),
        (-2.0, 3.0, 5, UNDECIDED),
        (2.0, 1.0, 2, UNDECIDED),
        (2.0, None, 1, UNDECIDED),
    ],
)
def test_above_holds_if_the_whole_interval_is_above_zero(mean, half, n, expected):
    assert judge(claimed(mean, half, n))[0] == expected


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [
        (0.3, 0.5, HOLDS),
        (0.8, 0.5, UNDECIDED),
        (2.0, 0.5, FAILS),
        (-2.0, 0.5, FAILS),
        (0.0, 4.0, UNDECIDED),
    ],
)
def test_equal_holds_if_the_whole_interval_is_within_the_margin(mean, half, expected):
    assert judge(claimed(mean, half, 5, margin=1.0))[0] == expected


def test_holm_decides_in_order_and_stops_at_the_first_that_is_too_large():
    # Half-widths over five seeds whose p-values are 0.001, 0.02, 0.02 and 0.6.
    claims = [claimed(1.0, half) for half in (0.2774 / 0.8610, 0.7412, 0.7412, 4.9)]
    assert [judge(c)[1] for c in claims] == pytest.approx([0.001, 0.02, 0.02, 0.6], rel=0.01)
    assert [judge(claim)[0] for claim in claims] == [HOLDS, HOLDS, HOLDS, UNDECIDED]
    # 0.05/4 > 0.001, but 0.05/3 < 0.02.
    assert corrected(claims) == [HOLDS, UNDECIDED, UNDECIDED, UNDECIDED]
    assert corrected(claims[:2]) == [HOLDS, HOLDS]
    exact = claimed(-1.0, None, 1) | {"exact": True}
    assert corrected([*claims[:2], exact]) == [HOLDS, HOLDS, FAILS]


def test_how_many_seeds_would_decide():
    """The first number of seeds at which t · s / √n falls below the mean."""
    found = decided(claim(run_of(fixed(s0=-0.5, s1=1.5, s2=0.5, s3=-0.1, s4=1.1))), {})
    assert found["verdict"] == UNDECIDED
    needed = seeds_needed(found)
    deviation = math.sqrt((1 + 1 + 0.36 + 0.36) / 4)
    assert two_sided_t(needed - 1) * deviation / math.sqrt(needed) < 0.5
    assert two_sided_t(needed - 2) * deviation / math.sqrt(needed - 1) >= 0.5
    assert seeds_needed(claimed(1e-6, 1.0)) is None


def run_of(quantity):
    """As if it had been measured on runs."""
    return dataclasses.replace(quantity, measures=((object(), object()),))


def claim(*quantities):
    """That each of some quantities is above 0."""
    return Claim("x", "", {f"part {n}": each for n, each in enumerate(quantities, 1)})


def test_a_claim_about_several_numbers_holds_if_each_does():
    clear = run_of(fixed(s0=2.0, s1=2.1, s2=1.9, s3=2.2))
    less_clear = run_of(fixed(s0=0.2, s1=0.5, s2=0.6, s3=0.3))
    found = decided(claim(clear, less_clear, clear), {})
    assert (found["verdict"], found["part"], found["parts"]) == (HOLDS, "part 2", 3)
    assert judge(found)[1] == judge(decided(claim(less_clear), {}))[1]  # nothing to correct for
    noisy = run_of(fixed(s0=1.0, s1=-0.5, s2=1.4, s3=-0.3))
    found = decided(claim(clear, less_clear, noisy), {})
    assert (found["verdict"], found["part"]) == (UNDECIDED, "part 3")


def test_a_claim_about_several_numbers_fails_if_one_does_corrected_for_their_number():
    clear = run_of(fixed(s0=2.0, s1=2.1, s2=1.9, s3=2.2))
    below = run_of(fixed(s0=-0.2, s1=-0.5, s2=-0.6, s3=-0.3))
    found = decided(claim(clear, below), {})
    assert (found["verdict"], found["part"]) == (FAILS, "part 2")
    assert judge(found)[1] == pytest.approx(2 * judge(decided(claim(below), {}))[1])
    # Alone it would be told, at p = 0.022; not as one of four.
    assert decided(claim(clear, clear, clear, below), {})["verdict"] == UNDECIDED


def test_noise_alone_does_not_speak_against_a_claim_about_several_numbers():
    """The least of five numbers without any effect is below 0 in almost every seed."""
    noise = np.random.default_rng(0).standard_normal((200, 5, 5))
    verdicts = [
        decided(
            claim(*(run_of(fixed(**{f"s{n}": v for n, v in enumerate(part)})) for part in each)), {}
        )
        for each in noise
    ]
    wrong = sum(found["verdict"] != UNDECIDED for found in verdicts)
    assert wrong <= 15  # 5% of 200 are 10; judged by the least in each seed, 174 would "not hold"


def test_a_claim_without_runs_was_not_run_and_one_that_no_run_decides_is_untestable(
    tmp_path, tiny_run
):
    waiting = measured((tiny_run(tmp_path),), Measure("x", lambda run: 1.0))
    found = decided(claim(waiting - absent("no such model")), {})
    assert (found["verdict"], found["empty"]) == (UNTESTABLE, "no such model")
    found = decided(claim(waiting), {})
    assert (found["verdict"], found["empty"]) == (NOT_RUN, "not run yet")


def test_an_estimate_is_students_t_over_seeds():
    found = decided(claim(run_of(fixed(s0=1.0, s1=2.0, s2=3.0))), {})
    assert found["mean"] == 2.0 and found["by_seed"] == {"0": 1.0, "1": 2.0, "2": 3.0}
    # t(0.975, 2) = 4.3027 times s/√n = 1/√3.
    assert found["half_width"] == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found["verdict"] == UNDECIDED
    assert decided(claim(computed(lambda: 2.0)), {})["verdict"] == HOLDS


def test_a_number_that_needs_no_run_goes_with_every_seed():
    found = decided(claim(run_of(fixed(s0=2.0, s1=3.0, s2=4.0)) - computed(lambda: 1.0)), {})
    assert found["by_seed"] == {"0": 1.0, "1": 2.0, "2": 3.0} and not found["exact"]
    assert decided(claim(computed(lambda: 2.0) - computed(lambda: 1.0)), {})["exact"]


def test_values_that_are_all_alike_have_the_p_value_of_the_sign_test():
    """Three seeds that all count one layer more say little; t would be sure of it."""
    found = decided(claim(run_of(fixed(s0=1, s1=1, s2=1))), {})
    assert (judge(found), seeds_needed(found)) == ((UNDECIDED, 0.25), 6)
    assert judge(decided(claim(run_of(fixed(s0=0, s1=0, s2=0))), {}))[1] == 1.0
