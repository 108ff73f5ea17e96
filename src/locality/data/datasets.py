"""Datasets by name: `open_data`, and their openers.

From torchvision readers that decode files themselves, only the (private) lists of files and labels
are used, so that one decoding policy applies to all images.
"""

import contextlib
import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import numpy.typing as npt
from huggingface_hub.utils import WeakFileLock
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from locality.data.config import DATASETS, DataConfig, DatasetInfo
from locality.data.folder import check_root, list_folder, log_once, open_folder
from locality.data.sampling import Indices, class_fraction, class_slice, stratified_split
from locality.data.sources import ArraySource, DataSplits, FileSource, ImageSource, first_equal
from locality.data.tables import open_arrow, open_table
from locality.errors import UserError, some, wrap_errors
from locality.files import read_text

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
    opened = OPENERS[config.dataset](config)
    sources = [source for source in opened[1:] if source is not None]
    for source in sources:  # they share the memory for shrunk images
        source.divide(len(sources))
    _set_groups(config, sources)
    classes, train, val = _ordered(opened, names, custom=DATASETS[config.dataset].images is None)
    if config.part != (0.0, 1.0):
        train = train.subset(_slice(train, config.part, _PART_SEED))
        val = val and val.subset(_slice(val, config.part, _PART_SEED))
    has_val = val is not None and config.val_part is None
    if val is None:
        whole = whole or config.fold is not None
        train, val = (train, train) if whole else _split(config, train)
    if config.val_part is not None:
        val = train.subset(_slice(train, config.val_part, config.split_seed))
    if config.fold is not None:
        if has_val:
            log_once(f"folds divide the training images; the {len(val):,} others are not used")
        number, count = config.fold
        held = _slice(train, (number / count, (number + 1) / count), config.split_seed)
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


def _set_groups(config: DataConfig, sources: Sequence[ImageSource]) -> None:
    """Number the images' groups, the same in training and validation."""
    if config.group_column is None and config.group_by is None:
        return
    pattern, numbers = re.compile(config.group_by or ".*", re.DOTALL), dict[str, int]()
    groups, found, name = list[set[int]](), 0, ""
    for part, source in enumerate(sources):
        if source.group_names is None and config.group_column is not None:
            raise UserError(f"dataset '{config.dataset}' has no columns; give data.group_by")
        names = (os.path.basename(source.describe(index)) for index in range(len(source)))
        matches = [pattern.search(name := each) for each in source.group_names or names]
        found += len(matches) - matches.count(None)
        keys = [
            f"in {group}" if (group := _first(match)) else f"alone {part} {index}"
            for index, match in enumerate(matches)
        ]
        own = [numbers.setdefault(key, len(numbers)) for key in keys]
        source.groups = np.array(own, np.int64)
        groups.append({*own})
    if not found:
        raise UserError(f"data.group_by {config.group_by!r} is not in any name, such as {name}")
    if len(groups) > 1 and (both := groups[0] & groups[1]):
        log_once(f"{len(both):,} groups have images both in training and in validation")


def _first(match: re.Match[str] | None) -> str:
    """The first part that a pattern found; "" if it found none, as in an empty cell."""
    return next(filter(None, match.groups()), match[0]) if match else ""


def _choose(source: ImageSource, choice: Callable[[Indices], Indices]) -> Indices:
    """Choose images by their labels; copies of an image and the rest of its group go with it."""
    originals = source.originals()
    if copies := len(source) - len(np.unique(originals)):
        log_once(f"{copies:,} of {len(source):,} images are copies; a split keeps them together")
    if source.groups is not None:
        rows, columns = np.arange(len(source)), first_equal(source.groups)
        pairs = np.concatenate([rows, rows]), np.concatenate([originals, columns])
        links = coo_array((np.ones(2 * len(source)), pairs), shape=(len(source),) * 2)
        originals = first_equal(connected_components(links, directed=False)[1])
    distinct = np.unique(originals)
    chosen = distinct[choice(source.labels[distinct])]
    return np.flatnonzero(np.isin(originals, chosen))


# -- openers ---------------------------------------------------------------------------------------


def open_digits(config: DataConfig) -> tuple[list[str], ImageSource, None]:
    """1,797 handwritten digits, 8×8, grey as RGB; the images of scikit-learn's `load_digits`.

    They are the test part of the UCI repository's "Optical Recognition of Handwritten Digits"
    (Alpaydin and Kaynak, 1998; CC BY 4.0).
    """
    with np.load(Path(__file__).with_name("digits.npz")) as data:
        # 17 grey levels, 0 … 16, stretched to 0 … 255.
        grey = np.rint(data["images"] * (255 / 16)).astype(np.uint8)
        source = ArraySource(np.repeat(grey[..., None], 3, axis=-1), data["labels"], "digits")
    return [str(digit) for digit in range(10)], source, None


def open_imagenet(config: DataConfig) -> Opened:
    """ImageNet-1k or -22k, train/ and val/ with a folder per class."""
    classes, train, val = open_folder(config)
    if val is None:
        raise UserError(f"'{config.root}' has no train and val; ImageNet needs both")
    return classes, train, val


def open_imagenet100(config: DataConfig) -> Opened:
    """The first 100 classes of an ImageNet folder."""
    opened = open_imagenet(config)
    return renumber(opened, opened[0][:100])


def open_tiny_imagenet(config: DataConfig) -> Opened:
    """Tiny ImageNet as published, tiny-imagenet-200: 64×64 pixels, classes in order of their IDs.

    A class is called by the first of its names in words.txt, or by its WordNet ID if the file is
    missing or another class has that name, too.
    """
    root = Path(config.root or "").expanduser()
    root = next((path for path in (root / "tiny-imagenet-200", root) if path.is_dir()), root)
    table = root / "val" / "val_annotations.txt"
    if not (root / "train").is_dir() or not table.is_file():
        raise UserError(
            f"'{root}' is not Tiny ImageNet as published: expected train/ with a folder per class "
            f"and {table.relative_to(root)}"
        )
    listing = list_folder(root / "train")
    numbers = {name: number for number, name in enumerate(listing.files)}
    rows = [line.split("\t") for line in read_text(table).splitlines()]
    if unknown := {row[1] if len(row) > 1 else "" for row in rows} - numbers.keys():
        raise UserError(f"'{table}' names classes without a folder in train: {some(unknown)}")
    files, labels = (f"images/{row[0]}" for row in rows), [numbers[row[1]] for row in rows]
    val = FileSource(root / "val", files, labels, config.decoding)
    words = read_text(root / "words.txt") if (root / "words.txt").exists() else ""
    named = dict(line.split("\t")[:2] for line in words.splitlines() if "\t" in line)
    names = [named.get(name, name).split(",")[0] for name in numbers]
    shared = {name for name, count in Counter(names).items() if count > 1}
    classes = [id_ if name in shared else name for id_, name in zip(numbers, names, strict=True)]
    return classes, listing.source(numbers, config.decoding), val


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
    return list(_reader("FashionMNIST").classes), sources[0], sources[1]


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


# The reader, and its options for each part: the last is for validation, the others for training.
_READERS: dict[str, tuple[str, *tuple[dict[str, Any], ...]]] = {
    "fashion_mnist": ("FashionMNIST", {}),
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    # As in the transfer results that CvT's Table 4 compares with.
    "flowers102": ("Flowers102", *({"split": part} for part in ("train", "val", "test"))),
    "pets": ("OxfordIIITPet", {"split": "trainval"}, {"split": "test"}),
}


def _reader(name: str) -> Any:
    """A reader of torchvision, whose import takes seconds that folders need not wait for."""
    from torchvision import datasets

    return getattr(datasets, name)


def _parts(config: DataConfig) -> list[Any]:
    """The parts of a dataset, opened by its torchvision reader."""
    title, content = DATASETS[config.dataset].title, DATASETS[config.dataset].content
    name, *parts = _READERS[config.dataset]
    reader = _reader(name)
    root = Path(config.root or "").expanduser()
    # The first of several processes downloads; the others wait and find the files.
    turn: Any = contextlib.nullcontext()
    if config.download:
        root.mkdir(parents=True, exist_ok=True)
        turn = WeakFileLock(root / ".locality.lock")
    try:
        with turn:
            return [reader(str(root), download=config.download, **part) for part in parts]
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
    """A dataset with a torchvision reader.

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
    """Classes and images of another dataset, `DatasetInfo.of`; always in the same orders."""
    info = DATASETS[config.dataset]
    classes, train, val = OPENERS[info.of](replace(config, dataset=info.of))
    shuffled = _shuffled(train, info, f"{config.dataset} train")
    return classes, shuffled, val and _shuffled(val, info, f"{config.dataset} val")


def _shuffled(source: ImageSource, info: DatasetInfo, name: str) -> ImageSource:
    if source.pixels is None:  # small files of one size
        images = np.stack([np.asarray(source.read(index)) for index in range(len(source))])
    else:
        images = source.pixels.permute(0, 2, 3, 1).numpy()
    return ArraySource(shuffle_patches(images, info.patch, info.share), source.labels, name)


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


OPENERS: dict[str, Callable[[DataConfig], _Found]] = {
    "digits": open_digits,
    "folder": open_folder,
    "table": open_table,
    "arrow": open_arrow,
    "fashion_mnist": open_fashion_mnist,
    "cifar10_jpeg": open_folder,
    **dict.fromkeys(("cifar10", "cifar100", "flowers102", "pets"), open_torchvision),
    "imagenet": open_imagenet,
    "imagenet100": open_imagenet100,
    "tiny_imagenet": open_tiny_imagenet,
    **{name: open_shuffled for name, info in DATASETS.items() if info.of},
}
"""The function that opens each dataset: its classes, training images, and validation images or None
to hold some out."""
