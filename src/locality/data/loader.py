"""Batches as functions of their number, and loaders whose workers survive signals.

Training counts positions: step s of a run with global batch size G covers positions s·G … s·G+G−1,
for any number of processes, accumulated micro-batches and workers. A position determines the sample
(`sampling.sample_order`) and seeds its augmentation, so a worker needs only the micro-batch number.
Its only state is a cache of decoded and resized images.
"""

import contextlib
import multiprocessing
import multiprocessing.queues
import os
import re
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from locality.data import preprocessing as transforms
from locality.data import sampling
from locality.data.config import AugmentConfig, InputConfig
from locality.data.decoding import BadImage
from locality.data.sampling import Indices, Stream, hash_seed, sample_order
from locality.data.sources import ImageSource
from locality.errors import ProcessKilled, UserError
from locality.machine import end_if_importing

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

    def pin_memory(self) -> "Batch":
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
        least: the shorter side of shrunk images, see `InputConfig`.
    """

    source: ImageSource
    preprocessing: InputConfig
    batch_size: int
    rank: int
    world_size: int
    on_bad: OnBad
    least: int | None
    transform: transforms.ImageTransform = field(init=False)
    _kept: dict[int, Any] = field(init=False, repr=False, default_factory=dict)

    @abstractmethod
    def batch(self, number: int, skipped: dict[str, str]) -> Batch | None:
        """Batch `number`; unreadable images are added to `skipped`."""

    def __getitem__(self, number: int) -> LoadedBatch:
        skipped: dict[str, str] = {}
        with sampling.preserved_generators():
            try:
                return LoadedBatch(self.batch(number, skipped), skipped)
            except UserError as error:
                return LoadedBatch(None, skipped, str(error))

    def read(self, index: int, skipped: dict[str, str]) -> Any:
        """A prepared image; None if it cannot be decoded and may be skipped."""
        if (kept := self._kept.get(index)) is not None:
            return kept
        try:
            image = self.transform.prepared(self.source.read(index, self.least))
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
        return self.transform.prepared_bytes * len(self.source) <= _KEPT_BYTES

    def in_memory(self) -> torch.Tensor | None:
        """All images, (n, 3, H, W) uint8, if the transform accepts them without PIL."""
        pixels, transform = self.source.pixels, self.transform
        fits = pixels is not None and tuple(pixels.shape[-2:]) == transform.size
        return pixels if fits and transform.on_tensors else None

    def make_batch(self, pixels: transforms.Images, indices: Indices) -> Batch:
        """A batch from transformed images, (B, 3, H, W) uint8 or a list."""
        targets = torch.from_numpy(self.source.labels[indices])
        return Batch(transforms.normalise(pixels, self.preprocessing), targets, indices)


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
        self.transform = transforms.train_transform(self.augment, self.preprocessing)
        self.batched = self.augment
        if self.augment.crop == "resized":  # by image
            self.batched = replace(self.augment, hflip=0.0, color_jitter=0.0)
        self.erasing = transforms.create_erasing(self.augment)

    def positions(self, number: int) -> Indices:
        """The global positions of one micro-batch of this process, (B,) int64."""
        step, micro = divmod(number, self.accumulate)
        first = step * self.batch_size + micro * self.world_size + self.rank
        stop = (step + 1) * self.batch_size
        return np.arange(first, stop, self.world_size * self.accumulate, dtype=np.int64)

    def batch(self, number: int, skipped: dict[str, str]) -> Batch:
        positions = self.positions(number)
        indices = sample_order(positions, len(self.source), self.seed, self.augment.repeats)
        images: transforms.Images
        if (pixels := self.in_memory()) is not None:
            images = pixels[torch.from_numpy(indices)]
        else:
            images = self._drawn(self._read(positions, indices, skipped), positions)
        augment, uniform = self.batched, self._uniform(positions, 10)
        if augment.affine or augment.hflip or augment.crop == "pad":
            maps = transforms.window_maps(uniform[:, :7], augment, self.transform.size)
            images = transforms.warp(images, maps, augment.padding)
        if augment.color_jitter and augment.auto_augment is None:
            images = transforms.jitter_colors(images, uniform[:, 7:], augment.color_jitter)
        batch = self.make_batch(images, indices)
        if self.erasing is not None:
            seeds = self._seeds(Stream.ERASE, positions)
            for image, seed in zip(batch.images, seeds, strict=True):
                sampling.seed_generators(seed)
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
            sampling.seed_generators(seed)
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
        self.transform = transforms.eval_transform(self.preprocessing)
        self.own = np.arange(self.rank, len(self.source), self.world_size, dtype=np.int64)

    def __len__(self) -> int:
        return -(-len(self.own) // self.batch_size)

    def batch(self, number: int, skipped: dict[str, str]) -> Batch | None:
        indices = self.own[number * self.batch_size : (number + 1) * self.batch_size]
        if (pixels := self.in_memory()) is not None:
            return self.make_batch(pixels[torch.from_numpy(indices)], indices)
        images = [self.read(index, skipped) for index in indices.tolist()]
        read = np.array([image is not None for image in images], dtype=bool)
        images = [image for image in images if image is not None]
        return self.make_batch(images, indices[read]) if images else None


# -- loaders ---------------------------------------------------------------------------------------

_WORKER = "a process that loads images"
_KILLED = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (.*?)\.")
# What ends a run after its current step, and reaches the whole process group.
_STOPPING = (signal.SIGINT, signal.SIGTERM)
# Whether signals can be blocked and waited for; elsewhere workers keep torch's handlers.
_CAN_BLOCK = hasattr(signal, "sigwaitinfo")


class BatchLoader:
    """Iterates over batches in order; every iteration starts at the first.

    Args:
        batches: a dataset of batches.
        numbers: the numbers of the batches, in order.
        persistent: keep the workers between iterations.
        max_bad_images: how many different images may be skipped.
        workers: loading processes; 0 loads in this one, and leaves its generators untouched.
        pin_memory: deliver page-locked tensors, for copying to a GPU.

    Attributes:
        skipped: images skipped because they cannot be decoded, name → reason, in order. A resumed
            run may add those found before it stopped.
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
    ) -> None:
        end_if_importing()
        if workers and isinstance(batches, Batches) and batches.least is not None:
            batches.source.keep(batches.least)
        self.skipped: dict[str, str] = {}
        self._max_bad_images = max_bad_images
        self._numbers = numbers
        self._loader: DataLoader | None = DataLoader(
            batches,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            collate_fn=_unchanged,
            multiprocessing_context=_start_method() if workers else None,
            pin_memory=pin_memory,
            worker_init_fn=_init_worker,
            persistent_workers=persistent and workers > 0,
            # Without one, the loader draws from the process's default generator.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        if self._loader is None:
            raise RuntimeError("this loader has been closed")
        with _block_signals(), _ended_worker_named(self._loader._iterator):
            arriving: Iterator[LoadedBatch] = iter(self._loader)
        try:
            while True:
                with _ended_worker_named(arriving):
                    loaded = next(arriving, None)
                if loaded is None:
                    return
                if loaded.error is not None:
                    raise UserError(loaded.error)
                self.skipped.update(loaded.skipped)
                if len(self.skipped) > self._max_bad_images:
                    image, reason = next(iter(self.skipped.items()))
                    raise UserError(
                        f"{len(self.skipped)} images could not be read, more than the "
                        f"{self._max_bad_images} that max_bad_images allows; the first: {image}: "
                        f"{reason}"
                    )
                if loaded.batch is not None:
                    yield loaded.batch
        except (UserError, ProcessKilled):
            self.close()
            raise
        finally:
            # Workers end with their iterator, and an error's traceback would keep it alive.
            del arriving

    def close(self) -> None:
        """End persistent workers; the loader cannot be used afterwards."""
        self._loader = None


def train_loader(
    source: ImageSource,
    augment: AugmentConfig,
    preprocessing: InputConfig,
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
        augment: their augmentation, except mixup and cutmix, which training applies.
        preprocessing: how they are resized and normalised.
        batch_size: images per optimiser step over all processes and micro-batches, a multiple of
            their number.
        seed: seed of the order and the augmentation.
        stop_step: the step after the last; start_step: the first.
        rank, world_size: this process and the number of processes.
        accumulate: micro-batches per optimiser step.
        on_bad_image: "skip" replaces an image that cannot be decoded by another, chosen by
            position; "error" stops.
        loading: max_bad_images, workers, pin_memory; see `BatchLoader`.

    Raises:
        UserError: there are no images, or, while iterating, an image cannot be decoded or too many
            were skipped.
    """
    if not len(source):
        raise UserError("no images to train on; the dataset is empty or for evaluation only")
    batches = TrainBatches(
        *(source, preprocessing, batch_size, rank, world_size, on_bad_image, preprocessing.least),
        *(augment, seed, accumulate),
    )
    numbers = range(start_step * accumulate, stop_step * accumulate)
    return BatchLoader(batches, numbers, persistent=False, **loading)


def eval_loader(
    source: ImageSource,
    preprocessing: InputConfig,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    on_bad_image: OnBad = "error",
    least: int | None = None,
    **loading: Any,
) -> BatchLoader:
    """The evaluation batches of one process: images rank, rank + world_size, … of the source.

    Nothing is padded or repeated, so processes may differ by one image. Other arguments are those
    of `train_loader`.

    Args:
        batch_size: images per batch in this process.
        least: the shorter side of shrunk images; that of the preprocessing by default.
    """
    if not len(source):
        raise UserError("no images to evaluate on")
    least = preprocessing.least if least is None else least
    batches = EvalBatches(source, preprocessing, batch_size, rank, world_size, on_bad_image, least)
    # Workers are started once for all the evaluations of a run.
    return BatchLoader(batches, range(len(batches)), persistent=True, **loading)


@contextlib.contextmanager
def translate_killed_worker() -> Iterator[None]:
    """Replace torch's error for an ended loading process, which it raises wherever training is.

    Raises:
        ProcessKilled: a loading process was killed.
        UserError: it ended by itself.
    """
    try:
        yield
    except RuntimeError as error:
        if killed := _KILLED.search(str(error)):
            numbers = {signal.strsignal(number): number for number in signal.Signals}
            raise ProcessKilled(_WORKER, numbers.get(killed[1], signal.SIGKILL)) from error
        if "DataLoader worker" in str(error):
            raise UserError(
                "a loading process ended by itself; where loading processes import the script, "
                'its calls belong under `if __name__ == "__main__":`; or set data.workers to 0 '
                "(data__workers=0)"
            ) from error
        raise


@contextlib.contextmanager
def _ended_worker_named(iterator: Any) -> Iterator[None]:
    """As `translate_killed_worker`, also by the exit codes of an iterator's workers."""
    try:
        with translate_killed_worker():
            yield
    except (EOFError, ConnectionError, UserError) as error:
        # A connection breaks before its process has ended.
        codes = [worker.exitcode or 0 for worker in getattr(iterator, "_workers", ())]
        if min(codes, default=0) < 0 or not isinstance(error, UserError):
            raise ProcessKilled(_WORKER, -min(codes, default=0) or signal.SIGKILL) from error
        raise


def _start_method() -> str | None:
    """How workers start: forked on Linux, unless "spawn" is the user's choice.

    The fork server, Python 3.14's default, imports the script, and ends with one that has no main
    guard.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    return "fork" if chosen != "spawn" and sys.platform == "linux" else chosen


def _unchanged(loaded: Any) -> Any:
    return loaded


def _end_worker(error: BaseException, item: object) -> None:
    """End a worker that cannot send, since shared memory is full: the run would wait forever."""
    signal.raise_signal(signal.SIGBUS)


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM while workers start: they would end a starting worker."""
    if not _CAN_BLOCK:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker(_: int) -> None:
    torch.set_num_threads(1)
    info: Any = get_worker_info()
    if isinstance(info.dataset, Batches):
        info.dataset.source.divide(info.num_workers)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore
    if not _CAN_BLOCK:
        return
    # Ctrl-C and SIGTERM reach whole process groups. The training process decides how to react and
    # needs its workers to finish the current step; they end when it tells them to, or exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_on_sigterm, name="exit on SIGTERM", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _exit_on_sigterm() -> None:
    """Exit on SIGTERM from the training process, ignoring those of other processes."""
    trainer = multiprocessing.parent_process()
    while trainer is not None:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == trainer.pid:
            os._exit(0)
