"""Attention maps in little space: integer factors of the scores, with a bound on their error.

Content attention is a softmax of scores Q Kᵀ/√d, an N×N matrix of rank d at most. Scores count only
up to a constant per row, so a map is stored as two thin integer matrices A and B with

    |step² · Aᵀ B − (score − mean of its row)|  ≤  tolerance   for every query and key.

Every attention read back is then within a factor e^±(2·tolerance) of the true one, small or large.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.int16]

_RANK_GUESS = 80  # heads are hardly ever wider than 64
_TRIALS = 6
_SMALLEST, _LARGEST = -(2**15), 2**15 - 1


@dataclass(frozen=True)
class Factors:
    """Scores of one head, up to a constant per query: step² · queriesᵀ @ keys.

    Attributes:
        queries: (r, Nq) int16.
        keys: (r, Nk) int16.
        step: the unit of both.
    """

    queries: Integers
    keys: Integers
    step: float

    def attention(self) -> npt.NDArray[np.float64]:
        """The attention they stand for, (Nq, Nk)."""
        scores = self.step**2 * (self.queries.T.astype(np.float64) @ self.keys)
        scores -= scores.max(axis=1, keepdims=True)
        weights = np.exp(scores)
        return weights / weights.sum(axis=1, keepdims=True)

    def pack(self) -> bytes:
        """As bytes: counts of wide and narrow components and the step, then the integers.

        Little-endian: uint16 wide, uint16 narrow, float32 step; then, for queries and for keys, the
        wide components' low bytes, their high bytes, and the narrow components as int8.
        """
        sizes = np.maximum(
            np.abs(self.queries).max(1, initial=0), np.abs(self.keys).max(1, initial=0)
        )
        wide, narrow = np.flatnonzero(sizes > 127), np.flatnonzero((sizes > 0) & (sizes <= 127))
        parts = [struct.pack("<HHf", len(wide), len(narrow), self.step)]
        for matrix in (self.queries, self.keys):
            # Bytes of like kind side by side compress better.
            both = matrix[wide].astype("<i2").view(np.uint8).reshape(len(wide), matrix.shape[1], 2)
            parts += [both[..., 0].tobytes(), both[..., 1].tobytes()]
            parts.append(matrix[narrow].astype(np.int8).tobytes())
        return b"".join(parts)


def factorise(content: Tensor, tolerance: float) -> Factors:
    """Factors of one head's content attention.

    Args:
        content: (Nq, Nk) attention in double precision, no entry zero.
        tolerance: the largest error of a score.

    Raises:
        ValueError: if an entry is zero or not a number, so that its score is not known, or if
            the scores span too much for the tolerance.
    """
    scores = content.log()
    if not scores.isfinite().all():
        raise ValueError("attention of exactly zero has no finite score; use double precision")
    scores = scores - scores.mean(dim=1, keepdim=True)
    left, values, right = _decompose(scores, tolerance)
    queries, keys = left * values.sqrt(), right * values.sqrt()
    largest = queries.square().sum(1).max() + keys.square().sum(1).max()
    # Rounding moves each factor by up to half a step; errors of many components partly cancel.
    step = tolerance / max(float(largest) ** 0.5, 1e-9)
    best: Factors | None = None
    for _ in range(_TRIALS):
        found, error = _quantised(scores, queries, keys, step)
        if error <= tolerance and (best is None or found.step > best.step):
            best = found
        # The error grows about in proportion to the step: aim at just below the tolerance.
        step *= min(2.0, 0.95 * tolerance / max(error, 1e-12))
    if best is None:
        raise ValueError(
            f"scores that span {float(scores.max() - scores.min()):.0f} cannot be kept to "
            f"±{tolerance:g} in 16 bits; allow a larger tolerance"
        )
    return best


def _quantised(scores: Tensor, queries: Tensor, keys: Tensor, step: float) -> tuple[Factors, float]:
    """Factors in units of `step`, and the largest error of the scores they give."""
    # The step as the reader of the packed form will know it.
    step = float(np.float32(step))
    found = Factors(_rounded(queries, step), _rounded(keys, step), step)
    product = torch.from_numpy(found.queries.T.astype(np.float64) @ found.keys) * step**2
    return found, float((product - scores).abs().max())


def _decompose(scores: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """U, S, V with scores = U diag(S) Vᵀ, exact for what the tolerance can see."""
    if min(scores.shape) > 2 * _RANK_GUESS:
        # Twice as many random directions as there can be dimensions miss none of them.
        left, values, right = torch.svd_lowrank(scores, q=_RANK_GUESS, niter=2)
        if (left * values @ right.T - scores).abs().max() < tolerance / 100:
            return left, values, right
    left, values, right = torch.linalg.svd(scores, full_matrices=False)
    return left, values, right.T


def _rounded(factor: Tensor, step: float) -> Integers:
    """(N, r) in units of `step`, transposed, as int16."""
    return (factor.T / step).round().clamp(_SMALLEST, _LARGEST).numpy().astype(np.int16)
