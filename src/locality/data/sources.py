"""Labelled images with random access, and the names of their classes.

Classes are sorted as text, by code point ("1", "10", "2"), as torchvision, Keras and `datasets`
number class folders; runs and saved models record their own order. Labels and outputs are always
matched by name.

The fingerprint of a run's images tells a resumed run whether they have changed. Reading a million
files takes hours, their sizes and modification times 6 s; so large datasets are compared by these,
and small ones by content, which copying does not change.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from locality.data.config import DEFAULT_DECODING, Decoding
from locality.data.decoding import BadImage, decode, image_size, read_bytes, shrink
from locality.data.sampling import evenly
from locality.errors import UserError, some, wrap_errors
from locality.files import gunzip, in_threads, open_file
from locality.machine import memory

if TYPE_CHECKING:
    import torch


# Hashing this many bytes takes seconds; opening a file takes as long as hashing _OPENING_BYTES.
CONTENT_BYTES = 1_000_000_000
_OPENING_BYTES = 10_000
# Decoding images of this many bytes takes seconds.
COMPARED_BYTES = 100_000_000
# Of the machine's memory for shrunk images, and seconds to read them before processes start.
_KEPT_SHARE, _FILLING = 8, 20.0
_PIXEL_BYTES = 4  # of a Pillow image in RGB
_DIGITS = 16  # of a digest; modification times have fewer
_MAX_TABLE_BYTES = 1 << 28


def kept_bytes() -> int:
    """Memory for shrunk images: an eighth of the machine's, divided between its ranks."""
    return memory("cpu") // _KEPT_SHARE // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class ImageSource(ABC):
    """Labelled images with random access.

    Attributes:
        labels: (n,) int64, the class of each image.
        pixels: (n, 3, H, W) uint8 tensor if all images are in memory and of one size, else None.
        decoding: how encoded images are decoded.
        numbered: whether the classes are numbers without names.
        group_names: the cell of `DataConfig.group_column` for each image, if that is given.
        groups: (n,) int64, equal for images of one subject; None without groups.
    """

    labels: npt.NDArray[np.int64]
    pixels: torch.Tensor | None = None
    numbered: bool = False
    decoding: Decoding = DEFAULT_DECODING
    group_names: Sequence[str] | None = None
    groups: npt.NDArray[np.int64] | None = None
    _room: int

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int, least: int | None = None) -> Image.Image:
        """Image `index` in RGB.

        Args:
            index: its number.
            least: shrink it to this shorter side and keep it in memory, if there is room.

        Raises:
            BadImage: the image cannot be decoded.
        """
        if least is None:
            return decode(self.read_bytes(index), self.decoding)
        if (kept := self._kept.get((index, least))) is not None:
            return kept
        image = decode(self.read_bytes(index), replace(self.decoding, least=least))
        image = shrink(image, least)
        cost = _PIXEL_BYTES * image.width * image.height
        if cost <= self._room:
            self._room -= cost
            self._kept[index, least] = image = image.copy()  # without its file
        return image

    @cached_property
    def _kept(self) -> dict[tuple[int, int], Image.Image]:
        self._room = kept_bytes()
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the images kept, which another process reads again."""
        return {name: value for name, value in vars(self).items() if name != "_kept"}

    def size(self, index: int) -> tuple[int, int]:
        """(width, height) of image `index` in pixels, of which only the header is read.

        Raises:
            BadImage: it cannot be read.
        """
        return image_size(self.read_bytes(index), self.decoding)

    def keep(self, least: int) -> None:
        """Read images into memory that forked processes share, for at most `_FILLING` seconds."""
        end = time.monotonic() + _FILLING

        def keep(index: int) -> None:
            if time.monotonic() < end and self.room >= _PIXEL_BYTES * least**2:
                with contextlib.suppress(BadImage):
                    self.read(index, least)

        with warnings.catch_warnings():  # decoding suppresses them, which is not thread-safe
            for _ in in_threads(keep, range(len(self))):
                pass

    @property
    def room(self) -> int:
        """Bytes left for images kept in memory."""
        _ = self._kept  # sets it
        return self._room

    def divide(self, processes: int) -> None:
        """Divide the room for further images between this and other processes."""
        _ = self._kept
        self._room //= processes

    def read_bytes(self, index: int) -> bytes:
        """The encoded image; empty if there is none."""
        return b""

    @abstractmethod
    def describe(self, index: int) -> str:
        """The name of image `index` in messages: its path if it has one."""

    def files(self, indices: npt.NDArray[np.int64]) -> Iterable[tuple[str, str]]:
        """The files that hold the images at `indices`: names within the dataset, and paths.

        Names do not depend on the dataset's location. Empty if images have no files.
        """
        return ()

    def read_or_raise(self, index: int, least: int | None = None) -> Image.Image:
        """As `read`, but an error names the image.

        Raises:
            UserError: the image cannot be decoded.
        """
        with wrap_errors(f"{self.describe(index)} cannot be read", BadImage):
            return self.read(index, least)

    def counts(self, classes: Sequence[str]) -> dict[str, int]:
        """Number of images by class."""
        counts = np.bincount(self.labels, minlength=len(classes)).tolist()
        return dict(zip(classes, counts, strict=True))

    def originals(self) -> npt.NDArray[np.int64]:
        """For each image the index of the first equal one; itself if images are not compared."""
        return np.arange(len(self))

    def subset(self, indices: npt.ArrayLike) -> ImageSource:
        """The images at `indices`, in that order."""
        return Subset(self, np.asarray(indices, dtype=np.int64))

    def evenly(self, most: int) -> ImageSource:
        """At most `most` images, evenly within each class."""
        return self.subset(evenly(self.labels, most))


def first_equal(keys: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """For each key the index of the first one equal to it."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return first[inverse]


class Subset(ImageSource):
    """Some images of another source, in the order given."""

    def __init__(self, source: ImageSource, indices: npt.NDArray[np.int64]) -> None:
        self.labels, self.numbered = source.labels[indices], source.numbered
        self.groups = None if source.groups is None else source.groups[indices]
        if isinstance(source, Subset):
            # Flatten nested subsets.
            indices = source.indices[indices]
            source = source.source
        self.source: ImageSource = source
        self.indices: npt.NDArray[np.int64] = indices
        if source.pixels is not None:
            self.pixels = source.pixels[indices]

    def read(self, index: int, least: int | None = None) -> Image.Image:
        return self.source.read(int(self.indices[index]), least)

    def size(self, index: int) -> tuple[int, int]:
        return self.source.size(int(self.indices[index]))

    @property
    def room(self) -> int:
        return self.source.room

    def divide(self, processes: int) -> None:
        self.source.divide(processes)

    def read_bytes(self, index: int) -> bytes:
        return self.source.read_bytes(int(self.indices[index]))

    def describe(self, index: int) -> str:
        return self.source.describe(int(self.indices[index]))

    def files(self, indices: npt.NDArray[np.int64]) -> Iterable[tuple[str, str]]:
        return self.source.files(self.indices[indices])

    def originals(self) -> npt.NDArray[np.int64]:
        return first_equal(self.source.originals()[self.indices])


class ArraySource(ImageSource):
    """Images of one size, held in memory.

    Args:
        images: (n, H, W, 3) uint8.
        labels: (n,) integers.
        name: the collection's name in messages.
    """

    pixels: torch.Tensor

    def __init__(self, images: npt.NDArray[np.uint8], labels: npt.ArrayLike, name: str) -> None:
        self.labels = np.asarray(labels, dtype=np.int64)
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
            raise UserError(
                f"{name}: images are {images.shape} {images.dtype}; give (n, H, W, 3) uint8"
            )
        if len(images) != len(self.labels):
            raise UserError(f"{name}: {len(images)} images but {len(self.labels)} labels")
        import torch  # not needed to list and check files

        self.pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        self.name = name

    def read(self, index: int, least: int | None = None) -> Image.Image:
        return Image.fromarray(self.pixels[index].permute(1, 2, 0).contiguous().numpy())

    def size(self, index: int) -> tuple[int, int]:
        return self.pixels.shape[-1], self.pixels.shape[-2]

    def describe(self, index: int) -> str:
        return f"{self.name}[{index}]"


class FileSource(ImageSource):
    """Image files below one folder.

    Args:
        root: the folder.
        paths: paths of the files relative to it.
        labels: (n,) integers.
        decoding: decoding settings.
    """

    def __init__(
        self,
        root: Path | str,
        paths: Iterable[str],
        labels: npt.ArrayLike,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> None:
        self.root = str(root)
        # One array: Python strings take 200 bytes each, and reference counting would make every
        # worker copy them.
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.decoding = decoding

    def path(self, index: int) -> str:
        """The path of image `index` relative to the root."""
        return os.fsdecode(self._paths[index])

    def read_bytes(self, index: int) -> bytes:
        return read_bytes(self.describe(index))

    def files(self, indices: npt.NDArray[np.int64]) -> Iterator[tuple[str, str]]:
        for index in indices.tolist():
            path = self.path(index)
            yield path, os.path.join(self.root, path)

    def describe(self, index: int) -> str:
        return os.path.join(self.root, self.path(index))

    def originals(self) -> npt.NDArray[np.int64]:
        return self._originals

    @cached_property
    def _originals(self) -> npt.NDArray[np.int64]:
        return first_equal(_identities(self))


class Examined(NamedTuple):
    """What is known of an image.

    Attributes:
        fault: why it cannot be decoded; "" if it can.
        digest: the same for equal pixels; of 16-bit greys, for equal files.
        width, height: in pixels.
        bits: (used, available) bits of a 16-bit grey.
        grey: (64,) mean greys of 8×8 areas, 0 … 255.
    """

    fault: str = ""
    digest: int = 0
    width: int = 0
    height: int = 0
    bits: tuple[int, int] | None = None
    grey: npt.NDArray[np.uint8] = np.zeros(64, np.uint8)


def examine(source: ImageSource, least: int | None = None) -> Iterator[Examined]:
    """Decode all images, and keep them as `ImageSource.read` does if `least` is given."""

    def examined(index: int) -> Examined:
        try:
            image = source.read(index, least)
            bits = image.info.get("bits")
            # RGB has only the upper byte of 16-bit greys.
            data = source.read_bytes(index) if bits else f"{image.size}".encode() + image.tobytes()
        except BadImage as error:
            return Examined(str(error))
        grey = np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX)).ravel()
        return Examined("", _digest(data), *image.size, bits, grey)

    with warnings.catch_warnings():  # decoding suppresses them, which is not thread-safe
        yield from in_threads(examined, range(len(source)))


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _identities(source: FileSource) -> npt.NDArray[np.uint64]:
    """A key for every file, the same for equal pixels; of many or large files, for equal bytes."""
    paths = [source.describe(index) for index in range(len(source))]
    status = list(in_threads(_status, paths))
    sizes = Counter(size for size, _ in status)

    def key(index: int) -> int:
        with contextlib.suppress(BadImage):
            if sizes[status[index][0]] > 1:
                return _digest(source.read_bytes(index))
        return 0

    if sum(size + _OPENING_BYTES for size, _ in status) <= COMPARED_BYTES:
        keys: Iterable[int] = (image.digest for image in examine(source))
    else:
        keys = in_threads(key, range(len(paths)))
    # A file that cannot be read, or is alone in its size, equals no other.
    keys = [key or _digest(os.fsencode(path)) for key, path in zip(keys, paths, strict=True)]
    return np.array(keys, dtype=np.uint64)


@dataclass(frozen=True)
class DataSplits:
    """A dataset's classes, training and validation images.

    `train` is empty for evaluation-only datasets.
    """

    name: str
    classes: list[str]
    train: ImageSource
    val: ImageSource

    def notes(self, balanced: bool = False) -> list[str]:
        """Notes on classes without images and, unless training balances them, on uneven ones."""
        notes = []
        for part, source in (("training", self.train), ("validation", self.val)):
            if empty := [name for name, count in source.counts(self.classes).items() if not count]:
                notes.append(
                    f"{len(empty)} of {len(self.classes):,} classes have no {part} images: "
                    f"{some(empty)}"
                )
        advice = "" if balanced else imbalance(self.train.counts(self.classes))
        return [*notes, advice] if advice else notes


@dataclass(frozen=True)
class ImageFingerprint:
    """The fingerprint of a run's images.

    Attributes:
        fingerprint: the text stored in checkpoints: digests of the classes and all labels, in
            order, and of the images in memory and `table`.
        table: a line per file in order of use: size, digest or modification time, and split/name,
            separated by tabs; gzipped.
    """

    fingerprint: str
    table: bytes

    @classmethod
    def of(cls, splits: DataSplits) -> ImageFingerprint:
        """Compute the fingerprint of a run's images."""
        labels = hashlib.sha256(json.dumps(splits.classes).encode())
        files = hashlib.sha256()
        for source in (splits.train, splits.val):
            labels.update(source.labels.tobytes() + b"|")
            if source.pixels is not None:
                files.update(source.pixels.numpy().tobytes())
        table = _table(splits).encode()
        files.update(table)
        digests = "-".join(digest.hexdigest()[:_DIGITS] for digest in (labels, files))
        return cls(digests, gzip.compress(table, 1, mtime=0))

    def differences(self, before: Path) -> str:
        """The files that changed, are gone or are new since the table in `before`, in words."""
        old, new = _read_table(before), _parse_table(gzip.decompress(self.table))
        gone, added = ([n for n in x if n not in y] for x, y in ((old, new), (new, old)))
        moved = set(map(_inside, gone)) & set(map(_inside, added))
        changes = {
            "changed": [name for name in new if name in old and old[name] != new[name]],
            "gone": [name for name in gone if _inside(name) not in moved],
            "new": [name for name in added if _inside(name) not in moved],
            "on the other side of the split": sorted(moved),
        }
        return "; ".join(
            f"{len(names):,} {what}: {some(names)}" for what, names in changes.items() if names
        )

    def learnt(self, before: Path) -> int:
        """How many validation images are training images in the table of another run; none if the
        files are too many for digests."""
        new, old = _parse_table(gzip.decompress(self.table)), _read_table(before)
        known = {stamp for name, stamp in old.items() if name.startswith("train/")}
        return sum(
            stamp in known and len(stamp.partition("\t")[2]) == _DIGITS
            for name, stamp in new.items()
            if name.startswith("val/")
        )


def _files(splits: DataSplits) -> list[tuple[str, str]]:
    """Names, with their split, and paths of all files, in order of use."""
    return [
        (f"{part}/{name}", path)
        for part, source in (("train", splits.train), ("val", splits.val))
        for name, path in source.files(np.arange(len(source)))
    ]


def _table(splits: DataSplits) -> str:
    files = _files(splits)
    status = list(in_threads(_status, (path for _, path in files)))
    stamps: Iterable[str] = (f"{seconds}" for _, seconds in status)
    if sum(_OPENING_BYTES + size for size, _ in status) <= CONTENT_BYTES:
        stamps = in_threads(_content, (path for _, path in files))
    return "".join(
        f"{size}\t{stamp}\t{name!r}\n"
        for (name, _), (size, _), stamp in zip(files, status, stamps, strict=True)
    )


def _status(path: str) -> tuple[int, int]:
    """Size in bytes and modification time in whole seconds, as archives preserve it."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1  # reported when the image is read
    return status.st_size, int(status.st_mtime)


def _content(path: str) -> str:
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha1").hexdigest()[:_DIGITS]
    except (OSError, UserError):
        return "-"


def has_files(table: Path, splits: DataSplits) -> bool:
    """Whether a run's record is of these files, by split, name and size; none is opened."""
    files = _files(splits)
    status = in_threads(_status, (path for _, path in files))
    now = {repr(name)[1:-1]: f"{size}" for (name, _), (size, _) in zip(files, status, strict=True)}
    return now == {name: of.partition("\t")[0] for name, of in _read_table(table).items()}


def recorded_files(table: Path) -> set[tuple[str, str]]:
    """Name, without its split, and size of the files in a run's record of images, if any."""
    read = _read_table(table) if table.exists() else {}
    return {(_inside(name), stamp.partition("\t")[0]) for name, stamp in read.items()}


def _inside(name: str) -> str:
    """A name in a table without its split."""
    return name.partition("/")[2]


def _read_table(path: Path) -> dict[str, str]:
    with wrap_errors(f"{path} is not a record of images", OSError, ValueError):
        return _parse_table(gunzip(path, "record of images", _MAX_TABLE_BYTES))


def _parse_table(table: bytes) -> dict[str, str]:
    """Size and stamp of every file by its name."""
    rows = (line.rsplit("\t", 1) for line in table.decode().splitlines())
    return {name[1:-1]: stamp for stamp, name in rows}


# -- names of classes ------------------------------------------------------------------------------


def joinable(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """`names`, if classes can be matched by them; None without names or with duplicates."""
    return names if names is not None and len(set(names)) == len(names) else None


def class_difference(parts: Mapping[str, Iterable[str]]) -> str:
    """The classes that some splits lack, in words; empty if they agree."""
    classes = {part: set(names) for part, names in parts.items()}
    shared = set.intersection(*classes.values())
    only = {part: sorted(names - shared) for part, names in classes.items()}
    return "; ".join(f"only {part} has {some(names)}" for part, names in only.items() if names)


def imbalance(counts: Mapping[str, int]) -> str:
    """Advice on classes of very different size; "" otherwise.

    Args:
        counts: images per class.
    """
    held = {name: count for name, count in counts.items() if count}
    if not held:
        return ""
    least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
    if held[most] < 10 * held[least]:
        return ""
    return (
        f"classes have from {held[least]:,} ({least}) to {held[most]:,} images ({most}); rare "
        f"classes hardly change top-1: look at each class's accuracy, add images, or train with "
        f"--objective.class_weights true"
    )


def numbered(names: Sequence[str]) -> str:
    """The first three classes with their numbers, in words."""
    shown = [f"{number} is '{name}'" for number, name in enumerate(names[:3])]
    return ", ".join([*shown, *(["…"] if len(names) > 3 else [])])
