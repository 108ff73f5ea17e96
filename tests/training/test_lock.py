"""One run folder, one run."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from locality.errors import RunFailed, UserError
from locality.runs import FolderLock

from .conftest import tiny, train

HOLD = """
import os, sys, time
from pathlib import Path
from locality.runs import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
worker = os.fork()
if worker:
    print(worker, flush=True)
time.sleep(60)
"""


@contextmanager
def holder(path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds a lock, and the number of one that it has forked."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        yield process, worker
    finally:
        process.kill()
        process.wait()
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_a_second_process_is_refused_at_once_with_who_holds_the_folder(tmp_path):
    with holder(tmp_path / "lock") as (process, _):
        started = time.monotonic()
        with pytest.raises(UserError, match=f"process {process.pid} on"):
            FolderLock(tmp_path / "lock").acquire(timeout=30)
        assert time.monotonic() - started < 10


@pytest.mark.slow
def test_what_is_left_of_a_run_keeps_the_folder_and_is_waited_for(tmp_path):
    with holder(tmp_path / "lock") as (process, worker):
        process.kill()
        process.wait()
        with pytest.raises(UserError, match="remaining processes"):
            FolderLock(tmp_path / "lock").acquire(timeout=0.2)
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {worker}"])
        FolderLock(tmp_path / "lock").acquire(timeout=30)
        killer.wait()


def test_a_run_whose_folder_was_moved_writes_nothing_to_the_next(tmp_path, before_step):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    before_step(4, lambda: shutil.copytree(folder.rename(moved), folder))
    with pytest.raises(RunFailed, match="was moved"):
        train(tiny(), folder)
    assert (folder / "metrics.csv").read_text() == (moved / "metrics.csv").read_text()
    assert not (folder / "result.json").exists()
    before_step(None)
    assert train(tiny(), moved)["steps"] == 8
