"""Kendall's rank correlation."""

import numpy as np
import pytest
from scipy import stats

from locality_papers.nas import kendall


def test_rank_correlation_is_scipys():
    generator = np.random.default_rng(0)
    for size, values in ((20, 1000), (20, 4), (2, 2)):  # with few ties and many
        one, other = generator.integers(0, values, (2, size)).tolist()
        expected = stats.kendalltau(one, other).statistic
        assert kendall(one, other) == pytest.approx(0.0 if np.isnan(expected) else expected)
    assert kendall([1, 2, 3], [4, 5, 6]) == 1 and kendall([1, 2, 3], [3, 2, 1]) == -1
    assert kendall([1, 1], [1, 2]) == 0
