"""Datasets by name: openers that `datasets.yaml` names, and `open_data`, which calls them.

Of torchvision's readers that decode files themselves only the lists of files and labels are used,
which have no public name, so that all images meet the same decoding policy.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import pkgutil
import re
import zlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import numpy.typing as npt
import torchvision
from huggingface_hub.utils import WeakFileLock
from timm.data import ImageNetInfo

from locality import checks
from locality.data.classes import sort_classes
from locality.data.config import DATASETS, DataConfig
from locality.data.folder import (
    FileSource,
    check_root,
    list_folder,
    no_images_error,
    open_folder,
    open_splits,
    require_folder,
)
from locality.data.sampling import balanced_fraction, class_slice, sorted_fraction, stratified_split
from locality.data.sources import ArraySource, DataSplits, ImageSource
from locality.errors import UserError, some, wrap_errors
from locality.files import parse_json, read_text

_IMAGENET_CLASSES = 1000
_PART_SEED = 0  # of `DataConfig.part`: alike in all runs
_VALIDATION_NUMBER = re.compile(r"_val_(\d{8})\.")


# Classes, training and validation images; no training images where a set is for evaluation only.
Opened = tuple[list[str], ImageSource, ImageSource]
# The same, where the validation images may be still to be set aside.
_Found = tuple[list[str], ImageSource, ImageSource | None]


def open_data(
    config: DataConfig, seed: int, names: Sequence[str] | None = (), whole: bool = False
) -> DataSplits:
    """The dataset a run asks for, split, restricted to its classes, its part and its fraction.

    Args:
        config: which images.
        seed: the run's, for the choice of a fraction unless `config.subset_seed` is given.
        names: of classes, such as a run has recorded, in the order in which they are numbered,
            before others; None keeps the order that the dataset itself declares.
        whole: evaluate on all images of a dataset without a part for that, instead of on a part.

    Raises:
        UserError: the dataset is not there, is not usable, or a fraction leaves a class empty.
    """
    check_root(config)
    row = DATASETS[config.dataset]
    opener = pkgutil.resolve_name(f"locality.data.{row['opener']}")
    classes, train, val = _ordered(opener(config), names, custom="images" not in row)
    if config.part != (0.0, 1.0):
        train = train.subset(class_slice(train.labels, config.part, _PART_SEED))
        val = val and val.subset(class_slice(val.labels, config.part, _PART_SEED))
    if val is None:
        whole = whole or config.fold is not None
        train, val = (train, train) if whole else _split(config, train)
    limits = config.skip_classes, config.first_classes
    classes, train, val = _select_classes(config, (classes, train, val), *limits)
    if config.val_part is not None:
        val = train.subset(class_slice(train.labels, config.val_part, config.split_seed))
    if config.fold is not None:
        number, count = config.fold
        part = number / count, (number + 1) / count
        held = class_slice(train.labels, part, config.split_seed)
        val, train = train.subset(held), train.subset(np.delete(np.arange(len(train)), held))
    if config.train_part != (0.0, 1.0):
        train = train.subset(class_slice(train.labels, config.train_part, config.split_seed))
    if config.fraction < 1.0 and len(train):
        if config.subset == "sorted":
            kept = sorted_fraction(train.labels, config.fraction)
        else:
            chosen_by = seed if config.subset_seed is None else config.subset_seed
            kept = balanced_fraction(train.labels, config.fraction, chosen_by)
        train = train.subset(kept)
    if names:
        order = list(dict.fromkeys([*names, *classes]))
        classes, train, val = renumber((classes, train, val), order)
    return DataSplits(config.dataset, classes, train, val)


def _ordered(opened: _Found, names: Sequence[str] | None, custom: bool) -> _Found:
    """The same images, which other choices divide by the numbers of their classes."""
    classes, train, _ = opened
    own = set(classes)
    if names and own <= set(names):
        return renumber(opened, [name for name in names if name in own])
    # Known datasets have orders of their own.
    if names is None or not custom or train.numbered:
        return opened
    return renumber(opened, sort_classes(classes))


def renumber(opened: Any, order: list[str]) -> Any:
    """The images of the classes in `order`, which numbers them; some may have no images."""
    classes, *sources = opened
    if classes == order:
        return opened
    places = {name: number for number, name in enumerate(order)}
    numbers = np.array([places.get(name, -1) for name in classes], dtype=np.int64)
    parts = []
    for source in sources:
        if source is not None:
            source = source.subset(np.flatnonzero(numbers[source.labels] >= 0))
            source.labels = numbers[source.labels]
            if source.label_sets is not None:
                source.label_sets = [
                    tuple(n for n in numbers[list(answers)].tolist() if n >= 0)
                    for answers in source.label_sets
                ]
        parts.append(source)
    return order, parts[0], parts[1]


def _select_classes(config: DataConfig, opened: Opened, skipped: int, count: int | None) -> Opened:
    """The first `count` classes without the first `skipped`, numbered from 0."""
    classes, *_ = opened
    if not skipped and count is None:
        return opened
    count = len(classes) if count is None else count
    if count > len(classes):
        raise UserError(
            f"first {count} classes asked for; {config.dataset} has {len(classes)} classes"
        )
    if skipped >= count:
        raise UserError(f"skip_classes is {skipped}, but {config.dataset} has {count} classes here")
    return renumber(opened, classes[skipped:count])


def _split(config: DataConfig, source: ImageSource) -> tuple[ImageSource, ImageSource]:
    """Images to train on and to evaluate on, divided class by class."""
    train, val = stratified_split(source.labels, config.val_fraction, config.split_seed)
    if not len(train) or not len(val):
        raise UserError(f"{config.dataset} has too few images ({len(source)}) to set a part aside")
    return source.subset(train), source.subset(val)


# -- ImageNet and what belongs to it ---------------------------------------------------------------


def open_imagenet(config: DataConfig) -> Opened:
    """ImageNet-1k or -22k, train/ and val/ with a folder per class."""
    classes, train, val = open_folder(config)
    if val is None:
        raise UserError(f"'{config.root}' has no train and val; ImageNet needs both")
    return classes, train, val


def open_imagenet100(config: DataConfig) -> Opened:
    """The first 100 classes of an ImageNet folder."""
    return _select_classes(config, open_imagenet(config), 0, 100)


def open_imagenet_v2(config: DataConfig) -> Opened:
    """ImageNet-V2 (Recht et al., 2019), whose folders are named by class number, 0 … 999.

    Sorted as text, as most readers do, they would be 0, 1, 10, 100, …, and most labels wrong. The
    root is the folder of class folders, or one that holds nothing else but that folder.
    """
    folder = require_folder(config.root)
    listing = list_folder(folder)
    if len(listing.classes) == 1 and not listing.classes[0].isdigit():
        listing = list_folder(folder / listing.classes[0])
    names = [str(number) for number in range(_IMAGENET_CLASSES)]
    if wrong := sorted(set(listing.classes) - set(names)):
        raise UserError(
            f"'{folder}' is not ImageNet-V2, with folders 0 to 999: it has {some(wrong)}"
        )
    if not any(listing.files):
        raise no_images_error(listing.root)
    source = listing.source(names, config.decoding)
    source.numbered = True
    return names, source.subset([]), source


def open_imagenet_real(config: DataConfig) -> Opened:
    """ImageNet's validation images with the reassessed labels (ReaL, Beyer et al., 2020).

    An image may have several right answers; those that have none are left out. The root is
    ImageNet's folder, with val/ in class folders, or val/ itself; `config.real_labels` is
    `real.json`, a list of class lists in the order of the files' numbers.

    """
    folder, labels_file = require_folder(config.root), config.real_labels
    if (folder / "val").is_dir():
        folder = folder / "val"
    classes, (source,) = open_splits({"val": folder}, config.decoding)
    answers = _real_labels(labels_file)
    paths, sets = [], []
    for path in map(source.path, range(len(source))):
        match = _VALIDATION_NUMBER.search(path)
        if match is None:
            raise UserError(
                f"'{path}' in '{folder}' is not named as ImageNet's validation images: "
                f"ILSVRC2012_val_00000001.JPEG"
            )
        number = int(match.group(1))
        if not 1 <= number <= len(answers):
            raise UserError(f"'{labels_file}' labels {len(answers)} images; '{path}' is another")
        if answers[number - 1]:
            paths.append(path)
            sets.append(answers[number - 1])
    if set(classes) <= set(synsets := ImageNetInfo().label_names()):
        # The labels are numbers of ImageNet's classes, of which the folder may have some.
        classes = synsets
    if strange := [label for label in chain(*sets) if not 0 <= label < len(classes)]:
        raise UserError(
            f"'{labels_file}' has class {max(strange)}; '{folder}' {len(classes)} classes"
        )
    chosen = FileSource(folder, paths, [answers[0] for answers in sets], config.decoding)
    chosen.label_sets = sets
    return classes, chosen.subset([]), chosen


def _real_labels(path: str | None) -> list[tuple[int, ...]]:
    if path is None:
        raise UserError("the ReaL labels are needed; give the path of real.json as real_labels")
    with wrap_errors("the ReaL labels", FileNotFoundError):
        answers = parse_json(read_text(Path(path).expanduser()), f"the ReaL labels '{path}'")
    checks.shaped(f"the ReaL labels '{path}'", answers, [[int]])
    return [tuple(answer) for answer in answers]


# -- through torchvision ---------------------------------------------------------------------------


FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts it."""


def open_fashion_mnist(config: DataConfig) -> Opened:
    """Fashion-MNIST: 60,000 grey images to train on, 10,000 of test, 28×28, in memory.

    The four IDX files, compressed or not, lie in the root itself or where torchvision puts them.
    """
    if config.download:
        _parts(config)
    root = FASHION_MNIST if config.root is None else Path(config.root).expanduser()
    sources = []
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = (
            _read_idx(_find_idx_file(root, f"{prefix}-{content}-ubyte"), dims)
            for content, dims in (("images-idx3", 3), ("labels-idx1", 1))
        )
        rgb = np.broadcast_to(images[..., None], (*images.shape, 3))
        sources.append(ArraySource(rgb, labels, f"fashion_mnist {part}"))
    train, test = sources
    return list(torchvision.datasets.FashionMNIST.classes), train, test


def _find_idx_file(root: Path, name: str) -> Path:
    """One of Fashion-MNIST's files."""
    for folder in (root, root / "FashionMNIST" / "raw"):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.exists():
                return path
    raise UserError(
        f"Fashion-MNIST is not in '{root}': there is no {name}; `apt-get install "
        f"dataset-fashion-mnist`, or give a data.root and data.download=true"
    )


def _read_idx(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """What an IDX file of bytes holds: a type, sizes of four bytes each, the values."""
    with wrap_errors(f"'{path}' is damaged", OSError, EOFError, zlib.error, ValueError):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:4] != bytes((0, 0, 8, dims)):
            raise ValueError("its first bytes are not those of such a file")
        shape = np.frombuffer(content, ">i4", dims, 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape)


def _parts(config: DataConfig) -> list[Any]:
    """The parts of a dataset that its reader finds."""
    row = DATASETS[config.dataset]
    title, content = row["title"], row["content"]
    root = Path(config.root or "").expanduser()
    # Of several processes the first one downloads, the others find what it has fetched.
    turn: Any = contextlib.nullcontext()
    if config.download:
        root.mkdir(parents=True, exist_ok=True)
        turn = WeakFileLock(root / ".locality.lock")
    try:
        with turn:
            return [
                getattr(torchvision.datasets, row["reader"])(
                    str(root), download=config.download, **part
                )
                for part in row["parts"]
            ]
    except URLError as error:
        raise UserError(
            f"{title} could not be downloaded ({error.reason}); put {content} into '{root}'"
        ) from error
    except ModuleNotFoundError as error:
        raise UserError(f"{title} is described by MATLAB files: pip install scipy") from error
    except (RuntimeError, FileNotFoundError) as error:
        raise UserError(
            f"{title} is not in '{root}', or damaged: expected {content}; set data.download to "
            f"true to fetch it"
        ) from error


def open_torchvision(config: DataConfig) -> Opened:
    """A dataset that torchvision has a reader for, see `datasets.yaml`.

    The reader has `classes`, and either `data`, (n, height, width, 3), with `targets`, or files as
    `_images` or `_image_files` with `_labels`. SVHN's, for one, has no `classes`.
    """
    parts = _parts(config)
    return (
        list(parts[0].classes),
        _source(parts[:-1], f"{config.dataset} train", config),
        _source(parts[-1:], f"{config.dataset} test", config),
    )


def _source(parts: list[Any], name: str, config: DataConfig) -> ImageSource:
    """The images of some parts: in memory, or files anywhere below the dataset's root."""
    if hasattr(parts[0], "data"):
        return ArraySource(parts[0].data, parts[0].targets, name)
    root = os.path.abspath(os.path.expanduser(str(config.root)))
    files = "_images" if hasattr(parts[0], "_images") else "_image_files"
    paths = [os.path.relpath(path, root) for part in parts for path in getattr(part, files)]
    labels = [label for part in parts for label in part._labels]
    return FileSource(root, paths, labels, config.decoding)
