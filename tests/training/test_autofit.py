"""Settings chosen for a custom dataset, and kept on resuming."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from locality.cli import main
from locality.commands.train import read_run
from locality.errors import UserError
from locality.files import read_rows
from locality.settings import replace
from locality.training import RunFolder
from locality.training.autofit import MIN_EPOCHS, AutoFit, autofit
from locality.training.cost import Cost
from locality.training.evaluation import evaluate_run
from locality.training.model import settings_from_weights
from locality.training.recipes import recipe as named_recipe
from locality.training.resolved_run import ResolvedRun

from ..conftest import write_classes
from .conftest import tiny, train

PER_MAC = 1e-11
PLANNER = "locality.training.autofit"
LENGTHS = ("schedule.steps", "schedule.eval_every", "schedule.patience")


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A fake machine: seconds per multiply-accumulate, and per image loaded."""
    machine = {"mac": PER_MAC, "loading": 1e-3}

    def measured(run: ResolvedRun) -> Cost:
        workers = run.config.data.workers
        return Cost(*run.counts, machine["loading"], 3 * run.macs * machine["mac"], workers)

    monkeypatch.setattr(f"{PLANNER}.measure_cost", measured)
    monkeypatch.setattr(f"{PLANNER}.perf_counter", lambda: 0.0)  # measuring takes no time
    return machine


def photographs(root: Path, side: int = 80, per_class: int = 16, classes: int = 2) -> Path:
    counts = {f"class {label}": per_class for label in range(classes)}
    return write_classes(root, counts, size=(side, side + 8))


def passes(planned: AutoFit) -> float:
    assert planned.cost is not None
    config = planned.config
    return (config.schedule.steps or 0) * config.engine.batch_size / planned.cost.train


def seconds(planned: AutoFit) -> float:
    """Estimated seconds of the run itself."""
    assert planned.cost is not None
    schedule, images = planned.config.schedule, passes(planned) * planned.cost.train
    return planned.cost.seconds(images, schedule.length / schedule.eval_every)


def given(root: Path, **settings: Any) -> dict[str, Any]:
    return {"data.root": str(root), "data.dataset": "folder"} | settings


def test_more_time_or_speed_makes_a_larger_model_or_more_passes(tmp_path, speed):
    root = given(photographs(tmp_path / "photos", 260, per_class=4))
    chosen = [autofit("photos", root, minutes).config for minutes in (0.1, 20, 45, 600)]
    sizes = [(config.model.name, config.model.img_size) for config in chosen]
    assert sizes == [("convit_nano", 32), ("convit_micro", 64), ("convit_mini", 128),
                     ("convit_tiny", 224)]  # fmt: skip
    speed["mac"], speed["loading"] = PER_MAC / 4, 2.5e-4
    faster = autofit("photos", root, 0.1).config
    assert faster.model == chosen[0].model
    assert (faster.schedule.steps or 0) > (chosen[0].schedule.steps or 0)


@pytest.mark.parametrize("slower", [0.5, 1, 3])
def test_after_warm_up_the_length_is_that_of_the_speed_so_far(
    tmp_path: Path, slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = autofit("photos", given(photographs(tmp_path / "photos")), 2)
    assert planned.cost is not None and planned.replan is not None
    begun, batch = int(planned.config.schedule.warmup), planned.config.engine.batch_size
    took = slower * begun * batch * planned.cost.training
    monkeypatch.setattr(f"{PLANNER}.perf_counter", lambda: took)
    config = planned.replan(begun, took)
    assert config.schedule.warmup == begun
    assert config == replace(planned.config, {n: getattr(config.schedule, n[9:]) for n in LENGTHS})
    rest = ((config.schedule.steps or 0) - begun) * batch * slower * planned.cost.training
    assert 0.8 * 120 < took + rest < 120


@pytest.mark.parametrize("minutes", [0.05, 1, 30])
def test_a_run_is_planned_for_the_time_it_may_take(tmp_path, minutes):
    root = given(photographs(tmp_path / "photos", 100))
    planned = autofit("photos", root, minutes)
    config = planned.config
    assert seconds(planned) <= 60 * minutes * 1.05
    assert seconds(planned) >= 60 * minutes * 0.8 or passes(planned) * 24 > 199_000
    assert config.schedule.warmup < (config.schedule.steps or 0)


def test_the_time_is_for_the_choice_and_the_baselines_too(tmp_path, monkeypatch):
    root = given(photographs(tmp_path / "photos", 32))
    quick = autofit("photos", root, 1)
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(f"{PLANNER}.perf_counter", lambda: next(clock))
    slow = autofit("photos", root, 1)
    assert passes(slow) < 0.9 * passes(quick)
    assert 45 < float(re.search(r"about (\d+) s in all", str(slow))[1]) < 75  # type: ignore[index]
    monkeypatch.setattr(Cost, "baselines", 20.0)
    monkeypatch.setattr(f"{PLANNER}.perf_counter", lambda: 0.0)
    assert passes(autofit("photos", root, 1)) < 0.75 * passes(quick)


@pytest.mark.parametrize(("recipe", "minutes"), [("photos", 3), ("finetune", 0.6)])
def test_a_run_that_learns_little_is_told_the_time_that_would_do(tmp_path, speed, recipe, minutes):
    root = given(photographs(tmp_path / "photos", 40))
    speed["mac"] = 5e-8 if recipe == "photos" else 1e-6
    if recipe == "finetune":
        train(tiny(), tmp_path / "donor")
        root |= settings_from_weights(str(tmp_path / "donor"))
    said = next(line for line in autofit(recipe, root, minutes).reasons if line.startswith("short"))
    assert "24 images" in said
    enough = int(re.search(r"--minutes (\d+)", said)[1])  # type: ignore[index]
    assert passes(autofit(recipe, root, enough)) >= MIN_EPOCHS
    with pytest.raises(UserError, match="once"):
        autofit(recipe, root, 0.001)


def test_small_images_have_a_small_model_and_a_recipe_of_their_own(tmp_path):
    enlarged = autofit("photos", given(photographs(tmp_path / "other", 50)), 60).config
    assert enlarged.model.img_size == 32
    root = given(photographs(tmp_path / "photos", 28))
    config = autofit("photos", root, 60).config
    model, augment = config.model, config.augment
    assert (model.name, model.img_size, model.patch_size) == ("convit_nano", 28, 4)
    assert augment.affine and augment.crop == "pad" and augment.auto_augment is None
    assert config.engine.batch_size == 64
    deit = autofit("photos", root | {"model.name": "deit_nano"}, 60).config
    assert deit.model.img_size == 28 and deit.augment == augment
    large = autofit("photos", root | {"model.img_size": 64, "model.patch_size": 16}, 60).config
    assert large.augment.auto_augment and not large.augment.affine


def test_a_given_length_keeps_the_choice_of_model_and_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{PLANNER}.measure_cost", None)
    root = given(photographs(tmp_path / "photos", 70))
    lengths: tuple[dict[str, Any], ...] = (
        {"schedule.steps": 9},
        {"schedule.epochs": 2.0},
        {"schedule.steps": 9000},
    )
    chosen = [autofit("photos", root | length, None).config for length in lengths]
    sizes = [(config.model.name, config.model.img_size) for config in chosen]
    assert sizes == [("convit_nano", 32), ("convit_nano", 32), ("convit_mini", 64)]
    assert [config.schedule.length for config in chosen] == [9, 2, 9000]


def test_short_runs_on_small_photographs_do_not_mix_images(tmp_path):
    root = given(photographs(tmp_path / "photos", 28))

    def mixing(length, minutes=None):
        augment = autofit("photos", root | length, minutes).config.augment
        return augment.mixup, augment.cutmix

    mixed = mixing({"schedule.steps": 2000})
    assert min(mixed) > 0 and mixing({}, 10) == mixed
    assert mixing({"schedule.steps": 200}) == (0, 0) == mixing({}, 0.1)
    assert mixing({"schedule.steps": 200, "augment.mixup": 0.3}) == (0.3, 0)


def test_the_fastest_number_of_threads_is_taken(tmp_path, monkeypatch):
    seconds = {0: 5e-3, 4: 3e-3, 2: 1e-3, 1: 2e-3}
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setattr(
        f"{PLANNER}.measure_cost",
        lambda run: Cost(*run.counts, 1e-4, seconds[run.config.engine.threads]),
    )
    root = given(photographs(tmp_path / "photos", 28))
    assert autofit("photos", root, 1).config.engine.threads == 2
    assert autofit("photos", root | {"engine.threads": 4}, 1).config.engine.threads == 4


def test_slow_loading_gets_processes_of_its_own(tmp_path, speed):
    root = given(photographs(tmp_path / "photos"))
    speed["loading"] = 1e-4
    assert autofit("photos", root, 1).config.data.workers == 0
    speed["loading"] = 0.1
    config = autofit("photos", root, 1).config
    assert config.data.workers > 0
    assert autofit("photos", root | {"data.workers": 0}, 1).config.data.workers == 0


def test_loading_and_computing_share_a_processor_and_not_a_gpu(monkeypatch):
    monkeypatch.setattr("locality.machine.processors", lambda: 4)
    cost = partial(Cost, 1, 1, 2, 1)
    assert cost(2, 3, 0, True).training == cost(2, 3, 0, False).training == 5
    assert cost(2, 3, 2, True).training == 4
    assert cost(2, 3, 2, False).training == 3
    assert cost(8, 3, 2, False).training == 4
    assert cost(2, 3, 0, True).evaluating == 3
    # On two of four cores, steps lose half of the workers' time, and both decode.
    first = 2 + 6  # to load and decode the validation image
    assert cost(2, 3, 0, True, decoding=6).seconds(0, 0) == first + 6
    assert cost(2, 3, 2, True, decoding=6).seconds(0, 0) == first + 6
    assert cost(2, 3, 8, True, decoding=6).seconds(0, 0) == first + 24
    assert cost(2, 3, 8, False, decoding=6).seconds(0, 0) == first + 6


def test_what_is_decoded_once_takes_time_once(tmp_path, monkeypatch):
    def measured(decoding: float) -> float:
        monkeypatch.setattr(
            f"{PLANNER}.measure_cost",
            lambda run: Cost(*run.counts, 1e-4, 1e-3, decoding=decoding),
        )
        return passes(autofit("photos", root, 1))

    root = given(photographs(tmp_path / "images", per_class=400, side=40))
    images, val, rate = 640, 160, 1.1e-3
    lost = 2 * (images + val) * 0.01 / rate / images  # in the run, and for the baselines
    assert measured(0) - measured(0.01) == pytest.approx(lost, rel=0.1)


def test_fine_tuning_takes_architecture_and_preparation_from_the_weights(tmp_path):
    donor = tmp_path / "donor"
    train(tiny(input__crop_mode="squash"), donor)
    settings = settings_from_weights(str(donor))
    root = photographs(tmp_path / "photos", 20, classes=3)
    planned = autofit("finetune", given(root) | settings, 0.1)
    config = planned.config
    assert config.model.overrides == tiny().model.overrides
    assert (config.model.name, config.model.img_size) == ("convit_nano", 8)
    assert config.input == tiny(input__crop_mode="squash").input
    # Small models train as from scratch; larger ones learn slowly and stop early.
    assert (config.schedule.patience, config.optim.layer_decay) == (config.schedule.steps, 1.0)
    assert named_recipe("finetune").optim.layer_decay == 0.75
    larger = autofit("finetune", given(root) | settings | {"model.img_size": 16}, 0.1).config
    assert larger.model.img_size == 16


@pytest.mark.slow
def test_one_word_trains_and_the_same_word_goes_on(tmp_path, monkeypatch, capsys, speed):
    monkeypatch.chdir(tmp_path)
    photographs(Path("photos"), 32)
    words = ["train", "photos/", "--minutes", "0.02", "--engine.tensorboard", "false"]
    assert main([*words, "--dry_run"]) == 0
    assert not Path("runs").exists()
    assert main(words) == 0
    assert "chance 50.0%" in capsys.readouterr().err
    folder = Path("runs/photos/photos-0.02min-s0")
    config = RunFolder(folder).read_config()
    best = max(float(row["top1"]) for row in read_rows(folder / "metrics.csv"))
    assert evaluate_run(folder)["top1"] == pytest.approx(best)
    assert (folder / "checkpoints/last.ckpt").exists()
    assert (config.recipe, config.data.exif) == ("photos", True)
    speed["mac"] /= 100
    assert main(words) == 0
    assert read_run(words[1:])[0] == config
    assert read_run(["--config", str(folder / "config.yaml")])[0] == config
    assert main([*words[:2], "--minutes", "9", "--output", str(folder)]) == 0
    assert f"{config.schedule.length:g} steps" in capsys.readouterr().err
    # Another model has another folder.
    assert main([*words, "--model", "deit_nano", "--dry_run"]) == 0


@pytest.mark.slow
def test_one_word_fine_tunes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photographs(Path("photos"), 16, classes=3)
    train(tiny(), tmp_path / "donor")
    words = ["finetune", "photos/", "--from", "donor", "--minutes", "0.02", "--quiet"]
    assert main([*words, "--engine.tensorboard", "false", "--output", "tuned"]) == 0
    assert len(RunFolder("tuned").classes()) == 3
    assert (RunFolder("tuned").read_result() or {})["recipe"] == "finetune"


def test_mistakes_are_said(tmp_path):
    root = photographs(tmp_path / "photos")
    with pytest.raises(FileNotFoundError, match="photos"):
        read_run([str(tmp_path / "photo")])
    for words in ([str(root), "--minutes=1", "--schedule.steps=3"], ["digits", "--minutes=1"]):
        with pytest.raises(UserError, match="minutes"):
            read_run(words)
