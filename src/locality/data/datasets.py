"""Datasets by name: the openers listed in `datasets.yaml`, and `open_data`, which calls them.

From torchvision readers that decode files themselves, only the (private) lists of files and labels
are used, so that one decoding policy applies to all images.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import pkgutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import numpy.typing as npt
import torchvision
from huggingface_hub.utils import WeakFileLock

from locality.data.config import DATASETS, DataConfig
from locality.data.folder import (
    check_root,
    log_once,
    open_folder,
)
from locality.data.sampling import Indices, class_fraction, class_slice, stratified_split
from locality.data.sources import (
    ArraySource,
    DataSplits,
    FileSource,
    ImageSource,
)
from locality.errors import UserError, wrap_errors

_PART_SEED = 0  # of `DataConfig.part`: the same in all runs


# Classes, training and validation images; evaluation-only datasets have no training images.
Opened = tuple[list[str], ImageSource, ImageSource]
# The same, with None if the validation images have yet to be held out.
_Found = tuple[list[str], ImageSource, ImageSource | None]


def open_data(
    config: DataConfig, seed: int, names: Sequence[str] | None = (), whole: bool = False
) -> DataSplits:
    """Open and split a dataset, restricted to the configured classes, parts and fraction.

    Args:
        config: the dataset and its restrictions.
        seed: the run's seed, which selects the fraction.
        names: class names in the order in which to number them, such as those recorded by a run;
            other classes follow. None keeps the order that the dataset declares.
        whole: evaluate on all images of a dataset without a validation split.

    Raises:
        UserError: the dataset is missing or unusable, or a fraction leaves a class empty.
    """
    check_root(config)
    row = DATASETS[config.dataset]
    opener = pkgutil.resolve_name(f"locality.data.{row['opener']}")
    classes, train, val = _ordered(opener(config), names, custom="images" not in row)
    if config.part != (0.0, 1.0):
        train = train.subset(class_slice(train.labels, config.part, _PART_SEED))
        val = val and val.subset(class_slice(val.labels, config.part, _PART_SEED))
    has_val = val is not None and config.val_part is None
    if val is None:
        whole = whole or config.fold is not None
        train, val = (train, train) if whole else _split(config, train)
    if config.first_classes is not None:
        classes, train, val = _first_classes((classes, train, val), config.first_classes)
    if config.val_part is not None:
        val = train.subset(_slice(train, config.val_part, config.split_seed))
    if config.fold is not None:
        if has_val:
            log_once(f"folds divide the training images; the {len(val):,} others are not used")
        number, count = config.fold
        part = number / count, (number + 1) / count
        held = _slice(train, part, config.split_seed)
        val, train = train.subset(held), train.subset(np.delete(np.arange(len(train)), held))
    if config.train_part != (0.0, 1.0):
        train = train.subset(_slice(train, config.train_part, config.split_seed))
    if config.fraction < 1.0 and len(train):
        by = None if config.subset == "sorted" else seed
        train = train.subset(class_fraction(train.labels, config.fraction, by))
    if names:
        order = list(dict.fromkeys([*names, *classes]))
        classes, train, val = renumber((classes, train, val), order)
    return DataSplits(config.dataset, classes, train, val)


def _ordered(opened: _Found, names: Sequence[str] | None, custom: bool) -> _Found:
    """Number the classes by `names`; those of custom datasets are sorted by default."""
    classes, train, _ = opened
    own = set(classes)
    if names and own <= set(names):
        return renumber(opened, [name for name in names if name in own])
    # Built-in datasets keep their own order.
    if names is None or not custom or train.numbered:
        return opened
    return renumber(opened, sorted(own))


def renumber(opened: Any, order: list[str]) -> Any:
    """The images of the classes in `order`, which numbers them; some may have no images."""
    classes, *sources = opened
    if classes == order:
        return opened
    index = {name: number for number, name in enumerate(order)}
    numbers = np.array([index.get(name, -1) for name in classes], dtype=np.int64)
    parts = []
    for source in sources:
        if source is not None:
            source = source.subset(np.flatnonzero(numbers[source.labels] >= 0))
            source.labels = numbers[source.labels]
        parts.append(source)
    return order, parts[0], parts[1]


def _first_classes(opened: Opened, count: int) -> Opened:
    """The images of the first `count` classes."""
    classes, *_ = opened
    if count > len(classes):
        raise UserError(f"there are {len(classes)} classes, not {count}")
    return renumber(opened, classes[:count])


def _split(config: DataConfig, source: ImageSource) -> tuple[ImageSource, ImageSource]:
    """Training and validation images, stratified by class."""

    def held_out(labels: Indices) -> Indices:
        return stratified_split(labels, config.val_fraction, config.split_seed)[1]

    val = _choose(source, held_out)
    train = np.delete(np.arange(len(source)), val)
    if not len(train) or not len(val):
        raise UserError(f"{config.dataset} has too few images ({len(source)}) to hold some out")
    return source.subset(train), source.subset(val)


def _slice(source: ImageSource, part: tuple[float, float], seed: int) -> Indices:
    return _choose(source, lambda labels: class_slice(labels, part, seed))


def _choose(source: ImageSource, choice: Callable[[Indices], Indices]) -> Indices:
    """Choose images by their labels; copies of an image go with it."""
    originals = source.originals()
    distinct = np.unique(originals)
    if copies := len(source) - len(distinct):
        log_once(f"{copies:,} of {len(source):,} images are copies; a split keeps them together")
    chosen = distinct[choice(source.labels[distinct])]
    return np.flatnonzero(np.isin(originals, chosen))


# -- ImageNet and its variants ---------------------------------------------------------------------


def open_imagenet(config: DataConfig) -> Opened:
    """ImageNet-1k or -22k, train/ and val/ with a folder per class."""
    classes, train, val = open_folder(config)
    if val is None:
        raise UserError(f"'{config.root}' has no train and val; ImageNet needs both")
    return classes, train, val


def open_imagenet100(config: DataConfig) -> Opened:
    """The first 100 classes of an ImageNet folder."""
    return _first_classes(open_imagenet(config), 100)


# -- through torchvision ---------------------------------------------------------------------------


FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""


def open_fashion_mnist(config: DataConfig) -> Opened:
    """Fashion-MNIST: 60,000 training and 10,000 test images, grey, 28×28, in memory.

    The four IDX files, compressed or not, are in the root or where torchvision puts them.
    """
    if config.download and config.root is not None:
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
        f"Fashion-MNIST is not in '{root}': {name} is missing; `apt-get install "
        f"dataset-fashion-mnist`, or give data.root and data.download=true"
    )


def _read_idx(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of bytes: the type, four-byte sizes, then the values."""
    with wrap_errors(f"'{path}' is damaged", OSError, EOFError, zlib.error, ValueError):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:4] != bytes((0, 0, 8, dims)):
            raise ValueError("its header is not that of an IDX file")
        shape = np.frombuffer(content, ">i4", dims, 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape)


def _parts(config: DataConfig) -> list[Any]:
    """The parts of a dataset, opened by its torchvision reader."""
    row = DATASETS[config.dataset]
    title, content = row["title"], row["content"]
    root = Path(config.root or "").expanduser()
    # The first of several processes downloads; the others wait and find the files.
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
    except (RuntimeError, FileNotFoundError) as error:
        raise UserError(
            f"{title} is not in '{root}', or damaged: expected {content}; set data.download to "
            f"true to fetch it"
        ) from error


def open_torchvision(config: DataConfig) -> Opened:
    """A dataset with a torchvision reader, see `datasets.yaml`.

    The reader needs `classes` (SVHN's has none), and either `data`, (n, height, width, 3), with
    `targets`, or files as `_images` or `_image_files` with `_labels`.
    """
    parts = _parts(config)
    return (
        list(parts[0].classes),
        _source(parts[:-1], f"{config.dataset} train", config),
        _source(parts[-1:], f"{config.dataset} test", config),
    )


def _source(parts: list[Any], name: str, config: DataConfig) -> ImageSource:
    """The images of some parts: in memory, or files below the dataset's root."""
    if hasattr(parts[0], "data"):
        return ArraySource(parts[0].data, parts[0].targets, name)
    root = os.path.abspath(os.path.expanduser(str(config.root)))
    files = "_images" if hasattr(parts[0], "_images") else "_image_files"
    paths = [os.path.relpath(path, root) for part in parts for path in getattr(part, files)]
    labels = [label for part in parts for label in part._labels]
    return FileSource(root, paths, labels, config.decoding)


# -- patches in another order: a control of locality -----------------------------------------------

# One order for all images hides where patches are, but what is where stays as it was. An order of
# its own for each image leaves nothing to learn from position.


def open_shuffled(config: DataConfig) -> tuple[list[str], ImageSource, ImageSource | None]:
    """Classes and images of the row's dataset `of`; always in the same orders."""
    row = DATASETS[config.dataset]
    opener = pkgutil.resolve_name(f"locality.data.{DATASETS[row['of']]['opener']}")
    classes, *sources = opener(replace(config, dataset=row["of"]))
    train, val = (
        source and ArraySource(_shuffled(source, row), source.labels, f"{config.dataset} {part}")
        for part, source in zip(("train", "val"), sources, strict=True)
    )
    return classes, train, val


def _shuffled(source: ImageSource, row: dict[str, Any]) -> npt.NDArray[np.uint8]:
    assert source.pixels is not None
    images = source.pixels.permute(0, 2, 3, 1).numpy()
    return shuffle_patches(images, row["patch"], row["share"])


def shuffle_patches(
    images: npt.NDArray[np.uint8], patch: int, share: float | None, seed: int = 0
) -> npt.NDArray[np.uint8]:
    """Images (n, H, W, 3) with their patches in another order.

    Args:
        images: the images.
        patch: side of a patch in pixels, a divisor of H and W.
        share: None for one order for all images; else the probability that an image has its own.
        seed: random seed. The images shuffled by a smaller share are among those of a larger.
    """
    (n, height, width, _), rng = images.shape, np.random.default_rng(seed)
    rows, columns = height // patch, width // patch
    cells = images.reshape(n, rows, patch, columns, patch, 3).swapaxes(2, 3)
    orders = np.tile(np.arange(rows * columns), (n, 1))
    if share is None:
        orders[:] = rng.permutation(rows * columns)
    else:
        own = rng.permuted(orders, axis=1)
        orders = np.where(rng.random((n, 1)) < share, own, orders)
    cells = cells.reshape(n, rows * columns, patch, patch, 3)
    cells = np.take_along_axis(cells, orders[:, :, None, None, None], axis=1)
    cells = cells.reshape(n, rows, columns, patch, patch, 3).swapaxes(2, 3)
    return cells.reshape(images.shape)
