"""The processes of a run: stop signals and collectives.

When one has ended, torchrun, srun or Fabric, whichever started them, ends the others.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from torch import Tensor

from locality.errors import ProcessKilled

# One Ctrl-C may arrive twice, from the terminal and from a launcher such as torchrun; a later one
# counts as a second.
_REPEATED_CTRL_C_SECONDS = 1.0

# A killed process is gone this long after its connections.
_EXIT_SECONDS = 1.0
_CHILD_SECONDS = 60.0

# Ctrl-C, batch systems and torchrun, SLURM's warning, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class SignalHandler:
    """The first signal this process has received.

    Attributes:
        signum: its number; 0 if there was none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._owner = os.getpid()

    @contextlib.contextmanager
    def installed(self) -> Iterator[SignalHandler]:
        """Handle signals within the block; Python allows it in the main thread only."""
        with _handled(self._handle):
            yield self

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a forked data worker: the training process decides
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
            again = "; again to stop at once, without saving" if signum == signal.SIGINT else ""
            # print() is not reentrant: this handler may interrupt it.
            with contextlib.suppress(OSError):  # the terminal was closed
                os.write(2, f"\nstopping after this step and saving{again}\n".encode())
        elif signum == signal.SIGINT and time.monotonic() - self._since > _REPEATED_CTRL_C_SECONDS:
            raise KeyboardInterrupt


def forward_signals() -> AbstractContextManager[None]:
    """Within the block, forward signals to child processes and ignore them here."""

    def forward(signum: int, _: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signum)

    return _handled(forward)


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, install `handler` for the signals that are not ignored (by nohup, say)."""
    main = threading.current_thread() is threading.main_thread()
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


class Collectives:
    """Collective operations; no-ops in a run of one process.

    Args:
        fabric: devices and processes.
        signals: the signals this process has received.
    """

    def __init__(self, fabric: Fabric, signals: SignalHandler) -> None:
        self.is_single = fabric.world_size == 1
        self._fabric = fabric
        self._signals = signals

    def all_reduce_metrics(self, total: Tensor) -> Callable[[], tuple[float, float, int]]:
        """Sum `Objective.batch_metrics` and the signals over all processes.

        Returns:
            a function that waits for the sums, which a GPU copies in the background: the loss of
            all micro-batches, the correct predictions, and the signal to stop, or 0.
        """
        if not self.is_single:
            total = self.all_reduce(torch.cat((total, total.new_tensor(self._flags()))))
        arrived = None
        if total.is_cuda:
            pinned = torch.empty_like(total, device="cpu", pin_memory=True)
            total = pinned.copy_(total, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()

        def values() -> tuple[float, float, int]:
            if arrived is not None:
                arrived.synchronize()
            loss_sum, correct, *flags = total.tolist()
            return loss_sum, correct, _first_signal(flags) if flags else self._signals.signum

        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all processes, in place."""
        if not self.is_single:
            torch.distributed.all_reduce(tensor)
        return tensor

    def any_signal(self) -> int:
        """The signal that any process has received, or 0; every process must call this."""
        if self.is_single:
            return self._signals.signum
        flags = torch.tensor(self._flags(), device=self._fabric.device)
        return _first_signal(self.all_reduce(flags).tolist())

    def all_gather(self, known: dict[str, str]) -> None:
        """Add the items of all processes to `known`."""
        if self.is_single:
            return
        gathered: list[dict[str, str]] = [{}] * self._fabric.world_size
        torch.distributed.all_gather_object(gathered, known)
        for other in gathered:
            known.update(other)

    def broadcast(self, buffers: list[Tensor]) -> None:
        """Copy the `buffers` of rank 0 to all processes."""
        if not self.is_single:
            for buffer in buffers:
                torch.distributed.broadcast(buffer, src=0)

    def _flags(self) -> list[float]:
        return [float(self._signals.signum == signum) for signum in SIGNALS]


def _first_signal(counts: list[float]) -> int:
    return next((int(s) for s, count in zip(SIGNALS, counts, strict=True) if count), 0)


def is_started_by_rank0(fabric: Fabric) -> bool:
    """Whether rank 0 of a command has started this process, and reports errors for it."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    return isinstance(environment, LightningEnvironment) and environment.local_rank() > 0


def killed_process(fabric: Fabric) -> ProcessKilled | None:
    """The killed process among those that this one has started; torchrun and srun say it of theirs.

    Called when communication has failed.
    """
    if not (observed := _started_by(fabric)):
        return None
    launcher: Any = fabric.strategy.launcher
    launcher.procs = children = list(observed)
    observed.clear()  # Fabric's observer would kill this process before it can say why
    time.sleep(_EXIT_SECONDS)
    for rank, child in enumerate(children, 1):
        if (code := child.poll() or 0) < 0:
            return ProcessKilled(f"rank {rank} of the run", -code, resumes=True)
    return None


def end_processes(fabric: Fabric) -> None:
    """Leave the process group, and wait for the processes that this one has started.

    Called at exit, since the same processes may train again. The threads of the group hold tensors,
    and releasing them while the interpreter finalises would abort the process.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for child in _started_by(fabric):
        try:
            child.wait(_CHILD_SECONDS)
        except subprocess.TimeoutExpired:  # it waits for a lost GPU
            child.kill()
            child.wait()


def _started_by(fabric: Fabric) -> list[subprocess.Popen[bytes]]:
    return getattr(getattr(fabric.strategy, "launcher", None), "procs", [])
