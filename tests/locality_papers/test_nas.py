"""Rank correlation of accuracies between seeds."""

import pytest

from locality.errors import UserError
from locality_papers.measures import Quantity, Values
from locality_papers.nas import between_seeds


def test_every_two_seeds_are_compared_once():
    def candidate(*top1):
        return Quantity(lambda _: Values(dict(enumerate(top1))))

    found = between_seeds([candidate(1, 1, 3), candidate(2, 2, 2), candidate(3, 3, 1)])
    mean = found.evaluate({}).estimate()  # of 1, −1 and −1, which are not independent
    assert mean.mean == pytest.approx(-1 / 3) and mean.half_width is None
    with pytest.raises(UserError, match="two seeds"):
        between_seeds([candidate(1), candidate(2)]).evaluate({})
