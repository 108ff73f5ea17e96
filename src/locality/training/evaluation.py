"""Evaluation: top-1, top-5 and loss, each image counted once over all processes, and predictions.

`Predictions` is predictions.csv: the class of every validation image, confusion, calibration.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locality import checks
from locality.checkpoints.api import Classifier, open_model
from locality.data import (
    Batch,
    BatchLoader,
    DataConfig,
    DataSplits,
    ImageSource,
    eval_loader,
    open_data,
)
from locality.data.classes import class_difference, joinable, numbered
from locality.data.datasets import renumber
from locality.data.loader import translate_killed_worker
from locality.errors import UserError, prefix_errors, some
from locality.files import csv_text, read_rows, write_atomic
from locality.models import count_macs
from locality.training.config import Precision, read_config
from locality.training.devices import (
    accumulation_dtype,
    autocast,
    choose_precision,
    resolve_accelerator,
)

_log = logging.getLogger("locality")


def evaluate_run(
    folder: Path | str, data: DataConfig | None = None, **options: Any
) -> dict[str, Any]:
    """Top-1, top-5 and loss of a run's model.

    Args:
        folder: the run's.
        data: other data with the same classes, such as ImageNet-V2; None is the run's own.
        options: of `evaluate_opened`.

    Raises:
        UserError: if the folder is no run, or the data has other classes.
    """
    config = read_config(Path(folder))
    opened = open_model(folder)
    if data is None and options.get("splits") is None:
        options["splits"] = open_for(opened, config.data, config.seed, recorded=True)
    return evaluate_opened(opened, data or config.data, seed=config.seed, **options)


def evaluate_opened(
    opened: Classifier,
    data: DataConfig,
    *,
    seed: int = 0,
    img_size: int | tuple[int, int] | None = None,
    batch_size: int = 256,
    precision: str = "fp32",
    accelerator: str = "auto",
    splits: DataSplits | None = None,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, Any]:
    """Top-1, top-5 and loss of an opened model on a dataset, with the model's preprocessing.

    Args:
        opened: what `locality.checkpoints.open_model` gives.
        data: of classes that the model has.
        seed: of the data's own random splits.
        img_size: side of the images, or (height, width); None is the model's own.
        batch_size: images at once.
        precision: as `engine.precision` of a run.
        accelerator: "auto", "cpu", "cuda" or "mps".
        splits: the data, if `open_for` has opened them already.
        on_batch: as for `evaluate`.

    Raises:
        UserError: if it is an exported graph, the data has other classes, there is no such
            precision or accelerator, an image is damaged, or logits are not finite.
    """
    checks.one_of("precision", precision, get_args(Precision))
    checks.integer("batch_size", batch_size, 1)
    device = torch.device(resolve_accelerator(accelerator))
    model = opened.module()
    splits = open_for(opened, data, seed) if splits is None else splits
    preprocessing = opened.preprocessing
    if img_size is not None:
        preprocessing = preprocessing.at(img_size)
    loader = eval_loader(
        splits.val,
        preprocessing,
        batch_size=batch_size,
        workers=data.workers,
        on_bad_image=data.on_bad(training=False),
        max_bad_images=data.max_bad_images,
        pin_memory=device.type == "cuda",
    )
    macs = count_macs(model, preprocessing.size) if precision == "auto" else 0
    chosen = choose_precision(precision, device.type, macs)

    def checked(batch: Batch, logits: Tensor) -> None:
        opened.check_logits(logits)
        if on_batch is not None:
            on_batch(batch, logits)

    with autocast(device.type, chosen):
        result = evaluate(
            model.to(device), loader, device, label_sets=splits.val.label_sets, on_batch=checked
        )
    return result | {"dataset": data.dataset, "skipped": dict(loader.skipped)}


def open_for(
    opened: Classifier,
    data: DataConfig,
    seed: int = 0,
    whole: bool = False,
    recorded: bool = False,
    splits: DataSplits | None = None,
) -> DataSplits:
    """The images that a model is evaluated on, whose classes are numbered as its outputs are.

    Classes are joined by name. Without names on one side numbers are taken as those of outputs, or
    the classes by their order, which the log says.

    Args:
        opened: the model.
        data, seed, whole: as `open_data` takes them.
        recorded: they are those of the model's own run, divided in the order it has recorded.
        splits: these images, if they are open already.

    Raises:
        UserError: if there are images of classes that the model does not have.
    """
    count, names = opened.module().num_classes, joinable(opened.classes)
    if splits is None:
        splits = open_data(data, seed, names if recorded or names is None else (), whole)
    held = {splits.classes[label] for label in np.unique(splits.val.labels)}
    numbers = [str(number) for number in range(count)]
    if names is None and set(splits.classes) == set(numbers):
        _log.warning(f"{opened.name} has no class names: those of the data number its outputs")
        return _renumbered(splits, numbers)
    if names is None or (splits.val.numbered and not held <= set(names)):
        who = f"{opened.name} has" if names is None else "the data have"
        if len(splits.classes) != count:
            raise UserError(
                f"{opened.name} tells {count} classes apart and dataset '{data.dataset}' has "
                f"{len(splits.classes)}; {who} no class names, so give images of as many classes"
            )
        _log.warning(
            f"{who} no class names: classes and outputs are matched by their order, "
            f"{numbered(splits.classes)}"
        )
        return splits
    if held - set(names):
        difference = class_difference({opened.name: names, "the data": held})
        raise UserError(
            f"{opened.name} was not trained on all classes of dataset '{data.dataset}': "
            f"{difference}; give images of its classes, in folders or with labels of their names"
        )
    if missing := [name for name in names if name not in held]:
        _log.warning(
            f"{len(missing)} of the {count} classes of {opened.name} have no images here "
            f"({some(missing)}); accuracy is over all {count} outputs"
        )
    return _renumbered(splits, list(dict.fromkeys([*names, *splits.classes])))


def _renumbered(splits: DataSplits, order: list[str]) -> DataSplits:
    return DataSplits(splits.name, *renumber((splits.classes, splits.train, splits.val), order))


@translate_killed_worker()
@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: BatchLoader,
    device: torch.device | str = "cpu",
    *,
    label_sets: Sequence[tuple[int, ...]] | None = None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    num_batches: int | None = None,
    before_batch: Callable[[], None] | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, Any]:
    """Top-1 and top-5 accuracy in per cent, mean cross entropy, and the number of images.

    With several processes each evaluates its part and every one gets the totals.

    Args:
        model: images → logits; put into evaluation mode and back.
        loader: this process's batches.
        device: where the model is.
        label_sets: all correct labels of every image (ReaL labels). The loss is that of the first.
        all_reduce: sums a tensor over all processes.
        num_batches: of the process that has most, so that all processes synchronise equally often.
        before_batch: called before every batch on all processes; may raise to stop.
        memory_format: of the images.
        on_batch: called with every batch of this process and its logits.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(4, dtype=accumulation_dtype(torch.device(device)), device=device)
    try:
        batches = iter(loader)
        for _ in range(len(loader) if num_batches is None else num_batches):
            if before_batch is not None:
                before_batch()
            batch = next(batches, None)
            if batch is None:
                continue
            images = batch.images.to(device, non_blocking=True, memory_format=memory_format)
            targets = batch.targets.to(device, non_blocking=True)
            logits = model(images).float()
            if on_batch is not None:
                on_batch(batch, logits)
            correct = _is_correct(logits, targets, batch.indices.tolist(), label_sets)
            totals[0] += correct[:, :1].sum()
            totals[1] += correct.any(dim=1).sum()
            totals[2] += F.cross_entropy(logits, targets, reduction="sum")
            totals[3] += len(targets)
    finally:
        model.train(was_training)
    if all_reduce is not None:
        totals = all_reduce(totals)
    top1, top5, loss, count = totals.tolist()
    total = count or float("nan")
    return {
        "top1": 100 * top1 / total,
        "top5": 100 * top5 / total,
        "loss": loss / total,
        "n": int(count),
    }


def _is_correct(
    logits: Tensor,
    targets: Tensor,
    indices: list[int],
    label_sets: Sequence[tuple[int, ...]] | None,
) -> Tensor:
    """Which of the (up to) five most likely classes are correct, (B, 5) bool, best first."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    if label_sets is None:
        return best == targets[:, None]
    answers = torch.zeros_like(logits, dtype=torch.bool)
    for row, index in enumerate(indices):
        answers[row, list(label_sets[index])] = True
    return answers.gather(1, best)


_COLUMNS = ("index", "path", "label", "prediction", "confidence")
_BINS = 15

Numbers = npt.NDArray[np.int64]


class PredictionCollector:
    """Collects the predicted class of every image, as `on_batch` of `evaluate`.

    Attributes:
        table: (n, 2), by the image's index: its predicted class, counted from 1, and that class's
            probability; zeros for a missing image, so that the tables of processes can be summed.
    """

    def __init__(self, images: int, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self.table = torch.zeros(images, 2, dtype=accumulation_dtype(device), device=device)

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        best = logits.softmax(dim=1).max(dim=1)
        rows = torch.stack([best.indices + 1, best.values], dim=1)
        self.table[torch.from_numpy(batch.indices).to(self.table.device)] = rows.to(self.table)

    def predictions(self, source: ImageSource, classes: Sequence[str]) -> Predictions:
        """The predictions of a source's images.

        An image with several correct labels gets the predicted one if that is among them.
        """
        table = self.table.cpu().numpy()
        seen = np.flatnonzero(table[:, 0])
        predicted = table[seen, 0].astype(np.int64) - 1
        labels = np.array(source.labels[seen], dtype=np.int64)
        if source.label_sets is not None:
            pairs = zip(seen.tolist(), predicted, strict=True)
            right = [guess in source.label_sets[index] for index, guess in pairs]
            labels = np.where(right, predicted, labels)
        paths = [source.describe(index) for index in seen.tolist()]
        return Predictions(list(classes), seen, paths, labels, predicted, table[seen, 1])

    def write(self, path: Path, source: ImageSource, classes: Sequence[str]) -> None:
        """Write a row per image, atomically."""
        found = self.predictions(source, classes)
        names = np.array(found.classes, dtype=object)
        confidence = [f"{value:.6f}" for value in found.confidence]
        labels, predicted = names[found.labels], names[found.predicted]
        rows = zip(found.indices, found.paths, labels, predicted, confidence, strict=True)
        write_atomic(path, csv_text([_COLUMNS, *rows]))


@dataclass(frozen=True)
class Predictions:
    """The predictions of n images.

    Attributes:
        classes: names of all k classes.
        indices: of the images, (n,).
        paths: of the images.
        labels, predicted: class numbers, (n,).
        confidence: the probability of the predicted class, (n,).
    """

    classes: list[str]
    indices: Numbers
    paths: list[str]
    labels: Numbers
    predicted: Numbers
    confidence: npt.NDArray[np.float64]

    @classmethod
    def read(cls, path: Path, classes: list[str]) -> Predictions:
        """Read what `PredictionCollector` wrote.

        Raises:
            UserError: if the file is something else, or of other classes.
        """
        number = {name: index for index, name in enumerate(classes)}
        sentence = (
            f"{path} is not a table of predictions for the classes of its run; delete it, and "
            f"`locality report --record` writes it anew"
        )
        cells: dict[str, Any] = {"index": int, "path": str, "confidence": float}
        cells |= {"label": number.__getitem__, "prediction": number.__getitem__}
        with prefix_errors(sentence):
            rows = read_rows(path, cells)
            found = cls(
                classes,
                np.array([int(row["index"]) for row in rows], dtype=np.int64),
                [row["path"] for row in rows],
                np.array([number[row["label"]] for row in rows], dtype=np.int64),
                np.array([number[row["prediction"]] for row in rows], dtype=np.int64),
                np.array([float(row["confidence"]) for row in rows]),
            )
            if not ((found.confidence >= 0) & (found.confidence <= 1)).all():
                raise UserError("a confidence is outside 0 to 1")
            return found

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether each prediction is correct, (n,)."""
        return self.labels == self.predicted

    @cached_property
    def pairs(self) -> Counter[tuple[int, int]]:
        """How many images have a label and a predicted class, by both."""
        return Counter(zip(self.labels.tolist(), self.predicted.tolist(), strict=True))

    def confusion(self, chosen: Sequence[int]) -> Numbers:
        """The confusion matrix of the chosen classes: labels in rows, predictions in columns."""
        return np.array([[self.pairs[label, other] for other in chosen] for label in chosen])

    def per_class(self) -> list[dict[str, Any]]:
        """For each class, in the classes' order: how many `images` it has, how many of them are
        `right`, how many images are `called` so, and what it is most often taken for: `confused`,
        so many `times`."""
        empty = {"images": 0, "right": 0, "called": 0, "times": 0}
        rows: list[dict[str, Any]] = [dict(empty) for _ in self.classes]
        for (label, predicted), times in sorted(self.pairs.items()):
            rows[label]["images"] += times
            rows[predicted]["called"] += times
            if label == predicted:
                rows[label]["right"] = times
            elif times > rows[label]["times"]:
                rows[label] |= {"confused": self.classes[predicted], "times": times}
        return rows

    @property
    def macro(self) -> float:
        """The accuracy in percent of a class, on average over those that have images."""
        images = np.bincount(self.labels)
        right = np.bincount(self.labels[self.right], minlength=len(images))
        return float(100 * np.mean(right[images > 0] / images[images > 0]))

    @property
    def never(self) -> list[str]:
        """Classes that have images, and that no image is predicted as."""
        return [self.classes[n] for n in np.setdiff1d(self.labels, self.predicted)]

    def calibration(self) -> tuple[npt.NDArray[np.float64], float]:
        """Whether confidence is accuracy: of images in each of 15 equal ranges of confidence that
        has any, (m, 3): mean confidence, accuracy, share of the images; and the expected
        calibration error Σ share · |accuracy − confidence| (Guo et al., 2017), as a fraction."""
        ranges = np.minimum((self.confidence * _BINS).astype(int), _BINS - 1)
        bins = [
            (self.confidence[chosen].mean(), self.right[chosen].mean(), chosen.mean())
            for chosen in (ranges == number for number in np.unique(ranges))
        ]
        table = np.array(bins).reshape(-1, 3)
        return table, float((table[:, 2] * np.abs(table[:, 1] - table[:, 0])).sum())

    def mistakes(self, most: int) -> Numbers:
        """Rows of wrong predictions, the most confident first, at most `most`."""
        wrong = np.flatnonzero(~self.right)
        return wrong[np.argsort(-self.confidence[wrong], kind="stable")][:most]
