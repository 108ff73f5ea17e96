"""The randomness of training steps, as a function of where a run is.

Mixup, dropout and stochastic depth draw from global generators. Seeding these from (seed, step,
micro-batch, rank) before every pass makes a resumed run draw what an uninterrupted one would.
"""

from __future__ import annotations

import numpy as np
import torch

from locality.data.sampling import Stream, keys, seed_generators

# Keys are cheap by the hundred and slow one by one.
_BLOCK = 256


class StepRandomness:
    """Seeds all generators for a pass.

    Args:
        seed: the run's.
        rank: of this process.
        accumulate: passes per step.
        device: whose generator to seed beside the processor's.
    """

    def __init__(self, seed: int, rank: int, accumulate: int, device: torch.device) -> None:
        self._seed = seed
        self._rank = rank
        self._accumulate = accumulate
        self._device = device
        self._first = -_BLOCK
        self._keys: list[list[int]] = []

    def enter(self, step: int, micro: int) -> None:
        """Seed Python's, numpy's and torch's generators for pass `micro` of step `step`."""
        if not self._first <= step < self._first + _BLOCK:
            self._first = step
            steps = np.arange(step, step + _BLOCK)[:, None]
            micros = np.arange(self._accumulate)[None]
            self._keys = keys(self._seed, Stream.STEP, self._rank, steps, micros).tolist()
        key = self._keys[step - self._first][micro]
        seed_generators(key)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(key >> 1)
        elif self._device.type == "mps":
            torch.mps.manual_seed(key & 0xFFFF_FFFF)


def seed_initial_weights(seed: int) -> None:
    """Seed all generators for drawing a model's initial weights, the same on every rank."""
    torch.manual_seed(seed)
