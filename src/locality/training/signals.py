"""Signals: they raise a flag, and training stops at the next step boundary."""

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

# Both a terminal and a launcher such as torchrun pass Ctrl-C on; only what comes later than this
# is a second one.
_REPEATED_CTRL_C_SECONDS = 1.0

# What asks a run to stop: Ctrl-C, batch systems, torchrun, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class SignalHandler:
    """Remembers the first signal that came.

    Attributes:
        signum: its number; 0 while none has come.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._owner = os.getpid()

    @contextlib.contextmanager
    def installed(self) -> Iterator[SignalHandler]:
        """Handle signals within the block, in the main thread only (Python allows no other)."""
        with _handled(self._handle):
            yield self

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a forked data worker: the training process decides
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
            again = "; again to stop at once, without saving" if signum == signal.SIGINT else ""
            # print() may be interrupted by this very handler and is not reentrant.
            with contextlib.suppress(OSError):  # nobody reads it when the terminal was closed
                os.write(2, f"\nstopping after this step and saving{again}\n".encode())
        elif signum == signal.SIGINT and time.monotonic() - self._since > _REPEATED_CTRL_C_SECONDS:
            raise KeyboardInterrupt


def forward_signals() -> AbstractContextManager[None]:
    """Within the block, pass signals on to the processes this one has started, and live on."""

    def forward(signum: int, _: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signum)

    return _handled(forward)


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, `handler` gets the signals that are not ignored (by nohup, say)."""
    main = threading.current_thread() is threading.main_thread()  # the only one that may
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
