"""The progress bar of a run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from locality.errors import printable
from locality.training.speed import span

_SECONDS_BETWEEN_LINES = 30.0
# The first steps pay for allocations and compilation: the median of so many does not show them.
_MEASURED_STEPS = 20


class Progress:
    """Tells a person how a run goes: a bar on a terminal, a line now and then elsewhere.

    Args:
        total: steps in all.
        step: steps finished already.
        quiet: say nothing.
    """

    def __init__(self, total: int, step: int, quiet: bool) -> None:
        self.quiet = quiet
        self._total = total
        self._first = step
        self._told = time.monotonic()
        self._bar: Any = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.quiet:
            return
        text = printable(text, keep="\n")
        with self._as_long_as_somebody_reads():
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _as_long_as_somebody_reads(self) -> Iterator[None]:
        # A terminal that was closed is no reason for a run to fail before it has saved.
        try:
            yield
        except OSError:
            self.quiet, self._bar = True, None

    def wants_update(self, step: int) -> bool:
        """Whether it is time to say something again, after `step` steps."""
        if self.quiet:
            return False
        if step == (self._first + _MEASURED_STEPS if self._bar is None else self._total):
            return True
        wait = _SECONDS_BETWEEN_LINES if self._bar is None else 0.1
        return time.monotonic() - self._told > wait

    def update(
        self, step: int, loss: float, top1: float, images_per_second: float, seconds: float
    ) -> None:
        """Show where the run is; a step takes `seconds`."""
        self._told = time.monotonic()
        figures = f"loss {loss:.3f}, top-1 {top1:.1f}%, {images_per_second:.0f} images/s"
        if self._bar is not None:
            with self._as_long_as_somebody_reads():
                self._bar.set_postfix_str(figures, refresh=False)
                self._bar.update(step - self._bar.n)
        else:
            left = span(seconds * (self._total - step))
            self.say(f"step {step}/{self._total}: {figures}, {left} left")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            with self._as_long_as_somebody_reads():
                self._bar.close()
