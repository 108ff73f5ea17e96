"""Kendall's rank correlation."""

from locality_papers.nas import kendall


def test_rank_correlation():
    assert kendall([1, 2, 3], [4, 5, 6]) == 1 and kendall([1, 2, 3], [3, 2, 1]) == -1
    assert kendall([1, 1], [1, 2]) == 0
