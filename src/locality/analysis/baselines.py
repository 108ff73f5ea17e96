"""scikit-learn's classifiers on pixels, and the most frequent class.

They are deterministic and untuned, so runs on the same images have the same baselines.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from threadpoolctl import threadpool_limits

from locality import checks
from locality.data import DataSplits, eval_loader, open_data
from locality.data.config import InputConfig
from locality.data.sources import ImageSource
from locality.errors import UserError
from locality.files import read_shaped
from locality.runs import Run
from locality.training.config import RunConfig, read_config

MAX_SIDE = 32
"""Larger images are resized so that their longer side has this many pixels."""

MAX_IMAGES, MAX_TIMED_IMAGES = 20_000, 2000
"""Larger sets are subsampled evenly within each class; the second is for runs of minutes."""

ADVICE = "train longer, more of the model, or from weights of more images (locality finetune)"
"""For a model that is below a baseline."""

FEW_PASSES, ENOUGH_PASSES = 3, 20
"""Passes over the images below which a model is not trained, and that most runs need."""

BASELINES = "baselines.json"
CHANCE = "chance"
_SHAPE = {
    "top1": dict[str, checks.Finite],
    "train_images": int,
    "all_train_images": int,
    "pixels?": str,
}
_BATCH = 512
# Of logistic regression; the second takes about half a minute.
_ITERATIONS, _MOST_WORK = 200, 130_000_000_000
CLASSIFIERS: dict[str, Callable[[], Any]] = {
    CHANCE: DummyClassifier,
    "nearest neighbour": partial(KNeighborsClassifier, 1),
    "logistic regression": LogisticRegression,
}
"""scikit-learn's defaults, but one neighbour and, of logistic regression, 200 iterations."""


def pixel_baselines(
    splits: DataSplits, preprocessing: InputConfig, workers: int = 0, most: int = MAX_IMAGES
) -> dict[str, Any]:
    """The baselines on the images of a run.

    Args:
        splits: the run's data.
        preprocessing: the run's preprocessing; its crop is kept, its size limited to `MAX_SIDE`.
        workers: number of data loading processes; 0 loads in this process.
        most: images of either split to use.

    Returns:
        the content of `baselines.json`: `top1` in percent by name, and how many of the training
        images (`all_train_images`) the baselines were fitted to (`train_images`), at how many
        `pixels`, "28×28".

    Raises:
        UserError: a split is empty.
    """
    train, labels, val, targets = split_pixels(splits, preprocessing, workers, most)
    top1 = {}
    for name, create in CLASSIFIERS.items():
        # The others need two classes.
        classes = len(np.unique(labels))
        classifier = create() if classes > 1 else DummyClassifier()
        if "max_iter" in classifier.get_params():
            work = train.size * classes  # multiply-accumulates, of which an iteration takes two
            classifier.set_params(max_iter=max(10, min(_ITERATIONS, _MOST_WORK // work)))
        # On busy processors, threads that wait for each other take many times as long as one.
        quiet = warnings.catch_warnings(action="ignore", category=UserWarning)
        with quiet, threadpool_limits(1):
            classifier.fit(train, labels)
            top1[name] = 100 * float(classifier.score(val, targets))
    height, width = _small_size(preprocessing)
    return {
        "top1": top1,
        "train_images": len(train),
        "all_train_images": len(splits.train),
        "pixels": f"{height}×{width}",
    }


def _small_size(preprocessing: InputConfig) -> tuple[int, int]:
    height, width = preprocessing.size
    scale = min(1.0, MAX_SIDE / max(height, width))
    return max(1, round(scale * height)), max(1, round(scale * width))


def split_pixels(
    splits: DataSplits, preprocessing: InputConfig, workers: int = 0, most: int = MAX_IMAGES
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pixels (n, d), 0 … 1, and classes (n,) of the training and the validation images.

    Arguments and errors: see `pixel_baselines`.
    """
    if not len(splits.train) or not len(splits.val):
        raise UserError(f"{splits.name} has no training or no validation images")
    as_is = replace(
        preprocessing, img_size=_small_size(preprocessing), mean=(0.0,) * 3, std=(1.0,) * 3
    )
    train, labels = _pixels(splits.train, as_is, workers, most, preprocessing.least)
    val, targets = _pixels(splits.val, as_is, workers, most, preprocessing.least)
    if all((images == images[:, :1]).all() for images in (train, val)):
        train, val = train[:, :1], val[:, :1]  # grey: all channels are equal
    return train.reshape(len(train), -1), labels, val.reshape(len(val), -1), targets


def record_baselines(
    folders: Iterable[Path | str],
    known: dict[str, dict[str, Any]] | None = None,
    splits: DataSplits | None = None,
) -> None:
    """Write `baselines.json` (top-1 in percent by name) into run folders that lack it.

    Computed once for runs on the same images.

    Args:
        folders: run folders.
        known: results already computed by `expected_baselines`.
        splits: their images, if already open.

    Raises:
        OSError, UserError: a run's images can no longer be read.
    """
    known = {} if known is None else known
    for run in map(Run, folders):
        if not (run.path / BASELINES).exists():
            record = _record(read_config(run.path), known, run.classes(), splits)
            run.write_json(run.path / BASELINES, record)


def expected_baselines(config: RunConfig, known: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Top-1 in percent of each baseline on the images of a run that has not started.

    Args:
        config: the run's configuration.
        known: cache of results, to pass to `record_baselines` later.

    Raises:
        OSError, UserError: the run's images cannot be read.
    """
    return _named(_record(config, known))


def _record(
    config: RunConfig,
    known: dict[str, dict[str, Any]],
    classes: Sequence[str] = (),
    splits: DataSplits | None = None,
) -> dict[str, Any]:
    preprocessing = config.input.at(config.model.img_size)
    images = repr((config.data, config.seed, preprocessing))
    if images not in known:
        most = MAX_IMAGES if config.schedule.minutes is None else MAX_TIMED_IMAGES
        splits = splits or open_data(config.data, config.seed, classes)
        known[images] = pixel_baselines(splits, preprocessing, config.data.workers, most)
    return known[images]


def read_baselines(folder: Path | str) -> dict[str, float]:
    """Top-1 in percent of each baseline on a run's images; empty if not recorded.

    Baselines fitted to a subset have its size in their name: "nearest neighbour of 20,000 images".

    Raises:
        UserError: the file has another format.
    """
    record = read_shaped(Path(folder) / BASELINES, _SHAPE)
    return {} if record is None else _named(record)


def read_baseline_pixels(folder: Path | str) -> str:
    """The image size of a run's baselines, "28×28"; "" if not recorded."""
    return (read_shaped(Path(folder) / BASELINES, _SHAPE) or {}).get("pixels", "")


def _named(record: Mapping[str, Any]) -> dict[str, float]:
    number = record["train_images"]
    part = f" of {number:,} images" if number < record["all_train_images"] else ""
    return {name if name == CHANCE else name + part: top1 for name, top1 in record["top1"].items()}


def unsized(name: str) -> str:
    """A baseline's name without the number of images that it was fitted to."""
    return name.partition(" of ")[0]


def listed(baselines: Mapping[str, float]) -> str:
    """Baselines as text: "chance 10.2%, nearest neighbour 90.1%"."""
    return ", ".join(f"{name} {top1:.1f}%" for name, top1 in baselines.items())


def below(what: str, top1: float, baselines: Mapping[str, float], passes: float = math.inf) -> str:
    """The baselines above a model named `what`, as text for `ADVICE` to follow; "" if none is.

    Args:
        what: the model's name.
        top1: its accuracy in per cent.
        baselines: theirs by name.
        passes: how many times it saw each image.
    """
    if passes < FEW_PASSES:
        return f"{what} ({top1:.1f}%) has hardly been trained: it saw each image {passes:.2g} times"
    # Compare rounded values, as printed.
    above = [name for name, other in baselines.items() if round(top1, 1) < round(other, 1)]
    return f"{what} ({top1:.1f}%) is below {' and '.join(above)} on the same pixels" * bool(above)


def _pixels(
    source: ImageSource, preprocessing: InputConfig, workers: int, most: int, least: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3, H, W) of 0 … 1, and their classes (n,); at most `most`."""
    source = source.evenly(most) if len(source) > most else source
    loader = eval_loader(
        source, preprocessing, batch_size=_BATCH, on_bad_image="skip", least=least, workers=workers
    )
    batches = list(loader)
    images, labels = ([getattr(b, part).numpy() for b in batches] for part in ("images", "targets"))
    return np.concatenate(images), np.concatenate(labels)
