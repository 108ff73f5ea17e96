"""Checkpoints of runs, with a checksum.

A file is a line of text with the SHA-256 and the size of the rest, followed by the output of
`torch.save`. (Neither `torch.load` nor safetensors notices a flipped byte in a tensor.) A new
checkpoint replaces the old one only when it is on disk; the old one is kept as `previous.ckpt`.
"""

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from locality import checks
from locality.checkpoints.native import unpickle
from locality.errors import CheckpointNotSaved, NonFiniteWeights, RunFailed, UserError, one_line
from locality.files import atomic_file, open_file

_log = logging.getLogger("locality")

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"
BEST = "best.ckpt"

_SHAPE = {"step": checks.Natural, "progress": dict, "model": dict, "optimizer": dict, "data": str}
_SHAPE |= {"ema?": dict, "config": dict, "metrics": str, "scaler": dict}
_MAGIC = "locality checkpoint 1"
_HEADER_BYTES = len(_MAGIC) + 1 + 64 + 1 + 20 + 1


class DamagedCheckpoint(RunFailed):
    """A checkpoint does not match its checksum; the message names the file."""

    exit_code = 2


def in_memory(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a nested structure of tensors and plain values into main memory.

    The copy can be written while training continues.
    """
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), dict(state))


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state in main memory to `path`, atomically.

    An existing checkpoint becomes `previous.ckpt` in the same folder once the new one is on disk.
    """
    with atomic_file(path) as file:
        file.write(b" " * _HEADER_BYTES)
        torch.save(state, file)
        header = _expected_header(file)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
        if path.exists():
            os.replace(path, path.with_name(PREVIOUS))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint written by `write_checkpoint` into main memory.

    Raises:
        DamagedCheckpoint: if the file differs in any bit from the one written.
        FileNotFoundError: if the file does not exist.
    """
    with open_file(path) as file:
        if file.read(_HEADER_BYTES) != _expected_header(file):
            raise DamagedCheckpoint(
                f"checkpoint {path} is damaged: its content does not match its checksum"
            )
        file.seek(_HEADER_BYTES)
        try:
            state = unpickle(file, path)
            checks.shaped("its state", state, _SHAPE)
            for weights in (state["model"], state.get("ema") or {}):
                checks.shaped("its weights", weights, dict[str, Tensor])
        except UserError as error:
            raise DamagedCheckpoint(
                f"checkpoint {path} does not hold the state of a run: {one_line(error)}"
            ) from error
        return state


def _expected_header(file: IO[bytes]) -> bytes:
    """The header for the rest of a file; leaves the file at its end."""
    file.seek(_HEADER_BYTES)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    return f"{_MAGIC} {digest} {file.tell() - _HEADER_BYTES:020d}\n".encode()


def _newest_valid(
    folder: Path, names: Sequence[str]
) -> tuple[dict[str, Any] | None, str, dict[str, str]]:
    """The first intact checkpoint of `names`, its name, and the errors of the damaged ones."""
    damaged: dict[str, str] = {}
    for name in names:
        try:
            return read_checkpoint(folder / name), name, damaged
        except FileNotFoundError:
            continue
        except DamagedCheckpoint as error:
            damaged[name] = str(error)
    return None, "", damaged


class CheckpointFolder:
    """The last, previous and best checkpoints of a run, saved one at a time.

    Args:
        path: an existing folder.
        saved_step: the step of its last checkpoint, if known.
    """

    def __init__(self, path: Path, saved_step: int | None = None) -> None:
        self.path = path
        self.saved_step = saved_step
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a state as the last checkpoint; on errors, existing checkpoints are kept.

        Raises:
            CheckpointNotSaved: if it cannot be written.
            NonFiniteWeights: if a weight is infinite or NaN.
        """
        step = state["step"]
        for name, tensor in state["model"].items():
            if not tensor.isfinite().all():
                raise NonFiniteWeights(
                    f"{name} is not finite after step {step}, so no checkpoint was written; "
                    f"{self._kept()}. Lower optim.lr or set optim.clip_grad, in a new run folder"
                )
        try:
            write_checkpoint(self.path / LAST, state)
        except OSError as error:
            raise CheckpointNotSaved(
                f"the checkpoint of step {step} could not be written to {self.path} "
                f"({error.strerror or error}); {self._kept()}. Free some space and repeat the "
                f"command"
            ) from error
        self.saved_step = step

    def _kept(self) -> str:
        if self.saved_step is None:
            return "no earlier one exists"
        return f"the one of step {self.saved_step} is kept"

    def keep_best(self) -> None:
        """Keep the last checkpoint also as the best."""
        # The last one is missing if the run resumed from the previous one.
        last = next(file for name in (LAST, PREVIOUS) if (file := self.path / name).exists())
        second = self.path / f".{BEST}.tmp"
        second.unlink(missing_ok=True)
        try:
            os.link(last, second)
        except OSError:  # a file system without links
            shutil.copyfile(last, second)
        os.replace(second, self.path / BEST)

    def load(self) -> tuple[dict[str, Any] | None, str, list[str]]:
        """The newest intact checkpoint, or None if none was written.

        Returns:
            the state, its filename ("" for none), and a sentence for each file skipped.

        Raises:
            DamagedCheckpoint: if all existing checkpoints are damaged.
        """
        state, name, damaged = _newest_valid(self.path, (LAST, PREVIOUS))
        passed_over = list(damaged.values())
        if state is not None:
            self.saved_step = state["step"]
            if name == PREVIOUS and not passed_over and not any(self._leftovers()):
                passed_over = [f"checkpoint {self.path / LAST} is missing"]
        elif passed_over:
            raise DamagedCheckpoint(
                "; ".join(passed_over)
                + ". No intact checkpoint is left: start again in a new folder"
            )
        return state, name, passed_over

    def _leftovers(self) -> Iterator[Path]:
        """Temporary files of a process killed while saving."""
        return self.path.glob(".*.tmp")

    def tidy(self) -> None:
        """Remove leftovers, and rename damaged checkpoints to `….damaged`, so that they cannot
        replace a good one."""
        for leftover in self._leftovers():
            leftover.unlink(missing_ok=True)
        for name in _newest_valid(self.path, (LAST, PREVIOUS))[2]:
            os.replace(self.path / name, (self.path / name).with_suffix(".ckpt.damaged"))

    def start(self, state: Mapping[str, Any]) -> None:
        """Copy `state` and save the copy in a thread, after waiting for the previous one.

        Raises:
            CheckpointNotSaved: if the previous checkpoint could not be saved.
        """
        self.wait()
        self._thread = threading.Thread(target=self._save_in_thread, args=(in_memory(state),))
        self._thread.start()

    def _save_in_thread(self, state: Mapping[str, Any]) -> None:
        try:
            self.save(state)
        except Exception as error:  # re-raised in the training thread
            self._failure = error

    def wait(self) -> None:
        """Wait until no checkpoint is being saved.

        Raises:
            CheckpointNotSaved: if the checkpoint could not be saved.
        """
        if self._thread is not None:
            # Joins the thread: a future's result is ready before its thread ends, and processes
            # forked in between (data loading workers) can deadlock.
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise an error of the saving thread, if any.

        Raises:
            CheckpointNotSaved: if the last checkpoint could not be saved.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


def load_best_state(folder: Path | str) -> dict[str, Any]:
    """The best checkpoint of a run if it has one, else the last intact one. Read-only."""
    state, name, damaged = _newest_valid(Path(folder) / "checkpoints", (BEST, LAST, PREVIOUS))
    if state is not None:
        for error in damaged.values():
            _log.warning(f"{error}; {name} is used instead")
        return state
    reason = "; ".join(damaged.values()) or "no checkpoint yet"
    raise UserError(f"run folder {folder} has no weights to load: {reason}")
