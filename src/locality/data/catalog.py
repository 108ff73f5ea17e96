"""Datasets by name."""

from __future__ import annotations

from collections.abc import Callable

from locality.data.config import DATASETS, DataConfig
from locality.data.sources import DataSplits, ImageSource, digits
from locality.data.subsets import (
    balanced_fraction,
    first_classes,
    sorted_fraction,
    stratified_split,
)
from locality.errors import UserError, unknown


def open_data(config: DataConfig, seed: int) -> DataSplits:
    """The dataset a run asks for, split, restricted to its first classes and its fraction.

    Args:
        config: which images.
        seed: the run's, for the choice of a fraction unless `config.subset_seed` is given.

    Raises:
        UserError: the dataset is not there, is not usable, or a fraction leaves a class empty.
    """
    try:
        opener = _OPENERS[config.dataset]
    except KeyError:
        raise unknown("dataset", config.dataset, DATASETS) from None
    splits = opener(config)
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
    return DataSplits(splits.name, splits.classes, splits.train.subset(kept), splits.val)


def _first_classes(splits: DataSplits, count: int) -> DataSplits:
    if count > len(splits.classes):
        raise UserError(
            f"first_classes is {count}, but {splits.name} has {len(splits.classes)} classes"
        )
    train = splits.train.subset(first_classes(splits.train.labels, count))
    val = splits.val.subset(first_classes(splits.val.labels, count))
    return DataSplits(splits.name, splits.classes[:count], train, val)


def split_source(
    name: str, source: ImageSource, classes: list[str], config: DataConfig
) -> DataSplits:
    """One source divided into training and validation images, class by class."""
    train, val = stratified_split(source.labels, config.val_fraction, config.split_seed)
    return DataSplits(name, classes, source.subset(train), source.subset(val))


def _open_digits(config: DataConfig) -> DataSplits:
    source, classes = digits()
    return split_source("digits", source, classes, config)


_OPENERS: dict[str, Callable[[DataConfig], DataSplits]] = {"digits": _open_digits}
