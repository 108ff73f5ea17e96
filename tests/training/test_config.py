"""A run's configuration: validated, written and read without loss."""

import re
from typing import Any, Literal

import pytest

from locality.errors import UserError
from locality.settings import (
    differences,
    flatten,
    from_dict,
    from_yaml,
    parse,
    settings_of,
    to_dict,
    to_yaml,
)
from locality.training import RECIPES, RunConfig, recipe, replace
from locality.training.config import identity

from .conftest import tiny

BAD = {
    "seed": [-1, 1.5, "zero"],
    "model.img_size": [0, -8, 2.5, (8, 0), (8, 8, 8)],
    "model.num_classes": [3],
    "optim.lr": [0, float("nan"), float("inf"), "fast"],
    "optim.betas": [[0.9], [0.9, 1.0], 0.9],
    "schedule.steps": [0, None, 1.5],
    "schedule.epochs": [3],  # beside steps
    "schedule.warmup": [-1, 4000],
    "schedule.warmup_lr": [1.0],
    "schedule.min_lr": [1.0, -1],
    "schedule.constant_images": [True],  # with steps
    "entry": ["ema"],  # without weights
    "engine.accumulate": [0, 3],  # 3 does not divide 64
    "engine.precision": ["bf16"],
    "engine.compile": ["yes", 1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_value_that_cannot_be_used_is_named(name, value):
    with pytest.raises(UserError) as caught:
        replace(recipe("fashion_mnist"), {"engine.ema_decay": None, name: value})
    message = str(caught.value)
    assert name.rpartition(".")[2] in message
    assert "\n" not in message


@pytest.mark.parametrize("name", [n for n in settings_of(recipe("digits")) if n != "model.name"])
@pytest.mark.parametrize("text", ["9" * 400, "-" + "9" * 400, "1e999", "0x" + "f" * 400])
def test_a_number_without_end_is_refused_or_text(name, text):
    hint = settings_of(recipe("digits"))[name].hint
    try:
        config = replace(recipe("digits"), {name: parse(text, hint, name)})
    except UserError as error:
        assert name.rpartition(".")[2] in str(error) and len(str(error)) < 1000
    else:
        assert flatten(to_dict(config))[name] == text  # a path or a name


@pytest.mark.parametrize("value", [True, 1, "head"])
def test_what_a_choice_accepts_is_named_whatever_was_given(value):
    with pytest.raises(UserError, match="known: backbone"):
        replace(recipe("digits"), {"optim.freeze": value})


def test_an_unknown_setting_is_refused_with_the_nearest():
    for given, meant in (("engine.batchsize", "engine.batch_size"), ("optimizer.lr", "optim.lr")):
        with pytest.raises(UserError, match=re.escape(meant)):
            replace(recipe("digits"), {given: 1})
    with pytest.raises(UserError, match=r"optim\.weight_decay"):
        from_yaml(RunConfig, "optim: {weightdecay: 0.1}")


@pytest.mark.parametrize("group", ["model", "data", "schedule"])
@pytest.mark.parametrize("value", [None, 3, [], "x"])
def test_a_group_is_settings_by_name(group, value):
    for changes in ({group: value}, {group: value, f"{group}.name": 1}):
        with pytest.raises(UserError, match=group):
            replace(recipe("digits"), changes)
    with pytest.raises(UserError, match=group):
        RunConfig(**{group: value})


@pytest.mark.parametrize("text", ["optim: [", "optim: 3", "just words"])
def test_a_file_that_is_no_configuration_is_refused(text):
    with pytest.raises(UserError):
        from_yaml(RunConfig, text)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_writing_and_reading(name):
    config = recipe(name)
    assert from_yaml(RunConfig, to_yaml(config)) == config
    assert from_dict(RunConfig, to_dict(config)) == config


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("1e-3", float, 1e-3),
        ("7", float, 7.0),
        ("07", str, "07"),
        ("null", str | None, None),
        ("12", str | None, "12"),
        ("none", Literal["none", "pad"], "none"),
        ("[0, .5]", tuple[float, float], (0.0, 0.5)),
        ("0, .5", tuple[float, float], (0.0, 0.5)),
        ("3", tuple[int, ...], (3,)),
        ("exact", float | Literal["exact"] | None, "exact"),
        ("{depth: 3}", dict[str, Any], {"depth": 3}),
    ],
)
def test_what_is_typed_becomes_the_value_of_its_type(text, hint, value):
    assert parse(text, hint, "setting") == value


@pytest.mark.parametrize(("text", "hint"), [("1.5", int), ("yes", int), ("3", bool), ("x", float)])
def test_what_has_another_type_is_refused(text, hint):
    with pytest.raises(UserError, match="setting is"):
        parse(text, hint, "setting")


ROLES = {  # a setting of each role, and the purposes for which it counts
    "optim.lr": (1e-3, {"resume", "result", "pair", "group"}),
    "engine.threads": (3, set()),
    "recipe": ("x", {"resume"}),
    "engine.compile": (True, {"resume", "result"}),
    "data.split_seed": (3, {"resume", "result", "pair"}),
    "objective.teacher": ("b/run", {"resume", "result", "pair", "group"}),
}


@pytest.mark.parametrize("name", ROLES)
def test_what_makes_two_runs_the_same_depends_on_the_purpose(name):
    value, purposes = ROLES[name]
    one = replace(recipe("digits"), {"objective.distillation": "soft", "objective.teacher": "a/r"})
    other = replace(one, {name: value})
    for purpose in ("resume", "result", "pair", "group"):
        same = identity(one, purpose) == identity(other, purpose)
        assert same == (purpose not in purposes), purpose
        assert identity(to_dict(one), purpose) == identity(one, purpose)
    moved = replace(one, {"objective.teacher": "elsewhere/r"})
    assert identity(moved, "resume") == identity(one, "resume")


def test_differences_name_settings_and_both_values():
    one = tiny()
    other = replace(one, {"optim.lr": 1e-3, "model.depth": 3, "augment.hflip": 0.5})
    assert set(differences(one, other)) == {
        ("optim.lr", 6.2e-3, 1e-3),
        ("model.depth", 2, 3),
        ("augment.hflip", 0.0, 0.5),
    }
