"""Position-keyed randomness: the order of samples, subsets and splits.

All randomness in the data is a function of (seed, stream, position): the image at a position, its
augmentation, its replacement if it cannot be read, the images of a fraction or a split. Nothing
depends on earlier draws or on the number of workers or processes, so a resumed run repeats itself
without saved state.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Unlike a library's
shuffle, the permutation needs no memory, can start in the middle, and does not change with library
versions.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from enum import IntEnum
from math import isqrt

import numpy as np
import numpy.typing as npt

from locality.errors import UserError

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(shift) for shift in (30, 27, 31))
_ONE = np.uint64(1)
# With 16 rounds even the permutations of 5 or 6 items are equally likely; 12 leave a bias.
_ROUNDS = np.arange(16, dtype=np.uint64)


class Stream(IntEnum):
    """The purpose of a key. Streams are independent, even with the same seed and position."""

    ORDER = 1
    AUGMENT = 2
    ERASE = 3
    REPLACE = 4
    SUBSET = 5
    SPLIT = 6
    STEP = 7  # for training: mixup, dropout, drop path
    AFFINE = 8


def hash_seed(seed: int, *words: int | npt.ArrayLike) -> Hashes:
    """64-bit hashes of (seed, words); words may be arrays, which broadcast.

    Words are integers modulo 2⁶⁴; their order matters.
    """
    state = _mix(_word(seed))
    for word in words:
        state = _mix(state ^ _word(word))
    return state


def _word(value: int | npt.ArrayLike) -> Hashes:
    if isinstance(value, int):
        return np.array([value & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64)
    return np.atleast_1d(np.asarray(value)).astype(np.uint64)


def _mix(x: Hashes) -> Hashes:
    x = x + _GOLDEN
    x = (x ^ (x >> _SHIFT_1)) * _MULTIPLY_1
    x = (x ^ (x >> _SHIFT_2)) * _MULTIPLY_2
    return x ^ (x >> _SHIFT_3)


def permute(ranks: npt.ArrayLike, size: int, key: Hashes) -> Indices:
    """Apply the random permutation of 0 … size − 1 selected by `key` to `ranks`.

    A Feistel network on a × b ≥ size, a ≈ b, in the additive form of Black and Rogaway (2002);
    values outside 0 … size − 1 are mapped again until they are inside.

    Args:
        ranks: integers from 0 to size − 1.
        size: number of items permuted.
        key: one key, or one per rank.

    Returns:
        int64 array of the shape of `ranks`.
    """
    places = np.atleast_1d(np.asarray(ranks)).astype(np.uint64)
    rows = isqrt(max(size - 1, 0)) + 1
    sides = np.uint64(rows), np.uint64(-(-size // rows))
    result = _feistel(places, *sides, key)
    key = np.broadcast_to(key, result.shape)
    while (outside := np.flatnonzero(result >= np.uint64(size))).size:
        result[outside] = _feistel(result[outside], *sides, key[outside])
    return result.astype(np.int64)


def _feistel(x: Hashes, rows: np.uint64, columns: np.uint64, key: Hashes) -> Hashes:
    row, column = x // columns, x % columns
    round_keys = _mix(key + _ROUNDS[:, None])
    for add_to_row, add_to_column in zip(round_keys[::2], round_keys[1::2], strict=True):
        # Halved: if the sum wrapped around, two places could map to one.
        row = (row + (_mix(column ^ add_to_row) >> _ONE)) % rows
        column = (column + (_mix(row ^ add_to_column) >> _ONE)) % columns
    return row * columns + column


def sample_order(positions: npt.ArrayLike, size: int, seed: int, repeats: int = 1) -> Indices:
    """The sample at each global position, from a new permutation every epoch.

    With repeated augmentation (Hoffer et al., 2020) `repeats` neighbouring positions share a
    sample, and an epoch of `size` positions shows the first part of its permutation, as timm's
    `RepeatAugSampler` does.
    """
    epochs, places = np.divmod(np.atleast_1d(np.asarray(positions, dtype=np.int64)), size)
    return permute(places // repeats, size, hash_seed(seed, Stream.ORDER, epochs))


def seed_generators(key: int) -> None:
    """Seed the three generators that timm's and torchvision's transforms draw from.

    Those are Python's `random`, numpy's global one and torch's default one for the CPU. Each gets
    its own part of the key: numpy and torch use the same Mersenne Twister and would otherwise draw
    the same numbers. `torch.manual_seed` also seeds other devices, which takes 85 µs.
    """
    import torch  # takes seconds, and splits need none

    random.seed(key)
    np.random.seed(key >> 32)  # noqa: NPY002 (the generator that timm uses)
    torch.default_generator.manual_seed(key & 0xFFFF_FFFF)


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the process's three generators after the block."""
    import torch

    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    processor = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.default_generator.set_state(processor)


def class_fraction(labels: npt.ArrayLike, fraction: float, seed: int | None) -> Indices:
    """A fraction of every class's images.

    Args:
        labels: (n,) integers.
        fraction: the fraction, in (0, 1].
        seed: of a random choice, rounded to the nearest number of images. It is nested: a smaller
            fraction is a subset of a larger one. None chooses the first int(n · fraction) images
            in the source's own sorted order, as the code released with the ConViT paper does.

    Raises:
        UserError: a class that has images would be left with none.
    """
    # Adding ½ before truncating rounds halves up, so that counts never fall as fractions rise.
    rounding = 0.0 if seed is None else 0.5
    counts = np.unique(labels, return_counts=True)[1]
    kept = (counts * fraction + rounding).astype(int)
    if emptied := np.flatnonzero(kept == 0).tolist():
        raise UserError(
            f"a fraction of {fraction:g} leaves {len(emptied)} classes without images (one has "
            f"{counts[emptied[0]]}); give a larger fraction"
        )
    return _chosen(labels, seed, Stream.SUBSET, lambda n: (0, int(n * fraction + rounding)))


def stratified_split(
    labels: npt.ArrayLike, val_fraction: float, seed: int
) -> tuple[Indices, Indices]:
    """Training and validation indices, stratified by class.

    A class of two or more images has at least one on either side; a single image is for training.
    """

    def held_out(n: int) -> tuple[int, int]:
        return 0, 0 if n < 2 else min(max(int(n * val_fraction + 0.5), 1), n - 1)

    val = _chosen(labels, seed, Stream.SPLIT, held_out)
    return np.setdiff1d(np.arange(np.size(labels)), val), val


def evenly(labels: Indices, most: int) -> Indices:
    """Indices of at most `most` images, evenly within each class, sorted by class."""
    most = min(most, len(labels))
    return labels.argsort(kind="stable")[np.arange(most) * len(labels) // most]


def class_slice(labels: npt.ArrayLike, part: tuple[float, float], seed: int) -> Indices:
    """A part of every class, between two fractions of an order drawn by `seed`.

    Disjoint parts share no image, and adjoining ones leave none out.
    """
    low, high = part
    return _chosen(labels, seed, Stream.SPLIT, lambda n: (int(n * low + 0.5), int(n * high + 0.5)))


def _chosen(
    labels: npt.ArrayLike, seed: int | None, stream: Stream, span: Callable[[int], tuple[int, int]]
) -> Indices:
    """Indices of every class's images between two places, sorted.

    Places are in an order drawn by `seed`, or in the source's order if that is None.
    """
    chosen = [np.empty(0, dtype=np.int64)]
    present, counts = np.unique(np.asarray(labels, dtype=np.int64), return_counts=True)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts))[:-1]
    for label, members in zip(present.tolist(), by_class, strict=True):
        places = np.arange(*span(len(members)))
        if seed is not None:
            places = permute(places, len(members), hash_seed(seed, stream, label))
        chosen.append(members[places])
    return np.sort(np.concatenate(chosen))
