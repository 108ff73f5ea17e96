"""Checkpoints are complete or refused, and the previous one is kept."""

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from locality.checkpoints import run_state
from locality.checkpoints.run_state import (
    LAST,
    PREVIOUS,
    CheckpointFolder,
    read_checkpoint,
    write_checkpoint,
)
from locality.errors import NonFiniteWeights, UserError
from locality.training import CheckpointNotSaved, DamagedCheckpoint

from .conftest import assert_same, assert_same_run, tiny, train


def state(step: int, size: int = 50) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(size, size, generator=generator)
    return {
        "step": step,
        "model": {"weight": weights, "count": torch.tensor(step)},
        "ema": None,
        "optimizer": {},
        "progress": {"step": step},
        "data": "",
        "config": {},
        "metrics": "",
        "scaler": {},
    }


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = CheckpointFolder(tmp_path)
    folder.save(state(1))
    folder.save(state(2))
    return tmp_path


def refused(written: Path, damaged: bytes) -> None:
    (written / LAST).write_bytes(damaged)
    with pytest.raises(DamagedCheckpoint, match=LAST):
        read_checkpoint(written / LAST)
    folder = CheckpointFolder(written)
    found, name, passed_over = folder.load()
    assert_same(found, state(1))
    assert name == PREVIOUS
    assert LAST in passed_over[0] and (written / LAST).exists()
    folder.tidy()
    (written / f"{LAST}.damaged").unlink()


def test_a_truncated_file_or_a_flipped_bit_is_refused_and_the_previous_one_used(written):
    whole = (written / LAST).read_bytes()
    refused(written, whole + b"x")
    for offset in range(0, len(whole), len(whole) // 20):
        refused(written, whole[:offset])
    rng = random.Random(0)
    header = whole.index(b"\n") + 1
    offsets = [*range(0, header, 5), *(rng.randrange(header, len(whole)) for _ in range(20))]
    for offset in offsets:
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << rng.randrange(8)
        refused(written, bytes(flipped))


def test_a_damaged_file_never_takes_the_place_of_a_whole_one(written):
    (written / LAST).write_bytes(b"rubbish")
    folder = CheckpointFolder(written)
    folder.load()
    folder.tidy()
    folder.save(state(3))
    assert_same(read_checkpoint(written / PREVIOUS), state(1))
    assert_same(read_checkpoint(written / LAST), state(3))


def test_with_no_whole_file_left_the_run_does_not_start_over(written):
    for name in (LAST, PREVIOUS):
        (written / name).write_bytes((written / name).read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="new folder") as caught:
        CheckpointFolder(written).load()
    assert LAST in str(caught.value) and PREVIOUS in str(caught.value)


def moment(state: dict[str, Any]) -> dict[str, Any]:
    return state["optimizer"]["state"][0]


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "step": lambda state: state.update(step="x"),
    "another step": lambda state: state.update(step=1),
    "progress": lambda state: state.update(progress={"step": "x"}),
    "counters": lambda state: state["progress"].update(num_images=None),
    "model": lambda state: state.update(model={}),
    "a weight": lambda state: state["model"].update(cls_token=3),
    "its shape": lambda state: state["model"].update(cls_token=torch.zeros(2)),
    "ema": lambda state: state.update(ema=[]),
    "optimizer": lambda state: state.update(optimizer={}),
    "groups": lambda state: state["optimizer"]["param_groups"].pop(),
    "lr": lambda state: state["optimizer"]["param_groups"][0].update(lr="x"),
    "moments": lambda state: moment(state).update({n: torch.zeros(2) for n in moment(state)}),
    "scaler": lambda state: state.update(scaler=5),
    "config": lambda state: state.update(config={"seed": []}),
    "no config": lambda state: state.update(config=None),
    "metrics": lambda state: state.update(metrics=3),
    "data": lambda state: state.update(data=[]),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run that has ended after its checkpoint of step 2, without a result."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    train(tiny(**{"schedule.steps": 2, "schedule.warmup": 1}), folder)
    (folder / "result.json").unlink()
    return folder


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_checkpoint_of_other_content_is_refused(kind, begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    path = tmp_path / "run/checkpoints" / LAST
    content = read_checkpoint(path)
    DAMAGES[kind](content)
    write_checkpoint(path, content)
    path.with_name(PREVIOUS).unlink()
    with pytest.raises((DamagedCheckpoint, UserError)) as caught:
        train(tiny(**{"schedule.steps": 2, "schedule.warmup": 1}), tmp_path / "run")
    assert "checkpoint" in str(caught.value) or "config.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_that_are_not_finite_never_replace_good_ones(name, written):
    folder = CheckpointFolder(written)
    folder.load()
    damaged = state(3)
    damaged["model"]["bias"] = torch.zeros(50)
    damaged["model"][name][2] = float("nan")
    with pytest.raises(NonFiniteWeights, match="step 3"):
        folder.save(damaged)
    assert_same(CheckpointFolder(written).load()[0], state(2))


def test_leftovers_of_a_killed_process_are_removed(written):
    (written / f".{LAST}.abc123.tmp").write_bytes(b"half")
    CheckpointFolder(written).tidy()
    assert sorted(path.name for path in written.iterdir()) == [LAST, PREVIOUS]


def disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_to_full_disk(content: object, _: object, save: Any = torch.save) -> None:
    save(content, SimpleNamespace(write=disk_full, flush=disk_full))


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_full_disk_keeps_what_is_there_and_says_so(where, written, monkeypatch):
    folder = CheckpointFolder(written)
    folder.load()
    if where == "write":
        monkeypatch.setattr(run_state.torch, "save", save_to_full_disk)
    else:
        monkeypatch.setattr(run_state.os, where, disk_full)
    with pytest.raises(CheckpointNotSaved, match="No space left") as caught:
        folder.save(state(3))
    assert "step 3" in str(caught.value) and "step 2 is kept" in str(caught.value)
    monkeypatch.undo()
    assert_same(CheckpointFolder(written).load()[0], state(2))
    folder.tidy()
    assert not list(written.glob(".*"))


def test_a_run_that_meets_a_full_disk_goes_on_when_there_is_space_again(tmp_path, monkeypatch):
    train(tiny(), tmp_path / "whole")
    save = CheckpointFolder.save

    def full(self: CheckpointFolder, state: dict[str, Any]) -> None:
        with monkeypatch.context() as patch:
            if state["step"] > 3:
                patch.setattr(run_state.torch, "save", save_to_full_disk)
            save(self, state)

    monkeypatch.setattr(CheckpointFolder, "save", full)
    with pytest.raises(CheckpointNotSaved, match="step 3 is kept"):
        train(tiny(), tmp_path / "run")
    monkeypatch.undo()
    train(tiny(), tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_killing_a_process_while_it_saves_leaves_a_readable_checkpoint(tmp_path):
    # The temporary folder is not used: files are written beside the one they replace.
    rng = random.Random(0)
    folder = CheckpointFolder(tmp_path)
    folder.save(state(0, 300))
    last = 0
    for _ in range(25):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.environ["TMPDIR"] = "/dev/shm"
            for step in range(last + 1, 10_000):
                following = state(step, 300)
                os.write(writing, b".")
                folder.save(following)
        for _ in range(rng.randint(1, 3)):
            os.read(reading, 1)
        time.sleep(0.01 * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        found, _, passed_over = CheckpointFolder(tmp_path).load()
        assert found is not None and not passed_over
        assert_same(found, state(found["step"], 300))
        last = found["step"]
    assert last >= 10


def test_what_is_saved_is_what_was_there_when_it_was_asked(tmp_path):
    saver = CheckpointFolder(tmp_path)
    live = state(1)
    saver.start(live)
    live["model"]["weight"].zero_()
    saver.wait()
    assert_same(read_checkpoint(tmp_path / LAST), state(1))


def test_a_failure_to_save_is_handed_over_once(tmp_path, monkeypatch):
    saver = CheckpointFolder(tmp_path)
    monkeypatch.setattr(run_state.torch, "save", save_to_full_disk)
    saver.start(state(1))
    with pytest.raises(CheckpointNotSaved):
        saver.wait()
    saver.check()
