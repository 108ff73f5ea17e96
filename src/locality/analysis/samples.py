"""Choosing the images that instruments look at: the same ones, every time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from locality.checkpoints import Classifier
from locality.data.config import AugmentConfig
from locality.data.sources import ImageSource
from locality.data.transforms import eval_transform, normalise
from locality.errors import UserError


@dataclass(frozen=True)
class Sample:
    """A few images of a source, ready for a model and for people.

    Attributes:
        images: (n, 3, H, W) float32, normalised.
        shown: (n, H, W, 3) uint8, the same before normalisation.
        labels: (n,) class numbers.
        indices: (n,) their places in the source.
    """

    images: Tensor
    shown: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]


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
    source: ImageSource, augment: AugmentConfig, img_size: int | tuple[int, int], count: int
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
    return Sample(normalise(pixels, augment), shown, source.labels[indices], indices)


def observable(subject: Classifier) -> nn.Module:
    """The network of a classifier.

    Raises:
        UserError: if it is an exported graph.
    """
    if subject.model is None:
        raise UserError(f"{subject.name} is an exported graph, whose attention cannot be observed")
    return subject.model


def pixels(subject: Classifier, batch: Tensor) -> npt.NDArray[np.uint8]:
    """What `subject.prepare` made of images, for people: (n, H, W, 3) uint8."""
    mean, std = (
        torch.tensor(values).view(-1, 1, 1)
        for values in (subject.preprocessing.mean, subject.preprocessing.std)
    )
    shown = ((batch.cpu() * std + mean) * 255).round().clamp(0, 255).byte()
    return shown.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
