"""Experiment trackers: the figures of a run in Weights & Biases' and MLflow's own files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from locality.errors import UserError
from locality.training.recorder import Recorder
from locality.training.resolved_run import ResolvedRun
from locality.training.run_folder import RunFolder
from locality.training.state import TrainState

from .conftest import tiny, train, train_interrupted


@pytest.mark.slow
def test_mlflow_is_told_a_run_and_its_resumption_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_before: Callable[..., None]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = tiny(engine__tracker="mlflow")
    stop_before(5)
    train_interrupted(config, tmp_path / "run")
    stop_before(None)
    result = train(config, tmp_path / "run")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("locality").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["optim.lr"] == str(config.optim.lr)
    assert run.data.metrics["top1/val"] == result["top1"]


@pytest.mark.slow
def test_weights_and_biases_keep_a_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    recorder = Recorder(run, ResolvedRun(tiny(engine__tracker="wandb")), TrainState(), True)
    row = {"step": 5, "epoch": 1, "images": 80, "lr": 0.1, "train_loss": 1.5, "train_top1": None}
    recorder.log_evaluation(row | {"top1": 30.25, "top5": 70.0, "val_loss": 2.5}, 9, 1.0)
    recorder.close()
    (written,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    # Its service writes the file out a moment after it was told to.
    deadline = time.monotonic() + 60
    while b"30.25" not in (content := written.read_bytes()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert b"top1/val" in content and b"optim" in content


def test_a_tracker_that_is_not_installed_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'mlflow-skinny'"):
        ResolvedRun(tiny(engine__tracker="mlflow"))
