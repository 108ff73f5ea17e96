"""Runs as requests: identity and order."""

import json

import pytest
import yaml

from locality import settings
from locality.files import parse_yaml
from locality.runner.runs import Request, content_folder, digest
from locality.training import RunConfig, recipe, replace, train


def test_folders_are_shared_by_runs_that_do_the_same_and_by_no_others(tmp_path, tiny_config):
    config = tiny_config()
    same = replace(config, {"recipe": "other name", "data.workers": 2, "engine.threads": 3})
    assert content_folder(tmp_path, config) == content_folder(tmp_path, same)
    for change in (
        {"seed": 1},
        {"optim.lr": 1e-3},
        {"data.fraction": 0.5},
        {"model.locality_strength": 2.0},
        {"schedule.snapshot_every": 1.0},
    ):
        assert digest(replace(config, change)) != digest(config), change


@pytest.mark.parametrize(
    ("name", "written", "values"),
    [
        ("model.locality_strength", ["2", "2.0", "2e0"], [2, 2.0, "2.0"]),
        ("optim.betas", ["0.9,0.99", "[0.9, 0.99]"], [(0.9, 0.99), [0.9, 0.99]]),
    ],
)
def test_one_value_is_one_identity_however_written(tiny_config, name, written, values):
    config = tiny_config()
    known = settings.settings_of(config)
    parsed = [settings.parse(text, known[name].hint, name) for text in written]
    group, _, own = name.partition(".")
    made = [replace(config, {name: value}) for value in (*values, *parsed)]
    for text in written:
        values = settings.to_dict(config)
        values[group][own] = parse_yaml(text if "," not in text else f"[{text.strip('[]')}]", name)
        made.append(settings.from_yaml(RunConfig, yaml.safe_dump(values)))
    assert len({digest(each) for each in made}) == 1


IDENTITIES = """\
445c6caeca51 defaults
2cbe156919e4 digits
56eb12ec3d2c fashion_mnist
248cb8a3360e convit_cifar
faf478ee1ea2 cvt_cifar
f19355b690f9 deit_300
1f903f342794 deit_300 {data.fraction: 0.1, schedule.constant_images: true}
e26ee6762184 cvt_300
966723668c16 digits {seed: 7, data.fraction: 0.05}
6cd6958c37ba digits {model.name: deit_nano, data.part: [0.25, 1.0]}
24ab61fd014d digits {model.locality_strength: 2.0}
d27d1342ad4b digits {model.locality_strength: 1.0, model.gating_init: 0}
02a1c10515cf digits {model.name: cvt_nano, model.kv_stride: 1}
b81ba2d158d9 digits {model.name: cvt_nano, model.mlp_ratio: [2.0, 4.0, 4.0]}
05c162ae9d1d digits {model.name: timm/resnet18, model.drop_rate: 0.1}
9d2f024dad88 digits {weights: runs/digits/a, optim.layer_decay: 0.75}
ae419350a8b4 digits {objective.teacher: runs/digits/a, objective.distillation: soft}
2cbe156919e4 digits {engine.threads: 2, engine.accumulate: 2, data.workers: 4, recipe: other}
cca11cc7e8ac digits {schedule.eval_every: 75, schedule.snapshot_every: 100, engine.compile: true}
c6b02bf919f6 digits {data.fold: [0, 5], data.split_seed: 3}
fd4dcbe0a7bc fashion_mnist {model.patch_size: 2, optim.betas: [0.9, 0.95], optim.eps: 1.0e-7}
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


def test_numbers_of_a_timm_model_are_one_setting_however_written():
    config = recipe("digits", {"model.name": "timm/resnet18"})
    made = [replace(config, {"model.drop_rate": value}) for value in (0, 0.0, "0.0", "0e1")]
    assert len({digest(each) for each in made}) == 1


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
    relabelled = replace(run.config, {"recipe": "x", "engine.threads": 3})
    assert Request("", relabelled, run.folder).is_finished()
    assert not Request("", replace(run.config, {"optim.lr": 1e-3}), run.folder).is_finished()


def test_a_run_whose_donor_has_moved_is_still_finished(tmp_path, tiny_config):
    config = tiny_config(weights="here/donor-123")
    run = Request("", config, content_folder(tmp_path, config))
    run.folder.mkdir()
    (run.folder / "config.yaml").write_text(settings.to_yaml(config))
    (run.folder / "result.json").write_text(json.dumps({"model": config.model.name}))
    moved = replace(config, {"weights": str(tmp_path / "there" / "donor-123")})
    assert content_folder(tmp_path, moved) == run.folder
    assert Request("", moved, run.folder).is_finished()
    other = replace(config, {"weights": "here/donor-456"})
    assert not Request("", other, run.folder).is_finished()
