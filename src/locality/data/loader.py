"""Loaders that deliver batches in order, with worker processes that survive signals."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.queues
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from locality.data.batches import Batch, EvalBatches, LoadedBatch, OnBad, TrainBatches
from locality.data.config import AugmentConfig, InputConfig
from locality.data.sources import ImageSource
from locality.errors import ProcessKilled, UserError
from locality.machine import UNGUARDED, end_if_importing

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
        source, preprocessing, batch_size, rank, world_size, on_bad_image, augment, seed, accumulate
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
    **loading: Any,
) -> BatchLoader:
    """The evaluation batches of one process: images rank, rank + world_size, … of the source.

    Nothing is padded or repeated, so processes may differ by one image. Other arguments are those
    of `train_loader`.

    Args:
        batch_size: images per batch in this process.
    """
    if not len(source):
        raise UserError("no images to evaluate on")
    batches = EvalBatches(source, preprocessing, batch_size, rank, world_size, on_bad_image)
    # Workers are started once for all the evaluations of a run.
    return BatchLoader(batches, range(len(batches)), persistent=True, **loading)


_NO_GUARD = (
    "loading processes import the script that starts them: put its calls under "
    '`if __name__ == "__main__":`, or set data.workers to 0 (data__workers=0)'
)


@contextlib.contextmanager
def translate_killed_worker() -> Iterator[None]:
    """Replace torch's error for a killed loading process, which it raises wherever training is.

    Raises:
        ProcessKilled: a loading process was killed.
        UserError: it imported a script without a main guard.
    """
    try:
        yield
    except RuntimeError as error:
        if killed := _KILLED.search(str(error)):
            numbers = {signal.strsignal(number): number for number in signal.Signals}
            raise ProcessKilled(_WORKER, numbers.get(killed[1], signal.SIGKILL)) from error
        if f"exit code {UNGUARDED}" in str(error):
            raise UserError(_NO_GUARD) from error
        raise


@contextlib.contextmanager
def _ended_worker_named(iterator: Any) -> Iterator[None]:
    """As `translate_killed_worker`, also by the exit codes of an iterator's workers."""
    try:
        with translate_killed_worker():
            yield
    except (EOFError, ConnectionError, RuntimeError) as error:
        codes = [worker.exitcode or 0 for worker in getattr(iterator, "_workers", ())]
        if UNGUARDED in codes:
            raise UserError(_NO_GUARD) from error
        if min(codes, default=0) < 0:
            raise ProcessKilled(_WORKER, -min(codes)) from error
        if isinstance(error, RuntimeError):
            raise
        raise ProcessKilled(_WORKER) from error  # a connection to one that is just ending


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
