"""The recipes hold the papers' values, can all be built, and run with a small model and dataset."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import TINY_CVT

from locality.checkpoints.run_state import load_best_state
from locality.errors import UserError
from locality.models import build
from locality.training import RECIPES, RunConfig, recipe, replace
from locality.training.optim import make_plan
from locality.training.recipes import describe

from .conftest import train

IMAGENET = 1_281_167


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_described_and_its_model_exists(name):
    config = recipe(name)
    assert config.recipe == name
    text = RECIPES[name].__doc__ or ""
    for part in ("Command:", "Cost:", "Expect:", f"locality train {name}"):
        assert part in text
    assert describe(name).splitlines()[0].endswith(".")
    assert f"`{name}`" in (Path(__file__).parents[2] / "docs/training.md").read_text()
    with torch.device("meta"):
        build(config.model)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.3, 0.5, 1.0])
def test_a_fraction_is_passed_more_often_and_shows_as_many_images(fraction):
    kept = round(fraction * IMAGENET)
    settings = {"data.fraction": fraction, "schedule.constant_images": True}
    plan = make_plan(recipe("deit_300", settings), kept)
    full = make_plan(recipe("deit_300"), IMAGENET)
    assert plan.steps == pytest.approx(full.steps, abs=2)
    assert plan.warmup == pytest.approx(full.warmup, abs=1)
    assert plan.images / kept == pytest.approx(300 / fraction, rel=1e-3)


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="deit_300"):
        recipe("deit300")


SIZE = 32
VIT = {"depth": 2, "num_heads": 4, "embed_dim": 32, "patch_size": 8}
CVT = TINY_CVT | {"embed_pool": False, "drop_path_rate": 0.1}


@pytest.fixture(scope="module")
def images(tmp_path_factory, class_folders) -> Path:
    """An image folder: two classes, eight training and four validation images of each."""
    counts = {"train/cat": 8, "train/dog": 8, "val/cat": 4, "val/dog": 4}
    return class_folders(tmp_path_factory.mktemp("images"), counts, size=(40, 48))


def stand_in(config: RunConfig, images: Path) -> RunConfig:
    """The same recipe with a small model, on the folder, for two updates."""
    changes: dict[str, Any] = {
        "data.dataset": "folder",
        "data.root": str(images),
        "data.workers": 0,
        "model.img_size": SIZE,
        "weights": None,
        "engine.batch_size": 8,
        "engine.precision": "fp32",
        "schedule.eval_every": 1,
        # Scaled to a batch of eight, peak rates are below the recipes' minimum rates.
        "schedule.min_lr": 0.0,
        "schedule.warmup_lr": 0.0,
    }
    sizes = CVT
    if not config.model.name.startswith("cvt"):
        sizes = VIT | ({"gpsa_layers": 1} if "convit" in config.model.name else {})
    changes |= {f"model.{name}": value for name, value in sizes.items()}
    if config.schedule.steps is None:
        changes |= {"schedule.epochs": 1.0, "schedule.warmup": 0.25}
    else:
        changes |= {"schedule.steps": 2, "schedule.warmup": 1}
    return replace(config, changes)


# They cover a ViT, and initial weights.
FAST = ("deit_300", "finetune")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in RECIPES],
)
def test_a_recipe_trains_evaluates_and_saves(name, images, tmp_path):
    config = stand_in(recipe(name), images)
    if name == "finetune":
        donor = stand_in(recipe("photos", {"model.name": "convit_tiny"}), images)
        train(replace(donor, {"model.img_size": 16}), tmp_path / "donor")
        config = replace(config, {"weights": str(tmp_path / "donor")})
    if name == "deit_300":
        # A teacher with other normalisation and size, like timm's.
        teacher = stand_in(recipe("digits"), images)
        train(replace(teacher, {"model.img_size": 16}), tmp_path / "teacher")
        config = replace(config, {"objective.teacher": str(tmp_path / "teacher")})
    result = train(config, tmp_path / "run")
    assert result["steps"] == 2
    assert result["val_images"] == 8
    assert result["train_images"] == 16
    assert np.isfinite(result["val_loss"])
    assert load_best_state(tmp_path / "run")["step"] == result["best_step"]
