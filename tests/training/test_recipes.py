"""The recipes hold the papers' values and can all be built."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from locality.errors import UserError
from locality.models import build
from locality.training import RECIPES, recipe
from locality.training.optim import make_plan
from locality.training.recipes import describe

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


def test_the_deit_recipe_is_the_published_one():
    config = recipe("deit_300", {"model.name": "convit_small"})
    assert config.schedule.epochs == 300
    assert config.schedule.warmup == 5
    assert (config.schedule.warmup_lr, config.schedule.min_lr) == (1e-6, 1e-5)
    assert config.engine.batch_size == 1024
    assert config.optim.peak_lr(1024) == pytest.approx(5e-4 * 1024 / 512)
    assert (config.optim.name, config.optim.weight_decay, config.optim.eps) == ("adamw", 0.05, 1e-8)
    assert config.optim.clip_grad is None
    augment = config.augment
    assert (augment.mixup, augment.cutmix, augment.mixup_prob) == (0.8, 1.0, 1.0)
    assert augment.mixup_switch_prob == 0.5
    assert augment.auto_augment == "rand-m9-mstd0.5-inc1"
    assert (augment.color_jitter, augment.random_erasing, augment.repeats) == (0.4, 0.25, 3)
    assert augment.hflip == 0.5
    assert (config.input.interpolation, config.input.crop_pct) == ("bicubic", 0.875)
    assert config.objective.label_smoothing == 0.1
    assert config.model.drop_path_rate == 0.1


def test_the_cvt_recipe_follows_the_released_configuration():
    config = recipe("cvt_300")
    assert config.optim.peak_lr(2048) == pytest.approx(2.5e-4 * 2048 / 256)
    assert config.optim.peak_lr(128) == pytest.approx(1.25e-4)
    assert config.optim.weight_decay == 0.05
    assert recipe("cvt_300", {"model.name": "cvt_21"}).optim.weight_decay == 0.1
    assert recipe("cvt_300", {"model.name": "cvt_21"}).augment.repeats == 3


@pytest.mark.parametrize(
    ("target", "steps"),
    [("imagenet", 20_000), ("cifar10", 10_000), ("cifar100", 10_000), ("pets", 500)],
)
def test_fine_tuning_lasts_as_long_as_in_the_paper(target, steps):
    config = recipe("finetune_384", {"data.dataset": target})
    assert config.schedule.steps == steps
    assert (config.optim.name, config.optim.momentum) == ("sgd", 0.9)
    assert (config.engine.batch_size, config.model.img_size) == (512, 384)
    assert config.input.crop_mode == "squash"


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.3, 0.5, 1.0])
def test_a_fraction_is_passed_more_often_and_shows_as_many_images(fraction):
    kept = round(fraction * IMAGENET)
    plan = make_plan(recipe("subset", {"data.fraction": fraction}), kept)
    full = make_plan(recipe("deit_300"), IMAGENET)
    assert plan.steps == pytest.approx(full.steps, abs=2)
    assert plan.warmup == pytest.approx(full.warmup, abs=1)
    assert plan.images / kept == pytest.approx(300 / fraction, rel=1e-3)


def test_recipes_differ_from_their_base_where_they_say_so():
    base, distilled = recipe("deit_300_plus"), recipe("distill_hard")
    assert distilled.objective.teacher == "timm/regnety_160"
    same = dataclasses.replace(distilled, recipe=base.recipe, objective=base.objective)
    assert same == base


def test_an_unknown_recipe_or_choice_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="deit_300"):
        recipe("deit300")
    with pytest.raises(UserError, match="model"):
        recipe("digits", {"modle": "convit_nano"})
    with pytest.raises(UserError, match="pets"):
        recipe("finetune_384", {"data.dataset": "pet"})
