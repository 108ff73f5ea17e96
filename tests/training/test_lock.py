"""One run folder, one run."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from locality.errors import RunFailed, UserError
from locality.training.loop import Loop
from locality.training.run_folder import FolderLock

from .conftest import tiny, train

HOLD = """
import sys, time
from pathlib import Path
from locality.training.run_folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
getattr(lock, sys.argv[2])()
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def holder(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_second_process_is_refused_at_once_with_who_holds_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path / "lock", "acquire") as process:
        started = time.monotonic()
        with pytest.raises(UserError, match=f"process {process.pid} on"):
            FolderLock(tmp_path / "lock").acquire(timeout=30)
        assert time.monotonic() - started < 10


@pytest.mark.slow
def test_a_killed_process_leaves_the_folder_free(tmp_path: Path) -> None:
    with holder(tmp_path / "lock", "acquire") as process:
        process.kill()
        process.wait()
        lock = FolderLock(tmp_path / "lock")
        lock.acquire(timeout=0)
        lock.release()


@pytest.mark.slow
def test_the_folder_is_taken_while_any_process_of_the_run_lives(tmp_path: Path) -> None:
    with holder(tmp_path / "lock", "acquire") as launcher, holder(tmp_path / "lock", "join"):
        launcher.kill()
        launcher.wait()
        with pytest.raises(UserError, match="what is left of it"):
            FolderLock(tmp_path / "lock").acquire(timeout=0.2)
    FolderLock(tmp_path / "lock").acquire(timeout=0)


def test_a_forked_worker_holds_the_folder_too(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "lock")
    lock.acquire()
    worker = os.fork()
    if not worker:
        time.sleep(60)
        os._exit(0)
    lock.release()
    try:
        other = FolderLock(tmp_path / "lock")
        # The process that claimed it is this one and lives, so there is nothing to wait for.
        with pytest.raises(UserError):
            other.acquire(timeout=0.2)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    FolderLock(tmp_path / "lock").acquire(timeout=0)


@pytest.mark.slow
def test_what_is_left_of_a_run_is_waited_for(tmp_path: Path) -> None:
    with (
        holder(tmp_path / "lock", "acquire") as launcher,
        holder(tmp_path / "lock", "join") as rest,
    ):
        launcher.kill()
        launcher.wait()
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {rest.pid}"])
        FolderLock(tmp_path / "lock").acquire(timeout=30)
        killer.wait()


def test_processes_of_one_run_share_the_folder(tmp_path: Path) -> None:
    one, other = FolderLock(tmp_path / "lock"), FolderLock(tmp_path / "lock")
    one.acquire()
    other.join()
    one.release()
    with pytest.raises(UserError):
        FolderLock(tmp_path / "lock").acquire(timeout=0)
    other.release()


def test_a_process_cannot_join_a_run_that_lost_the_folder(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        with pytest.raises(UserError):
            FolderLock(tmp_path / "lock").join()


def test_a_run_whose_folder_was_moved_writes_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    step = Loop.train_step

    def renamed(self: Loop, batches: Any) -> int:
        if self.state.step == 4 and not moved.exists():
            folder.rename(moved)
            shutil.copytree(moved, folder)
        return step(self, batches)

    monkeypatch.setattr(Loop, "train_step", renamed)
    with pytest.raises(RunFailed, match="was moved"):
        train(tiny(), folder)
    assert (folder / "metrics.csv").read_text() == (moved / "metrics.csv").read_text()
    assert not (folder / "result.json").exists()
    assert train(tiny(), moved)["steps"] == 8
