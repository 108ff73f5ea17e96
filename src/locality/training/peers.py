"""The other processes of a run, and why they ended.

A command that trains in several processes is rank 0 and the parent of the others. Processes that
torchrun or srun started cannot see each other.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment

from locality.errors import ProcessKilled, RunFailed
from locality.training.signals import SIGNALS

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
        """Why another process has ended, if one has that should not."""
        if self._parent is not None and os.getppid() != self._parent:
            return ProcessKilled("rank 0 of the run", resumes=True)
        self.take_children()
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
        """The exception that another rank than 0 ends with.

        It is silent if rank 0 started this process and lives to report the error.
        """
        reported = self._parent is not None and os.getppid() == self._parent
        if not isinstance(outcome, ProcessKilled):
            # All ranks have raised it.
            return SystemExit(0 if reported else getattr(outcome, "exit_code", 1))
        return SystemExit(outcome.exit_code) if reported else outcome

    def take_children(self) -> list[subprocess.Popen[bytes]]:
        """The processes that Fabric started, taken from its own observer thread.

        That thread would kill this process when one of them fails, before it could say why.
        """
        started = getattr(self._launcher, "procs", [])
        _children.extend(started)
        started.clear()
        return _children

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
