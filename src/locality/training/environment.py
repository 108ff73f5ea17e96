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
from locality.machine import processor

_PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "numpy", "pillow")


def describe_environment() -> dict[str, Any]:
    """Versions, hardware, commit, command and time, as plain values."""
    return {
        "locality": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "host": socket.gethostname(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }


def commit() -> str | None:
    """The commit of the source tree this package lies in; None outside a git checkout.

    A "+" at its end says that files were changed since.
    """
    here = Path(__file__).resolve()
    try:
        # An installed copy may lie inside somebody else's checkout, which does not track it.
        _git("ls-files", "--error-unmatch", here.name, folder=here.parent)
        return _git(
            "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+", folder=here.parent
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str, folder: Path) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
    )
    return answer.stdout.strip()
