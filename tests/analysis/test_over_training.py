"""What is measured over training: the same as afterwards, nothing lost, nothing changed."""

import json

import pytest
import torch

from locality.analysis.measures import measure_model
from locality.analysis.pictures import sample
from locality.analysis.recording import (
    HISTORY,
    AttentionRecorder,
    measure_trajectory,
    read_history,
    trajectory,
)
from locality.data import open_data
from locality.errors import UserError
from locality.training import RunConfig, load_run, recipe, replace, train
from locality.training.devices import resolve_accelerator

STEPS = {"schedule.steps": 6, "schedule.warmup": 0, "schedule.eval_every": 3}


def config(**changes) -> RunConfig:
    settings = {"data.fraction": 0.05, "engine.tensorboard": False, "engine.batch_size": 16}
    return replace(recipe("digits"), STEPS | settings | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was measured every second step, and kept its weights as often."""
    folder = tmp_path_factory.mktemp("measured")
    changes = {"schedule.snapshot_every": 2.0}
    train(config(**changes), folder, quiet=True, callback=AttentionRecorder(every=2, images=20))
    return folder


def test_measured_before_now_and_then_and_after(run):
    history = read_history(run)
    assert [record["step"] for record in history] == [0, 2, 4, 6]
    assert history[0]["layers"][0]["gates"] == pytest.approx([0.7310586] * 4)
    assert all(record["images"] == 20 and record["seconds"] > 0 for record in history)


def test_the_last_record_is_that_of_the_finished_model(run):
    model, settings = load_run(run)
    val = open_data(settings.data, settings.seed).val
    chosen = sample(val, settings.input.at(model.img_size), 20)
    where = resolve_accelerator("auto")  # as training does
    measured = measure_model(model.to(where), chosen.images.to(where))
    assert read_history(run)[-1]["layers"] == measured["layers"]


def test_snapshots_give_the_same_curves(run):
    then, later = trajectory(run), measure_trajectory(run, images=20)
    assert then["steps"] == later["steps"] and then["epochs"] == pytest.approx(later["epochs"])
    for one, other in zip(then["layers"], later["layers"], strict=True):
        assert one["nonlocality"] == pytest.approx(other["nonlocality"], abs=1e-6)
        assert one["gates"] == other["gates"]


def test_an_observed_run_is_the_run_without(run, tmp_path):
    train(config(**{"schedule.snapshot_every": 2.0}), tmp_path / "alone", quiet=True)
    seen, alone = load_run(run)[0], load_run(tmp_path / "alone")[0]
    for name, value in alone.state_dict().items():
        assert torch.equal(value, seen.state_dict()[name]), name
    assert (run / "metrics.csv").read_text() == (tmp_path / "alone" / "metrics.csv").read_text()


def test_interrupted_measurements_are_taken_up_again(tmp_path):
    """A killed process may leave half a line, and steps that the resumed run sees again."""
    folder = tmp_path / "run"
    train(config(), folder, quiet=True, callback=AttentionRecorder(every=3, images=10))
    whole = (folder / HISTORY).read_text()
    lines = whole.splitlines()
    (folder / HISTORY).write_text("\n".join(lines[:2]) + '\n{"step": 6, "ep')
    (folder / "result.json").unlink()
    assert [record["step"] for record in read_history(folder)] == [0, 3]
    train(config(), folder, quiet=True, callback=AttentionRecorder(every=3, images=10))
    again = read_history(folder)
    assert [record["step"] for record in again] == [0, 3, 6]
    assert again[2]["layers"] == json.loads(lines[2])["layers"]


def test_every_counts_in_the_unit_of_the_schedule(tmp_path):
    epochs = {"schedule.steps": None, "schedule.epochs": 4.0, "schedule.eval_every": 4.0}
    train(config(**epochs), tmp_path, quiet=True, callback=AttentionRecorder(every=1, images=10))
    found = [record["epoch"] for record in read_history(tmp_path)]
    assert found == pytest.approx([0, 1, 2, 3, 4], abs=0.2)


def test_a_run_that_says_nothing_of_its_training(tmp_path):
    assert read_history(tmp_path) == []
    with pytest.raises(UserError, match="--measure_every"):
        trajectory(tmp_path)
    with pytest.raises(UserError, match="no record of its attention"):
        measure_trajectory(tmp_path)


def test_bad_settings():
    with pytest.raises(UserError, match="measure_every"):
        AttentionRecorder(every=0)
    with pytest.raises(UserError, match="measure_images"):
        AttentionRecorder(every=1, images=0)
