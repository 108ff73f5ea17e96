"""Comparing models on a custom dataset: equal recipe and budget, nothing computed twice."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from locality.analysis.runs import read_runs
from locality.errors import UserError
from locality.runner.comparison import comparison_runs, expected_seconds, shortened
from locality.runner.runs import run_all
from locality.runs import Run
from locality.settings import differences
from locality.training import train

MODELS = ("convit_nano", "timm/test_resnet")


@pytest.fixture
def photos(tmp_path, class_folders):
    return class_folders(tmp_path / "photos", {"light": 12, "dark": 12}, size=(40, 48))


@pytest.fixture
def asked(photos, tmp_path):
    def runs(**changes):
        data = {"data.root": str(photos), "data.dataset": "folder"}
        given = {"models": MODELS, "steps": 2, "seeds": 2, "fractions": (0.5, 1.0)}
        return comparison_runs(data, tmp_path / "out", **given | changes)[0]

    return runs


def test_models_differ_in_nothing_but_the_model(asked):
    first, second = (run.config for run in asked()[:2])
    changed = {name for name, *_ in differences(first, second)}
    assert all(name.startswith("model.") for name in changed)
    assert (first.model.img_size, first.model.patch_size) == (32, 4)
    assert second.model.img_size == 32
    assert first.schedule.patience is None


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_minutes_are_shared_alike(asked, jobs):
    runs = asked(steps=None, minutes=4, jobs=jobs)
    assert len({run.folder for run in runs}) == len(runs) == 8
    (minutes,) = {run.config.schedule.minutes for run in runs}
    rounds = math.ceil(8 / jobs)
    assert minutes == pytest.approx(4 / rounds)
    assert asked(steps=None, minutes=4, jobs=jobs) == runs
    # What has been spent before the runs is spared in them, but not more than half.
    for spent, left in ((24, 216), (200, 120)):
        (each,) = {60 * minutes - run.spent for run in shortened(runs, spent, jobs)}
        assert each * rounds == pytest.approx(left)
    # Starting takes from the runs, not more than half, and all read their images.
    for starting, reading, seconds in ((8, 0, 240), (60, 0, 300), (0, 4 * each, None)):
        expected = seconds or reading * (1 + 8 / jobs)
        if jobs < 3:  # else a round has fewer runs
            assert expected_seconds(runs, jobs, starting, reading) == pytest.approx(expected)


@pytest.mark.slow
def test_folds_evaluate_every_image_once(asked, here):
    runs = asked(folds=2, fractions=(1.0,))
    assert [outcome.error for outcome in run_all(runs, executor=here, quiet=True)] == [None] * 4
    for model in range(2):
        parts = [Run(run.folder).predictions().paths for run in runs[model::2]]
        assert len(set(parts[0]) | set(parts[1])) == sum(map(len, parts)) == 24


def test_weights_are_fine_tuned(tiny_config, tmp_path, asked):
    models = [str(tmp_path / name) for name in ("one", "other")]
    for seed, folder in enumerate(models):
        train(tiny_config(seed=seed), folder, quiet=True)
    runs = asked(models=models, pretrained=True)
    assert {run.config.weights for run in runs} == set(models)
    assert {run.config.recipe for run in runs} == {"finetune"}
    # As in `finetune`, whatever the weights cut away.
    assert {(run.config.input.crop_pct, run.config.engine.batch_size) for run in runs} == {(1, 64)}
    assert len({run.folder for run in runs}) == 8


def test_what_cannot_be_compared_is_refused(photos, asked, tmp_path):
    for changes, named in (
        ({"models": ("convit_nano",)}, "not 1"),
        ({"fractions": (0.5,)}, "fractions"),
        ({"folds": 1}, "folds"),
        ({"fractions": (0.01, 1.0)}, "without images"),
        ({"models": ("convit_nano", "convit_nan")}, "convit_nano"),
        ({"models": (str(tmp_path / "none"), "timm/test_resnet"), "pretrained": True}, "none"),
        ({"models": ("one/donor", "other/donor"), "pretrained": True}, "the same file name"),
    ):
        with pytest.raises((UserError, OSError), match=named):
            asked(**changes)
    image = next((photos / "dark").iterdir())
    image.write_bytes(image.read_bytes()[:40])
    with pytest.raises(UserError, match=image.name):
        asked(folds=3, fractions=(1.0,))
    assert not (tmp_path / "out").exists()


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
