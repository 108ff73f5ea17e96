"""News of what is being done, at least every ten seconds; durations and sizes in words."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 10.0
"""Between two lines; on busy processors they come later."""


@contextlib.contextmanager
def repeating(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` in a thread every few seconds while the block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(SECONDS):
            tell()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def doing(what: str, quiet: bool = False, at_once: bool = True) -> Iterator[None]:
    """Print what is being done, and how long it has taken every few seconds while the block runs.

    Args:
        what: such as "opening the images".
        quiet: print nothing.
        at_once: print it also when the block begins.
    """
    if quiet:
        yield
        return
    started = time.monotonic()

    def tell(took: str = "") -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            print(f"locality: {what} …{took}", file=sys.stderr, flush=True)

    if at_once:
        tell()
    with repeating(lambda: tell(f" {time.monotonic() - started:.0f} s")):
        yield


def format_duration(seconds: float) -> str:
    """Format a duration: "19 s", "4 min", "2.5 h", "12 d", "3.2 years"."""
    for unit, length in (("years", 365 * 86400), ("d", 86400), ("h", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def format_bytes(count: float) -> str:
    """Format a number of bytes: "17.2 MB", "1.3 TB"."""
    unit, size = next((u, s) for u, s in (("TB", 1e12), ("GB", 1e9), ("MB", 0)) if count >= s)
    return f"{count / (size or 1e6):.3g} {unit}"
