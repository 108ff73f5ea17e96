"""Statistics over few seeds: means, intervals, and differences paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mpmath import betainc, findroot


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval by Student's t.

    Attributes:
        mean: mean of the values.
        half_width: the interval is mean ± half_width; None for a single value.
        n: number of values.
    """

    mean: float
    half_width: float | None
    n: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width

    def p_value(self, at: float = 0.0) -> float:
        """Two-sided p-value of "the mean is `at`"; 1 for a single value.

        If all values are equal, Student's t is undefined and the sign test is used.
        """
        if not self.half_width:
            return 1.0 if self.half_width is None or self.mean == at else 2.0 ** (1 - self.n)
        df = self.n - 1
        return two_sided_p((self.mean - at) / self.half_width * two_sided_t(df), df)

    @property
    def excludes_zero(self) -> bool:
        """Whether an interval exists and excludes zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def estimate(values: Sequence[float], shared: float = 0.0) -> Estimate:
    """The mean of `values` with its 95% interval: mean ± t(n − 1) · s · √(1/n + shared).

    Args:
        values: at least one.
        shared: 0 for independent values. For folds, which share training images and so vary too
            little: images per fold / training images (Nadeau & Bengio, 2003).

    Raises:
        ValueError: `values` is empty.
    """
    n = len(values)
    if n == 0:
        raise ValueError("a mean needs at least one value")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    if deviation < 1e-9 * abs(mean):  # equal, as differences of rounded numbers
        deviation = 0.0
    scale = math.sqrt(1 / n + shared)
    return Estimate(mean, two_sided_t(n - 1) * deviation * scale, n)


def mean_curve(
    curves: Sequence[Mapping[str, Sequence[float]]], *, partial: bool = False
) -> dict[str, Any]:
    """The mean of curves {"x": […], "y": […]} at the x that all of them have.

    Args:
        curves: curves with ascending x.
        partial: also average at x that only some curves have.

    Returns:
        {"x", "mean", "half_width", "n"}: the x, and the fields of `estimate` at each.
    """
    by_place: dict[float, list[float]] = {}
    for curve in curves:
        for place, value in zip(curve["x"], curve["y"], strict=True):
            by_place.setdefault(place, []).append(value)
    at = {
        place: estimate(values)
        for place, values in sorted(by_place.items())
        if partial or len(values) == len(curves)
    }
    return {
        "x": list(at),
        "mean": [each.mean for each in at.values()],
        "half_width": [each.half_width for each in at.values()],
        "n": [each.n for each in at.values()],
    }


@cache
def two_sided_p(t: float, df: float) -> float:
    """P(|T| ≥ |t|) of Student's distribution."""
    return float(betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True))


@cache
def two_sided_t(df: float) -> float:
    """The t with P(|T| ≤ t) = 95% in Student's distribution.

    P(|T| > t) = I_x(ν/2, 1/2), the regularised incomplete beta function at x = ν / (ν + t²).
    """
    x = findroot(
        lambda x: betainc(df / 2, 0.5, 0, x, regularized=True) - (1 - 0.95),
        (0, 1),
        solver="illinois",
        maxsteps=200,
    )
    return math.sqrt(df * (1 / float(x) - 1))


def proportion_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share that was seen in `count` independent trials."""
    z = 1.96
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return centre - half, centre + half


def paired_difference(
    first: Mapping[Any, float], second: Mapping[Any, float], shared: float = 0.0
) -> Estimate | None:
    """first − second, paired by seed, so that a seed's effect on both (split, order) cancels.

    Args:
        first, second: seed → value; seeds in only one of them are ignored.
        shared: see `estimate`.

    Returns:
        the estimate of the mean difference, or None without a common seed.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    return estimate([first[seed] - second[seed] for seed in seeds], shared)


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of m hypotheses are rejected with Holm's correction.

    In order of p-values, the k-th is rejected if it and all before it have p < level / (m − k + 1).
    The probability of any false rejection is then at most `level`.
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] >= level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
