import shutil

import pytest

from locality.analysis import measure_model, record
from locality.analysis.pictures import load_pictures, sample
from locality.analysis.recording import check_observable, record_missing
from locality.analysis.runs import RecordedRun, group, read_runs
from locality.data import open_data
from locality.errors import UserError
from locality.settings import to_dict
from locality.training import load_run, recipe, replace, train


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config):
    folder = tmp_path_factory.mktemp("run")
    train(tiny_config(), folder, quiet=True)
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


def test_an_unfinished_run_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="finished"):
        record(tmp_path)


def test_a_network_without_attention_is_refused_and_others_are_recorded(run, tmp_path, tiny_config):
    network = tiny_config("timm/test_resnet", model__img_size=32)
    folders = [tmp_path / "network", shutil.copytree(run, tmp_path / "run")]
    train(network, folders[0], quiet=True)
    (folders[1] / "measures.json").unlink(missing_ok=True)
    (refused,) = record_missing(folders)
    assert refused.startswith(str(folders[0]))
    assert (folders[1] / "measures.json").exists()
    with pytest.raises(UserError, match="timm/test_resnet"):
        check_observable(network)


def test_runs_of_other_settings_are_no_seeds_of_each_other(tmp_path):
    changes = {"slow": {"optim.lr": 1e-4}, "fast": {}, "again": {"seed": 1, "engine.devices": 2}}
    runs = [
        RecordedRun(tmp_path / name, to_dict(replace(recipe("digits"), change)))
        for name, change in changes.items()
    ]
    assert [(one.label, len(one.runs)) for one in group(runs)] == [
        ("convit_nano (lr=0.0001)", 1),
        ("convit_nano (lr=0.0062)", 2),
    ]
