"""Dataset validation: the report of `data check`, and the check of a run's validation images.

Validation images are decoded before training, or mostly only their headers if there are many, so
that a damaged one is reported before the first step, not at the first evaluation.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from locality.data.classes import class_difference, imbalance
from locality.data.config import DataConfig, Decoding
from locality.data.datasets import open_data
from locality.data.decoding import BadImage, load, read_bytes, to_rgb
from locality.data.folder import find_splits, left_out, list_folder
from locality.data.resizing import MOST_CROPPED, cropped_share
from locality.data.sources import ImageSource
from locality.errors import ProcessKilled, UserError, printable, some
from locality.files import in_threads
from locality.machine import processors

# Files handed to a process at once: enough to amortise the overhead.
_CHUNK = 64


@dataclass
class CheckReport:
    """The report of `locality data check`.

    Attributes:
        folder: the folder or dataset checked.
        images: number of images per split ("train" and "val", or "all").
        classes: number of classes.
        bad_files: files that cannot be decoded, path → reason.
        empty_classes: classes without images, per split.
        class_difference: classes that only one split has, in words; empty if they agree.
        duplicates: (training file, validation file) with the same content.
        repeats: (earlier file, file) of the same split with the same content.
        ignored: files without an image suffix, or outside the class folders.
        loops: links back to a folder above them.
        modes: number of images per colour mode ("RGB", "L", "CMYK", …).
        sizes: minimum, 5%, median, 95% and maximum of "width" and "height" in pixels.
        cropped: mean share of an image's pixels outside its largest centre square.
        bits: (used, available) bits of 16-bit greys; None without any.
        counts: images per class, in the training split if there is one.
    """

    folder: str
    images: dict[str, int] = field(default_factory=dict)
    classes: int = 0
    bad_files: dict[str, str] = field(default_factory=dict)
    empty_classes: dict[str, list[str]] = field(default_factory=dict)
    class_difference: str = ""
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    repeats: list[tuple[str, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    modes: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    cropped: float = 0.0
    bits: tuple[int, int] | None = None
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether a run on this folder neither stops nor evaluates on training images."""
        return not (
            self.bad_files
            or self.class_difference
            or self.duplicates
            or any(self.empty_classes.values())
            or not any(self.images.values())
            or _black(self.bits)
        )

    def lines(self, most: int = 10) -> list[str]:
        """The report in words, with at most `most` examples of each fault."""
        counts = ", ".join(f"{number:,} in {part}" for part, number in self.images.items())
        text = [f"{self.folder}: {self.classes} classes, images: {counts}"]
        for side, values in self.sizes.items():
            spread = " · ".join(map(str, values))
            text.append(f"{side} (least · 5% · median · 95% · greatest): {spread} pixels")
        if self.modes:
            modes = ", ".join(f"{number:,} {mode}" for mode, number in self.modes.items())
            text.append(f"colour modes: {modes}")
        if self.cropped >= 0.005:
            squashed = "; `locality train FOLDER` squashes them" * (self.cropped > MOST_CROPPED)
            text.append(f"a square centre crop drops {self.cropped:.0%} of the pixels{squashed}")
        text.append(_unused_bits(self.bits))
        if self.class_difference:
            text.append(f"train and val have different classes: {self.class_difference}")
        for part, names in self.empty_classes.items():
            if names:
                text.append(f"classes of {part} without images ({len(names)}): {some(names, most)}")
        faults = {
            "files that cannot be decoded": [f"{p}: {why}" for p, why in self.bad_files.items()],
            "validation images that are also training images": [
                f"{val} = {train}" for train, val in self.duplicates
            ],
            "files that repeat an earlier one of the same part": [
                f"{again} = {earlier}" for earlier, again in self.repeats
            ],
            "links that lead back to a folder above, not followed": self.loops,
        }
        for what, found in faults.items():
            if found:
                text += [f"{what} ({len(found):,}):", *(f"  {item}" for item in found[:most])]
            if len(found) > most:
                text.append(f"  … and {len(found) - most:,} more")
        if self.ignored:
            kinds = {Path(path).suffix.lower(): path for path in reversed(self.ignored)}
            counts = left_out(self.ignored)
            text.append(f"files that are ignored{counts}, such as {some(kinds.values())}")
        text.append(imbalance(self.counts))
        text.append("nothing is wrong" if self.ok else "this folder needs attention")
        return [printable(line) for line in text if line]


class ImageInfo(NamedTuple):
    """Digest, size, colour mode and used bits of an image."""

    digest: bytes
    width: int
    height: int
    mode: str
    bits: tuple[int, int] | None

    @classmethod
    def of(cls, mode: str, image: Image.Image) -> ImageInfo:
        """Describe an image in RGB, whose file has another mode; equal pixels are duplicates."""
        content = f"{image.size}".encode() + image.tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        return cls(digest, image.width, image.height, mode, image.info.get("bits"))


def check(
    folder: Path | str | None,
    *,
    dataset: str = "folder",
    workers: int | None = None,
    progress: bool = True,
    **settings: Any,
) -> CheckReport:
    """Decode every image of a dataset and report its faults.

    Args:
        folder: a folder with train/ and val/ or with class folders; or another dataset's root.
        dataset: one of `DATASETS`.
        workers: processes; None uses all processors this process may use.
        progress: show a progress bar.
        settings: of `DataConfig`.
    """
    root = None if folder is None else str(folder)
    config = DataConfig(dataset, root, **settings)
    report = CheckReport(config.root or dataset)
    found: dict[str, tuple[list[str], ImageSource]]
    if dataset == "folder":
        listings = {part: list_folder(root) for part, root in find_splits(folder).items()}
        report.class_difference = class_difference({p: x.files for p, x in listings.items()})
        for each in listings.values():
            report.ignored += [str(each.root / path) for path in each.ignored]
            report.loops += [str(each.root / path) for path in each.loops]
        read = config.decoding
        found = {part: ([*x.files], x.source(x.files, read)) for part, x in listings.items()}
    else:
        splits = open_data(config, seed=0)
        found = {"train": (splits.classes, splits.train), "val": (splits.classes, splits.val)}
    report.classes = len(next(iter(found.values()))[0])
    good: list[ImageInfo] = []
    first: dict[str, dict[bytes, str]] = {part: {} for part in found}
    total = sum(len(source) for _, source in found.values())
    bar = tqdm(total=total, unit="image", disable=not progress, desc="checking")
    for part, (classes, source) in found.items():
        report.images[part] = len(source)
        by_class = source.counts(classes)
        report.counts = report.counts or by_class
        report.empty_classes[part] = [name for name, count in by_class.items() if not count]
        names = [source.describe(index) for index in range(len(source))]
        examined = _inspect_all(source, names, config.decoding, workers)
        for path, item in zip(names, examined, strict=True):
            bar.update()
            # Bad files are reported as such; all empty ones would be duplicates of each other.
            if isinstance(item, str):
                report.bad_files[path] = item
                continue
            good.append(item)
            if (earlier := first[part].setdefault(item.digest, path)) != path:
                report.repeats.append((earlier, path))
            if part == "val" and item.digest in first["train"]:
                report.duplicates.append((first["train"][item.digest], path))
    bar.close()
    report.modes = dict(Counter(item.mode for item in good).most_common())
    report.bits = _most_used(item.bits for item in good)
    report.cropped = float(np.mean([cropped_share(i.width, i.height) for i in good] or [0]))
    for side in ("width", "height") if good else ():
        sides = [getattr(item, side) for item in good]
        spread = np.percentile(sides, (0, 5, 50, 95, 100), method="nearest")
        report.sizes[side] = spread.astype(int).tolist()
    return report


def _inspect_all(
    source: ImageSource, names: list[str], decoding: Decoding, workers: int | None
) -> Iterator[ImageInfo | str]:
    """Info on each image, or why it cannot be decoded; image files are read in parallel."""
    if names != [path for _, path in source.files(np.arange(len(source)))]:
        yield from (_inspect_decoded(source, index) for index in range(len(source)))
        return
    examine = partial(_inspect, decoding=decoding)
    workers = min(workers or processors(), -(-len(names) // _CHUNK))
    if workers <= 1:
        yield from map(examine, names)
        return
    # Processes rather than threads: much of decoding holds the GIL.
    try:
        with ProcessPoolExecutor(workers) as pool:
            yield from pool.map(examine, names, chunksize=_CHUNK)
    except BrokenProcessPool as error:
        raise ProcessKilled("a process that checks images") from error


def _inspect(path: str, decoding: Decoding) -> ImageInfo | str:
    try:
        data = read_bytes(path)
        image = load(data, decoding)
        return ImageInfo.of(image.mode, to_rgb(image, decoding))
    except BadImage as error:
        return str(error)


def _inspect_decoded(source: ImageSource, index: int) -> ImageInfo | str:
    try:
        image = source.read(index)
        return ImageInfo.of(image.mode, image)
    except BadImage as error:
        return str(error)


def _most_used(bits: Iterable[tuple[int, int] | None]) -> tuple[int, int] | None:
    return min(filter(None, bits), key=lambda each: each[1] - each[0], default=None)


def _black(bits: tuple[int, int] | None) -> bool:
    """Whether 16-bit greys become black in 8 bits."""
    return bits is not None and 0 < bits[0] <= bits[1] - 8


def _unused_bits(bits: tuple[int, int] | None) -> str:
    """Advice on 16-bit greys that leave more than one bit unused; "" otherwise."""
    used, there = bits or (0, 0)
    if not 0 < used < there - 1:
        return ""
    proposed = max(8, used)
    return (
        f"16-bit greys use {used} of {there} bits and look {'black' if _black(bits) else 'dark'}; "
        f"if {2**proposed - 1} is their white, train with --data.grey_bits {proposed}"
    )


# One processor decodes this many images of ImageNet's size in half a minute.
MAX_DECODED = 5_000


def verify(source: ImageSource) -> str:
    """Check that all validation images can be read.

    Returns:
        a summary for the header of a run; empty for images in memory.

    Raises:
        UserError: images cannot be read, or are black in 8 bits.
    """
    if source.pixels is not None:
        return ""
    whole = len(source) <= MAX_DECODED
    bits: list[tuple[int, int] | None] = []

    def problem(index: int) -> str | None:
        try:
            if whole or index % 100 == 0:
                bits.append(source.read(index).info.get("bits"))
            else:
                source.check_header(index)
        except BadImage as error:
            return str(error)
        return None

    # Decoding suppresses warnings, which is not thread-safe: restored here.
    with warnings.catch_warnings():
        found = enumerate(in_threads(problem, range(len(source))))
        bad = {source.describe(index): reason for index, reason in found if reason is not None}
    if bad:
        raise UserError(
            f"{len(bad)} of {len(source):,} validation images cannot be read: {some(list(bad))} "
            f"({next(iter(bad.values()))}); repair or remove them; `locality train` also takes "
            f"--data.on_bad_image skip"
        )
    unused = _unused_bits(used := _most_used(bits))
    if _black(used):
        raise UserError(f"the validation images are black: {unused}")
    done = f"all {len(source):,} validation images can be decoded"
    if not whole:
        done = f"validation images: {len(source):,} headers read, one in a hundred decoded"
    return f"{done}; {unused}" if unused else done
