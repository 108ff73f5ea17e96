"""Position-keyed randomness: the order of samples, subsets and splits.

Everything random about the data is a function of (seed, stream, position): which image comes at a
position, how it is augmented, what stands in for it when it cannot be read, which images make up a
fraction or a split. Nothing depends on what was drawn before, on the number of workers or of
processes, so that a resumed run repeats itself without any state.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Our own
permutation rather than a library's shuffle: it needs no memory, starts in the middle for free,
and stays the same when libraries change their generators.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from enum import IntEnum
from math import isqrt

import numpy as np
import numpy.typing as npt
import torch

from locality.errors import UserError

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(shift) for shift in (30, 27, 31))
_ONE = np.uint64(1)
# With 16 rounds even the permutations of 5 or 6 things are all equally likely; 12 leave a bias.
_ROUNDS = np.arange(16, dtype=np.uint64)


class Stream(IntEnum):
    """What a key is for. Two streams with the same seed and position share nothing."""

    ORDER = 1
    AUGMENT = 2
    ERASE = 3
    REPLACE = 4
    SUBSET = 5
    SPLIT = 6
    STEP = 7  # for training: mixup, dropout, drop path
    AFFINE = 8


def hash_seed(seed: int, *words: int | npt.ArrayLike) -> Hashes:
    """64-bit keys for (seed, words): well mixed, any word broadcast as an array.

    Words are whole numbers taken modulo 2⁶⁴; their order matters.
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
    """Where `ranks` go under the random permutation of 0 … size − 1 that `key` names.

    A Feistel network on a × b ≥ size, a ≈ b, in the additive form of Black and Rogaway (2002);
    values that fall outside 0 … size − 1 walk on until they are inside.

    Args:
        ranks: any number of places, each from 0 to size − 1.
        size: how many things are permuted.
        key: one key, or one per rank.

    Returns:
        int64 array of the shape of `ranks`.
    """
    places = np.atleast_1d(np.asarray(ranks)).astype(np.uint64)
    rows = isqrt(max(size - 1, 0)) + 1
    columns = -(-size // rows)
    result = _feistel(places, np.uint64(rows), np.uint64(columns), key)
    key = np.broadcast_to(key, result.shape)
    while (outside := np.flatnonzero(result >= np.uint64(size))).size:
        result[outside] = _feistel(
            result[outside], np.uint64(rows), np.uint64(columns), key[outside]
        )
    return result.astype(np.int64)


def _feistel(x: Hashes, rows: np.uint64, columns: np.uint64, key: Hashes) -> Hashes:
    row, column = x // columns, x % columns
    round_keys = _mix(key + _ROUNDS[:, None])
    for add_to_row, add_to_column in zip(round_keys[::2], round_keys[1::2], strict=True):
        # Halved, so that the sum cannot wrap around, which would send two places to one.
        row = (row + (_mix(column ^ add_to_row) >> _ONE)) % rows
        column = (column + (_mix(row ^ add_to_column) >> _ONE)) % columns
    return row * columns + column


def sample_order(positions: npt.ArrayLike, size: int, seed: int, repeats: int = 1) -> Indices:
    """The sample trained at each global position: an own permutation for every epoch.

    With repeated augmentation (Hoffer et al., 2020) `repeats` neighbouring positions share a
    sample, and an epoch of `size` positions shows the first part of its permutation, as timm's
    `RepeatAugSampler` does.
    """
    epochs, places = np.divmod(np.atleast_1d(np.asarray(positions, dtype=np.int64)), size)
    return permute(places // repeats, size, hash_seed(seed, Stream.ORDER, epochs))


def seed_generators(key: int) -> None:
    """Seed the three generators that timm's and torchvision's transforms draw from.

    Those are Python's `random`, numpy's global one and torch's default one for the processor.
    Each gets its own part of the key: numpy and torch run the same Mersenne Twister and would
    otherwise draw the same numbers. `torch.manual_seed` would do more, and cost 85 µs for it.
    """
    random.seed(key)
    np.random.seed(key >> 32)  # noqa: NPY002 (the generator that timm uses)
    torch.default_generator.manual_seed(key & 0xFFFF_FFFF)


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the process's three generators as they were before the block."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    processor = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.default_generator.set_state(processor)


def balanced_fraction(labels: npt.ArrayLike, fraction: float, seed: int) -> Indices:
    """A seeded random fraction of every class, rounded to the nearest whole number of images.

    Nested: with one seed, a smaller fraction's images are all among a larger one's.

    Raises:
        UserError: a class that has images would be left with none.
    """
    # Adding ½ before truncating rounds halves up, so that counts never fall as fractions rise.
    return _fraction(labels, fraction, seed, lambda n: int(n * fraction + 0.5))


def sorted_fraction(labels: npt.ArrayLike, fraction: float) -> Indices:
    """The first int(n · fraction) images of every class, in the source's own sorted order.

    This is the choice that the code released with the ConViT paper makes.

    Raises:
        UserError: a class that has images would be left with none.
    """
    return _fraction(labels, fraction, None, lambda n: int(n * fraction))


def stratified_split(
    labels: npt.ArrayLike, val_fraction: float, seed: int
) -> tuple[Indices, Indices]:
    """Training and validation indices, every class divided in the same proportion.

    Each class that has two images or more gives at least one to either side; a single image is
    trained on.
    """

    def held_out(n: int) -> tuple[int, int]:
        return 0, 0 if n < 2 else min(max(int(n * val_fraction + 0.5), 1), n - 1)

    val = _chosen(labels, seed, Stream.SPLIT, held_out)
    return np.setdiff1d(np.arange(np.size(labels)), val), val


def class_slice(labels: npt.ArrayLike, part: tuple[float, float], seed: int) -> Indices:
    """A part of every class in an order that `seed` draws: from one fraction of it to another.

    Parts that do not overlap have no image in common, and adjoining ones leave none out.
    """
    low, high = part
    return _chosen(labels, seed, Stream.SPLIT, lambda n: (int(n * low + 0.5), int(n * high + 0.5)))


def _chosen(
    labels: npt.ArrayLike, seed: int | None, stream: Stream, span: Callable[[int], tuple[int, int]]
) -> Indices:
    """Of every class's n images those from one place to another, sorted.

    Places are those of the order that `seed` draws, or of the source's own.
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


def _fraction(
    labels: npt.ArrayLike, fraction: float, seed: int | None, count: Callable[[int], int]
) -> Indices:
    sizes = zip(*np.unique(labels, return_counts=True), strict=True)
    if emptied := [(label, size) for label, size in sizes if not count(size)]:
        label, size = emptied[0]
        raise UserError(
            f"a fraction of {fraction:g} leaves {len(emptied)} classes without images "
            f"(class {label} has {size}); give a larger fraction"
        )
    return _chosen(labels, seed, Stream.SUBSET, lambda n: (0, count(n)))
