"""Runs as requests: what makes two of them the same, and which comes first."""

from __future__ import annotations

import json

import pytest

from locality import settings
from locality.errors import UserError
from locality.runner import runs
from locality.runner.runs import Run, content_folder, digest, with_needs
from locality.training import replace, train


def test_folders_are_shared_by_runs_that_do_the_same_and_by_no_others(tmp_path, tiny_config):
    config = tiny_config()
    same = replace(config, {"recipe": "other name", "data.workers": 2, "engine.tensorboard": True})
    assert content_folder(tmp_path, config) == content_folder(tmp_path, same)
    for change in (
        {"seed": 1},
        {"optim.lr": 1e-3},
        {"data.fraction": 0.5},
        {"model.overrides.locality_strength": 2.0},
        {"schedule.snapshot_every": 1.0},
    ):
        assert digest(replace(config, change)) != digest(config), change
    assert digest(config, "another.package:task") != digest(config)


def test_a_setting_that_has_its_default_names_no_folder(tiny_config, monkeypatch):
    before = digest(tiny_config())
    # As a later version would, with one more setting.
    known, defaults = runs.flatten, runs._defaults()
    monkeypatch.setattr(runs, "flatten", lambda values: known(values) | {"data.new": 0})
    monkeypatch.setattr(runs, "_defaults", lambda: defaults | {"data.new": 0})
    assert digest(tiny_config()) == before


def test_where_a_needed_run_lies_does_not_matter_but_which_it_is_does(tiny_config):
    config = tiny_config()
    taught = [
        replace(config, {"objective.teacher": f"{place}/{name}"})
        for place, name in (("a", "x"), ("b", "x"), ("a", "y"))
    ]
    assert digest(taught[0]) == digest(taught[1])
    assert digest(taught[0]) != digest(taught[2])


def test_a_folder_says_what_is_in_it(tmp_path, tiny_config):
    folder = content_folder(tmp_path, tiny_config("deit_nano", seed=3, data__fraction=0.05))
    assert folder.name.startswith("deit_nano-5-s3-")


def test_needed_runs_come_first_and_once(tmp_path, tiny_config, tiny_run):
    net, teacher = tiny_run(tmp_path), tiny_run(tmp_path, seed=9)
    student = Run("s", tiny_config(seed=1), tmp_path / "s", needs=(net, teacher))
    other = Run("o", tiny_config(seed=2), tmp_path / "o", needs=(student, net))
    assert with_needs([other, student]) == [net, teacher, student, other]


def test_a_run_is_finished_by_the_result_of_its_own_configuration_alone(tmp_path, tiny_run):
    run = tiny_run(tmp_path)
    assert not run.is_finished() and not run.is_started()
    train(run.config, run.folder, quiet=True)
    assert run.is_finished()
    relabelled = replace(run.config, {"recipe": "x", "engine.tensorboard": True})
    assert Run("", relabelled, run.folder).is_finished()
    assert not Run("", replace(run.config, {"optim.lr": 1e-3}), run.folder).is_finished()


def test_a_damaged_result_is_named(tmp_path, tiny_run):
    run = tiny_run(tmp_path)
    run.folder.mkdir(parents=True)
    (run.folder / "result.json").write_text(json.dumps({"top1": 1})[:-3])
    with pytest.raises(UserError, match=r"result\.json is not JSON"):
        run.is_finished()


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
