"""Recording measures a run before, during and after training, and changes nothing of it."""

import json
import shutil

import pytest
import torch

from locality.analysis import measure_model, measure_trajectory, record
from locality.analysis.pictures import load_pictures, sample
from locality.analysis.recording import (
    TRAJECTORY,
    record_missing,
    recorded_trajectory,
)
from locality.analysis.runs import group, read_runs
from locality.data import open_data, train_loader
from locality.errors import UserError
from locality.report import build_report
from locality.runs import Run
from locality.settings import to_yaml
from locality.training import load_run, recipe, replace, train
from locality.training.devices import resolve_accelerator


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config):
    """A run with a snapshot every second step."""
    folder = tmp_path_factory.mktemp("run")
    train(tiny_config(schedule__steps=6, schedule__snapshot_every=2.0), folder, quiet=True)
    return folder


def test_record_measures_the_initial_and_the_trained_model(run):
    content = record(run, images=20, pictures=2)
    assert content == read_runs([run])[0].measures
    model, config = load_run(run)
    chosen = sample(open_data(config.data, config.seed).val, config.input.at(model.img_size), 20)
    assert content["after"] == measure_model(model, chosen.images)
    first = content["before"]["layers"][0]
    assert first["gates"] == pytest.approx([0.7310586] * 4)
    assert first["strengths"] == pytest.approx([1.0] * 4)
    assert first["centres"][0] == pytest.approx([-0.5, -0.5])
    assert content["after"]["layers"][0]["gates"] != first["gates"]


def test_record_keeps_pictures_and_leaves_the_rest_alone(run):
    before = {path: path.read_bytes() for path in run.rglob("*.*") if path.suffix != ".npz"}
    record(run, images=20, pictures=2)
    assert {path: path.read_bytes() for path in before} == before
    pictures = load_pictures(run / "attention.npz")
    assert pictures.images.shape == (2, 8, 8, 3) and pictures.labels == ["0", "1"]
    assert len(pictures.layers) == 4


def test_training_images_are_kept_as_the_first_step_saw_them(run, tmp_path):
    record(run, images=20, pictures=3)
    _, config = load_run(run)
    splits = open_data(config.data, config.seed)
    options = {"batch_size": config.engine.batch_size, "seed": config.seed, "stop_step": 1}
    seen = next(iter(train_loader(splits.train, config.augment, config.input.at(8), **options)))
    kept = load_pictures(run / "augmented.npz")
    assert kept.labels == [splits.classes[label] for label in seen.targets[:3]]
    pixels = torch.from_numpy(kept.images).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (config.input.mean, config.input.std))
    shown = (255 * (seen.images[:3] * std + mean)).clamp(0, 255)
    torch.testing.assert_close(pixels.float(), shown, atol=0.51, rtol=0)
    page = build_report([run], tmp_path / "report.html").read_text()
    assert page.count('augmented"></div>') == 3


def test_an_unfinished_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="finished"):
        record(tmp_path)


def test_a_network_without_attention_is_refused_and_others_are_recorded(run, tmp_path, tiny_config):
    network = tiny_config("timm/test_resnet", model__img_size=32)
    folders = [tmp_path / "network", shutil.copytree(run, tmp_path / "run")]
    train(network, folders[0], quiet=True)
    (folders[1] / "measures.json").unlink(missing_ok=True)
    (refused,) = record_missing(folders)
    assert refused.startswith(str(folders[0]))
    assert (folders[0] / "augmented.npz").exists()  # which needs no attention
    moved = tiny_config(weights=str(folders[1]))
    train(moved, tmp_path / "tuned", quiet=True)
    folders[1].rename(tmp_path / "elsewhere")
    (refused,) = record_missing([tmp_path / "tuned"])
    assert "does not exist" in refused
    (tmp_path / "elsewhere").rename(folders[1])
    assert (folders[1] / "measures.json").exists()


def test_runs_of_other_settings_are_no_seeds_of_each_other(tmp_path):
    changes = {"slow": {"optim.lr": 1e-4}, "fast": {}, "again": {"seed": 1, "engine.accumulate": 2}}
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(to_yaml(replace(recipe("digits"), change)))
    runs = [Run(tmp_path / name) for name in changes]
    assert [(one.label, len(one.runs)) for one in group(runs)] == [
        ("convit_nano (lr=0.0001)", 1),
        ("convit_nano (lr=0.0062)", 2),
    ]


def test_the_last_measures_are_those_of_the_finished_model(run):
    model, settings = load_run(run)
    val = open_data(settings.data, settings.seed).val
    chosen = sample(val, settings.input.at(model.img_size), 20)
    where = resolve_accelerator("auto")  # as they are
    measured = measure_model(model.to(where), chosen.images.to(where))["layers"]
    trajectory = measure_trajectory(run, images=20)
    assert trajectory["steps"] == [0, 2, 4, 6] and trajectory["images"] == 20
    found = trajectory["layers"]
    assert found[0]["gates"][0] == pytest.approx([0.7310586] * 4)
    for layer, last in zip(found, measured, strict=True):
        assert layer["nonlocality"][-1] == last["nonlocality"]["layer_mean"]
        assert (layer["gates"] and layer["gates"][-1]) == last["gates"]


def test_what_is_recorded_is_what_is_measured_and_outlives_the_snapshots(run):
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
