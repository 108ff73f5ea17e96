"""The fingerprint of a run's images, by which a resumed run knows whether they have changed.

To read a million files takes hours, to ask for their size and time of modification 6 s. So large
datasets are compared by those, and small ones by their content, which copying does not change.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from locality.data.sources import DataSplits
from locality.errors import some, wrap_errors
from locality.files import in_threads

# As many bytes are read and digested in seconds; opening a file takes as long as so many more.
CONTENT_BYTES = 1_000_000_000

_OPENING_BYTES = 10_000

_DIGITS = 16  # of a file's digest; a time of modification has fewer

_MAX_TABLE_BYTES = 1 << 28


@dataclass(frozen=True)
class ImageFingerprint:
    """The fingerprint of a run's images.

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
    def of(cls, splits: DataSplits) -> ImageFingerprint:
        """Compute it from the images of a run, or from the sizes and times of their files."""
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
        old, new = (_parse_table(gzip.decompress(each).decode()) for each in (before, self.table))
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
    status = list(in_threads(_status, (path for _, path in files)))
    stamps: Iterable[str] = (f"{seconds}" for _, seconds in status)
    if sum(_OPENING_BYTES + size for size, _ in status) <= CONTENT_BYTES:
        stamps = in_threads(_content, (path for _, path in files))
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
            return hashlib.file_digest(file, "sha1").hexdigest()[:_DIGITS]
    except OSError:
        return "-"


def _parse_table(table: str) -> dict[str, str]:
    """Size and stamp of every file by its name."""
    lines = (line.rsplit("\t", 1) for line in table.splitlines())
    return {name[1:-1]: stamp for stamp, name in lines}


def duplicates(record: Path) -> list[list[str]] | None:
    """Names of files with the same content, in groups, from where a `ImageFingerprint.table` lies.

    Returns:
        None if files are compared by modification time, as those of large datasets are.

    Raises:
        UserError: if the file is something else.
    """
    with (
        wrap_errors(f"{record} is no record of images", EOFError, OSError, ValueError, zlib.error),
        gzip.open(record) as file,
    ):
        stamps = _parse_table(file.read(_MAX_TABLE_BYTES).decode())
    groups: dict[str, list[str]] = {}
    for name, stamp in stamps.items():
        if len(stamp.partition("\t")[2]) == _DIGITS:
            groups.setdefault(stamp, []).append(name)
    if stamps and not groups:
        return None
    return [names for names in groups.values() if len(names) > 1]
