"""Batches as functions of their number.

Training counts positions: step s of a run with global batch size G covers positions s·G … s·G+G−1,
for any number of processes, accumulated micro-batches and workers. A position determines the sample
(`sampling.sample_order`) and seeds its augmentation, so a worker needs only the micro-batch number.
Its only state is a cache of decoded and resized images.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from locality.data.config import AugmentConfig, InputConfig
from locality.data.decoding import BadImage
from locality.data.preprocessing import (
    Images,
    ImageTransform,
    create_erasing,
    eval_transform,
    jitter_colors,
    normalise,
    train_transform,
    warp,
    window_maps,
)
from locality.data.sampling import (
    Indices,
    Stream,
    hash_seed,
    preserved_generators,
    sample_order,
    seed_generators,
)
from locality.data.sources import ImageSource
from locality.errors import UserError

OnBad = Literal["error", "skip"]

# How often a replacement for an unreadable image is drawn before giving up on the dataset.
_MAX_REPLACEMENTS = 100
# Prepared images are cached if all of them fit into this, in each loading process.
_KEPT_BYTES = 128_000_000


@dataclass(frozen=True)
class Batch:
    """One batch of images and targets.

    Attributes:
        images: (B, 3, H, W) float32, normalised.
        targets: (B,) int64 classes.
        indices: (B,) int64, indices into the source.
    """

    images: torch.Tensor
    targets: torch.Tensor
    indices: Indices

    def __len__(self) -> int:
        return len(self.targets)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, for asynchronous copies to a GPU."""
        return replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())


class LoadedBatch(NamedTuple):
    """A worker's result: a batch or an error, and the images skipped, name → reason.

    Errors are values: torch would wrap an exception's message in a worker's traceback.
    """

    batch: Batch | None
    skipped: dict[str, str]
    error: str | None = None


@dataclass(eq=False)
class Batches(Dataset, ABC):
    """A dataset of batches by number, made in the loading process.

    Attributes:
        source: the images.
        preprocessing: how they are resized and normalised.
        batch_size: images per batch: of all processes in training, of this one in evaluation.
        rank, world_size: this process and the number of processes.
        on_bad: whether an image that cannot be decoded is an error or skipped.
    """

    source: ImageSource
    preprocessing: InputConfig
    batch_size: int
    rank: int
    world_size: int
    on_bad: OnBad
    transform: ImageTransform = field(init=False)
    _kept: dict[int, Any] = field(init=False, repr=False, default_factory=dict)

    @abstractmethod
    def batch(self, number: int, skipped: dict[str, str]) -> Batch | None:
        """Batch `number`; unreadable images are added to `skipped`."""

    def __getitem__(self, number: int) -> LoadedBatch:
        skipped: dict[str, str] = {}
        with preserved_generators():
            try:
                return LoadedBatch(self.batch(number, skipped), skipped)
            except UserError as error:
                return LoadedBatch(None, skipped, str(error))

    def read(self, index: int, skipped: dict[str, str]) -> Any:
        """A prepared image; None if it cannot be decoded and may be skipped."""
        if (kept := self._kept.get(index)) is not None:
            return kept
        try:
            image = self.transform.prepared(self.source.read(index))
            if self._keeps:
                self._kept[index] = image
            return image
        except BadImage as error:
            name, reason = self.source.describe(index), str(error)
        if self.on_bad == "error":
            raise UserError(
                f"{name}: {reason}; repair or remove the file, or set data.on_bad_image to skip"
            )
        skipped[name] = reason
        return None

    @cached_property
    def _keeps(self) -> bool:
        """Whether to cache decoded and resized images; cropping and flipping are cheap."""
        each = self.transform.prepared_bytes
        return each is not None and each * len(self.source) <= _KEPT_BYTES

    def in_memory(self) -> torch.Tensor | None:
        """All images, (n, 3, H, W) uint8, if the transform accepts them without PIL."""
        pixels, transform = self.source.pixels, self.transform
        fits = pixels is not None and tuple(pixels.shape[-2:]) == transform.size
        return pixels if fits and transform.on_tensors else None

    def make_batch(self, pixels: Images, indices: Indices) -> Batch:
        """A batch from transformed images, (B, 3, H, W) uint8 or a list."""
        targets = torch.from_numpy(self.source.labels[indices])
        return Batch(normalise(pixels, self.preprocessing), targets, indices)


@dataclass(eq=False)
class TrainBatches(Batches):
    """Training micro-batches; number n is micro-batch n mod A of step n div A.

    Positions are dealt in turn to the micro-batches of all processes, so that the adjacent copies
    of repeated augmentation go to different processes, as in the DeiT recipe.
    """

    augment: AugmentConfig
    seed: int
    accumulate: int

    def __post_init__(self) -> None:
        self.transform = train_transform(self.augment, self.preprocessing)
        self.batched = self.augment
        if self.augment.crop == "resized":  # by image
            self.batched = replace(self.augment, hflip=0.0, color_jitter=0.0)
        self.erasing = create_erasing(self.augment)

    def positions(self, number: int) -> Indices:
        """The global positions of one micro-batch of this process, (B,) int64."""
        step, micro = divmod(number, self.accumulate)
        first = step * self.batch_size + micro * self.world_size + self.rank
        stop = (step + 1) * self.batch_size
        return np.arange(first, stop, self.world_size * self.accumulate, dtype=np.int64)

    def batch(self, number: int, skipped: dict[str, str]) -> Batch:
        positions = self.positions(number)
        indices = sample_order(positions, len(self.source), self.seed, self.augment.repeats)
        images: Images
        if (pixels := self.in_memory()) is not None:
            images = pixels[torch.from_numpy(indices)]
        else:
            images = self._drawn(self._read(positions, indices, skipped), positions)
        augment, uniform = self.batched, self._uniform(positions, 10)
        if augment.affine or augment.hflip or augment.crop == "pad":
            maps = window_maps(uniform[:, :7], augment, self.transform.size)
            images = warp(images, maps, augment.padding)
        if augment.color_jitter and augment.auto_augment is None:
            images = jitter_colors(images, uniform[:, 7:], augment.color_jitter)
        batch = self.make_batch(images, indices)
        if self.erasing is not None:
            seeds = self._seeds(Stream.ERASE, positions)
            for image, seed in zip(batch.images, seeds, strict=True):
                seed_generators(seed)
                self.erasing(image)
        return batch

    def _seeds(self, stream: Stream, positions: Indices) -> list[int]:
        return hash_seed(self.seed, stream, positions).tolist()

    def _uniform(self, positions: Indices, count: int) -> torch.Tensor:
        """(B, count) float32 in [0, 1) for maps and colours."""
        drawn = hash_seed(self.seed, Stream.AFFINE, positions[:, None], np.arange(count))
        return torch.from_numpy((drawn >> np.uint64(40)).astype(np.float32) / 2**24)

    def _drawn(self, images: Iterable[Any], positions: Indices) -> list[torch.Tensor]:
        """The random transforms of prepared images."""
        if not self.transform.steps:
            return [*images]
        drawn = []
        for image, seed in zip(images, self._seeds(Stream.AUGMENT, positions), strict=True):
            # Seeded after reading, in case a decoder draws random numbers.
            seed_generators(seed)
            drawn.append(self.transform.drawn(image))
        return drawn

    def _read(self, positions: Indices, indices: Indices, skipped: dict[str, str]) -> Iterator[Any]:
        """Read images; others, in a fixed random order, replace unreadable ones and their index."""
        for place, position in enumerate(positions.tolist()):
            for attempt in range(_MAX_REPLACEMENTS + 1):
                if (image := self.read(int(indices[place]), skipped)) is not None:
                    yield image
                    break
                drawn = hash_seed(self.seed, Stream.REPLACE, position, attempt)[0]
                indices[place] = drawn % np.uint64(len(self.source))
            else:
                raise UserError(
                    f"{_MAX_REPLACEMENTS} images in a row could not be read; the last: "
                    f"{': '.join(list(skipped.items())[-1])}"
                )


@dataclass(eq=False)
class EvalBatches(Batches):
    """Evaluation batches of this process's images."""

    def __post_init__(self) -> None:
        self.transform = eval_transform(self.preprocessing)
        self.own = np.arange(self.rank, len(self.source), self.world_size, dtype=np.int64)

    def __len__(self) -> int:
        return -(-len(self.own) // self.batch_size)

    def batch(self, number: int, skipped: dict[str, str]) -> Batch | None:
        indices = self.own[number * self.batch_size : (number + 1) * self.batch_size]
        if (pixels := self.in_memory()) is not None:
            return self.make_batch(pixels[torch.from_numpy(indices)], indices)
        images, used = [], []
        for index in indices.tolist():
            if (image := self.read(index, skipped)) is not None:
                images.append(self.transform.drawn(image))
                used.append(index)
        indices = np.array(used, dtype=np.int64)
        return self.make_batch(images, indices) if used else None
