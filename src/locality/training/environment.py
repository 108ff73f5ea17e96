"""Where and with what a run was computed."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from locality._version import __version__

_PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "numpy", "pillow")


def describe_environment() -> dict[str, Any]:
    """Versions, hardware, commit, command and time, as plain values."""
    return {
        "locality": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "host": socket.gethostname(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }


def commit() -> str | None:
    """The commit of the source tree this package lies in, "+" if it was changed since; None
    outside a git checkout."""
    here = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
