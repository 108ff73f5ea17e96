"""The environment of measurements: hardware, versions and commit."""

import contextlib
import ctypes
import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from locality import __version__

T = TypeVar("T")


def processor_name() -> str:
    """The processor's name from /proc/cpuinfo, else from Python."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        line = next(line for line in file if line.startswith("model name"))
        return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def end_if_importing() -> None:
    """End a worker that imports a script without a main guard: it would train in every worker.

    The process that started it says so (`data/loader.py`).
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(2)


def processors() -> int:
    """The number of processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def idle_processors(most: int) -> int:
    """Processors that nobody uses now, at least 1 and at most `most`.

    A step waits for the slowest of its threads, so that a busy processor costs more than it gives.
    """
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, min(most, processors() - round(busy)))


def spare_threads() -> int:
    """Torch's number of threads, less those that would wait for busy processors.

    Beside other processes, threads that wait for each other take many times as long as one. A run
    that has just ended still counts as load, hence at least half.
    """
    import torch

    threads = torch.get_num_threads()
    return max(1, threads // 2, idle_processors(threads))


@contextlib.contextmanager
def arithmetic_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads within the block; 0 keeps the current number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def memory(device_type: str) -> int:
    """Bytes of memory available on a device type: "cpu", "cuda" or "mps"."""
    if device_type == "cuda":
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Containers and batch systems may set a lower limit.
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def limited(function: Callable[[], T], seconds: float) -> T:
    """The value of `function`, called in a thread.

    Raises:
        TimeoutError: if it takes longer; the thread ends at its next Python instruction.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if thread.is_alive():
            ending = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(*ending)
        raise TimeoutError(f"it took longer than {seconds:.0f} s") from None


_HERE = Path(__file__).resolve()
_PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "numpy", "pillow")


def describe_environment() -> dict[str, Any]:
    """Versions, hardware, commit, command and time, as plain values."""
    import torch

    return {
        "locality": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "host": socket.gethostname(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }


def commit() -> str | None:
    """The commit of the package's source tree, or None outside a git checkout.

    A trailing "+" marks uncommitted changes.
    """
    try:
        # An installed copy may be inside another project's checkout, which does not track it.
        _git("ls-files", "--error-unmatch", _HERE.name)
        return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    answer = subprocess.run(["git", *arguments], cwd=_HERE.parent, **how)
    return answer.stdout.strip()


def is_main_process() -> bool:
    """Whether this process is rank 0 of torchrun, srun or Fabric, or the only process."""
    ranks = ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK")
    return all(os.environ.get(rank, "0") == "0" for rank in ranks)
