"""Launchers: torchrun, srun, or one command that starts the processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from locality.settings import to_yaml

from .conftest import assert_same_run, tiny

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
RANK = str(Path(__file__).with_name("rank.py"))


def started(
    words: list[str], launcher: list[str] | None = None, **environment: str
) -> subprocess.Popen[str]:
    command = [sys.executable, *(launcher or []), *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | environment
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def finished(*tasks: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Exit codes and joined stderr; fails with tracebacks of all after three minutes."""
    late = time.monotonic() + 180
    hung = []
    for task in tasks:
        try:
            task.communicate(timeout=max(0.0, late - time.monotonic()))
        except subprocess.TimeoutExpired:
            hung.append(task)
    for task in hung:
        parent = psutil.Process(task.pid)
        for process in (parent, *parent.children(recursive=True)):
            process.send_signal(signal.SIGABRT)  # prints tracebacks, one process after the other
            psutil.wait_procs([process], timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGKILL)
    errors = "".join(task.communicate()[1] for task in tasks)
    if hung:
        pytest.fail(f"{[task.args for task in hung]} have not ended:\n{errors}")
    return [task.returncode for task in tasks], errors


def launch(launcher: str, how: str, words: list[str], folder: Path) -> tuple[list[int], str]:
    """Train in `folder`; return the visible exit codes and errors.

    Checks that every process leaves nothing behind.
    """
    reports = folder.with_name(f"{folder.name}-reports")
    reports.mkdir()
    words = [*words, "--output", str(folder)]
    own = [RANK, str(reports), how, *words]
    if launcher == "srun":
        # Environment that srun, and submitit through it, sets for each of two tasks.
        with socket.socket() as free:
            free.bind(("", 0))
            port = str(free.getsockname()[1])
        shared = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
        shared |= {"SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "1"}
        shared |= {"SLURM_JOB_NAME": "train"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        tasks = [
            started(own, **shared, SLURM_PROCID=str(task), SLURM_LOCALID=str(task))
            for task in range(2)
        ]
    elif launcher == "torchrun":
        tasks = [started(own, TORCHRUN)]
    else:
        tasks = [started([*own, "--engine.devices", "1" if launcher == "one" else "2"])]
    codes, errors = finished(*tasks)
    left = [json.loads(report.read_text()) for report in reports.iterdir()]
    assert len(left) == 1 if launcher == "one" else 2
    for report in left:
        codes += report["started"]
        assert (report["threads"], report["children"], report["shared memory"]) == ([], [], [])
    return codes, errors


def configuration(folder: Path, **changes: Any) -> list[str]:
    (folder / "config.yaml").write_text(to_yaml(tiny(**changes)))
    return ["train", "digits", "--config", str(folder / "config.yaml")]


@pytest.mark.slow
def test_torchrun_and_the_command_alone_train_the_same_in_two_processes(tmp_path):
    words = configuration(tmp_path, augment__mixup=0.8)
    for launcher, processes in (("torchrun", 1), ("alone", 2)):
        folder = tmp_path / launcher
        codes, errors = launch(launcher, "end", words, folder)
        assert codes == [0] * processes, errors
        assert "engine  2 × cpu, fp32, 1 × 8 images each" in errors
        assert errors.count("finished in") == 1
    assert_same_run(tmp_path / "torchrun", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "how", "codes"),
    [
        ("one", "SIGINT", [130]),
        # Fabric ends the others if one that it started fails, so these end with 0 after a signal.
        ("alone", "SIGTERM", [143, 0]),
        ("alone", "SIGKILL", [137, -signal.SIGKILL]),
        ("torchrun", "SIGTERM", [1]),  # its exit code for any failure
        ("srun", "end", [0, 0]),
    ],
)
def test_nothing_is_left_behind(launcher, how, codes, tmp_path):
    words = configuration(tmp_path, data__workers=1)
    seen, errors = launch(launcher, how, words, tmp_path / "run")
    if how == "SIGKILL" and "terminated with code -9" in errors:
        return  # Fabric's observer was faster than the lost connection
    assert seen == codes, errors
    assert (tmp_path / "run/checkpoints/last.ckpt").exists()
    if how == "SIGKILL":
        assert "killed from outside" in errors and "Traceback" not in errors


@pytest.mark.slow
def test_two_machines_lose_one_and_go_on(tmp_path):
    words = configuration(tmp_path, augment__mixup=0.8)
    assert launch("torchrun", "end", words, tmp_path / "whole")[0] == [0]
    codes, errors = two_machines("machine", words, tmp_path / "run")
    assert -signal.SIGKILL in codes and 0 not in codes, errors
    codes, errors = two_machines("end", words, tmp_path / "run")
    assert codes == [0, 0] and "resumed after step 3" in errors, errors
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def two_machines(how: str, words: list[str], folder: Path) -> tuple[list[int], str]:
    """Train under two torchruns, as on two machines; return exit codes and errors."""
    reports = folder.with_name(f"{folder.name}-{how}")
    reports.mkdir()
    with socket.socket() as free:
        free.bind(("", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=run"]
    own = [RANK, str(reports), how, *words, "--output", str(folder)]
    return finished(*(started(own, launcher) for _ in range(2)))
