"""Writing checkpoints beside the training, which goes on meanwhile.

Making a checkpoint of a small model and waiting for the disk takes as long as a training step, of a
large one as long as many. Only the copy of the state has to be made between two steps.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from locality.checkpoints.run_state import Packed, pack
from locality.training.checkpoint import CheckpointFolder


class BackgroundSaver:
    """Saves one checkpoint at a time in a thread of its own.

    Args:
        folder: where to.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, state: Mapping[str, Any]) -> None:
        """Copy `state` and begin to save the copy, once the checkpoint before it is saved.

        Raises:
            CheckpointNotSaved: if the checkpoint before it could not be.
        """
        self.wait()
        self._thread = threading.Thread(target=self._save, args=(pack(state),), name="checkpoint")
        self._thread.start()

    def _save(self, packed: Packed) -> None:
        try:
            self._folder.save(packed)
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
