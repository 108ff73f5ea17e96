"""Figures by name, from real runs, models and images."""

import shutil

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from locality.analysis.recording import record
from locality.analysis.runs import RecordedRun, group
from locality.analysis.taps import capture
from locality.checkpoints import Classifier, Preprocessing
from locality.errors import UserError
from locality.figures import FIGURES
from locality.figures.style import save
from locality.models import build
from locality.settings import to_dict
from locality.training import recipe, replace, train

SMALL = Preprocessing(img_size=8, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_config):
    """Both models, two seeds of one, and one distilled from the other."""
    root = tmp_path_factory.mktemp("runs")
    short = {"schedule__snapshot_every": 1.0, "data__fraction": 0.05}
    kinds = {
        "convit": tiny_config(**short),
        "deit-0": tiny_config("deit_nano", **short),
        "deit-1": tiny_config("deit_nano", 1, **short),
        "taught": tiny_config("deit_nano", objective__teacher=str(root / "convit"), **short),
    }
    for name, config in kinds.items():
        train(config, root / name, quiet=True)
        record(root / name, images=20, pictures=1)
    return root


@pytest.fixture(scope="module")
def pictures():
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8)) for _ in range(3)]


def subject(shaken, name, seed=0):
    return Classifier.of(shaken(build(name), seed), name, SMALL)


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes if axes.lines]


def test_runs_that_differ_in_seed_alone_share_a_panel(runs):
    figure = FIGURES["nonlocality"].draw([runs / "deit-0", runs / "deit-1", runs / "convit"])
    assert titles(figure) == ["ConViT", "DeiT"]


def test_distillation_is_told_apart(runs):
    figure = FIGURES["nonlocality"].draw([runs / "deit-0", runs / "taught"])
    assert titles(figure) == ["deit_nano (no distillation)", "deit_nano (distilled)"]


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


def test_runs_of_other_settings_have_no_common_gates(runs):
    again = yaml.safe_load((runs / "convit" / "config.yaml").read_text())
    with pytest.raises(UserError, match=r"5%.*10%"):
        again["data"]["fraction"] = 0.1
        other = runs.parent / "other"
        shutil.copytree(runs / "convit", other)
        (other / "config.yaml").write_text(yaml.safe_dump(again))
        FIGURES["gates"].draw([runs / "convit", other])


def test_gates_are_those_of_the_convit(runs):
    figure = FIGURES["gates"].draw([runs / "deit-0", runs / "convit"])
    assert len([axes for axes in figure.axes if axes.lines]) == 3
    with pytest.raises(UserError, match="ConViT"):
        FIGURES["gates"].draw([runs / "deit-0"])


def test_maps_of_models_side_by_side(shaken, pictures, tmp_path):
    models = [subject(shaken, name) for name in ("deit_nano", "convit_nano")]
    figure = FIGURES["maps"].draw(models, pictures, layers=[0, 3], heads=3, place=(0.1, 0.9))
    assert sum(bool(axes.images) for axes in figure.axes) == 1 + 2 * 2 * 3
    text = save(figure, tmp_path / "maps")[1].read_text()
    assert "deit_nano" in text and "layer 4" in text


def test_mean_maps_are_the_mean(shaken, pictures):
    model = subject(shaken, "deit_nano")
    figure = FIGURES["mean-maps"].draw([model], pictures, layers=[1], heads=4, place=(0.0, 0.5))
    shown = np.array([axes.images[0].get_array() for axes in figure.axes if axes.images])
    with torch.no_grad(), capture(model.model, layers=[1]) as views:
        model.model(model.prepare(pictures))
    row = views[0].maps.mixed[:, :, 1 + 2, 1:]  # the third patch of the first row
    expected = row.mean(0).unflatten(-1, (4, 4)).numpy()
    lowest = expected.max((1, 2), keepdims=True) / 1000
    np.testing.assert_allclose(shown, np.maximum(expected, lowest), rtol=1e-5)


def test_initial_maps_are_local_with_psa_and_nearly_even_without():
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8))
    figure = FIGURES["initial-maps"].draw([picture])
    shown = [axes.images[0].get_array() for axes in figure.axes if axes.images][1:]
    assert len(shown) == 12
    even, local = np.array(shown[:4]), np.array(shown[8:])
    assert (even.max((1, 2)) < 3 / 196).all()
    assert (local.max((1, 2)) > 0.2).all()


def test_layers_that_are_not_there(shaken, pictures):
    with pytest.raises(UserError, match="layer 5 is out"):
        FIGURES["maps"].draw([subject(shaken, "deit_nano")], pictures, layers=[4])
    with pytest.raises(UserError, match="no images given"):
        FIGURES["maps"].draw([subject(shaken, "deit_nano")], [])
    with pytest.raises(UserError, match="at least one model"):
        FIGURES["mean-maps"].draw([], pictures)
