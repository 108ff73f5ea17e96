"""Datasets by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from locality.data.arrow import open_arrow
from locality.data.config import DataConfig
from locality.data.folder import existing_folder, find_layout, open_one, open_train_val
from locality.data.imagenet import open_imagenet_real, open_imagenet_v2
from locality.data.sources import DataSplits, ImageSource, digits
from locality.data.subsets import (
    balanced_fraction,
    first_classes,
    sorted_fraction,
    stratified_split,
)
from locality.data.torchvision_sets import (
    open_cifar10,
    open_cifar100,
    open_flowers102,
    open_pets,
)
from locality.errors import UserError


def open_data(config: DataConfig, seed: int) -> DataSplits:
    """The dataset a run asks for, split, restricted to its first classes and its fraction.

    Args:
        config: which images.
        seed: the run's, for the choice of a fraction unless `config.subset_seed` is given.

    Raises:
        UserError: the dataset is not there, is not usable, or a fraction leaves a class empty.
    """
    splits = _OPENERS[config.dataset](config)
    if config.first_classes is not None:
        splits = _first_classes(splits, config.first_classes)
    if config.fraction == 1.0 or not len(splits.train):
        return splits
    labels = splits.train.labels
    if config.subset == "sorted":
        kept = sorted_fraction(labels, config.fraction)
    else:
        chosen_by = seed if config.subset_seed is None else config.subset_seed
        kept = balanced_fraction(labels, config.fraction, chosen_by)
    return replace(splits, train=splits.train.subset(kept))


def _first_classes(splits: DataSplits, count: int) -> DataSplits:
    if count > len(splits.classes):
        raise UserError(
            f"first_classes is {count}, but {splits.name} has {len(splits.classes)} classes"
        )
    train = splits.train.subset(first_classes(splits.train.labels, count))
    val = splits.val.subset(first_classes(splits.val.labels, count))
    return DataSplits(splits.name, splits.classes[:count], train, val)


def _split(name: str, classes: list[str], source: ImageSource, config: DataConfig) -> DataSplits:
    """One source divided into training and validation images, class by class."""
    train, val = stratified_split(source.labels, config.val_fraction, config.split_seed)
    if not len(train) or not len(val):
        raise UserError(
            f"{name} has too few images ({len(source)}) to set a part aside for evaluation"
        )
    return DataSplits(name, classes, source.subset(train), source.subset(val))


def _for_evaluation(name: str, classes: list[str], source: ImageSource) -> DataSplits:
    return DataSplits(name, classes, source.subset([]), source)


def _open_digits(config: DataConfig) -> DataSplits:
    source, classes = digits()
    return _split("digits", classes, source, config)


def _open_folder(config: DataConfig) -> DataSplits:
    layout = find_layout(existing_folder(config.root))
    if layout.val is None:
        classes, source = open_one(layout.train, config.decoding)
        return _split("folder", classes, source, config)
    classes, train, val = open_train_val(layout.train, layout.val, config.decoding)
    return DataSplits("folder", classes, train, val)


def _open_imagenet(config: DataConfig) -> DataSplits:
    root = existing_folder(config.root)
    missing = [part for part in ("train", "val") if not (root / part).is_dir()]
    if missing:
        raise UserError(
            f"'{root}' has no folder {' and no '.join(missing)}; ImageNet needs train and val, "
            "both with one folder per class"
        )
    classes, train, val = open_train_val(root / "train", root / "val", config.decoding)
    return DataSplits("imagenet", classes, train, val)


def _open_imagenet100(config: DataConfig) -> DataSplits:
    splits = _first_classes(_open_imagenet(config), 100)
    return replace(splits, name="imagenet100")


def _open_imagenet_v2(config: DataConfig) -> DataSplits:
    return _for_evaluation("imagenet_v2", *open_imagenet_v2(config.root, config.decoding))


def _open_imagenet_real(config: DataConfig) -> DataSplits:
    opened = open_imagenet_real(config.root, config.real_labels, config.decoding)
    return _for_evaluation("imagenet_real", *opened)


def _open_arrow(config: DataConfig) -> DataSplits:
    classes, train, val = open_arrow(
        config.root, config.decoding, config.image_column, config.label_column
    )
    if val is None:
        return _split("arrow", classes, train, config)
    return DataSplits("arrow", classes, train, val)


_OPENERS: dict[str, Callable[[DataConfig], DataSplits]] = {
    "digits": _open_digits,
    "folder": _open_folder,
    "cifar10": open_cifar10,
    "cifar100": open_cifar100,
    "flowers102": open_flowers102,
    "pets": open_pets,
    "imagenet": _open_imagenet,
    "imagenet100": _open_imagenet100,
    "imagenet_v2": _open_imagenet_v2,
    "imagenet_real": _open_imagenet_real,
    "arrow": _open_arrow,
}
