"""The processes of a run: stop signals, collectives, and why another process has ended.

A command that trains in several processes is rank 0 and the parent of the others. Processes started
by torchrun or srun cannot see each other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from torch import Tensor

from locality.errors import ProcessKilled, RunFailed

# One Ctrl-C may arrive twice, from the terminal and from a launcher such as torchrun; a later one
# counts as a second.
_REPEATED_CTRL_C_SECONDS = 1.0

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


# Timeout for a child to exit by itself; one that waits for a lost GPU never would.
_CHILD_SECONDS = 300

# Errors of gloo, NCCL and the store of the process group when a peer is gone.
_CONNECTION_LOST = re.compile(
    r"by peer|Broken pipe|remote process exited|got 0 bytes|recv.* failed", re.I
)
# A process that fails closes its connections some seconds before it exits.
_CHILD_EXIT_SECONDS, _PARENT_EXIT_SECONDS = 20.0, 2.0
# When a peer has exited gloo fails at once, but NCCL may wait for ever.
_GRACE_SECONDS = 10.0
_POLL = 0.2

_PARENT = "LOCALITY_RANK_0"

# Ranks 1, 2, … if this process started them; later runs use them again.
_children: list[subprocess.Popen[bytes]] = []


class Peers:
    """The other processes of a run.

    Args:
        fabric: the Fabric that launches the run.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._alone = fabric.world_size == 1
        self._launcher = getattr(fabric.strategy, "launcher", None)
        self._parent: int | None = None
        environment = getattr(fabric.strategy, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment):
            if environment.local_rank() == 0:
                # A child that starts after its parent has died has another parent.
                os.environ[_PARENT] = str(os.getpid())
            elif _PARENT in os.environ:
                self._parent = int(os.environ[_PARENT])

    def lost(self) -> RunFailed | None:
        """Why another process has ended unexpectedly, or None."""
        if self._parent is not None and os.getppid() != self._parent:
            return ProcessKilled("rank 0 of the run", resumes=True)
        # Fabric's observer thread would kill this process when one of these fails, before it
        # reports the cause.
        started = getattr(self._launcher, "procs", [])
        _children.extend(started)
        started.clear()
        codes = {rank: code for rank, child in enumerate(_children, 1) if (code := child.poll())}
        if not codes:
            return None
        rank, code = min(codes.items(), key=lambda each: each[1])  # killed ones before failed ones
        if code < 0:
            return ProcessKilled(f"rank {rank} of the run", -code, resumes=True)
        if code > 128 and code - 128 not in SIGNALS:
            return ProcessKilled(f"a loading process of rank {rank}", code - 128, resumes=True)
        return RunFailed(f"rank {rank} of the run failed, for the reason above")

    def explain(self, error: BaseException) -> RunFailed | None:
        """Why another process has ended, if that caused `error`."""
        of_torch = isinstance(error, RuntimeError) and not isinstance(error, RunFailed)
        if self._alone or not of_torch or not _CONNECTION_LOST.search(str(error)):
            return None
        patience = 0.0 if self._parent is None else _PARENT_EXIT_SECONDS
        deadline = time.monotonic() + (_CHILD_EXIT_SECONDS if _children else patience)
        while (lost := self.lost()) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        return lost or ProcessKilled(
            "another process of the run is gone and, unless it says why itself,", resumes=True
        )

    def exit_error(self, outcome: Exception) -> BaseException:
        """The exception with which a rank other than 0 ends.

        It is silent if rank 0 started this process and is alive to report the error.
        """
        reported = self._parent is not None and os.getppid() == self._parent
        if not isinstance(outcome, ProcessKilled):
            # All ranks have raised it.
            return SystemExit(0 if reported else getattr(outcome, "exit_code", 1))
        return SystemExit(outcome.exit_code) if reported else outcome

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Within the block, exit with a message if another process has ended unnoticed."""
        stopped = threading.Event()

        def poll() -> None:
            while not stopped.wait(_POLL):
                if (lost := self.lost()) and not stopped.wait(_GRACE_SECONDS):
                    os.write(2, f"locality: {lost}\n".encode())
                    for child in _children:
                        child.kill()
                    os._exit(lost.exit_code)

        thread = threading.Thread(target=poll, name="peers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def end_children() -> None:
    """Destroy the process group, then wait for child processes.

    Called at exit, since the same processes may train again. The threads of the group hold tensors,
    and releasing them while the interpreter finalises would abort the process.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for child in _children:
        try:
            child.wait(_CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
