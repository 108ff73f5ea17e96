"""Interruptions: signals raise a flag, and training stops at the next step boundary."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# Both a terminal and a launcher such as torchrun pass Ctrl-C on; only what comes later than this
# is a second one.
_SAME_CTRL_C_SECONDS = 1.0

# What asks a run to stop: Ctrl-C, batch systems, torchrun, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupted(Exception):
    """A signal stopped the run after it had saved a checkpoint.

    Attributes:
        signum: the signal.
        step: steps finished and saved.
        exit_code: what the process should exit with: 128 + the signal's number (130 after Ctrl-C,
            143 after SIGTERM).
    """

    def __init__(self, signum: int, step: int, exit_code: int | None = None) -> None:
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name} after step {step}; the same command resumes the run")
        self.signum = signum
        self.step = step
        self.exit_code = 128 + signum if exit_code is None else exit_code


class EvaluationStopped(Exception):
    """An evaluation was asked to stop, by the signal whose number it carries."""


class Interruption:
    """Remembers the first signal that came.

    Attributes:
        signum: its number; 0 while none has come.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._owner = os.getpid()

    @contextlib.contextmanager
    def listening(self) -> Iterator[Interruption]:
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
        elif signum == signal.SIGINT and time.monotonic() - self._since > _SAME_CTRL_C_SECONDS:
            raise KeyboardInterrupt


@contextlib.contextmanager
def forwarded_to_children() -> Iterator[None]:
    """Within the block, pass signals on to the processes this one has started, and live on."""

    def forward(signum: int, _: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signum)

    with _handled(forward):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, `handler` gets the signals that are not ignored (by nohup, say)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signum: signal.signal(signum, handler)
        for signum in SIGNALS
        if signal.getsignal(signum) not in (signal.SIG_IGN, None)
    }
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)
