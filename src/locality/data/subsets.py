"""Class-balanced, nested, seeded choices of training images (ConViT Table 2) and splits.

All functions take the labels of a source, (n,) whole numbers, and return sorted int64 indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from locality.data.keyed import Indices, Keys, Stream, keys, permuted
from locality.errors import UserError


def balanced_fraction(labels: npt.ArrayLike, fraction: float, seed: int) -> Indices:
    """A seeded random share of every class, rounded to the nearest whole number of images.

    Nested: with one seed, a smaller fraction's images are all among a larger one's.

    Raises:
        UserError: a class that has images would be left with none.
    """
    # Adding ½ before truncating rounds halves up, so that counts never fall as fractions rise.
    return _per_class(labels, fraction, seed, lambda n: int(n * fraction + 0.5))


def sorted_fraction(labels: npt.ArrayLike, fraction: float) -> Indices:
    """The first int(n · fraction) images of every class, in the source's own sorted order.

    This is the choice that the code released with the ConViT paper makes.

    Raises:
        UserError: a class that has images would be left with none.
    """
    return _per_class(labels, fraction, None, lambda n: int(n * fraction))


def stratified_split(
    labels: npt.ArrayLike, val_fraction: float, seed: int
) -> tuple[Indices, Indices]:
    """Training and validation indices, every class divided in the same proportion.

    Each class that has two images or more gives at least one to either side; a single image is
    trained on.
    """
    labels = np.asarray(labels, dtype=np.int64)

    def held_out(n: int) -> int:
        return 0 if n < 2 else min(max(int(n * val_fraction + 0.5), 1), n - 1)

    val = [
        members[permuted(np.arange(held_out(len(members))), len(members), key)]
        for members, key in _classes(labels, seed, Stream.SPLIT)
    ]
    chosen = np.zeros(len(labels), dtype=bool)
    if val:
        chosen[np.concatenate(val)] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def first_classes(labels: npt.ArrayLike, count: int) -> Indices:
    """The images of classes 0 … count − 1."""
    return np.flatnonzero(np.asarray(labels) < count)


def _classes(labels: npt.NDArray, seed: int, stream: Stream) -> Iterator[tuple[Indices, Keys]]:
    """Members of each class that has any, in the source's order, and the class's own key."""
    order = np.argsort(labels, kind="stable")
    present, counts = np.unique(labels, return_counts=True)
    stops = np.cumsum(counts)
    for label, start, stop in zip(present, stops - counts, stops, strict=True):
        yield order[start:stop], keys(seed, stream, int(label))


def _per_class(
    labels: npt.ArrayLike, fraction: float, seed: int | None, count: Callable[[int], int]
) -> Indices:
    labels = np.asarray(labels, dtype=np.int64)
    if not 0 < fraction <= 1:
        raise UserError(f"fraction is {fraction!r}; give a finite number above 0 and at most 1")
    chosen = []
    emptied = []
    for members, key in _classes(labels, seed or 0, Stream.SUBSET):
        kept = count(len(members))
        if kept == 0:
            emptied.append((int(labels[members[0]]), len(members)))
            continue
        ranks = np.arange(kept)
        chosen.append(members[ranks if seed is None else permuted(ranks, len(members), key)])
    if emptied:
        label, size = emptied[0]
        raise UserError(
            f"a fraction of {fraction:g} leaves {len(emptied)} classes without images "
            f"(class {label} has {size}); give a larger fraction"
        )
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)
