"""Run folders: contents, ownership and reading."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from locality.checkpoints import save
from locality.checkpoints.run_state import load_best_state
from locality.errors import UserError
from locality.runs import Run
from locality.settings import to_yaml
from locality.training import evaluate_run, initial_model, load_run
from locality.training import train as train_run
from locality.training.devices import resolve_accelerator
from locality.training.folder_checks import check_folder
from locality.training.job import Job
from locality.training.model import build_model, initialize_model
from locality.training.recorder import Recorder
from locality.training.state import TrainState

from .conftest import assert_same, tiny, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(tiny(engine__ema_decay=0.5, schedule__snapshot_every=4), folder)
    return folder


def test_the_environment_says_what_made_the_run(finished):
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["seed"] == 0
    assert environment["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert environment["processor"] is not None
    (start,) = environment["starts"]
    assert (start["step"], start["precision"]) == (0, "fp32")
    assert start["device"].startswith(resolve_accelerator("auto"))


def test_metrics_have_a_row_per_evaluation_and_the_result_is_the_last(finished):
    with open(finished / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [3, 6, 8]
    assert [int(row["images"]) for row in rows] == [48, 96, 128]
    result = json.loads((finished / "result.json").read_text())
    for name in ("top1", "top5", "val_loss"):
        assert float(rows[-1][name]) == result[name]
    assert result["train_images"] + result["val_images"] < 1797
    assert (result["model"], result["recipe"], result["steps"]) == ("convit_nano", "digits", 8)
    assert result["parameters"] > 0 and result["macs"] > 0 and result["images_per_second"] > 0


def test_a_loaded_run_is_as_good_as_it_was(finished):
    result = json.loads((finished / "result.json").read_text())
    found = evaluate_run(finished)
    assert found["top1"] == pytest.approx(result["top1"])
    assert found["loss"] == pytest.approx(result["val_loss"], abs=1e-6)
    assert found["n"] == result["val_images"]


def test_the_last_snapshot_is_what_is_loaded(finished):
    names = sorted(path.name for path in (finished / "snapshots").iterdir())
    assert names == [f"step-{step:08d}.safetensors" for step in (0, 4, 8)]
    weights = load_file(finished / "snapshots" / names[-1])
    model, config = load_run(finished)
    assert not model.training and config.engine.ema_decay == 0.5
    assert_same(dict(model.state_dict()), weights)


def test_the_average_starts_from_the_first_update_and_weighs_the_second(tmp_path):
    lengths = {"schedule__steps": 2, "schedule__warmup": 0, "schedule__snapshot_every": 1}
    train(tiny(engine__ema_decay=0.75, **lengths), tmp_path)
    first = load_file(tmp_path / "snapshots" / "step-00000001.safetensors")
    state = load_best_state(tmp_path)
    for name, average in state["ema"].items():
        torch.testing.assert_close(average, 0.75 * first[name] + 0.25 * state["model"][name])


def test_parameters_that_no_gradient_reaches_are_named_at_the_first_step(tmp_path, capsys):
    # σ(−1000) is exactly 0: neither gates nor their positional parts can learn.
    shut = tiny(overrides={"gating_init": -1000.0, "drop_path_rate": 0.0}, schedule__steps=2)
    train_run(shut, tmp_path / "shut")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no gradient" in line]
    assert "blocks.0.attn.v_pos" in line and "blocks.0.attn.gating" in line
    train_run(tiny(schedule__steps=2), tmp_path / "open")
    assert "no gradient" not in capsys.readouterr().err


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        train(tiny(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_is_no_run_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="not a run folder"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("optim: {lr: 1e-3}")
    with pytest.raises(UserError, match="no checkpoint"):
        load_run(tmp_path)
    (tmp_path / "config.yaml").write_text("optim: {speed: 1e-3}")
    with pytest.raises(UserError, match=r"optim\.speed"):
        load_run(tmp_path)


def test_a_run_starts_from_another_runs_weights(finished, tmp_path):
    config = tiny(weights=str(finished), schedule__steps=2, schedule__snapshot_every=5)
    train(config, tmp_path / "run")
    donor, _ = load_run(finished)
    assert_same(initial_model(tmp_path / "run").state_dict(), donor.state_dict())


def test_a_run_starts_from_a_file_of_weights(tmp_path):
    donor = build_model(tiny(seed=7), 10)
    save(donor, tmp_path / "weights")
    for path in (tmp_path / "weights", tmp_path / "weights" / "model.safetensors"):
        model, (note,) = initialize_model(tiny(weights=str(path)), "abcdefghij")
        assert "no class names" in note
        assert_same(model.state_dict(), donor.state_dict())


def test_a_resumed_run_no_longer_needs_the_weights_it_started_from(tmp_path, interrupt):
    save(build_model(tiny(seed=7), 10), tmp_path / "weights")
    config = tiny(weights=str(tmp_path / "weights"))
    interrupt(config, tmp_path / "run", 4)
    shutil.rmtree(tmp_path / "weights")
    assert train(config, tmp_path / "run")["steps"] == 8
    assert train(config, tmp_path / "run")["steps"] == 8


def test_a_path_in_other_words_is_the_same_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.config_file.write_text(to_yaml(tiny(weights="donor")))
    check_folder(run.path, tiny(weights=str(tmp_path / "donor")))
    with pytest.raises(UserError, match="weights"):
        check_folder(run.path, tiny(weights="other"))


def test_time_of_a_resumed_run_is_that_of_all_its_steps(tmp_path):
    job = Job(tiny(schedule__steps=20), tmp_path).open()
    job.folder.timing_file.write_text(
        "step,seconds,images_per_second,eval_seconds,peak_memory_mb\n10,5.0,20,1,100\n"
    )
    recorder = Recorder(job, TrainState(step=18, evaluated=10), quiet=True)
    assert recorder.seconds == pytest.approx(9.0)
    for step in (19, 20):
        recorder.log_step(TrainState(step=step), 0.5)
    assert recorder.seconds == pytest.approx(10.0)
    recorder.close()
