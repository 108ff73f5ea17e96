"""One run folder, one run: a lock that lives as long as any process of the run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from pathlib import Path
from typing import IO

from locality.errors import UserError
from locality.files import read_json

# Data workers of a killed run notice within 5 s that it is gone; the lock is theirs until then.
LEFTOVER_SECONDS = 20.0


class FolderLock:
    """Keeps other runs out of a folder.

    The first process of a run proves that nobody is there by locking the file for itself alone
    (`claim`). It then shares the lock, which all its processes hold (`join`), so that a run whose
    launcher was killed still keeps others out while one of its processes lives. The system
    releases the lock when the last of them is gone, however it ended.

    Args:
        path: the lock file; it stays when the lock is released.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def claim(self, patience: float = LEFTOVER_SECONDS) -> None:
        """Take the folder.

        Args:
            patience: seconds to wait for what is left of a run whose main process is gone.

        Raises:
            UserError: if another run has it.
        """
        self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 (held open on purpose)
        deadline = time.monotonic() + patience
        while not self._try(fcntl.LOCK_EX):
            if self._holder_lives() or time.monotonic() > deadline:
                message = self._in_use()
                self.release()
                raise UserError(message)
            time.sleep(0.05)
        self._file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, self._file)
        self._file.flush()
        self._share()

    def join(self) -> None:
        """Hold the lock too, in another process of the run that claimed it.

        Raises:
            UserError: if the run lost the folder meanwhile.
        """
        self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115
        self._share()

    def release(self) -> None:
        """Let go of this process's share."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _share(self) -> None:
        # Turning an exclusive lock into a shared one lets go of it for an instant. Whoever gets
        # in between holds it exclusively, and this fails.
        if not self._try(fcntl.LOCK_SH):
            message = self._in_use()
            self.release()
            raise UserError(message)

    def _try(self, kind: int) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
                raise
            warnings.warn(
                f"{self.path.parent} is on a file system without locks: make sure yourself that "
                f"no two runs use it",
                stacklevel=2,
            )
        return True

    def _holder(self) -> dict[str, object]:
        try:
            return read_json(self.path)
        except UserError:
            return {}

    def _holder_lives(self) -> bool:
        """Whether the main process is known to be alive."""
        holder = self._holder()
        pid = holder.get("pid")
        if not isinstance(pid, int) or holder.get("host") != socket.gethostname():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def _in_use(self) -> str:
        holder = self._holder()
        return (
            f"run folder {self.path.parent} is in use by another run (process {holder.get('pid')} "
            f"on {holder.get('host')} or what is left of it); wait for it, end it, or choose "
            f"another folder"
        )
