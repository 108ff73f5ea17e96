"""The linear probe: a classifier fitted to the features of a frozen network.

Fine-tuning that begins with it keeps more of what the network knows (Kumar et al., 2022).
"""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits
from torch import nn

from locality.data import DataSplits, ImageSource, eval_loader
from locality.data.sampling import evenly
from locality.errors import UserError
from locality.machine import arithmetic_threads
from locality.models import ImageClassifier
from locality.models.config import to_2tuple
from locality.settings import replace
from locality.training.config import RunConfig
from locality.training.devices import resolve_accelerator
from locality.training.model import initialize_model

MAX_IMAGES = 20_000
"""Larger sets are subsampled evenly within each class."""

STRENGTHS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Of scikit-learn's `C`, of which cross-validation chooses one."""

_FOLDS, _COMPARED_IMAGES, _ITERATIONS = 5, 1000, 300
_TOLERANCE, _COMPARED_TOLERANCE = 1e-6, 1e-4
# Small batches: at 224 pixels, the feature maps of 32 images leave the processor's cache.
_BATCH, _TIMED_IMAGES, _FEWEST_IMAGES = 16, 16, 20
_SHARE = 0.4  # of a run's minutes
_SMALLER = 0.25  # of that time, for smaller image sizes beside
_LEAST_DEVIATION = 0.3  # of a feature, of the median feature's

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
SizedProbe = tuple[Any, "Probe"]
"""An image size and the probe at it."""


@dataclass(frozen=True)
class Probe:
    """A linear classifier of features.

    Attributes:
        weight: (classes, width).
        bias: (classes,).
        strength: scikit-learn's `C`.
        images: number of training images.
        top1, loss: accuracy in percent and cross entropy, by cross-validation on them.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    strength: float
    images: int
    top1: float
    loss: float

    def copy_to(self, model: ImageClassifier) -> str:
        """Make it the classifier of a model, except the rows that this has inherited.

        Only differences of rows matter, so new ones are added at the inherited ones' mean.

        Returns:
            a note for the run's header.
        """
        head: Any = model.get_classifier()
        known = model.inherited
        new = [row for row in range(len(self.bias)) if row not in known]
        with torch.no_grad():
            for own, fitted in ((head.weight, self.weight), (head.bias, self.bias)):
                fitted = fitted.to(own)
                shift = own[known].mean(0) - fitted[known].mean(0) if known else 0
                own[new] = fitted[new] + shift
        if not new:
            return "no linear probe: the weights know all classes and keep their classifier"
        return str(self)

    def __str__(self) -> str:
        return (
            f"linear probe of {self.images:,} images: {self.top1:.1f}% of them by cross-validation "
            f"(C = {self.strength:g})"
        )


def check_probe(model: ImageClassifier) -> None:
    """Check that a model's classifier is linear.

    Raises:
        UserError: if it is not.
    """
    head = model.get_classifier()
    if not isinstance(head, nn.Linear) or head.bias is None:
        raise UserError(
            f"the classifier of {model.variant} is not one linear layer, so none can be fitted to "
            f"its features; give --optim.probe false"
        )


def probe_run(
    config: RunConfig,
    splits: DataSplits,
    sizes: Sequence[Any] = (),
    log: Callable[[str], None] | None = None,
) -> SizedProbe:
    """The probe of a run's network before its first step, on its training images.

    A run of minutes passes as many images as it can in two fifths of them. Smaller sizes
    have a quarter of that time beside.

    Args:
        config: the run.
        splits: its images.
        sizes: image sizes from which to choose, ascending; by default the run's own. They are the
            largest at which all images pass in time, and smaller ones. The lowest cross entropy
            decides.
        log: called with each size's result, the smallest first.

    Returns:
        the image size and the probe.

    Raises:
        UserError: if the images that can be read are of one class.
    """
    own = config.model.img_size
    sizes, most = [*sizes] or [own], min(len(splits.train), MAX_IMAGES)
    device = resolve_accelerator(config.engine.accelerator)
    found: list[SizedProbe] = []
    with arithmetic_threads(config.engine.threads):
        if config.schedule.minutes is not None:
            limit = _SHARE * 60 * config.schedule.minutes
            model, _ = initialize_model(config, splits.classes)
            for images in (1, _TIMED_IMAGES):  # the first is slow
                started = time.perf_counter()
                extract(model, splits.train.evenly(images), config, device)
            each = (time.perf_counter() - started) / _TIMED_IMAGES / math.prod(to_2tuple(own))
            seconds = {size: most * each * math.prod(to_2tuple(size)) for size in sizes}
            *smaller, largest = [size for size in sizes if seconds[size] <= limit] or sizes[:1]
            fewest = min(most, _FEWEST_IMAGES * len(splits.classes))
            most = max(fewest, int(most * min(1.0, limit / seconds[largest])))
            totals = itertools.accumulate(seconds[size] for size in smaller)
            pairs = zip(smaller, totals, strict=True)
            sizes = [*(size for size, total in pairs if total <= _SMALLER * limit), largest]
        for size in sizes:
            sized = replace(config, {"model.img_size": size})
            model, _ = initialize_model(sized, splits.classes)
            rows, labels = extract(model, splits.train.evenly(most), sized, device)
            balanced = config.objective.class_weights
            found.append((size, fit_probe(rows, labels, len(splits.classes), balanced)))
            if log is not None:
                height, width = to_2tuple(size)
                log(f"{height}×{width} pixels: {found[-1][1]}")
    return min(found, key=lambda pair: pair[1].loss)


@torch.inference_mode()
def extract(
    model: ImageClassifier, source: ImageSource, config: RunConfig, device: torch.device | str
) -> tuple[Floats, Labels]:
    """Pass images once through a network in evaluation mode: features (n, width), labels (n,)."""
    model, loading = model.eval().to(device), config.data.loading(training=True)
    loader = eval_loader(source, config.input.at(model.img_size), batch_size=_BATCH, **loading)
    rows, labels = [], []
    for batch in loader:
        rows.append(model.features(batch.images.to(device)).double().cpu().numpy())
        labels.append(batch.targets.numpy())
    if not rows:  # no image can be read
        return np.empty((0, 0)), np.empty(0, dtype=np.int64)
    return np.concatenate(rows), np.concatenate(labels)


def fit_probe(rows: Floats, labels: Labels, num_classes: int, balanced: bool = False) -> Probe:
    """scikit-learn's logistic regression on standardised features, as a linear layer.

    Args:
        rows: features (n, width).
        labels: (n,).
        num_classes: all classes, also those without images.
        balanced: give each class the same weight.

    Raises:
        UserError: if the images are of one class, or each of another.
    """
    if len(np.unique(labels)) < 2:
        raise UserError("the training images that can be read are of one class; add others")
    if np.bincount(labels).max() < 2:
        raise UserError("no class has two training images; add some, or give --optim.probe false")
    folds, best = _folds(labels), (math.inf, 0.0, STRENGTHS[0])
    for strength in STRENGTHS:
        loss = correct = 0.0
        for train, test in folds:
            linear = _linear(
                rows[train], labels[train], num_classes, strength, balanced, _COMPARED_TOLERANCE
            )
            logits, own = rows[test] @ linear[0].T + linear[1], labels[test]
            loss -= log_softmax(logits, axis=1)[np.arange(len(test)), own].sum()
            correct += (logits.argmax(axis=1) == own).sum()
        if loss >= best[0]:
            break  # larger ones are worse, and slower to fit
        best = float(loss), float(correct), strength
    count = sum(len(test) for _, test in folds)
    weight, bias = map(torch.from_numpy, _linear(rows, labels, num_classes, best[2], balanced))
    scores = 100 * best[1] / count, best[0] / count
    return Probe(weight.float(), bias.float(), best[2], len(labels), *scores)


def _folds(labels: Labels) -> list[tuple[Any, Any]]:
    """(training, test) indices of a cross-validation, of at most `_COMPARED_IMAGES` images."""
    chosen = evenly(labels, max(_COMPARED_IMAGES, 2 * len(np.unique(labels))))
    count = min(_FOLDS, int(np.bincount(labels[chosen]).max()))
    folds = StratifiedKFold(count, shuffle=True, random_state=0)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of small classes
        pairs = folds.split(chosen, labels[chosen])
        found = [(chosen[train], chosen[test]) for train, test in pairs]
    # Without the fold that tests the only image of one of two classes.
    return [(train, test) for train, test in found if len(np.unique(labels[train])) > 1]


def _linear(
    rows: Floats,
    labels: Labels,
    num_classes: int,
    strength: float,
    balanced: bool,
    tolerance: float = _TOLERANCE,
) -> tuple[Floats, Floats]:
    """(classes, width) and (classes,) of a classifier of rows as they are."""
    mean, deviation = rows.mean(axis=0), rows.std(axis=0)
    # What hardly varies in these images may vary in others, and would then outweigh all else.
    deviation = np.maximum(deviation, _LEAST_DEVIATION * np.median(deviation))
    deviation[deviation == 0] = 1
    weighting = "balanced" if balanced else None
    limits = {"max_iter": _ITERATIONS, "tol": tolerance}
    model = LogisticRegression(C=strength, class_weight=weighting, **limits)
    # On busy processors, threads that wait for each other take many times as long as one. Warnings:
    # not converged, few images a class.
    quiet = warnings.catch_warnings(action="ignore", category=UserWarning)
    with quiet, threadpool_limits(1):
        model.fit((rows - mean) / deviation, labels)
    coefficients, intercepts = model.coef_ / deviation, model.intercept_
    intercepts = intercepts - coefficients @ mean
    if len(model.classes_) == 2:  # one row, of the second class
        coefficients, intercepts = (np.stack((-x[0], x[0])) / 2 for x in (coefficients, intercepts))
    # A class without images is 10 below the mean of the others: never the answer.
    weight = np.tile(coefficients.mean(axis=0), (num_classes, 1))
    bias = np.full(num_classes, intercepts.mean() - 10)
    weight[model.classes_], bias[model.classes_] = coefficients, intercepts
    return weight, bias
