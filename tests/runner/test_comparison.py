"""Comparing models on a custom dataset: equal recipe and budget, nothing computed twice."""

import os
import signal
import subprocess
import sys
import time

import pytest

from locality.analysis.runs import read_runs
from locality.errors import UserError
from locality.runner import comparison
from locality.runner.comparison import (
    ComparisonSpec,
    available,
    comparison_runs,
    measure_inference,
    plan,
    train_and_tidy,
)
from locality.runner.executors import run_all
from locality.runs import RunFolder
from locality.settings import differences

MODELS = ("convit_nano", "timm/test_resnet")


@pytest.fixture
def photos(tmp_path, class_folders):
    return class_folders(tmp_path / "photos", {"light": 12, "dark": 12}, size=(40, 48))


def asked(photos, **changes):
    data = {"data.root": str(photos), "data.dataset": "folder"}
    given = {"minutes": None, "steps": 2, "seeds": 2, "fractions": (0.5, 1.0)} | changes
    return ComparisonSpec(data, given.pop("models", MODELS), **given)


def test_models_differ_in_nothing_but_the_model(photos, tmp_path):
    first, second = plan(asked(photos), tmp_path / "out", jobs=2).values()
    changed = {name for name, *_ in differences(first, second)}
    assert changed == {"model.name", "model.patch_size"}
    assert (first.model.img_size, first.model.patch_size, second.model.img_size) == (32, 4, 32)


def test_a_comparison_goes_on_with_its_own_images_alone(photos, tmp_path):
    begun = plan(asked(photos), tmp_path / "out", jobs=2)
    assert plan(asked(photos), tmp_path / "out", jobs=2) == begun
    (photos / "dark" / "000.png").rename(photos / "dark" / "new.png")
    with pytest.raises(UserError, match="have changed"):
        plan(asked(photos), tmp_path / "out", jobs=2)


def test_minutes_are_shared_alike_and_kept_as_they_were_planned(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "processors", lambda: 2)
    short = asked(photos, minutes=4, steps=None)
    begun = plan(short, tmp_path / "out", jobs=2)
    (minutes,) = {config.schedule.minutes for config in begun.values()}
    assert 0.9 < minutes * short.count / 2 / 4 < 0.96
    assert begun["convit_nano"].schedule.patience is None
    runs = comparison_runs(short, begun, tmp_path / "out")
    assert len({run.folder for run in runs}) == len(runs) == short.count == 8
    assert plan(short, tmp_path / "out", jobs=1) == begun
    with pytest.raises(UserError, match="seeds: 2"):
        plan(asked(photos, minutes=4, steps=None, seeds=3), tmp_path / "out", jobs=2)


@pytest.mark.slow
def test_folds_evaluate_every_image_once(photos, tmp_path, here):
    folds = asked(photos, folds=2, fractions=(1.0,))
    runs = comparison_runs(folds, plan(folds, tmp_path, jobs=1), tmp_path)
    outcomes = run_all(runs, executor=here, quiet=True)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    for model in range(2):
        parts = [RunFolder(run.folder).predictions().paths for run in runs[model::2]]
        assert len(set(parts[0]) | set(parts[1])) == sum(map(len, parts)) == 24
    weights = [RunFolder(run.folder).checkpoints / "previous.ckpt" for run in runs]
    assert not any(path.exists() for path in weights)
    found = measure_inference(runs, tmp_path)
    assert found.keys() == set(MODELS) and found == measure_inference(runs, tmp_path)


def test_weights_are_kept_of_runs_on_all_images(tiny_config, tmp_path):
    for fraction in (0.5, 1.0):
        train_and_tidy(tiny_config(data__fraction=fraction), tmp_path / str(fraction))
        assert RunFolder(tmp_path / str(fraction)).predictions()
    assert not list(tmp_path.glob("0.5/checkpoints/*.ckpt"))
    assert [path.name for path in tmp_path.glob("1.0/checkpoints/*.ckpt")] == ["last.ckpt"]


def test_weights_that_cannot_be_had_are_left_out(tiny_config, tmp_path, photos):
    train_and_tidy(tiny_config(), tmp_path / "donor")
    found, missing = available([str(tmp_path / "donor"), str(tmp_path / "nothing")])
    assert found == [str(tmp_path / "donor")]
    assert "nothing" in missing[0]
    train_and_tidy(tiny_config(seed=1), tmp_path / "other" / "donor")
    tuned = asked(photos, models=(*found, str(tmp_path / "other" / "donor")), pretrained=True)
    configs = plan(tuned, tmp_path / "out", jobs=1)
    assert {config.model.weights for config in configs.values()} == set(tuned.models)
    assert {config.recipe for config in configs.values()} == {"finetune"}
    runs = comparison_runs(tuned, configs, tmp_path / "out")
    assert len({run.folder for run in runs}) == tuned.count == 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"models": ("convit_nano",)}, "not 1"),
        ({"fractions": (0.5,)}, "fractions"),
        ({"fractions": (0.0, 1.0)}, "fractions"),
        ({"seeds": 0}, "seeds"),
        ({"folds": 1}, "folds"),
        ({"fractions": (0.01, 1.0)}, "without images"),
        ({"models": ("convit_nano", "convit_nan")}, "convit_nano"),
    ],
)
def test_what_cannot_be_compared_is_refused(photos, tmp_path, changes, named):
    with pytest.raises(UserError, match=named):
        plan(asked(photos, **changes), tmp_path / "out", jobs=1)


def test_what_cannot_be_started_is_said_before_any_run(photos, tmp_path, cli):
    image = next((photos / "dark").iterdir())
    image.write_bytes(image.read_bytes()[:40])
    with pytest.raises(UserError, match=image.name):
        plan(asked(photos, folds=3, fractions=(1.0,)), tmp_path / "out", jobs=1)
    refused = cli("compare", photos, "--pretrained", "--models=nowhere/at/all", code=2)
    assert "no weights" in refused.err


def words(photos, out, *more):
    return ["compare", str(photos), f"--models={','.join(MODELS)}", "--steps=3", "--seeds=2",
            "--fractions=0.5,1", f"--output={out}", "--jobs=1", "--threads=1", *more]  # fmt: skip


def test_a_dry_run_says_how_many_runs_and_starts_none(photos, tmp_path, cli):
    said = cli(*words(photos, tmp_path / "out", "--dry_run")).out
    assert "8 runs: 0 finished, 0 to resume, 8 to start" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_whole_command_killed_and_given_again(photos, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "locality", *words(photos, out, "--quiet")]
    first = subprocess.Popen(command, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not (done := list(out.glob("runs/*/*/result.json"))):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.1)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    assert len(done) < 8
    kept = {path: path.stat().st_mtime_ns for path in done}
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in done} == kept
    runs = read_runs([out / "runs"])
    assert len(runs) == 8 and all(run.is_finished for run in runs)
    assert (out / "comparison.html").exists()
