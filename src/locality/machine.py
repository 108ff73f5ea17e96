"""What measurements were taken on."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def processor() -> str:
    """The processor's name as Linux tells it, or what Python knows."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        line = next(line for line in file if line.startswith("model name"))
        return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory(device_type: str) -> int:
    """Bytes of memory that a process on a device of this type may use: "cpu", "cuda" or "mps"."""
    if device_type == "cuda":
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Containers and batch systems allow less than there is.
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
