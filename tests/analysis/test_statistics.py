import math

import numpy as np
import pytest
from scipy import stats

from locality.analysis.statistics import estimate, holm


def test_difference_is_the_paired_t_test():
    first, second = [69.0, 66.2, 71.9], [45.2, 47.0, 44.1]
    ours = estimate(np.subtract(first, second))
    theirs = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.n == 3 and ours.excludes_zero


def test_folds_that_share_images_have_a_wider_interval():
    alone, folds = estimate([90.0, 92.0, 94.0]), estimate([90.0, 92.0, 94.0], shared=1 / 2)
    assert folds.half_width / alone.half_width == pytest.approx(math.sqrt(1 + 3 / 2))
    assert folds.p_value(85) > alone.p_value(85)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_values_that_are_all_alike_have_the_p_value_of_the_sign_test(n):
    found = estimate([2.0] * n)
    assert found.p_value() == pytest.approx(stats.binomtest(n, n).pvalue)
    assert found.excludes_zero == (n > 5)
    assert found.p_value(at=2) == 1
    # Also where they are equal but for rounding.
    first, second = (100 * (of + np.arange(n)) / 60 for of in (50, 49))
    assert estimate(first - second).p_value() == found.p_value()


def same_images(rng, shared, runs=8, images=200):
    """Right or wrong, model A − model B, of runs on the same images; and the expected difference.

    Each model finds its own images hard, and a part of that is `shared`.
    """
    hard, right = rng.normal(size=images), []
    for easier in (0.0, 0.1):
        own = math.sqrt(shared) * hard + math.sqrt(1 - shared) * rng.normal(size=images)
        noise = math.sqrt(0.2) * rng.normal(size=(runs, images)) + 0.1 * rng.normal(size=(runs, 1))
        right.append(math.sqrt(0.8) * own + noise > -1 - easier)
    expected = np.diff(stats.norm.cdf(np.array([1.1, 1.0]) / math.sqrt(1.01)))[0]
    return right, expected


@pytest.mark.parametrize("shared, correlation", [(0.0, 0.0), (0.9, 0.76)])
def test_intervals_of_models_on_the_same_images_cover_95_percent(shared, correlation):
    rng, covered, correlations = np.random.default_rng(0), [], []
    for _ in range(2000):
        (first, second), expected = same_images(rng, shared)
        found = estimate(first.astype(float) - second)
        covered.append(found.low <= expected <= found.high)
        correlations.append(np.corrcoef(first.mean(axis=0), second.mean(axis=0))[0, 1])
    assert np.mean(covered) == pytest.approx(0.95, abs=0.01)
    assert np.mean(correlations) == pytest.approx(correlation, abs=0.03)


def test_intervals_of_repeated_splits_cover_95_percent():
    rng, covered, naive = np.random.default_rng(0), [], []
    for _ in range(2000):
        difference = rng.normal(size=200)  # of two models by image, expected to be 0
        tests = [rng.permutation(200)[:50] for _ in range(8)]
        values = [difference[chosen].mean() for chosen in tests]
        covered.append(not estimate(values, shared=50 / 150).excludes_zero)
        naive.append(not estimate(values).excludes_zero)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.01)
    assert np.mean(naive) < 0.8


def test_an_error_over_images_widens_the_interval():
    values = [90.0, 92.0, 94.0]
    alone, both = estimate(values), estimate(values, images=1.0)
    assert both.half_width > alone.half_width / 2 and both.df > alone.df
    error = math.sqrt(4 / 3 + 1)
    assert both.half_width == pytest.approx(stats.t.ppf(0.975, both.df) * error)
    assert estimate([2.0, 2.0], images=1.0).half_width == pytest.approx(1.96, abs=1e-3)


def test_holm_stops_at_the_first_that_is_not_small_enough():
    assert holm([0.04, 0.01, 0.03]) == [False, True, False]
    assert holm([0.01, 0.02, 0.03]) == [True, True, True]
    assert holm([0.02, 0.02]) == [True, True] and holm([0.03, 0.04]) == [False, False]
    assert holm([]) == []


def test_one_seed_has_no_interval():
    alone = estimate([3.0])
    assert alone.mean == 3 and alone.half_width is None and alone.low is None
    assert not alone.excludes_zero
