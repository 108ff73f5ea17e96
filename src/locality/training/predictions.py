"""Predictions of the validation images: predictions.csv, confusion, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from locality.data import (
    Batch,
    ImageSource,
)
from locality.errors import wrap_errors
from locality.files import csv_text, read_rows, write_atomic
from locality.training.devices import accumulation_dtype

_COLUMNS = ("index", "path", "label", "prediction", "confidence")
_BINS = 15

Numbers = npt.NDArray[np.int64]


class PredictionCollector:
    """Collects the predicted class of every image, as `on_batch` of `evaluate`.

    Attributes:
        table: (n, 2), by the image's index: its predicted class, counted from 1, and that class's
            probability; zeros for a missing image, so that the tables of processes can be summed.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self.table = torch.zeros(images, 2, dtype=accumulation_dtype(device), device=device)

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        best = logits.softmax(dim=1).max(dim=1)
        rows = torch.stack([best.indices + 1, best.values], dim=1)
        self.table[torch.from_numpy(batch.indices).to(self.table.device)] = rows.to(self.table)

    def write(self, path: Path, source: ImageSource, classes: Sequence[str]) -> None:
        """Write a row per image, atomically.

        An image with several correct labels gets the predicted one if that is among them.
        """
        rows: list[Sequence[object]] = [_COLUMNS]
        for index, (number, confidence) in enumerate(self.table.tolist()):
            if not number:
                continue
            predicted, label = int(number) - 1, int(source.labels[index])
            if source.label_sets is not None and predicted in source.label_sets[index]:
                label = predicted
            named = source.describe(index), classes[label], classes[predicted]
            rows.append([index, *named, f"{confidence:.6f}"])
        write_atomic(path, csv_text(rows))


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
        with wrap_errors(sentence, KeyError, TypeError, ValueError):
            rows = read_rows(path)
            found = cls(
                classes,
                np.array([int(row["index"]) for row in rows], dtype=np.int64),
                [row["path"] for row in rows],
                np.array([number[row["label"]] for row in rows], dtype=np.int64),
                np.array([number[row["prediction"]] for row in rows], dtype=np.int64),
                np.array([float(row["confidence"]) for row in rows]),
            )
            if not ((found.confidence >= 0) & (found.confidence <= 1)).all():
                raise ValueError("a confidence is outside 0 to 1")
            return found

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether each prediction is correct, (n,)."""
        return self.labels == self.predicted

    def confusion(self, chosen: Sequence[int]) -> Numbers:
        """The confusion matrix of the chosen classes: labels in rows, predictions in columns."""
        place = np.full(len(self.classes), -1)
        place[list(chosen)] = np.arange(len(chosen))
        labels, predicted = place[self.labels], place[self.predicted]
        matrix = np.zeros((len(chosen), len(chosen)), dtype=np.int64)
        among = (labels >= 0) & (predicted >= 0)
        np.add.at(matrix, (labels[among], predicted[among]), 1)
        return matrix

    def per_class(self) -> list[dict[str, Any]]:
        """For each class, in the classes' order: how many `images` it has, how many of them are
        `right`, how many images are `called` so, and what it is most often taken for: `confused`,
        so many `times`."""
        k = len(self.classes)
        images, called, right = (
            np.bincount(which, minlength=k).tolist()
            for which in (self.labels, self.predicted, self.labels[self.right])
        )
        rows: list[dict[str, Any]] = [
            {"images": images[n], "right": right[n], "called": called[n], "times": 0}
            for n in range(k)
        ]
        pairs = np.stack([self.labels, self.predicted])[:, ~self.right]
        found, counts = np.unique(pairs.T, axis=0, return_counts=True)
        for (label, predicted), times in zip(found, counts, strict=True):
            if times > rows[label]["times"]:
                rows[label] |= {"confused": self.classes[predicted], "times": int(times)}
        return rows

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
