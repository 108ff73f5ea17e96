"""The predictions of a run's validation images: predictions.csv, confusion and calibration."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from locality.errors import UserError, prefix_errors
from locality.files import csv_text, read_rows, write_atomic

_COLUMNS = ("index", "path", "label", "prediction", "confidence")
_BINS = 15
_MAX_BYTES = 1 << 30  # millions of images

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Predictions:
    """The predictions of n images.

    Attributes:
        classes: names of all k classes.
        indices: image indices, (n,).
        paths: image paths.
        labels, predicted: class numbers, (n,).
        confidence: the probability of the predicted class, (n,).
    """

    classes: list[str]
    indices: Numbers
    paths: list[str]
    labels: Numbers
    predicted: Numbers
    confidence: npt.NDArray[np.float64]

    def write(self, path: Path) -> None:
        """Write a row per image, atomically."""
        names = np.array(self.classes, dtype=object)
        confidence = [f"{value:.6f}" for value in self.confidence]
        labels, predicted = names[self.labels], names[self.predicted]
        rows = zip(self.indices, self.paths, labels, predicted, confidence, strict=True)
        write_atomic(path, csv_text([_COLUMNS, *rows]))

    @classmethod
    def read(cls, path: Path, classes: list[str]) -> "Predictions":
        """Read what `write` wrote.

        Raises:
            UserError: if the file is not a table of predictions for these classes.
        """
        number = {name: index for index, name in enumerate(classes)}
        sentence = (
            f"{path} is not a table of predictions for the classes of its run; delete it and "
            f"write it again with `locality report --record`"
        )
        kinds = (int, str, number.__getitem__, number.__getitem__, float)
        cells: dict[str, Any] = dict(zip(_COLUMNS, kinds, strict=True))
        with prefix_errors(sentence):
            rows = read_rows(path, cells, _MAX_BYTES)
            if not rows:
                raise UserError("it has no rows")
            indices, paths, labels, predicted, confidence = (
                [convert(row[name]) for row in rows] for name, convert in cells.items()
            )
            if not all(0 <= value <= 1 for value in confidence):
                raise UserError("a confidence is outside 0 to 1")
        indices, labels, predicted = np.array([indices, labels, predicted], dtype=np.int64)
        return cls(classes, indices, paths, labels, predicted, np.array(confidence, dtype=float))

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether each prediction is correct, (n,)."""
        return self.labels == self.predicted

    @cached_property
    def pairs(self) -> Counter[tuple[int, int]]:
        """Number of images by (label, predicted class)."""
        return Counter(zip(self.labels.tolist(), self.predicted.tolist(), strict=True))

    def confusion(self, labels: Sequence[int], predicted: Sequence[int] | None = None) -> Numbers:
        """The confusion matrix: `labels` in rows, `predicted` in columns (the same by default)."""
        columns = labels if predicted is None else predicted
        return np.array([[self.pairs[label, other] for other in columns] for label in labels])

    def per_class(self) -> list[dict[str, Any]]:
        """Per class, in order: its `number` and `name`; how many `images` it has, of those are
        predicted `right`, and of all images are `called` this class; `recall`, `precision` and `f1`
        in percent, None of no images; the class it is most often `confused` with, how many `times`.
        """
        empty = {"images": 0, "right": 0, "called": 0, "times": 0}
        rows: list[dict[str, Any]] = [
            {"number": number, "name": name, **empty} for number, name in enumerate(self.classes)
        ]
        for (label, predicted), times in sorted(self.pairs.items()):
            rows[label]["images"] += times
            rows[predicted]["called"] += times
            if label == predicted:
                rows[label]["right"] = times
            elif times > rows[label]["times"]:
                rows[label] |= {"confused": self.classes[predicted], "times": times}
        for row in rows:
            for share, total in (("recall", "images"), ("precision", "called")):
                row[share] = 100 * row["right"] / row[total] if row[total] else None
            either = row["images"] + row["called"]
            row["f1"] = 200 * row["right"] / either if either else None
        return rows

    def by_recall(self) -> list[dict[str, Any]]:
        """`per_class` of the classes with images, lowest recall first."""
        return sorted((row for row in self.per_class() if row["images"]), key=itemgetter("recall"))

    @property
    def macro(self) -> dict[str, float]:
        """Means over classes in percent, as in scikit-learn: `balanced_accuracy`, of the recall of
        classes that have images; `macro_f1`, of the F1 of these and of those predicted."""
        rows = self.per_class()
        means = {"balanced_accuracy": "recall", "macro_f1": "f1"}
        return {
            mean: float(np.mean([row[name] for row in rows if row[name] is not None]))
            for mean, name in means.items()
        }

    def answered(self, threshold: float) -> tuple[float, float | None]:
        """Percent of the images whose confidence is at least `threshold`, and of those right."""
        sure = self.confidence >= threshold
        right = 100 * float(self.right[sure].mean()) if sure.any() else None
        return 100 * float(sure.mean()), right

    @property
    def never(self) -> list[str]:
        """Classes with images that are never predicted."""
        return [self.classes[n] for n in np.setdiff1d(self.labels, self.predicted)]

    def calibration(self) -> tuple[npt.NDArray[np.float64], float]:
        """Calibration in 15 equal ranges of confidence: (m, 3), per range with images: mean
        confidence, accuracy, share of the images; and the expected calibration error
        Σ share · |accuracy − confidence| (Guo et al., 2017), as a fraction."""
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
