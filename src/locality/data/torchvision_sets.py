"""CIFAR-10, CIFAR-100, Flowers-102 and Oxford-IIIT Pets, through torchvision's own readers.

Of the readers that decode files themselves only the lists of files and labels are used, which
have no public name, so that all images meet the same decoding policy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
from torchvision import datasets

from locality.data.config import DataConfig
from locality.data.folder import FileSource
from locality.data.sources import ArraySource, DataSplits
from locality.errors import UserError
from locality.files import one_at_a_time


def open_cifar10(config: DataConfig) -> DataSplits:
    """CIFAR-10: 50,000 images to train on, 10,000 to be judged by, 32×32, in memory."""
    return _cifar(config, "cifar10", datasets.CIFAR10, "cifar-10-batches-py")


def open_cifar100(config: DataConfig) -> DataSplits:
    """CIFAR-100: as CIFAR-10, in 100 classes."""
    return _cifar(config, "cifar100", datasets.CIFAR100, "cifar-100-python")


def open_flowers102(config: DataConfig) -> DataSplits:
    """Flowers-102: the 1,020 training and 1,020 validation images, judged by the 6,149 of test.

    That is the division of the transfer results that CvT's Table 4 compares with.
    """
    parts = {
        split: _open(
            config,
            "Flowers-102",
            "flowers-102 with jpg/, imagelabels.mat and setid.mat",
            lambda root, download, split=split: datasets.Flowers102(root, split, download=download),
        )
        for split in ("train", "val", "test")
    }
    items = {
        split: list(zip(part._image_files, part._labels, strict=True))
        for split, part in parts.items()
    }
    # Older versions of torchvision do not know the flowers' names.
    classes = getattr(parts["train"], "classes", [f"class {n}" for n in range(1, 103)])
    return DataSplits(
        "flowers102",
        list(classes),
        _files(items["train"] + items["val"], config),
        _files(items["test"], config),
    )


def open_pets(config: DataConfig) -> DataSplits:
    """Oxford-IIIT Pets: 3,680 images to train on (trainval), 3,669 to be judged by (test)."""
    train, test = (
        _open(
            config,
            "Oxford-IIIT Pets",
            "oxford-iiit-pet with images/ and annotations/",
            partial(datasets.OxfordIIITPet, split=split),
        )
        for split in ("trainval", "test")
    )
    return DataSplits(
        "pets",
        list(train.classes),
        _files(list(zip(train._images, train._labels, strict=True)), config),
        _files(list(zip(test._images, test._labels, strict=True)), config),
    )


def _cifar(config: DataConfig, name: str, reader: Any, folder: str) -> DataSplits:
    title = name.upper().replace("CIFAR", "CIFAR-")
    train, test = (
        _open(
            config,
            title,
            f"{folder}, unpacked from {reader.filename}",
            partial(reader, train=part),
        )
        for part in (True, False)
    )
    return DataSplits(
        name,
        list(train.classes),
        ArraySource(train.data, train.targets, f"{name} train"),
        ArraySource(test.data, test.targets, f"{name} test"),
    )


def _open(config: DataConfig, title: str, content: str, reader: Callable[..., Any]) -> Any:
    if config.root is None:
        raise UserError(f"{title} needs a folder; give it as data.root")
    root = Path(config.root).expanduser()
    # Of several processes the first one downloads, the others find what it has fetched.
    turn = one_at_a_time(root) if config.download else contextlib.nullcontext()
    try:
        with turn:
            return reader(str(root), download=config.download)
    except URLError as error:
        raise UserError(
            f"{title} could not be downloaded ({error.reason}); put {content} into '{root}'"
        ) from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"{title} is described by MATLAB files, and reading them needs a package: "
            "pip install scipy"
        ) from error
    except (RuntimeError, FileNotFoundError) as error:
        raise UserError(
            f"{title} is not in '{root}', or damaged: expected {content}; set data.download to "
            "true to fetch it"
        ) from error


def _files(items: list[tuple[Any, int]], config: DataConfig) -> FileSource:
    """Files with labels; paths may be anywhere below the dataset's root."""
    root = os.path.abspath(os.path.expanduser(str(config.root)))
    paths = [os.path.relpath(path, root) for path, _ in items]
    labels = np.array([label for _, label in items], dtype=np.int64)
    return FileSource(root, paths, labels, config.decoding)
