"""The other processes of a run: how they have ended, as far as this one can tell.

A command that trains in several processes starts them itself: it is rank 0, sees the others as its
children, and is their parent. What torchrun or srun has started sees no other process.
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

# So long a process may take to end by itself, even on a crowded machine; one that waits for a lost
# GPU would never end.
_CHILD_SECONDS = 300

# How gloo, NCCL and the store of the process group say that the other side is gone.
_CONNECTION_LOST = re.compile(
    r"by peer|Broken pipe|remote process exited|got 0 bytes|recv.* failed", re.I
)
# A process that fails closes its connections first, and then takes so long to end; one that is
# killed has ended at once.
_CHILD_EXIT_SECONDS, _PARENT_EXIT_SECONDS = 20.0, 2.0
# After the end of another process gloo fails at once, and NCCL may wait for ever.
_GRACE_SECONDS = 10.0
_POLL = 0.2

_PARENT = "LOCALITY_RANK_0"

# Ranks 1, 2, … of all runs of this process, which are the same ones, if it has started them.
_children: list[subprocess.Popen[bytes]] = []


class Peers:
    """What a process of a run can see of the others.

    Args:
        fabric: that launches, or has launched, the run.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._alone = fabric.world_size == 1
        self._launcher = getattr(fabric.strategy, "launcher", None)
        self._parent: int | None = None
        environment = getattr(fabric.strategy, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment):
            if environment.local_rank() == 0:
                # A child may begin when its parent is gone, and has another one.
                os.environ[_PARENT] = str(os.getpid())
            elif _PARENT in os.environ:
                self._parent = int(os.environ[_PARENT])

    def lost(self) -> RunFailed | None:
        """What has become of another process, if one has ended that should not have."""
        if self._parent is not None and os.getppid() != self._parent:
            return ProcessKilled("rank 0 of the run", resumes=True)
        self.take_over()
        codes = {rank: code for rank, child in enumerate(_children, 1) if (code := child.poll())}
        if not codes:
            return None
        rank, code = min(codes.items(), key=lambda each: each[1])  # the killed before the failed
        if code < 0:
            return ProcessKilled(f"rank {rank} of the run", -code, resumes=True)
        if code > 128 and code - 128 not in SIGNALS:
            return ProcessKilled(f"a loading process of rank {rank}", code - 128, resumes=True)
        return RunFailed(f"rank {rank} of the run failed, for the reason above")

    def explained(self, error: BaseException) -> RunFailed | None:
        """What has become of another process, if that is why `error` was raised."""
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

    def leave(self, outcome: Exception) -> BaseException:
        """What a process that is not the first raises in the end.

        Rank 0 says what has happened, where it has started this process and lives.
        """
        told = self._parent is not None and os.getppid() == self._parent
        if not isinstance(outcome, ProcessKilled):
            # Which all have raised alike.
            return SystemExit(0 if told else getattr(outcome, "exit_code", 1))
        return SystemExit(outcome.exit_code) if told else outcome

    def take_over(self) -> list[subprocess.Popen[bytes]]:
        """The processes that Fabric has started, no longer watched by its own observer.

        That kills this process when one of them has failed; ending by itself it can say why.
        """
        started = getattr(self._launcher, "procs", [])
        _children.extend(started)
        started.clear()
        return _children

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, end with a sentence if another process has, and nothing else tells."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_POLL):
                if (lost := self.lost()) and not over.wait(_GRACE_SECONDS):
                    os.write(2, f"locality: {lost}\n".encode())
                    for child in _children:
                        child.kill()
                    os._exit(lost.exit_code)

        thread = threading.Thread(target=watch, name="peers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def end_children() -> None:
    """What a process does last: leave the process group, then outlive those it has started.

    The group's threads hold the tensors of the last operations until they are joined. One that
    lets go of them when the interpreter has begun to finalise aborts the process. It is too early
    for this when a run ends: the same processes may go on with another one.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for child in _children:
        try:
            child.wait(_CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
