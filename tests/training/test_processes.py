"""Two processes give the same samples, sums and faults as one."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from torch.multiprocessing import ProcessRaisedException

from locality.checkpoints.run_state import load_best_state
from locality.errors import ProcessKilled, UserError
from locality.runs import RunFolder
from locality.training import NonFiniteLoss, devices
from locality.training.loop import Loop
from locality.training.objective import Objective
from locality.training.processes import Collectives
from locality.training.resolved_run import ResolvedRun

from .conftest import FROM_OUTSIDE, assert_same_run, tiny, train, train_interrupted

# Marked as a whole; the Makefile runs this file separately, as every test that forks ranks:
# once torch.compile has run in a process, its forks cannot train.
pytestmark = pytest.mark.slow

TWO = {"engine__devices": 2, "engine__strategy": "ddp_fork"}


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path):
    same = {"schedule__steps": 20, "schedule__eval_every": 10, "overrides": {"drop_path_rate": 0}}
    # Each process mixes its own images.
    same |= {"augment__crop": "none", "augment__mixup": 0, "augment__cutmix": 0}
    # AdaMuon amplifies rounding about forty times as much as AdamW.
    same |= {"optim__name": "adamw", "optim__lr": 1e-3}
    expected = train(tiny(**same), tmp_path / "one")
    found = train(tiny(**same, **TWO), tmp_path / "two")
    assert found["val_images"] == expected["val_images"]
    train(tiny(**same, engine__accumulate=4), tmp_path / "accumulated")
    train(tiny(**same, **TWO, engine__grad_checkpointing=True), tmp_path / "recomputed")
    one = load_best_state(tmp_path / "one")["model"]
    for name in ("two", "accumulated", "recomputed"):
        other = load_best_state(tmp_path / name)["model"]
        worst = max(float((one[key] - other[key]).abs().max()) for key in one)
        assert worst <= 1e-6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_after_the_same_step(rank, tmp_path, monkeypatch):
    config = tiny(**TWO, augment__mixup=0.8, engine__ema_decay=0.9)
    train(config, tmp_path / "whole")
    step = Loop.train_step

    def struck(self: Loop, batches: Any) -> int:
        if self.state.step == 4 and self.fabric.global_rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches)

    monkeypatch.setattr(Loop, "train_step", struck)
    interrupted = train_interrupted(config, tmp_path / "run")
    assert (interrupted.step, interrupted.exit_code) == (5, 143)
    monkeypatch.setattr(Loop, "train_step", step)
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_bad_loss_on_one_process_stops_all(tmp_path, monkeypatch):
    loss = Objective.loss
    step = Loop.train_step

    def bad(self: Loop, batches: Any) -> int:
        if self.state.step == 2 and self.fabric.global_rank == 1:
            monkeypatch.setattr(Objective, "loss", lambda *a: loss(*a) * float("nan"))
        return step(self, batches)

    monkeypatch.setattr(Loop, "train_step", bad)
    with pytest.raises(NonFiniteLoss, match="in step 3 "):
        train(tiny(**TWO), tmp_path / "run")


def test_a_batch_that_cannot_be_divided_is_refused(monkeypatch):
    with pytest.raises(UserError, match="evenly between 3"):
        tiny(engine__devices=3)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="evenly between 3"):
        ResolvedRun(tiny())


def test_torchrun_and_slurm_decide_how_many_processes_there_are(monkeypatch):
    engine = tiny().engine
    assert devices.process_layout(engine, "cpu") == (1, 1)
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "1")
        patch.setenv("WORLD_SIZE", "8")
        patch.setenv("LOCAL_WORLD_SIZE", "4")
        assert devices.process_layout(engine, "cpu") == (4, 2)
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_NTASKS", "16")
        patch.setenv("SLURM_NNODES", "2")
        patch.setenv("SLURM_JOB_NAME", "train")
        assert devices.process_layout(engine, "cpu") == (8, 2)


def test_a_run_of_two_processes_can_go_on_in_one(tmp_path, stop_before):
    stop_before(3)
    train_interrupted(tiny(**TWO), tmp_path / "run")
    stop_before(None)
    assert train(tiny(), tmp_path / "run")["steps"] == 8
    starts = RunFolder(tmp_path / "run").environment_file.read_text()
    assert starts.count('"step": 4') == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_goes_on_after_a_killed_rank(rank, tmp_path, monkeypatch):
    config = tiny(**TWO)
    train(config, tmp_path / "whole")
    share = Collectives.all_reduce_metrics

    def struck(self: Collectives, *arguments: Any) -> Any:
        there = (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
        if there and self._fabric.global_rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return share(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Collectives, "all_reduce_metrics", struck)
        # Torch reports the first process that it sees to have failed; the other lost its peer.
        with pytest.raises((ProcessKilled, ProcessRaisedException)) as caught:
            train(config, tmp_path / "run")
    if isinstance(caught.value, ProcessKilled):
        assert re.search(f"rank {rank} .*{FROM_OUTSIDE}", str(caught.value))
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
