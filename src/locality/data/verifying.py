"""What is made sure of about a run's images: before its first step, and before it goes on.

Validation images are all decoded, or beyond a number recognised by their headers, so that a
damaged one is named before training and not at the first evaluation.

A record of all images says later whether they are still the same. To read a million files takes
hours, to ask for their size and time of modification 6 s, so large datasets are told apart by
that; small ones by their content, which copying does not change.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from locality.data.folder import some
from locality.data.sources import BadImage, DataSplits, ImageSource
from locality.errors import UserError

# As many images of ImageNet's size are decoded in half a minute by one processor.
DECODED_AT_MOST = 5_000
# As many bytes are read and digested in seconds; opening a file takes as long as so many more.
CONTENT_BYTES = 1_000_000_000
_OPENING_BYTES = 10_000
# Decoders and file systems let go of Python's lock; network file systems answer many at once.
_THREADS = 16
_AT_ONCE = 100

T = TypeVar("T")
R = TypeVar("R")


def verify(source: ImageSource) -> str:
    """Make sure that all validation images can be read.

    Returns:
        what was done, for the header of a run; empty for images in memory.

    Raises:
        UserError: some cannot, naming them.
    """
    if source.pixels is not None:
        return ""
    whole = len(source) <= DECODED_AT_MOST
    look = source.read if whole else source.check_header

    def problem(index: int) -> str | None:
        try:
            look(index)
        except BadImage as error:
            return str(error)
        return None

    found = enumerate(_in_threads(problem, range(len(source))))
    bad = {source.describe(index): reason for index, reason in found if reason is not None}
    if bad:
        raise UserError(
            f"{len(bad)} of {len(source):,} validation images cannot be read: {some(list(bad))} "
            f"({next(iter(bad.values()))}); repair or remove them, or set data.on_bad_image to "
            f"'skip'"
        )
    if whole:
        return f"all {len(source):,} validation images can be decoded"
    return (
        f"the headers of {len(source):,} validation images are whole; more than "
        f"{DECODED_AT_MOST:,} are not decoded beforehand"
    )


@dataclass(frozen=True)
class ImageRecord:
    """Which images a run uses, as far as can be told cheaply.

    Attributes:
        labels: digest of the classes and of all labels in their order.
        files: digest of what is in memory and of `table`.
        table: a line per file in the order of use: size, content or time of modification, and
            part/name, with tabs between; compressed.
    """

    labels: str
    files: str
    table: bytes

    @classmethod
    def of(cls, splits: DataSplits) -> ImageRecord:
        """Look at the images of a run, or at the sizes and times of their files."""
        labels = hashlib.sha256(json.dumps(splits.classes).encode())
        files = hashlib.sha256()
        for source in (splits.train, splits.val):
            labels.update(source.labels.tobytes() + b"|")
            if source.pixels is not None:
                files.update(source.pixels.numpy().tobytes())
        table = _table(splits).encode()
        files.update(table)
        return cls(
            labels.hexdigest()[:16], files.hexdigest()[:16], gzip.compress(table, 1, mtime=0)
        )

    @property
    def fingerprint(self) -> str:
        """What a checkpoint keeps of it."""
        return f"{self.labels}-{self.files}"

    def differences(self, before: bytes) -> str:
        """Which files changed, are gone or are new since the table `before`, in words."""
        old, new = _by_name(before), _by_name(self.table)
        found = {
            "changed": [name for name in new if name in old and old[name] != new[name]],
            "gone": [name for name in old if name not in new],
            "new": [name for name in new if name not in old],
        }
        return "; ".join(
            f"{len(names):,} {what}: {some(names)}" for what, names in found.items() if names
        )


def _table(splits: DataSplits) -> str:
    files = [
        (f"{part}/{name}", path)
        for part, source in (("train", splits.train), ("val", splits.val))
        for name, path in source.files(np.arange(len(source)))
    ]
    status = list(_in_threads(_status, (path for _, path in files)))
    stamps: Iterable[str] = (f"{seconds}" for _, seconds in status)
    if sum(_OPENING_BYTES + size for size, _ in status) <= CONTENT_BYTES:
        stamps = _in_threads(_content, (path for _, path in files))
    return "".join(
        f"{size}\t{stamp}\t{name!r}\n"
        for (name, _), (size, _), stamp in zip(files, status, stamps, strict=True)
    )


def _status(path: str) -> tuple[int, int]:
    """Size in bytes and time of modification in whole seconds, which survive archives."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1  # as a damaged image, it is dealt with where it is read
    return status.st_size, int(status.st_mtime)


def _content(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha1").hexdigest()[:16]
    except OSError:
        return "-"


def _by_name(table: bytes) -> dict[str, str]:
    lines = gzip.decompress(table).decode().splitlines()
    return {name[1:-1]: stamp for stamp, name in (line.rsplit("\t", 1) for line in lines)}


def _in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`function` of every item, in order."""

    def some_of(chunk: list[T]) -> list[R]:
        return [function(item) for item in chunk]

    waiting = iter(items)
    chunks = iter(lambda: list(islice(waiting, _AT_ONCE)), [])
    with ThreadPoolExecutor(_THREADS) as pool:
        for results in pool.map(some_of, chunks):
            yield from results
