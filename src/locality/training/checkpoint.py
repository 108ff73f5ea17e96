"""The checkpoints of a run that is going on: saved, passed over where damaged, cleared up."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locality.checkpoints.run_state import (
    LAST,
    PREVIOUS,
    DamagedCheckpoint,
    Packed,
    pack,
    read_checkpoint,
    write_checkpoint,
)
from locality.errors import CheckpointNotSaved, NonFiniteWeights


class CheckpointFolder:
    """The checkpoints of one run: the last one, and the one before it; one at a time is saved.

    Args:
        path: the folder, which exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved_step: int | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, packed: Packed) -> None:
        """Make a packed state the last checkpoint.

        Raises:
            CheckpointNotSaved: if it cannot be written; what was there is untouched.
            NonFiniteWeights: if a weight is infinite or not a number; what was there is untouched.
        """
        for name, (_, dtype, offset, shape) in packed.tree["model"].items():
            if not packed.buffers[dtype][offset : offset + math.prod(shape)].isfinite().all():
                raise NonFiniteWeights(
                    f"{name} is not finite after step {packed.step}, so no checkpoint was written; "
                    f"{self._kept()}. Lower optim.lr or set optim.clip_grad, in a new run folder"
                )
        try:
            write_checkpoint(self.path / LAST, packed)
        except (OSError, RuntimeError) as error:
            # torch.save turns a write error into a RuntimeError of its own.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            full = cause.errno == errno.ENOSPC
            raise CheckpointNotSaved(
                f"the checkpoint of step {packed.step} could not be written to {self.path} "
                f"({'the disk is full' if full else cause.strerror or cause}); {self._kept()}. "
                f"Make room and give the same command again"
            ) from error
        self.saved_step = packed.step

    def _kept(self) -> str:
        if self.saved_step is None:
            return "there is no earlier one"
        return f"the one of step {self.saved_step} is kept"

    def load(self) -> tuple[dict[str, Any] | None, str, list[str]]:
        """The newest checkpoint that is whole, or None when none was ever written.

        A damaged one is renamed to `….damaged`, so that it cannot replace a good one.

        Returns:
            the state, the name of its file ("" for none), and a sentence for each file that had
            to be passed over.

        Raises:
            DamagedCheckpoint: if there are checkpoints and none is whole.
        """
        # Temporary files, of a process that was killed while saving.
        leftovers = list(self.path.glob(".*.tmp"))
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
        passed_over = []
        for name in (LAST, PREVIOUS):
            path = self.path / name
            try:
                state = read_checkpoint(path)
            except FileNotFoundError:
                continue
            except DamagedCheckpoint as error:
                passed_over.append(str(error))
                os.replace(path, path.with_suffix(".ckpt.damaged"))
                continue
            self.saved_step = state["step"]
            if name == PREVIOUS and not passed_over and not leftovers:
                passed_over = [f"checkpoint {self.path / LAST} is missing"]
            return state, name, passed_over
        if passed_over:
            raise DamagedCheckpoint(
                "; ".join(passed_over)
                + ". No whole checkpoint is left: start again in a new folder"
            )
        return None, "", []

    def start(self, state: Mapping[str, Any]) -> None:
        """Copy `state` and begin to save the copy in a thread, once the one before is saved.

        Raises:
            CheckpointNotSaved: if the checkpoint before it could not be.
        """
        self.wait()
        self._thread = threading.Thread(target=self._save_apart, args=(pack(state),))
        self._thread.start()

    def _save_apart(self, packed: Packed) -> None:
        try:
            self.save(packed)
        except Exception as error:  # handed over to the thread that trains
            self._failure = error

    def wait(self) -> None:
        """Return when nothing is being saved.

        Raises:
            CheckpointNotSaved: if the checkpoint could not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what went wrong, if something has; costs nothing.

        Raises:
            CheckpointNotSaved: if the last checkpoint could not be saved.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
