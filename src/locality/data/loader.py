"""Batches as functions of a number, and loaders that deliver them in order.

Training counts positions: step s of a run with global batch G covers the positions s·G … s·G+G−1,
whatever the number of processes, of accumulated micro-batches and of workers. Positions say which
sample comes (`sampling.sample_order`) and seed its augmentation. A worker that is asked for
micro-batch number m needs nothing else, and keeps nothing for the next.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from locality.data.config import AugmentConfig, Preprocessing
from locality.data.preprocessing import (
    Images,
    ImageTransform,
    affine_maps,
    erasing,
    eval_transform,
    normalise,
    train_transform,
    warp,
)
from locality.data.sampling import (
    Indices,
    Stream,
    keys,
    preserved_generators,
    sample_order,
    seed_generators,
)
from locality.data.sources import BadImage, ImageSource
from locality.errors import ProcessKilled, UserError

OnBad = Literal["error", "skip"]

# How often a replacement for an unreadable image is drawn before giving up on the dataset.
_REPLACEMENTS = 100


@dataclass(frozen=True)
class Batch:
    """What a model is given at once.

    Attributes:
        images: (B, 3, H, W) float32, normalised.
        targets: (B,) int64 classes.
        indices: (B,) int64, the images' numbers in their source.
        positions: (B,) int64, their places in the run; the indices again in evaluation.
        step: number of the optimiser step, or of the batch in evaluation.
        micro: number of the micro-batch within the step.
    """

    images: torch.Tensor
    targets: torch.Tensor
    indices: Indices
    positions: Indices
    step: int
    micro: int

    def __len__(self) -> int:
        return len(self.targets)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which copies to a GPU need no waiting."""
        return replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())


class Failure(NamedTuple):
    """An image that could not be decoded: its name for people, and why."""

    image: str
    reason: str


class Loaded(NamedTuple):
    """What a worker sends: a batch, what was left out of it, and why there is none.

    Errors travel as values: torch would wrap an exception's message in a worker's traceback.
    """

    batch: Batch | None
    skipped: tuple[Failure, ...] = ()
    error: str | None = None


@dataclass(eq=False)
class Batches(Dataset, ABC):
    """Numbers → batches of some images, as a loading process makes them.

    Attributes:
        source: the images.
        preprocessing: how they are resized and normalised.
        batch_size: images at once: of all processes while training, of this one in evaluation.
        rank, world_size: this process and how many there are.
        on_bad: what to do about an image that cannot be decoded.
    """

    source: ImageSource
    preprocessing: Preprocessing
    batch_size: int
    rank: int
    world_size: int
    on_bad: OnBad
    transform: ImageTransform = field(init=False)

    @abstractmethod
    def batch(self, number: int, skipped: list[Failure]) -> Batch | None:
        """Batch `number`; what could not be read joins `skipped`."""

    def __getitem__(self, number: int) -> Loaded:
        skipped: list[Failure] = []
        with preserved_generators():
            try:
                return Loaded(self.batch(number, skipped), tuple(skipped))
            except UserError as error:
                return Loaded(None, error=str(error))

    def read(self, index: int, skipped: list[Failure]) -> Image.Image | None:
        """An image; None if it cannot be decoded and may be left out."""
        try:
            return self.source.read(index)
        except BadImage as error:
            failure = Failure(self.source.describe(index), str(error))
        if self.on_bad == "error":
            raise UserError(
                f"{failure.image}: {failure.reason}; repair or remove the file, or set "
                f"on_bad_image to 'skip'"
            )
        skipped.append(failure)
        return None

    def in_memory(self) -> torch.Tensor | None:
        """All images, (n, 3, H, W) uint8, where the transform can take them as they are."""
        pixels = self.source.pixels
        return pixels if pixels is not None and self.transform.takes_tensors(pixels) else None

    def assembled(
        self,
        pixels: Images,
        indices: Indices,
        positions: Indices,
        step: int,
        micro: int = 0,
    ) -> Batch:
        """The batch of transformed images, (B, 3, H, W) uint8, or one by one."""
        targets = torch.from_numpy(self.source.labels[indices])
        images = normalise(pixels, self.preprocessing)
        return Batch(images, targets, indices, positions, step, micro)


@dataclass(eq=False)
class TrainBatches(Batches):
    """Micro-batch number → its content. Number n is micro-batch n mod A of step n div A.

    Positions are dealt in turn to the micro-batches of all processes, so that the copies which
    repeated augmentation puts side by side come to different processes, as in the DeiT recipe.
    """

    augment: AugmentConfig
    seed: int
    accumulate: int

    def __post_init__(self) -> None:
        self.transform = train_transform(self.augment, self.preprocessing)
        self.erasing = erasing(self.augment)

    def positions(self, step: int, micro: int) -> Indices:
        """The global positions of one micro-batch of this process, (B,) int64."""
        first = step * self.batch_size + micro * self.world_size + self.rank
        stop = (step + 1) * self.batch_size
        return np.arange(first, stop, self.world_size * self.accumulate, dtype=np.int64)

    def batch(self, number: int, skipped: list[Failure]) -> Batch:
        step, micro = divmod(number, self.accumulate)
        positions = self.positions(step, micro)
        indices = sample_order(positions, len(self.source), self.seed, self.augment.repeats)
        if (pixels := self.in_memory()) is not None:
            images: Images = self._drawn(pixels[torch.from_numpy(indices)], positions)
        else:
            images = self._read(positions, indices, skipped)
        if self.augment.affine:
            images = warp(images, affine_maps(self._uniform(positions, 4), self.augment.affine))
        batch = self.assembled(images, indices, positions, step, micro)
        if self.erasing is not None:
            seeds = self._seeds(Stream.ERASE, positions)
            for image, seed in zip(batch.images, seeds, strict=True):
                seed_generators(seed)
                self.erasing(image)
        return batch

    def _seeds(self, stream: Stream, positions: Indices) -> list[int]:
        return keys(self.seed, stream, positions).tolist()

    def _uniform(self, positions: Indices, count: int) -> torch.Tensor:
        """(B, count) float32 numbers in [0, 1) of the affine maps."""
        drawn = keys(self.seed, Stream.AFFINE, positions[:, None], np.arange(count))
        return torch.from_numpy((drawn >> np.uint64(40)).astype(np.float32) / 2**24)

    def _drawn(self, pixels: torch.Tensor, positions: Indices) -> torch.Tensor:
        """Images that are in memory, transformed."""
        if self.transform.fixed:
            return pixels
        drawn, seeds = [], self._seeds(Stream.AUGMENT, positions)
        for image, seed in zip(self.transform.padded(pixels), seeds, strict=True):
            seed_generators(seed)
            drawn.append(self.transform.drawn(image))
        return torch.stack(drawn)

    def _read(
        self, positions: Indices, indices: Indices, skipped: list[Failure]
    ) -> list[torch.Tensor]:
        """Images read and transformed; `indices` are put right where another takes a place."""
        images, seeds = [], self._seeds(Stream.AUGMENT, positions)
        order = zip(positions.tolist(), indices.tolist(), seeds, strict=True)
        for place, (position, index, seed) in enumerate(order):
            image, indices[place] = self._readable(position, index, skipped)
            # Seeded after reading, so that nothing a decoder draws can matter.
            seed_generators(seed)
            images.append(self.transform(image))
        return images

    def _readable(
        self, position: int, index: int, skipped: list[Failure]
    ) -> tuple[Image.Image, int]:
        # The image due here, and what may replace it, in a fixed random order.
        others = (
            int(keys(self.seed, Stream.REPLACE, position, attempt)[0] % np.uint64(len(self.source)))
            for attempt in range(_REPLACEMENTS)
        )
        for candidate in chain([index], others):
            if (image := self.read(candidate, skipped)) is not None:
                return image, candidate
        raise UserError(
            f"{_REPLACEMENTS} images in a row could not be read; the last: "
            f"{skipped[-1].image}: {skipped[-1].reason}"
        )


@dataclass(eq=False)
class EvalBatches(Batches):
    """Batch number → its content, of the images that belong to this process."""

    def __post_init__(self) -> None:
        self.transform = eval_transform(self.preprocessing)
        self.own = np.arange(self.rank, len(self.source), self.world_size, dtype=np.int64)

    def __len__(self) -> int:
        return -(-len(self.own) // self.batch_size)

    def batch(self, number: int, skipped: list[Failure]) -> Batch | None:
        indices = self.own[number * self.batch_size : (number + 1) * self.batch_size]
        if (pixels := self.in_memory()) is not None:
            return self.assembled(pixels[torch.from_numpy(indices)], indices, indices, number)
        images, used = [], []
        for index in indices.tolist():
            if (image := self.read(index, skipped)) is not None:
                images.append(self.transform(image))
                used.append(index)
        indices = np.array(used, dtype=np.int64)
        return self.assembled(images, indices, indices, number) if used else None


_WORKER = "a process that loads images"
_KILLED = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (.*?)\.")
_ENDING_SECONDS = 1.0

_OURS = (signal.SIGINT, signal.SIGTERM)
# Signals can be held back and looked at; elsewhere workers take them as torch made them.
_CAN_HOLD = hasattr(signal, "sigwaitinfo")


class BatchLoader:
    """Iterates over batches in order; every iteration starts at the first.

    Args:
        batches: numbers → batches.
        numbers: which, in order.
        persistent: keep the workers from one iteration to the next.
        max_bad_images: how many different images may be skipped.
        workers: loading processes; 0 loads in this one, and leaves its generators untouched.
        pin_memory: deliver page-locked tensors, for copying to a GPU.
        start_method: of the workers: "fork", "forkserver" or "spawn"; None is Python's default,
            on Linux fork.

    Attributes:
        skipped: images left out because they cannot be decoded, name → reason, in the order met.
            A resumed run may put in what was found before it stopped.
    """

    def __init__(
        self,
        batches: Dataset,
        numbers: Sequence[int],
        *,
        persistent: bool,
        max_bad_images: int = 100,
        workers: int = 0,
        pin_memory: bool = False,
        start_method: str | None = None,
    ) -> None:
        self.skipped: dict[str, str] = {}
        self._max_bad_images = max_bad_images
        self._numbers = numbers
        self._loader: DataLoader | None = DataLoader(
            batches,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            worker_init_fn=_prepare_worker,
            multiprocessing_context=start_method if workers else None,
            persistent_workers=persistent and workers > 0,
            # Its own, since a loader without one draws from the process's default generator.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        if self._loader is None:
            raise RuntimeError("this loader has been closed")
        # Workers that wait for this iteration belong to the last one; one of them may be gone.
        waiting = getattr(self._loader, "_iterator", None)
        with _signals_held(), _naming_a_killed_worker_of(waiting):
            arriving: Iterator[Loaded] = iter(self._loader)
        del waiting
        try:
            while (loaded := self._next(arriving)) is not None:
                if loaded.error is not None:
                    raise UserError(loaded.error)
                self._note_skipped(loaded.skipped)
                if loaded.batch is not None:
                    yield loaded.batch
        except (UserError, ProcessKilled):
            self.close()
            raise
        finally:
            # Workers end with their iterator, and an error's traceback would keep it alive.
            del arriving

    def _next(self, arriving: Iterator[Loaded]) -> Loaded | None:
        with _naming_a_killed_worker_of(arriving):
            return next(arriving, None)

    def close(self) -> None:
        """End workers that wait for the next iteration; nothing can be loaded after that."""
        self._loader = None

    def _note_skipped(self, skipped: Sequence[Failure]) -> None:
        for image, reason in skipped:
            self.skipped.setdefault(image, reason)
        if len(self.skipped) > self._max_bad_images:
            image, reason = next(iter(self.skipped.items()))
            raise UserError(
                f"{len(self.skipped)} images could not be read, more than the "
                f"{self._max_bad_images} that max_bad_images allows; the first: {image}: {reason}"
            )


def train_loader(
    source: ImageSource,
    augment: AugmentConfig,
    preprocessing: Preprocessing,
    *,
    batch_size: int,
    seed: int,
    stop_step: int,
    start_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    accumulate: int = 1,
    on_bad_image: OnBad = "skip",
    **loading: Any,
) -> BatchLoader:
    """The training batches of one process.

    Args:
        source: the images to train on.
        augment: how they are changed; mixup and cutmix are left to training.
        preprocessing: how they are resized and normalised.
        batch_size: images per optimiser step over all processes and micro-batches.
        seed: of the order and the augmentation.
        stop_step: the step after the last; start_step: the first.
        rank, world_size: this process and how many there are.
        accumulate: micro-batches per optimiser step.
        on_bad_image: "skip" puts another image, chosen by position, in the place of one that
            cannot be decoded; "error" stops.
        loading: max_bad_images, workers, pin_memory, start_method; see `BatchLoader`.

    Raises:
        UserError: no images, a batch that cannot be divided evenly, and while iterating, an
            image that cannot be decoded or too many of them.
    """
    if not len(source):
        raise UserError("there are no images to train on; the dataset is empty or for evaluation")
    _ranks(rank, world_size)
    if batch_size < 1 or batch_size % (world_size * accumulate):
        raise UserError(
            f"a batch of {batch_size} cannot be divided evenly over {world_size} processes "
            f"× {accumulate} micro-batches; give a multiple of {world_size * accumulate}"
        )
    if not 0 <= start_step <= stop_step:
        raise UserError(f"steps from {start_step} to {stop_step} are no range")
    batches = TrainBatches(
        source, preprocessing, batch_size, rank, world_size, on_bad_image, augment, seed, accumulate
    )
    numbers = range(start_step * accumulate, stop_step * accumulate)
    return BatchLoader(batches, numbers, persistent=False, **loading)


def eval_loader(
    source: ImageSource,
    preprocessing: Preprocessing,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    on_bad_image: OnBad = "error",
    **loading: Any,
) -> BatchLoader:
    """The evaluation batches of one process: images rank, rank + world_size, … of the source.

    Nothing is padded or repeated, so processes may differ by one image. What is not said here is as
    for `train_loader`.

    Args:
        batch_size: images at once in this process.
    """
    if not len(source):
        raise UserError("there are no images to evaluate on")
    _ranks(rank, world_size)
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; give at least 1")
    batches = EvalBatches(source, preprocessing, batch_size, rank, world_size, on_bad_image)
    # Workers are started once for all the evaluations of a run.
    return BatchLoader(batches, range(len(batches)), persistent=True, **loading)


@contextlib.contextmanager
def _naming_a_killed_worker_of(iterator: Iterator[Loaded] | None) -> Iterator[None]:
    """As `naming_killed_workers`, also where torch cannot tell how a worker has ended."""
    try:
        with naming_killed_workers():
            yield
    except ProcessKilled:
        raise
    except (EOFError, OSError, RuntimeError) as error:
        # Of a connection to a worker that is gone, or is just about to be.
        workers = getattr(iterator, "_workers", [])
        deadline = time.monotonic() + _ENDING_SECONDS
        while workers and time.monotonic() < deadline:
            for code in (worker.exitcode for worker in workers):
                if code is not None and code < 0:
                    raise ProcessKilled(_WORKER, -code) from error
            time.sleep(0.01)
        raise


@contextlib.contextmanager
def naming_killed_workers() -> Iterator[None]:
    """Have torch's error for a loading process that was killed, raised anywhere, say just that.

    Raises:
        ProcessKilled: in its place.
    """
    try:
        yield
    except RuntimeError as error:
        if not (found := _KILLED.search(str(error))):
            raise
        names = {signal.strsignal(signum): signum for signum in signal.Signals}
        raise ProcessKilled(_WORKER, names.get(found[1], signal.SIGKILL)) from error


def _unchanged(loaded: Any) -> Any:
    return loaded


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM waiting while workers start: a new one would die of them."""
    if not _CAN_HOLD:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker(_: int) -> None:
    torch.set_num_threads(1)
    if not _CAN_HOLD:
        return
    # Ctrl-C and SIGTERM reach whole groups of processes. What follows from them is for the
    # training process to decide, and it needs its workers for the step it is in. They end when
    # it says so, or has ended itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_when_told, name="end when told", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_when_told() -> None:
    """Wait for a SIGTERM from the training process; SIGTERM stays blocked for the others."""
    trainer = multiprocessing.parent_process()
    while trainer is not None:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == trainer.pid:
            os._exit(0)


def _ranks(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} of {world_size} processes; give 0 … {world_size - 1}")
