"""Dataset validation: the report of `data check`, and the check of a run's validation images.

Validation images are decoded before training, of many an even choice, so that a damaged one is
reported before the first step, not at the first evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from locality.data.config import DataConfig, InputConfig
from locality.data.datasets import open_data
from locality.data.preprocessing import MOST_CROPPED, cropped_share
from locality.data.sources import Examined, ImageSource, examine, imbalance
from locality.errors import UserError, printable, some

# One processor decodes this many images of ImageNet's size in half a minute.
MAX_DECODED = 5_000


@dataclass
class CheckReport:
    """The report of `locality data check`.

    Attributes:
        folder: the folder or dataset checked.
        images: number of images per split ("train" and "val", or "all").
        classes: number of classes.
        bad_files: files that cannot be decoded, path → reason.
        empty_classes: classes without images, per split.
        duplicates: (training file, validation file) with the same content.
        repeats: (earlier file, file) of the same split with the same content.
        sizes: minimum, 5%, median, 95% and maximum of "width" and "height" in pixels.
        cropped: mean share of an image's pixels outside its largest centre square.
        greys: advice on 16-bit greys that leave bits unused, if any.
        black: whether they become black.
        counts: images per class, in the training split if there is one.
    """

    folder: str
    images: dict[str, int] = field(default_factory=dict)
    classes: int = 0
    bad_files: dict[str, str] = field(default_factory=dict)
    empty_classes: dict[str, list[str]] = field(default_factory=dict)
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    repeats: list[tuple[str, str]] = field(default_factory=list)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    cropped: float = 0.0
    greys: str = ""
    black: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether a run on this folder neither stops nor evaluates on training images."""
        return not (
            self.bad_files
            or self.duplicates
            or any(self.empty_classes.values())
            or not any(self.images.values())
            or self.black
        )

    def lines(self, most: int = 10) -> list[str]:
        """The report in words, with at most `most` examples of each fault."""
        counts = ", ".join(f"{number:,} in {part}" for part, number in self.images.items())
        text = [f"{self.folder}: {self.classes} classes, images: {counts}"]
        for side, values in self.sizes.items():
            spread = " · ".join(map(str, values))
            text.append(f"{side} (least · 5% · median · 95% · greatest): {spread} pixels")
        if self.cropped >= 0.005:
            squashed = "; `locality train FOLDER` squashes them" * (self.cropped > MOST_CROPPED)
            text.append(f"a square centre crop drops {self.cropped:.0%} of the pixels{squashed}")
        text.append(self.greys)
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
        }
        for what, items in faults.items():
            if items:
                text += [f"{what} ({len(items):,}):", *(f"  {item}" for item in items[:most])]
            if len(items) > most:
                text.append(f"  … and {len(items) - most:,} more")
        text.append(imbalance(self.counts))
        text.append("nothing is wrong" if self.ok else "this folder needs attention")
        return [printable(line) for line in text if line]


def check(
    folder: Path | str | None, *, dataset: str = "folder", progress: bool = True, **settings: Any
) -> CheckReport:
    """Decode every image of a dataset and report its faults.

    Args:
        folder: a folder with train/ and val/ or with class folders; or another dataset's root.
        dataset: one of `DATASETS`.
        progress: show a progress bar.
        settings: of `DataConfig`.
    """
    root = None if folder is None else str(folder)
    config = DataConfig(dataset, root, **settings)
    report = CheckReport(config.root or dataset)
    splits = open_data(config, seed=0, whole=True)
    # Without a split, all images are both.
    parts = {"train": splits.train, "val": splits.val}
    parts = {"all": splits.train} if splits.train is splits.val else parts
    report.classes = len(splits.classes)
    good: list[Examined] = []
    first: dict[str, dict[int, str]] = {part: {} for part in parts}
    for part, source in parts.items():
        report.images[part] = len(source)
        by_class = source.counts(splits.classes)
        report.counts = report.counts or by_class
        report.empty_classes[part] = [name for name, count in by_class.items() if not count]
        bar = tqdm(examine(source), f"checking {part}", len(source), disable=not progress)
        for index, image in enumerate(bar):
            path = source.describe(index)
            if image.fault:
                report.bad_files[path] = image.fault
                continue
            good.append(image)
            if (earlier := first[part].setdefault(image.digest, path)) != path:
                report.repeats.append((earlier, path))
            if part == "val" and image.digest in first["train"]:
                report.duplicates.append((first["train"][image.digest], path))
    report.greys, report.black = _unused_bits(good)
    report.cropped = _cropped(good)
    for side in ("width", "height") if good else ():
        sides = [getattr(image, side) for image in good]
        spread = np.percentile(sides, (0, 5, 50, 95, 100), method="nearest")
        report.sizes[side] = spread.astype(int).tolist()
    return report


def verify(source: ImageSource, preprocessing: InputConfig | None = None) -> str:
    """Check that validation images can be read: all, or `MAX_DECODED` of more.

    Args:
        source: the images.
        preprocessing: says which of their pixels a centre crop drops, if many.

    Returns:
        a summary for the header of a run; empty for images in memory.

    Raises:
        UserError: images cannot be read, or are black in 8 bits.
    """
    if source.pixels is not None:
        return ""
    count = len(source)
    source = source.subset(np.arange(count)[:: 1 + (count - 1) // MAX_DECODED])
    examined = [*examine(source)]
    bad = [index for index, image in enumerate(examined) if image.fault]
    if bad:
        raise UserError(
            f"{len(bad)} of {len(source):,} validation images cannot be read: "
            f"{some(map(source.describe, bad))} ({examined[bad[0]].fault}); repair or remove them; "
            f"`locality train` also takes --data.on_bad_image skip"
        )
    unused, black = _unused_bits(examined)
    if black:
        raise UserError(f"the validation images are black: {unused}")
    notes = [f"all {count:,} validation images can be decoded"]
    if len(source) < count:
        notes = [f"{len(source):,} of {count:,} validation images were decoded"]
    if unused:
        notes.append(unused)
    if preprocessing is not None and preprocessing.crop_mode == "center":
        dropped = _cropped(examined, preprocessing.size)
        if dropped > MOST_CROPPED:
            notes.append(
                f"the centre crop drops {dropped:.0%} of their pixels (--input.crop_mode squash "
                f"keeps them)"
            )
    return "; ".join(notes)


def _cropped(images: Iterable[Examined], shape: tuple[int, int] = (1, 1)) -> float:
    """The mean share of pixels outside the largest centre crop of a (height, width) shape."""
    shares = [cropped_share(image.width, image.height, shape) for image in images]
    return float(np.mean(shares)) if shares else 0.0


def _unused_bits(images: Iterable[Examined]) -> tuple[str, bool]:
    """Advice on 16-bit greys that leave more than one bit unused, and whether they are black."""
    bits = [image.bits for image in images if image.bits is not None]
    used, there = min(bits, key=lambda pair: pair[1] - pair[0], default=(0, 0))
    if not 0 < used < there - 1:
        return "", False
    proposed, black = max(8, used), used <= there - 8
    return (
        f"16-bit greys use {used} of {there} bits and look {'black' if black else 'dark'}; "
        f"if {2**proposed - 1} is their white, train with --data.grey_bits {proposed}"
    ), black
