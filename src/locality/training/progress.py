"""The progress bar of a run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from locality.errors import printable
from locality.training.speed import format_duration

_SECONDS_BETWEEN_LINES = 30.0
# The median step time of so many steps leaves out the first ones, which allocate and compile.
MEDIAN_STEPS = 20


class ProgressBar:
    """The progress of a run: a bar on a terminal, a line every 30 seconds elsewhere.

    Args:
        total: steps in all.
        step: steps finished already.
        quiet: print nothing.
    """

    def __init__(self, total: int, step: int, quiet: bool) -> None:
        self.quiet = quiet
        self._total = total
        self._first = step
        self._printed = time.monotonic()
        self._bar: Any = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True)

    def log(self, text: str) -> None:
        """Print a line."""
        if self.quiet:
            return
        text = printable(text, keep="\n")
        with self._ignoring_closed_terminal():
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _ignoring_closed_terminal(self) -> Iterator[None]:
        # A run whose terminal was closed goes on until it has saved.
        try:
            yield
        except OSError:
            self.quiet, self._bar = True, None

    def wants_update(self, step: int) -> bool:
        """Whether to call `update` after `step` steps."""
        if self.quiet:
            return False
        if step == (self._first + MEDIAN_STEPS if self._bar is None else self._total):
            return True
        wait = _SECONDS_BETWEEN_LINES if self._bar is None else 0.1
        return time.monotonic() - self._printed > wait

    def update(
        self, step: int, loss: float, top1: float, images_per_second: float, seconds: float
    ) -> None:
        """Show the progress; a step takes `seconds`."""
        self._printed = time.monotonic()
        figures = f"loss {loss:.3f}, top-1 {top1:.1f}%, {images_per_second:.0f} images/s"
        if self._bar is not None:
            with self._ignoring_closed_terminal():
                self._bar.set_postfix_str(figures, refresh=False)
                self._bar.update(step - self._bar.n)
        else:
            left = format_duration(seconds * (self._total - step))
            self.log(f"step {step}/{self._total}: {figures}, {left} left")

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            with self._ignoring_closed_terminal():
                self._bar.close()
