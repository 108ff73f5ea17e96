import math

import pytest
from scipy import stats

from locality.analysis.statistics import estimate, holm, paired_difference, proportion_interval


def test_difference_is_the_paired_t_test():
    first = {0: 69.0, 1: 66.2, 2: 71.9, 7: 1.0}
    second = {0: 45.2, 1: 47.0, 2: 44.1, 9: 2.0}
    ours = paired_difference(first, second)
    theirs = stats.ttest_rel([69.0, 66.2, 71.9], [45.2, 47.0, 44.1]).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.n == 3 and ours.excludes_zero


@pytest.mark.parametrize("n", [2, 3, 5, 10, 101])
def test_quantiles_are_those_of_students_distribution(n):
    values = list(range(n))
    expected = stats.t.ppf(0.975, n - 1) * stats.sem(values)
    assert estimate(values).half_width == pytest.approx(expected, rel=1e-10)


def test_folds_that_share_images_have_a_wider_interval():
    alone, folds = estimate([90.0, 92.0, 94.0]), estimate([90.0, 92.0, 94.0], shared=1 / 2)
    assert folds.half_width / alone.half_width == pytest.approx(math.sqrt(1 + 3 / 2))
    assert folds.p_value(85) > alone.p_value(85)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_values_that_are_all_alike_have_the_p_value_of_the_sign_test(n):
    found = estimate([2.0] * n)
    assert found.p_value() == pytest.approx(stats.binomtest(n, n).pvalue)
    assert found.p_value(at=2) == 1


def test_differences_that_are_equal_but_for_rounding_are_all_alike():
    first, second = ({at: 100 * (of + at) / 60 for at in range(3)} for of in (50, 49))
    found = paired_difference(first, second)
    assert found.half_width == 0 and found.p_value() == 0.25


def test_holm_stops_at_the_first_that_is_not_small_enough():
    assert holm([0.04, 0.01, 0.03]) == [False, True, False]
    assert holm([0.01, 0.02, 0.03]) == [True, True, True]
    assert holm([0.02, 0.02]) == [True, True] and holm([0.03, 0.04]) == [False, False]
    assert holm([]) == []


def test_one_seed_has_no_interval():
    alone = estimate([3.0])
    assert alone.mean == 3 and alone.half_width is None and alone.low is None
    assert not alone.excludes_zero
    assert paired_difference({0: 1.0}, {1: 2.0}) is None


def test_an_interval_of_a_proportion_is_wilsons():
    low, high = proportion_interval(0.8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert proportion_interval(1, 10)[1] == pytest.approx(1)
    # Its ends are where the share lies 1.96 standard errors away.
    for end in (low, high):
        assert abs(0.8 - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / 10))
