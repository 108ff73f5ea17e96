"""Where images come from: a numbered, labelled collection that can be read in any order.

The fingerprint of a run's images tells a resumed run whether they have changed. To read a million
files takes hours, to ask for their size and time of modification 6 s. So large datasets are
compared by those, and small ones by their content, which copying does not change.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from locality.data.config import DataConfig
from locality.errors import UserError, some, wrap_errors
from locality.files import gunzip, in_threads, open_file

if TYPE_CHECKING:
    import torch


class BadImage(Exception):
    """An image that cannot be decoded; the message says why, without naming it."""


class TooManyPixels(BadImage):
    """An image that could be decoded, but for its size."""


class ImageSource(ABC):
    """Labelled images with random access.

    Attributes:
        labels: (n,) int64, the class of each image.
        pixels: (n, 3, H, W) uint8 tensor when all images are in memory and of one size, else None.
        label_sets: where an image may have several right answers, one tuple of classes per
            image (ReaL labels); `labels` then holds the first of each. Else None.
        numbered: whether its classes are numbers and have no names.
    """

    labels: npt.NDArray[np.int64]
    pixels: torch.Tensor | None = None
    label_sets: Sequence[tuple[int, ...]] | None = None
    numbered: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Image.Image:
        """Image `index` in RGB.

        Raises:
            BadImage: the image cannot be decoded.
        """

    @abstractmethod
    def describe(self, index: int) -> str:
        """What to call image `index` when speaking to a person: a path where there is one."""

    def check_header(self, index: int) -> None:
        """Check image `index` without decoding it, as far as that is possible.

        Raises:
            BadImage: it cannot.
        """
        self.read(index)

    def files(self, indices: npt.NDArray[np.int64]) -> Iterable[tuple[str, str]]:
        """The files that hold the images at `indices`: names within the dataset, and paths.

        A name is the same wherever the dataset lies. Empty where images have no files.
        """
        return ()

    def read_or_raise(self, index: int) -> Image.Image:
        """As `read`, with a damaged image as an error that names it.

        Raises:
            UserError: the image cannot be decoded, naming it.
        """
        with wrap_errors(f"{self.describe(index)} cannot be read", BadImage):
            return self.read(index)

    def subset(self, indices: npt.ArrayLike) -> ImageSource:
        """The images at `indices`, in that order."""
        return Subset(self, np.asarray(indices, dtype=np.int64))


class Subset(ImageSource):
    """Some images of another source, in the order given."""

    def __init__(self, source: ImageSource, indices: npt.NDArray[np.int64]) -> None:
        self.labels, self.numbered = source.labels[indices], source.numbered
        if source.label_sets is not None:
            self.label_sets = [source.label_sets[index] for index in indices.tolist()]
        if isinstance(source, Subset):
            # One level is enough, however often a subset of a subset is taken.
            indices = source.indices[indices]
            source = source.source
        self.source: ImageSource = source
        self.indices: npt.NDArray[np.int64] = indices
        if source.pixels is not None:
            self.pixels = source.pixels[indices]

    def read(self, index: int) -> Image.Image:
        return self.source.read(int(self.indices[index]))

    def describe(self, index: int) -> str:
        return self.source.describe(int(self.indices[index]))

    def check_header(self, index: int) -> None:
        self.source.check_header(int(self.indices[index]))

    def files(self, indices: npt.NDArray[np.int64]) -> Iterable[tuple[str, str]]:
        return self.source.files(self.indices[indices])


class ArraySource(ImageSource):
    """Images of one size, held in memory.

    Args:
        images: (n, H, W, 3) uint8.
        labels: (n,) whole numbers.
        name: what to call the collection.
    """

    def __init__(self, images: npt.NDArray[np.uint8], labels: npt.ArrayLike, name: str) -> None:
        self.labels = np.asarray(labels, dtype=np.int64)
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
            raise UserError(
                f"{name}: images are {images.shape} {images.dtype}; give (n, H, W, 3) uint8"
            )
        if len(images) != len(self.labels):
            raise UserError(f"{name}: {len(images)} images but {len(self.labels)} labels")
        import torch  # files are listed and checked without it

        self.pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        self.name = name

    def read(self, index: int) -> Image.Image:
        assert self.pixels is not None
        return Image.fromarray(self.pixels[index].permute(1, 2, 0).contiguous().numpy())

    def describe(self, index: int) -> str:
        return f"{self.name}[{index}]"


@dataclass(frozen=True)
class DataSplits:
    """A dataset ready to use: its classes, what to train on and what to evaluate on.

    `train` is empty for datasets that are for evaluation only.
    """

    name: str
    classes: list[str]
    train: ImageSource
    val: ImageSource

    def file_bytes(self) -> int:
        """About the size of the image files, from a sample of them; 0 if images have none."""
        total = 0.0
        for source in (self.train, self.val):
            sample = np.arange(len(source))[:: 1 + len(source) // _SIZED_FILES]
            sizes = [_status(path)[0] for _, path in source.files(sample)]
            # A file per image, or all the files that hold them.
            total += sum(sizes) * (len(source) / len(sizes) if len(sizes) == len(sample) else 1)
        return round(total)


def open_digits(config: DataConfig) -> tuple[list[str], ImageSource, None]:
    """1,797 handwritten digits, 8×8, grey as RGB, as scikit-learn's `load_digits` has them."""
    return [str(digit) for digit in range(10)], ArraySource(*_digit_arrays(), "digits"), None


@cache
def _digit_arrays() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (1797, 8, 8, 3) uint8 and labels: the UCI repository's "Optical Recognition of
    Handwritten Digits" (Alpaydin and Kaynak, 1998; CC BY 4.0), its test part."""
    with np.load(Path(__file__).with_name("digits.npz")) as data:
        # 17 grey levels, 0 … 16, stretched to 0 … 255.
        grey = np.rint(data["images"] * (255 / 16)).astype(np.uint8)
        images, labels = np.repeat(grey[..., None], 3, axis=-1), data["labels"].astype(np.int64)
    for array in (images, labels):
        array.setflags(write=False)
    return images, labels


# As many bytes are read and digested in seconds; opening a file takes as long as so many more.
CONTENT_BYTES = 1_000_000_000

_OPENING_BYTES = 10_000

_DIGITS = 16  # of a file's digest; a time of modification has fewer

_MAX_TABLE_BYTES, _MOST_FILES = 1 << 28, 3_000_000

_SIZED_FILES = 500


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

    def differences(self, before: Path) -> str:
        """Which files changed, are gone or are new since the table in a file, in words."""
        old, new = _read_table(before), _parse_table(gzip.decompress(self.table))
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
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha1").hexdigest()[:_DIGITS]
    except (OSError, UserError):
        return "-"


def _parse_table(table: bytes) -> dict[str, str]:
    """Size and stamp of every file by its name."""
    found: dict[str, str] = {}
    for line in io.BytesIO(table):
        stamp, name = line.decode().rstrip("\n").rsplit("\t", 1)
        found[name[1:-1]] = stamp
        if len(found) > _MOST_FILES:
            raise ValueError(f"it names more than {_MOST_FILES:,} files")
    return found


def _read_table(path: Path) -> dict[str, str]:
    with wrap_errors(f"{path} is no record of images", OSError, ValueError):
        return _parse_table(gunzip(path, "record of images", _MAX_TABLE_BYTES))
