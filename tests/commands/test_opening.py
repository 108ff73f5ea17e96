"""Every command that takes a model accepts all forms of it, or refuses alike."""

import json

import pytest
import timm
import torch
from PIL import Image

import locality
from locality.checkpoints import KEY_MAPS, Preprocessing, export, load, loading, open_model, save
from locality.cli import main
from locality.errors import UserError
from locality.models import build
from locality.training.model import settings_from_weights

from ..conftest import SHORT_WORDS

DIGITS = ["--data.dataset", "digits", "--data.workers", "0"]
# Arguments: model, image, output folder.
COMMANDS = {
    "predict": lambda what, image, out: ["predict", image, "--model", what],
    "eval": lambda what, image, out: ["eval", what, *DIGITS],
    "explore": lambda what, image, out: [
        *("explore", what, "--images", image, "--output", f"{out}/explorer.html"),
    ],
    "convert": lambda what, image, out: ["convert", what, f"{out}/saved"],
}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A small ConViT in every form, by path."""
    root = tmp_path_factory.mktemp("given")
    assert main(["train", "digits", "--output", str(root / "run"), *SHORT_WORDS]) == 0
    model = load(root / "run")
    save(model, root / "saved")
    state = KEY_MAPS["timm"].from_native(model.state_dict(), model.config)
    torch.save(state, root / "convit_nano.pth")
    Image.new("RGB", (8, 8), "white").save(root / "image.png")
    return root


@pytest.fixture(scope="module")
def graph(given):
    """The same model as a graph; slow to make."""
    return export(load(given / "run"), given / "graph.onnx")


@pytest.fixture
def inputs(given, tmp_path, monkeypatch):
    """Eight kinds of source, and a missing file."""
    hub = {"me/model": given / "saved", "timm/convit_tiny.fb_in1k": tmp_path / "hub"}
    monkeypatch.setattr(loading, "snapshot_download", lambda name, **kw: hub[name])
    tiny = build("convit_tiny")
    (tmp_path / "hub").mkdir()
    state = KEY_MAPS["timm"].from_native(tiny.state_dict(), tiny.config)
    torch.save(state, tmp_path / "hub" / "pytorch_model.bin")
    theirs = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *a, pretrained=False, **kw: theirs(*a, **kw))
    return {
        "architecture": "convit_nano",
        "public": "convit_tiny.fb_in1k",
        "timm": "timm/test_vit",
        "hub": "me/model",
        "run": str(given / "run"),
        "saved": str(given / "saved"),
        "file": str(given / "convit_nano.pth"),
        "graph": str(given / "graph.onnx"),
        "missing": str(given / "nowhere.pth"),
    }


# Number of the four commands that refuse a kind; the others work.
REFUSED = {
    "architecture": 4,
    "public": 1,  # its classes are not digits
    "timm": 1,
    "graph": 2,
    "missing": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*REFUSED, "hub", "run", "saved", "file"])
def test_every_command_takes_the_same_models(kind, inputs, given, graph, tmp_path, capsys):
    refused = {}
    for name, words in COMMANDS.items():
        code = main(words(inputs[kind], str(given / "image.png"), str(tmp_path)))
        error = capsys.readouterr().err
        if code:
            refused[name] = error
            assert code == 2 and error.count("\n") == 1, (name, error)
    assert len(refused) == REFUSED.get(kind, 0), refused
    assert len(set(refused.values())) <= 1


@pytest.mark.slow
def test_a_graph_is_evaluated_as_the_model(given, tmp_path, cli):
    opened, results = open_model(given / "run"), []
    about = {"preprocessing": opened.preprocessing, "classes": opened.classes}
    graph = export(opened.module(), tmp_path / "graph.onnx", **about)
    for model in ([given / "run"], [graph, "--data.dataset", "digits"]):
        results.append(json.loads(cli("eval", *model, "--json").out))
    rounded = ("loss", "calibration_error")
    assert results[1] == results[0] | {
        name: pytest.approx(results[0][name], rel=1e-4) for name in rounded
    }
    cli("eval", graph, "--precision", "bf16-mixed", code=2)


def test_settings_reach_every_opener(inputs, given, cli):
    model = locality.load(inputs["saved"], settings={"drop_rate": 0.5})
    assert model.config.drop_rate == 0.5
    with pytest.raises(UserError, match="drop_rate"):
        locality.load(inputs["run"], settings={"drop_rat": 0.5})
    words = ["predict", given / "image.png", "--model", inputs["file"], "--set", "num_heads=2"]
    assert inputs["file"] in cli(*words, code=2).err


@pytest.mark.parametrize("command", ["predict", "eval", "explore"])
def test_weights_that_overflow_name_no_class(command, tmp_path, cli):
    model = locality.create_model("convit_nano")
    with torch.no_grad():
        model.head.bias.add_(1)
        for parameter in model.parameters():
            parameter.mul_(1e30)
    saved, image = save(model, tmp_path / "saved"), tmp_path / "photo.png"
    Image.radial_gradient("L").save(image)
    printed = cli(*COMMANDS[command](saved, image, tmp_path), code=2)
    assert not printed.out and "finite" in printed.err


def test_weights_for_grey_images_are_said_not_to_fit_datasets(tmp_path, cli):
    grey = Preprocessing(8, (0.4,), (0.3,))
    saved = save(locality.create_model("convit_nano", in_chans=1), tmp_path, preprocessing=grey)
    assert "RGB" in cli("eval", saved, *DIGITS, code=2).err
    with pytest.raises(UserError, match="RGB"):
        settings_from_weights(str(saved))
