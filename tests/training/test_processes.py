"""Two processes are one run: same samples, same sums, same faults."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from locality.checkpoints.run_state import load_best_state
from locality.data import open_data, train_loader
from locality.errors import UserError
from locality.training import Interrupted, NonFiniteLoss, RunFolder, devices
from locality.training.loop import Loop
from locality.training.objective import Objective
from locality.training.resolved_run import ResolvedRun

from .conftest import assert_same_run, tiny, train, train_interrupted

# Marked as a whole: the file is run by itself (see the Makefile).
pytestmark = pytest.mark.slow

TWO = {"engine__devices": 2, "engine__strategy": "ddp_fork"}


def samples(world_size: int, accumulate: int) -> list[list[int]]:
    """The sample numbers of each of the first steps, over all processes and passes."""
    config = tiny(augment__repeats=3)
    source = open_data(config.data, 0).train
    steps: list[list[int]] = [[] for _ in range(4)]
    for rank in range(world_size):
        loader = train_loader(
            source,
            config.augment,
            config.input.at(8),
            batch_size=16,
            seed=0,
            stop_step=4,
            rank=rank,
            world_size=world_size,
            accumulate=accumulate,
        )
        for batch in loader:
            steps[batch.step] += zip(batch.positions.tolist(), batch.indices.tolist(), strict=True)
    return [sorted(step) for step in steps]


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 4), (2, 4), (4, 2)])
def test_a_batch_holds_the_same_samples_however_it_is_divided(
    world_size: int, accumulate: int
) -> None:
    assert samples(world_size, accumulate) == samples(1, 1)


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path: Path) -> None:
    same = {"schedule__steps": 20, "schedule__eval_every": 10, "overrides": {"drop_path_rate": 0}}
    # Each process mixes its own images.
    same |= {"augment__crop": "none", "augment__mixup": 0, "augment__cutmix": 0}
    # The recipe's AdaMuon magnifies rounding, about forty times as much as AdamW.
    same |= {"optim__name": "adamw", "optim__lr": 1e-3}
    train(tiny(**same), tmp_path / "one")
    train(tiny(**same, **TWO), tmp_path / "two")
    train(tiny(**same, engine__accumulate=4), tmp_path / "accumulated")
    train(tiny(**same, **TWO, engine__grad_checkpointing=True), tmp_path / "recomputed")
    one = load_best_state(tmp_path / "one")["model"]
    for name in ("two", "accumulated", "recomputed"):
        other = load_best_state(tmp_path / name)["model"]
        worst = max(float((one[key] - other[key]).abs().max()) for key in one)
        assert worst <= 1e-6


def test_every_process_sees_the_same_evaluation(tmp_path: Path) -> None:
    one = train(tiny(schedule__steps=2), tmp_path / "one")
    two = train(tiny(schedule__steps=2, **TWO), tmp_path / "two")
    assert two["val_images"] == one["val_images"]
    assert two["top5"] == pytest.approx(one["top5"], abs=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_after_the_same_step(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_bad_loss_on_one_process_stops_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Objective.loss
    step = Loop.train_step

    def bad(self: Loop, batches: Any) -> int:
        if self.state.step == 2 and self.fabric.global_rank == 1:
            monkeypatch.setattr(Objective, "loss", lambda *a: loss(*a) * float("nan"))
        return step(self, batches)

    monkeypatch.setattr(Loop, "train_step", bad)
    with pytest.raises(NonFiniteLoss, match="in step 3 "):
        train(tiny(**TWO), tmp_path / "run")


def test_a_batch_that_cannot_be_divided_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="divided evenly between 3"):
        tiny(engine__devices=3)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="divided evenly between 3"):
        ResolvedRun(tiny())


def test_mixing_needs_pairs_in_every_process() -> None:
    with pytest.raises(UserError, match="even number of images"):
        ResolvedRun(tiny(augment__mixup=0.8, engine__devices=2, engine__batch_size=6))


def test_torchrun_and_slurm_decide_how_many_processes_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_run_of_two_processes_can_go_on_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Loop.train_step

    def struck(self: Loop, batches: Any) -> int:
        if self.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "train_step", struck)
        with pytest.raises(Interrupted):
            train(tiny(**TWO), tmp_path / "run")
    assert train(tiny(), tmp_path / "run")["steps"] == 8
    starts = RunFolder(tmp_path / "run").environment_file.read_text()
    assert starts.count('"step": 4') == 1
