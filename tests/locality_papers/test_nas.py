"""Kendall's rank correlation, and that of accuracies between seeds."""

import numpy as np
import pytest
from scipy import stats

from locality.errors import UserError
from locality_papers.measures import Quantity, Values
from locality_papers.nas import between_seeds, kendall


def test_rank_correlation_is_scipys():
    generator = np.random.default_rng(0)
    for size, values in ((20, 1000), (20, 4), (2, 2)):  # with few ties and many
        one, other = generator.integers(0, values, (2, size)).tolist()
        expected = stats.kendalltau(one, other).statistic
        assert kendall(one, other) == pytest.approx(0.0 if np.isnan(expected) else expected)
    assert kendall([1, 2, 3], [4, 5, 6]) == 1 and kendall([1, 2, 3], [3, 2, 1]) == -1
    assert kendall([1, 1], [1, 2]) == 0


def test_every_two_seeds_are_compared_once():
    def candidate(*top1):
        return Quantity(lambda _: Values(dict(enumerate(top1))))

    found = between_seeds([candidate(1, 1, 3), candidate(2, 2, 2), candidate(3, 3, 1)])
    mean = found.evaluate({}).estimate()  # of 1, −1 and −1, which are not independent
    assert mean.mean == pytest.approx(-1 / 3) and mean.half_width is None
    with pytest.raises(UserError, match="two seeds"):
        between_seeds([candidate(1), candidate(2)]).evaluate({})
