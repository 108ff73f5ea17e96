"""Runs as requests: identity and order."""

from __future__ import annotations

import json

import pytest
import yaml

from locality import settings
from locality.files import parse_yaml
from locality.runner.runs import Run, content_folder, digest
from locality.training import RunConfig, recipe, replace, train
from locality.training.config import model_settings


def test_folders_are_shared_by_runs_that_do_the_same_and_by_no_others(tmp_path, tiny_config):
    config = tiny_config()
    same = replace(config, {"recipe": "other name", "data.workers": 2, "engine.tensorboard": True})
    assert content_folder(tmp_path, config) == content_folder(tmp_path, same)
    for change in (
        {"seed": 1},
        {"optim.lr": 1e-3},
        {"data.fraction": 0.5},
        {"model.locality_strength": 2.0},
        {"schedule.snapshot_every": 1.0},
    ):
        assert digest(replace(config, change)) != digest(config), change
    assert digest(config, "another.package:task") != digest(config)


@pytest.mark.parametrize(
    ("name", "written", "values"),
    [
        ("model.locality_strength", ["2", "2.0", "2e0"], [2, 2.0, "2.0"]),
        ("optim.lr", ["1e-3", "0.001"], [0.001, "1e-3"]),
        ("optim.betas", ["0.9,0.99", "[0.9, 0.99]"], [(0.9, 0.99), [0.9, 0.99]]),
    ],
)
def test_one_value_is_one_identity_however_written(tiny_config, name, written, values):
    known, config = settings.settings_of(RunConfig) | model_settings("convit_nano"), tiny_config()
    parsed = [settings.parse(text, known[name].hint, name) for text in written]
    group, _, own = name.partition(".")
    made = [replace(config, {name: value}) for value in (*values, *parsed)]
    for text in written:
        values = settings.to_dict(config)
        values[group][own] = parse_yaml(text if "," not in text else f"[{text.strip('[]')}]", name)
        made.append(settings.from_yaml(RunConfig, yaml.safe_dump(values)))
    assert len({digest(each) for each in made}) == 1


IDENTITIES = """\
089e8d7e2242 defaults
55c725499254 digits
3647d747d97f fashion_mnist
eaf30235bfd7 convit_cifar
a6d5297a6f18 cvt_cifar
ccf1e2d531a2 deit_300
3cebdc2960f3 deit_300_plus
5e77bf6d13f2 distill_hard
f759c22d22ec subset
f8db07a61059 imagenet100
21b1675a4f1d cifar100_224
c67e870485d0 cvt_300
741056824581 cvt_22k
ebcc292482aa finetune_384
dee63658120c digits {seed: 7, data.fraction: 0.05}
9916f97bce1f digits {model.name: deit_nano, data.part: [0.25, 1.0]}
d860d424dedc digits {model.locality_strength: 2.0}
7207fc4587fd digits {model.locality_strength: 1.0, model.gating_init: 0}
85ebc798db96 digits {model.name: cvt_nano, model.kv_stride: 1}
2540da3ea3fc digits {model.name: cvt_nano, model.mlp_ratio: [2.0, 4.0, 4.0]}
61db7485cd80 digits {model.name: timm/resnet18, model.drop_rate: 0.1}
ebb1ca8c5c48 digits {model.weights: runs/digits/a, optim.layer_decay: 0.75}
f796cf5d1773 digits {objective.teacher: runs/digits/a, objective.distillation: soft}
55c725499254 digits {engine.devices: 2, engine.accumulate: 2, data.workers: 4, recipe: other}
25a66db93c4e digits {schedule.eval_every: 75, schedule.snapshot_every: 100, engine.compile: true}
4d974b5b6649 digits {data.fold: [0, 5], data.split_seed: 3, data.subset_seed: 2}
4035f3f34d50 fashion_mnist {model.patch_size: 2, optim.betas: [0.9, 0.95], optim.eps: 1.0e-7}
"""


# For `digits` and `fashion_mnist`, when the identities were recorded.
EARLIER = {
    "optim.name": "adamw",
    "optim.lr": 3.4e-3,
    "optim.weight_decay": 0.25,
    "augment.affine": 0.0,
    "augment.mixup": 0.0,
    "augment.cutmix": 0.5,
    "augment.random_erasing": 0.0,
    "objective.label_smoothing": 0.1,
    "engine.ema_decay": 0.99,
}
LENGTHS = {"digits": {"schedule.steps": 1500, "schedule.eval_every": 150}, "fashion_mnist": {}}


@pytest.mark.parametrize("row", IDENTITIES.splitlines())
def test_the_identity_of_a_configuration_never_changes(row):
    identity, name, *changes = row.split(" ", 2)
    config = RunConfig() if name == "defaults" else recipe(name)
    if name in LENGTHS:
        config = replace(config, EARLIER | LENGTHS[name])
    assert digest(replace(config, parse_yaml("".join(changes) or "{}", ""))) == identity


def test_where_a_needed_run_lies_does_not_matter_but_which_it_is_does(tiny_config):
    config = tiny_config()
    taught = [
        replace(config, {"objective.teacher": f"{place}/{name}"})
        for place, name in (("a", "x"), ("b", "x"), ("a", "y"))
    ]
    assert digest(taught[0]) == digest(taught[1])
    assert digest(taught[0]) != digest(taught[2])


def test_a_run_is_finished_by_the_result_of_its_own_configuration_alone(tmp_path, tiny_run):
    run = tiny_run(tmp_path)
    assert not run.is_finished()
    train(run.config, run.folder, quiet=True)
    assert run.is_finished()
    relabelled = replace(run.config, {"recipe": "x", "engine.tensorboard": True})
    assert Run("", relabelled, run.folder).is_finished()
    assert not Run("", replace(run.config, {"optim.lr": 1e-3}), run.folder).is_finished()


def test_a_run_whose_donor_has_moved_is_still_finished(tmp_path, tiny_config):
    config = tiny_config(model__weights="here/donor-123")
    run = Run("", config, content_folder(tmp_path, config))
    run.folder.mkdir()
    (run.folder / "config.yaml").write_text(settings.to_yaml(config))
    (run.folder / "result.json").write_text(json.dumps({"model": config.model.name}))
    moved = replace(config, {"model.weights": str(tmp_path / "there" / "donor-123")})
    assert content_folder(tmp_path, moved) == run.folder
    assert Run("", moved, run.folder).is_finished()
    other = replace(config, {"model.weights": "here/donor-456"})
    assert not Run("", other, run.folder).is_finished()
