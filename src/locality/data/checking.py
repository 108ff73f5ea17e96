"""Faults of images: the report of `locality data check`, and checks before a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist
from tqdm import tqdm

from locality.data.config import DataConfig
from locality.data.datasets import open_data
from locality.data.decoding import MOST_CROPPED, cropped_share
from locality.data.sampling import Indices
from locality.data.sources import Examined, ImageSource, examine, imbalance
from locality.errors import UserError, counted, printable, some

# One processor decodes this many images of ImageNet's size in half a minute.
MAX_DECODED = 5_000
MAX_COMPARED = 2_000
"""Up to so many training images are decoded and compared before a run that shrinks them."""
_NEAR, _MOST_PAIRS = 3, 50_000_000

_NO_FAULTS = "no faults: all images can be decoded, no class is empty, no image is in {}two classes"


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
        conflicts: (file, class, file, class) with the same content and different classes.
        copies: (file, file) with the same content, of one split and class.
        sizes: minimum, 5%, median, 95% and maximum of "width" and "height" in pixels.
        cropped: mean share of an image's pixels outside its largest centre square.
        black: whether 16-bit greys become black.
        advice: on unused bits, near-duplicates across the split and uneven classes.
    """

    folder: str
    images: dict[str, int] = field(default_factory=dict)
    classes: int = 0
    bad_files: dict[str, str] = field(default_factory=dict)
    empty_classes: dict[str, list[str]] = field(default_factory=dict)
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    conflicts: list[tuple[str, str, str, str]] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    cropped: float = 0.0
    black: bool = False
    advice: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether a run on this folder neither stops nor evaluates on training images."""
        faults = (self.bad_files, self.duplicates, self.conflicts, *self.empty_classes.values())
        usable = any(self.images.values()) and self.classes != 1 and not self.black
        return usable and not any(faults)

    def lines(self, most: int = 10) -> list[str]:
        """The report in words, with at most `most` examples of each fault."""
        counts = ", ".join(f"{number:,} in {part}" for part, number in self.images.items())
        text = [f"{self.folder}: {counted(self.classes, 'class')}, images: {counts}"]
        for side, values in self.sizes.items():
            spread = " · ".join(map(str, values))
            text.append(f"{side} (least · 5% · median · 95% · greatest): {spread} pixels")
        if self.cropped >= 0.005:
            squashed = "; `locality train FOLDER` squashes them" * (self.cropped > MOST_CROPPED)
            text.append(f"a square centre crop drops {self.cropped:.0%} of the pixels{squashed}")
        for part, names in self.empty_classes.items():
            if names:
                text.append(f"classes of {part} without images ({len(names)}): {some(names, most)}")
        faults = {
            "equal images of two classes": [
                f"{one} ({own}) = {two} ({other})" for one, own, two, other in self.conflicts
            ],
            "files that cannot be decoded": [f"{p}: {why}" for p, why in self.bad_files.items()],
            "validation images that are also training images": [
                f"{val} = {train}" for train, val in self.duplicates
            ],
            "copies": [f"{one} = {two}" for one, two in self.copies],
        }
        for what, items in faults.items():
            if items:
                text += [f"{what} ({len(items):,}):", *(f"  {item}" for item in items[:most])]
            if len(items) > most:
                text.append(f"  … and {len(items) - most:,} more")
        one = "a run needs at least two classes: a folder of images for each" * (self.classes == 1)
        text += [one, *self.advice]
        faultless = _NO_FAULTS.format("both splits or " if len(self.images) > 1 else "")
        text.append(faultless if self.ok else "this folder needs attention")
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
    config = DataConfig(dataset, None if folder is None else str(folder), **settings)
    report = CheckReport(config.root or dataset)
    splits = open_data(config, seed=0, whole=True)
    # Without a split, all images are both.
    parts = {"train": splits.train, "val": splits.val}
    parts = {"all": splits.train} if splits.train is splits.val else parts
    report.classes = len(splits.classes)
    good: dict[str, list[Examined]] = {part: [] for part in parts}
    seen: dict[int, tuple[str, str, str]] = {}
    for part, source in parts.items():
        report.images[part] = len(source)
        by_class = source.counts(splits.classes)
        report.empty_classes[part] = [name for name, count in by_class.items() if not count]
        bar = tqdm(examine(source), f"checking {part}", len(source), disable=not progress)
        for index, image in enumerate(bar):
            path = source.describe(index)
            if image.fault:
                report.bad_files[path] = image.fault
                continue
            good[part].append(image)
            label = splits.classes[source.labels[index]]
            if image.digest not in seen:
                seen[image.digest] = path, label, part
                continue
            first, other, where = seen[image.digest]
            if label != other:
                report.conflicts.append((first, other, path, label))
            elif part != where:
                report.duplicates.append((first, path))
            else:
                report.copies.append((first, path))
    every = [image for images in good.values() for image in images]
    unused, report.black = _unused_bits(every)
    report.advice = [unused, imbalance(splits.train.counts(splits.classes))]
    if "val" in good and splits.train.groups is None:
        report.advice.append(near_copies(good["train"], good["val"]))
    if every:
        report.cropped = float(np.mean([cropped_share(x.width, x.height) for x in every]))
    for side in ("width", "height") if every else ():
        sides = [getattr(image, side) for image in every]
        spread = np.percentile(sides, (0, 5, 50, 95, 100), method="nearest")
        report.sizes[side] = spread.astype(int).tolist()
    return report


def verify(
    source: ImageSource, least: int | None = None, part: str = "validation", allowed: int = 0
) -> tuple[list[str], list[Examined]]:
    """Check before training that images can be read: all, or `MAX_DECODED` of more.

    Args:
        source: the images.
        least: keep them in memory, see `ImageSource.read`.
        part: their name in messages.
        allowed: how many may be unreadable.

    Returns:
        notes for the header of a run, and what is known of the images; empty for images in memory.

    Raises:
        UserError: too many images cannot be read, or all are black in 8 bits.
    """
    if source.pixels is not None:
        return [], []
    if not (count := len(source)):
        raise UserError(f"there are no {part} images; give fewer folds or a larger part")
    source = source.subset(np.arange(count)[:: 1 + (count - 1) // MAX_DECODED])
    examined = [*examine(source, least)]
    bad = [index for index, image in enumerate(examined) if image.fault]
    notes = [f"all {count:,} {part} images can be decoded"]
    if len(source) < count:
        notes = [f"{len(source):,} of {count:,} {part} images were decoded"]
    if bad:
        what = (
            f"{len(bad)} of {len(source):,} {part} images cannot be read: "
            f"{some(map(source.describe, bad))} ({examined[bad[0]].fault})"
        )
        if len(bad) > allowed:
            raise UserError(
                f"{what}; repair or remove them; `locality train` also takes "
                f"--data.on_bad_image skip"
            )
        notes = [f"{what}; they are left out"]
    unused, black = _unused_bits(examined)
    if black:
        raise UserError(f"the {part} images are black: {unused}")
    return [*notes, *filter(None, [unused])], examined


def near_copies(train: Sequence[Examined], val: Sequence[Examined]) -> str:
    """A warning if validation images nearly equal training images; "" otherwise.

    Nearly equal are images whose 8×8 mean greys differ by less than `_NEAR` of 255 on average: the
    same photograph, cropped or compressed anew, or the next picture of a series.
    """
    ours, theirs = _greys(train), _greys(val)
    theirs = theirs[:: 1 + len(ours) * len(theirs) // _MOST_PAIRS]
    if not len(ours) or not len(theirs):
        return ""
    near = int((cdist(theirs, ours, "cityblock").min(axis=1) < 64 * _NEAR).sum())
    if not near:
        return ""
    return (
        f"{near:,} of {len(theirs):,} validation images nearly equal a training image, so accuracy "
        f"may be too high; keep the images of a subject on one side: move them, or, if there is no "
        f"val/, give what their names share, such as --data.group_by '([^_]+)_', or the column of "
        f"a table, --data.group_column NAME"
    )


def mirror_classes(train: Sequence[Examined], labels: Indices, classes: Sequence[str]) -> str:
    """A warning if mirror images of a class are images of another, which flips confuse; else "".

    Nearest neighbours by 8×8 mean greys decide: most of a class are nearest to their own class, and
    their mirror images to the other.
    """
    known = np.array([not image.fault for image in train], dtype=bool)
    if not known.any() or len(train) > MAX_COMPARED:
        return ""
    labels, greys, count = labels[known], _greys(train), len(classes)
    shares = []
    for images in (greys, greys.reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64)):
        distances = cdist(images, greys, "cityblock")
        np.fill_diagonal(distances, np.inf)
        pairs = count * labels + labels[distances.argmin(axis=1)]
        table = np.bincount(pairs, minlength=count**2).reshape(count, count)
        shares.append(table / np.maximum(1, table.sum(axis=1, keepdims=True)))
    plain, mirrored = shares
    hits = (mirrored > 0.5) & (mirrored > plain + 0.3) & (np.diag(plain)[:, None] > 0.5)
    named = [
        f"{classes[one]} and {classes[other]}" for one, other in np.argwhere(hits) if one < other
    ]
    if not named:
        return ""
    return f"mirror images of these classes look alike: {some(named)}; train with --augment.hflip 0"


def _greys(images: Sequence[Examined]) -> npt.NDArray[np.float64]:
    """(n, 64) mean greys of the images that can be decoded."""
    greys = [image.grey for image in images if not image.fault]
    return np.array(greys, dtype=float).reshape(-1, 64)


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
