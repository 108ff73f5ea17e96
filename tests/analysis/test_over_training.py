"""Measuring over training uses the run's weights and does not change the run."""

import json

import pytest
import torch

from locality.analysis.measures import measure_model
from locality.analysis.pictures import sample
from locality.analysis.recording import (
    TRAJECTORY,
    measure_trajectory,
    record,
    record_missing,
    recorded_trajectory,
)
from locality.data import open_data
from locality.training import load_run, train
from locality.training.devices import resolve_accelerator


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config):
    """A run with a snapshot every second step."""
    folder = tmp_path_factory.mktemp("measured")
    train(tiny_config(schedule__steps=6, schedule__snapshot_every=2.0), folder, quiet=True)
    return folder


def test_measured_before_now_and_then_and_after(run):
    found = measure_trajectory(run, images=20)
    assert found["steps"] == [0, 2, 4, 6] and found["images"] == 20
    assert found["layers"][0]["gates"][0] == pytest.approx([0.7310586] * 4)


def test_the_last_measures_are_those_of_the_finished_model(run):
    model, settings = load_run(run)
    val = open_data(settings.data, settings.seed).val
    chosen = sample(val, settings.input.at(model.img_size), 20)
    where = resolve_accelerator("auto")  # as they are
    measured = measure_model(model.to(where), chosen.images.to(where))["layers"]
    found = measure_trajectory(run, images=20)["layers"]
    for layer, last in zip(found, measured, strict=True):
        assert layer["nonlocality"][-1] == last["nonlocality"]["layer_mean"]
        assert (layer["gates"] and layer["gates"][-1]) == last["gates"]


def test_what_is_recorded_is_what_is_measured_and_outlives_the_snapshots(run):
    assert recorded_trajectory(run) is None
    record(run, images=20, pictures=1)
    found = json.loads((run / TRAJECTORY).read_text())
    assert found == measure_trajectory(run, images=20)
    (run / TRAJECTORY).unlink()
    record_missing([run])  # measures only missing snapshots
    assert recorded_trajectory(run)["steps"] == [0, 2, 4, 6]


def test_a_run_with_snapshots_is_the_run_without(run, tmp_path, tiny_config):
    train(tiny_config(schedule__steps=6), tmp_path / "alone", quiet=True)
    kept, alone = load_run(run)[0], load_run(tmp_path / "alone")[0]
    for name, value in alone.state_dict().items():
        assert torch.equal(value, kept.state_dict()[name]), name
    assert (run / "metrics.csv").read_text() == (tmp_path / "alone" / "metrics.csv").read_text()


def test_a_run_without_a_record_has_no_trajectory(tmp_path):
    assert recorded_trajectory(tmp_path) is None
