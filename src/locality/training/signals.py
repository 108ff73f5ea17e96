"""Signals that ask a run to stop: they set a flag, which is read after every step."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

# One Ctrl-C may arrive twice, from the terminal and from a launcher such as torchrun; a later one
# counts as a second.
_REPEATED_CTRL_C_SECONDS = 1.0

# Ctrl-C, batch systems and torchrun, SLURM's warning, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class SignalHandler:
    """The first signal this process has received.

    Attributes:
        signum: its number; 0 if there was none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._owner = os.getpid()

    @contextlib.contextmanager
    def installed(self) -> Iterator[SignalHandler]:
        """Handle signals within the block; Python allows it in the main thread only."""
        with _handled(self._handle):
            yield self

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a forked data worker: the training process decides
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
            again = "; again to stop at once, without saving" if signum == signal.SIGINT else ""
            # print() is not reentrant: this handler may interrupt it.
            with contextlib.suppress(OSError):  # the terminal was closed
                os.write(2, f"\nstopping after this step and saving{again}\n".encode())
        elif signum == signal.SIGINT and time.monotonic() - self._since > _REPEATED_CTRL_C_SECONDS:
            raise KeyboardInterrupt


def forward_signals() -> AbstractContextManager[None]:
    """Within the block, forward signals to child processes and ignore them here."""

    def forward(signum: int, _: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signum)

    return _handled(forward)


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, install `handler` for the signals that are not ignored (by nohup, say)."""
    main = threading.current_thread() is threading.main_thread()
    before = {
        signum: signal.signal(signum, handler)
        for signum in SIGNALS
        if main and signal.getsignal(signum) not in (signal.SIG_IGN, None)
    }
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)
