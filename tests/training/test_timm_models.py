"""timm's models train, save and run like ours."""

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from locality.errors import UserError
from locality.models import build
from locality.training import RunConfig, load_run, recipe, replace

from .conftest import SHORT, train

NAME = "timm/test_resnet"


def resnet(name: str = NAME, **changes: object) -> RunConfig:
    settings = {"model.name": name, "model.img_size": 16}
    return replace(recipe("digits"), SHORT | settings | changes)


@pytest.mark.parametrize(
    ("name", "overrides", "named"),
    [
        ("timm/test_resne", {}, "timm/test_resnet"),
        (NAME, {"gpsa_layers": 1}, "gpsa_layers"),
        (NAME, {"layers": {}}, "layers"),
    ],
)
def test_what_timm_does_not_have_is_refused(name, overrides, named):
    with pytest.raises(UserError, match=named):
        build(name, **overrides)


def test_layer_decay_needs_numbered_layers(tmp_path):
    config = resnet("timm/pit_ti_224", **{"optim.layer_decay": 0.75, "model.img_size": None})
    with pytest.raises(UserError, match=r"timm/pit_ti_224 .*layer_decay 1"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_image_of_one_pixel_cannot_be_normalised(tmp_path):
    with pytest.raises(UserError, match=r"one image at once; raise engine\.batch_size"):
        train(resnet(**{"engine.batch_size": 1}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_whole_life_of_a_run(tmp_path, cli):
    run, graph, saved = (tmp_path / name for name in ("run", "m.onnx", "saved"))
    result, image = train(resnet(), run), tmp_path / "white.png"
    Image.new("RGB", (8, 8), "white").save(image)
    assert f"top-1 {result['top1']:.2f}%" in cli("eval", run).out
    cli("export", run, graph)
    cli("convert", run, saved)
    answers = {cli("predict", image, "--model", model).out for model in (run, graph, saved)}
    assert len(answers) == 1
    cli("report", run, "--output", tmp_path / "report.html")
    assert NAME in (tmp_path / "report.html").read_text()
    refused = cli("convert", run, tmp_path / "x.pth", "--to", "timm", code=2)
    assert "a timm model" in refused.err


@pytest.mark.slow
def test_it_teaches_and_starts_other_runs(tmp_path, class_folders):
    train(resnet(), tmp_path / "teacher")
    taught = {"model.name": "deit_nano", "objective.teacher": str(tmp_path / "teacher")}
    taught |= {"model.img_size": None}
    assert train(resnet(**taught), tmp_path / "student")["steps"] == 8
    start = {"weights": str(tmp_path / "teacher"), "schedule.snapshot_every": 8}
    photos = class_folders(tmp_path / "photos", {f"c{number}": 4 for number in range(5)})
    start |= {"data.dataset": "folder", "data.root": str(photos), "data.fraction": 1.0}
    train(resnet(**start), tmp_path / "other")
    first = load_file(tmp_path / "other/snapshots/step-00000000.safetensors")
    teacher = load_run(tmp_path / "teacher")[0].state_dict()
    assert first.keys() == teacher.keys()
    for name, weight in first.items():
        if name.startswith("model.fc."):
            assert len(weight) == 5
        else:
            assert torch.equal(weight, teacher[name])
