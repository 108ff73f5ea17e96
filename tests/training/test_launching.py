"""Several processes, started by torchrun or srun: the same samples, sums and faults as one."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from locality.checkpoints.run_state import load_best_state
from locality.errors import RunFailed, UserError
from locality.runs import Run
from locality.settings import to_yaml
from locality.training import devices
from locality.training.job import Job

from .conftest import assert_same_run, tiny, train

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
MIXED = {"augment__mixup": 0.8, "engine__ema_decay": 0.9}
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
    """Train in `folder`; return exit codes and errors.

    Checks that every process leaves nothing behind.
    """
    reports = folder.with_name(f"{folder.name}-{how}-reports")
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
        tasks = [started(own)]
    codes, errors = finished(*tasks)
    left = [json.loads(report.read_text()) for report in reports.iterdir()]
    assert how == "SIGKILL" or len(left) == (1 if launcher == "one" else 2)
    for report in left:
        assert (report["threads"], report["children"], report["shared memory"]) == ([], [], [])
    return codes, errors


def configuration(folder: Path, **changes: Any) -> list[str]:
    (folder / "config.yaml").write_text(to_yaml(tiny(**changes)))
    return ["train", "digits", "--config", str(folder / "config.yaml")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes under torchrun that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    codes, errors = launch("torchrun", "end", configuration(folder, **MIXED), folder / "run")
    assert codes == [0], errors
    assert "engine  2 × cpu, fp32, 1 × 8 images each" in errors
    assert errors.count("finished in") == 1
    return folder / "run"


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batch(tmp_path):
    same = {"schedule__steps": 20, "schedule__eval_every": 10, "overrides": {"drop_path_rate": 0}}
    # Each process mixes its own images.
    same |= {"augment__crop": "none", "augment__mixup": 0, "augment__cutmix": 0}
    # AdaMuon amplifies rounding about forty times as much as AdamW.
    same |= {"optim__name": "adamw", "optim__lr": 1e-3}
    expected = train(tiny(**same), tmp_path / "one")
    train(tiny(**same, engine__accumulate=4), tmp_path / "accumulated")
    for name, more in (("two", {}), ("recomputed", {"engine__grad_checkpointing": True})):
        words = configuration(tmp_path, **same, **more)
        assert launch("torchrun", "end", words, tmp_path / name)[0] == [0]
    found = Run(tmp_path / "two").read_result() or {}
    assert found["val_images"] == expected["val_images"]
    one = load_best_state(tmp_path / "one")["model"]
    for name in ("two", "accumulated", "recomputed"):
        other = load_best_state(tmp_path / name)["model"]
        worst = max(float((one[key] - other[key]).abs().max()) for key in one)
        assert worst <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_what_strikes_one_process_stops_all_and_the_run_goes_on(how, whole, tmp_path):
    words = configuration(tmp_path, **MIXED)
    codes, errors = launch("torchrun", how, words, tmp_path / "run")
    assert codes == [1], errors  # torchrun's exit code for any failure
    step = load_best_state(tmp_path / "run")["step"]
    assert step == (5 if how == "SIGTERM" else 3)
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    assert launch("torchrun", "end", words, tmp_path / "run")[0] == [0]
    assert_same_run(tmp_path / "run", whole)
    assert train(tiny(**MIXED), tmp_path / "alone")["steps"] == 8  # in one process


@pytest.mark.slow
def test_a_bad_loss_on_one_process_stops_all(tmp_path):
    codes, errors = launch("torchrun", "nan", configuration(tmp_path), tmp_path / "run")
    assert codes == [1] and errors.count("the loss became nan in step 5;") == 1, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "how", "codes"), [("one", "SIGINT", [130]), ("srun", "end", [0, 0])]
)
def test_nothing_is_left_behind(launcher, how, codes, tmp_path):
    words = configuration(tmp_path, data__workers=1)
    seen, errors = launch(launcher, how, words, tmp_path / "run")
    assert seen == codes, errors
    assert (tmp_path / "run/checkpoints/last.ckpt").exists()


def test_torchrun_and_slurm_decide_how_many_processes_there_are(monkeypatch, tmp_path):
    assert devices.process_layout() == (1, 1)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UserError, match="torchrun"):
            devices.process_layout()
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "1")
        patch.setenv("WORLD_SIZE", "12")
        patch.setenv("LOCAL_WORLD_SIZE", "6")
        assert devices.process_layout() == (6, 2)
        with pytest.raises(UserError, match="evenly between 12"):
            Job(tiny(), tmp_path / "run").open()
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_NTASKS", "16")
        patch.setenv("SLURM_NNODES", "2")
        patch.setenv("SLURM_JOB_NAME", "train")
        assert devices.process_layout() == (8, 2)


def test_a_lost_process_is_told_in_a_sentence():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]")
    with pytest.raises(RunFailed, match="probably killed"), devices.translate_lost_process(2):
        raise lost
    for size, error in ((1, lost), (2, RuntimeError("shapes differ"))):
        same = pytest.raises(type(error), match=re.escape(str(error)))
        with same as caught, devices.translate_lost_process(size):
            raise error
        assert caught.value is error


@pytest.mark.slow
def test_two_machines_lose_one_and_go_on(whole, tmp_path):
    words = configuration(tmp_path, **MIXED)
    codes, errors = two_machines("machine", words, tmp_path / "run")
    assert -signal.SIGKILL in codes and 0 not in codes, errors
    codes, errors = two_machines("end", words, tmp_path / "run")
    assert codes == [0, 0] and "resumed after step 3" in errors, errors
    assert_same_run(tmp_path / "run", whole)


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
