"""Choosing the images that instruments look at: the same ones, every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from locality.checkpoints import Classifier
from locality.data import open_data
from locality.data.config import AugmentConfig
from locality.data.sources import ImageSource
from locality.data.transforms import eval_transform, normalise
from locality.errors import UserError
from locality.training.config import RunConfig


@dataclass(frozen=True)
class Sample:
    """A few images of a source, ready for a model and for people.

    Attributes:
        images: (n, 3, H, W) float32, normalised.
        shown: (n, H, W, 3) uint8, the same before normalisation.
        labels: the name of each one's class.
        classes: names of all classes, in the order of the logits; empty where nobody said.
    """

    images: Tensor
    shown: npt.NDArray[np.uint8]
    labels: list[str]
    classes: Sequence[str] = ()

    def first(self, count: int) -> Sample:
        """The first `count` of them."""
        few = slice(count)
        return Sample(self.images[few], self.shown[few], self.labels[few], self.classes)

    def class_name(self, index: int) -> str:
        """The name of a class, or its number where there is none."""
        return self.classes[index] if self.classes else str(index)


def one_of_each(labels: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Indices of `count` images that go round the classes: the first of each, then the second, …

    (n,) class numbers → at most `count` indices. No randomness: the same labels give the same
    choice, and a larger count begins with the choice of a smaller one.
    """
    order = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    rank = np.arange(len(labels)) - np.repeat(starts, sizes)
    # By rank within the class first; a stable sort keeps the classes in order.
    return order[np.argsort(rank, kind="stable")][:count]


def sample(
    source: ImageSource,
    augment: AugmentConfig,
    img_size: int | tuple[int, int],
    count: int,
    classes: Sequence[str] = (),
) -> Sample:
    """`count` images of a source, as evaluation prepares them, spread evenly over its classes.

    Raises:
        UserError: if the source has no image, or one of those chosen cannot be decoded.
    """
    if len(source) == 0 or count < 1:
        raise UserError(f"cannot choose {count} images out of {len(source)}")
    indices = one_of_each(source.labels, count)
    transform: Any = eval_transform(augment, img_size)
    pixels = torch.stack([transform(source.read_or_name(int(index))) for index in indices])
    shown = pixels.permute(0, 2, 3, 1).contiguous().numpy()
    labels = [classes[label] if classes else str(label) for label in source.labels[indices]]
    return Sample(normalise(pixels, augment), shown, labels, classes)


def validation_sample(config: RunConfig, img_size: int | tuple[int, int], count: int) -> Sample:
    """`count` validation images of a run, at the size its model takes."""
    splits = open_data(config.data, config.seed)
    return sample(splits.val, config.augment, img_size, count, splits.classes)


def prepared(subject: Classifier, images: Sequence[Image.Image]) -> Sample:
    """Images of unknown class, as a classifier prepares them."""
    batch = subject.prepare(images)
    mean, std = (
        torch.tensor(values).view(-1, 1, 1)
        for values in (subject.preprocessing.mean, subject.preprocessing.std)
    )
    pixels = ((batch.cpu() * std + mean) * 255).round().clamp(0, 255).byte()
    shown = pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
    return Sample(batch, shown, [""] * len(images), subject.classes or ())


def observable(subject: Classifier) -> nn.Module:
    """The network of a classifier.

    Raises:
        UserError: if it is an exported graph.
    """
    if subject.model is None:
        raise UserError(f"{subject.name} is an exported graph, whose attention cannot be observed")
    return subject.model
