"""Means over repeated runs with their intervals: the one error model of reports and the study.

Two things vary between repetitions of an experiment: the run (its seed), and the evaluated images.

- Each run has images of its own: their spread over runs includes both.
- All runs share their images: the images are a second sample, so accuracies by run and image are
  analysed as a crossed design (`estimate` with two dimensions). Differences of two models on the
  same images vary much less than independent accuracies would, as the same images are hard.
- Runs divide the same images again and again (folds, a new split per seed): their test sets
  overlap, so their spread is too small by `shared` (Nadeau & Bengio, 2003).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit
from scipy.stats import binomtest


@dataclass(frozen=True)
class Estimate:
    """A mean over runs with its interval by Student's t.

    Attributes:
        mean: mean of the values.
        half_width: the 95% interval is mean ± half_width; None for a single run, and 0, which is
            no interval either, if all values are equal.
        n: number of runs.
        df: degrees of freedom; n − 1 by default.
    """

    mean: float
    half_width: float | None
    n: int
    df: float | None = None

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width

    @property
    def error(self) -> float:
        """The standard error; infinite for a single run."""
        if self.half_width is None:
            return math.inf
        return self.half_width / _quantile(self.n - 1 if self.df is None else self.df)

    def p_value(self, at: float = 0.0) -> float:
        """Two-sided p-value of "the mean is `at`"; 1 for a single run.

        If all values are equal, Student's t is undefined and the sign test is used.
        """
        if not self.half_width:
            return 1.0 if self.half_width is None or self.mean == at else 2.0 ** (1 - self.n)
        df = self.n - 1 if self.df is None else self.df
        return float(2 * stdtr(df, -abs(self.mean - at) / self.error))

    @property
    def excludes_zero(self) -> bool:
        """Whether the p-value of zero is below 5%."""
        return self.p_value() < 0.05


def estimate(values: npt.ArrayLike, shared: float = 0.0, images: float = 0.0) -> Estimate:
    """The mean of `values` with its 95% interval.

    Args:
        values: one per run, at least one; or, of runs on the same images, (runs, images).
        shared: 0 for independent values; test images / training images where runs divide the same
            images again. The variance of the mean is then s² (1/n + shared).
        images: standard error over images that all runs share, if only their mean is known.

    Raises:
        ValueError: `values` is empty.
    """
    table = np.asarray(values, dtype=float)
    n = len(table)
    if n == 0:
        raise ValueError("a mean needs at least one value")
    by_run = table.reshape(n, -1).mean(axis=1)
    mean = math.fsum(by_run) / n
    if n == 1:
        return Estimate(mean, None, 1)
    spread = float(by_run.var(ddof=1))
    if math.sqrt(spread) < 1e-9 * abs(mean):  # equal, as differences of rounded numbers
        spread = 0.0
    variance, df = spread * (1 / n + shared), float(n - 1)
    if images:
        df *= (variance + images**2) ** 2 / variance**2 if variance else math.inf
        variance, df = variance + images**2, min(df, 1e6)
    elif table.ndim == 2 and table.shape[1] > 1 and np.ptp(table):
        variance, df = _crossed(table)
    return Estimate(mean, _quantile(df) * math.sqrt(variance), n, df)


def _crossed(table: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Variance of the mean of (runs, images), and its degrees of freedom.

    Both factors are random. The mean squares of runs and of images each contain that of the rest,
    which would count twice. Degrees of freedom are Satterthwaite's.
    """
    n, count = table.shape
    by_run, by_image = table.mean(axis=1), table.mean(axis=0)
    rest = table - by_run[:, None] - by_image + table.mean()
    squares = np.array([count * by_run.var(ddof=1), n * by_image.var(ddof=1), 0.0])
    degrees = np.array([n - 1, count - 1, (n - 1) * (count - 1)], dtype=float)
    squares[2] = -np.square(rest).sum() / degrees[2]
    total = max(squares.sum(), -squares[2])
    df = total**2 / float((squares**2 / degrees).sum())
    return total / table.size, df


def _quantile(df: float) -> float:
    """The t with P(|T| ≤ t) = 95% in Student's distribution."""
    return float(stdtrit(df, 0.975))


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
    by_x: dict[float, list[float]] = {}
    for curve in curves:
        for x, value in zip(curve["x"], curve["y"], strict=True):
            by_x.setdefault(x, []).append(value)
    estimates = {
        x: estimate(values)
        for x, values in sorted(by_x.items())
        if partial or len(values) == len(curves)
    }
    names = ("mean", "half_width", "n")
    return {"x": list(estimates)} | {
        name: [getattr(one, name) for one in estimates.values()] for name in names
    }


def proportion_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share that was seen in `count` independent trials."""
    found = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


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
