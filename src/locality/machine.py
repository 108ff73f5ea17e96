"""What measurements were taken on."""

from __future__ import annotations

import contextlib
import platform


def processor() -> str:
    """The processor's name as Linux tells it, or what Python knows."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        line = next(line for line in file if line.startswith("model name"))
        return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
