"""Synthetic images with a controlled use of locality: the distance of the patches to compare.

Every image, 16×16 and grey, is noise except for two motifs of 4×4 pixels on a grid of 4×4 cells;
its class is whether the two are the same. In a local image they are adjacent, and a window of 2×2
cells tells the class; in a distant one they are two or more cells apart. In the dataset `motifs_P`
a random P% of the images are distant. The comparison is the same at every P.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from locality.data.config import DATASETS, DataConfig
from locality.data.sources import ArraySource

GRID, MOTIF, KINDS = 4, 4, 3
_TRAIN, _VAL = 20_000, 2_000


def open_motifs(config: DataConfig) -> tuple[list[str], ArraySource, ArraySource]:
    """Classes, 20,000 training and 2,000 validation images; always the same."""
    name = config.dataset
    images, labels = draw_motifs(_TRAIN + _VAL, DATASETS[name]["distant"], seed=0)
    rgb = np.repeat(images[..., None], 3, axis=-1)
    train, val = slice(None, _TRAIN), slice(_TRAIN, None)
    return (
        ["different", "same"],
        ArraySource(rgb[train], labels[train], f"{name} train"),
        ArraySource(rgb[val], labels[val], f"{name} val"),
    )


@cache
def _motifs() -> npt.NDArray[np.bool_]:
    """(KINDS, 4, 4): patterns of eight bright pixels; any two differ in eight pixels."""
    rng, found = np.random.default_rng(0), list[npt.NDArray[np.bool_]]()
    while len(found) < KINDS:
        drawn = rng.permutation(np.arange(MOTIF**2) < MOTIF**2 // 2).reshape(MOTIF, MOTIF)
        if all((drawn != other).sum() == MOTIF**2 // 2 for other in found):
            found.append(drawn)
    return np.stack(found)


def draw_motifs(
    count: int, distant: float, seed: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (count, 16, 16) and their labels (count,), half of them 1, "same".

    Args:
        count: number of images.
        distant: fraction of images whose motifs are two or more cells apart; others are adjacent.
        seed: random seed.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % 2)
    first = rng.integers(KINDS, size=count)
    second = np.where(labels == 1, first, (first + rng.integers(1, KINDS, count)) % KINDS)
    places = _places(rng, rng.random(count) < distant)
    images = rng.integers(0, 128, (count, GRID, MOTIF, GRID, MOTIF), dtype=np.uint8)
    for kinds, place in zip((first, second), places, strict=True):
        rows, columns = np.divmod(place, GRID)
        images[np.arange(count), rows, :, columns] = np.where(_motifs()[kinds], 224, 32)
    return images.reshape(count, GRID * MOTIF, GRID * MOTIF), labels


def _places(rng: np.random.Generator, is_distant: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Cells of each image's motifs, (2, n), row-major: uniform over adjacent or distant pairs."""
    rows, columns = np.divmod(np.arange(GRID**2), GRID)
    across = np.abs(rows[:, None] - rows), np.abs(columns[:, None] - columns)
    near, far = np.argwhere(sum(across) == 1), np.argwhere(np.maximum(*across) >= 2)
    drawn = [pairs[rng.integers(len(pairs), size=len(is_distant))] for pairs in (near, far)]
    return np.where(is_distant[:, None], drawn[1], drawn[0]).T
