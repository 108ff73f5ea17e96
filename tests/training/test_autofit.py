"""Settings chosen for a custom dataset, and kept on resuming."""

from pathlib import Path
from typing import Any

import pytest

from locality.cli import main
from locality.commands.train import prepare, read_run
from locality.layers.grid import projected_grid
from locality.machine import idle_processors
from locality.models import list_models
from locality.runs import Run
from locality.settings import replace, to_yaml
from locality.training.autofit import SIZES, image_size, sized
from locality.training.config import RunConfig, read_config
from locality.training.evaluation import evaluate_run
from locality.training.model import settings_from_weights
from locality.training.recipes import recipe as named_recipe

from ..conftest import write_classes
from .conftest import tiny, train


def photographs(root: Path, side: int = 80, per_class: int = 16, classes: int = 2) -> Path:
    counts = {f"class {label}": per_class for label in range(classes)}
    return write_classes(root, counts, size=(side, side + 8))


def given(root: Path, **settings: Any) -> dict[str, Any]:
    images = {"data.root": str(root), "data.dataset": "folder", "schedule.minutes": 3.0}
    return images | {"weights": "scratch"} | settings


def chosen(name: str, settings: dict[str, Any]) -> tuple[RunConfig, str]:
    job = prepare(name, settings, quiet=True)
    return job.config, " ".join(job.notes)


def test_the_size_is_the_largest_that_the_images_reach():
    sides = {20: 28, 28: 28, 31: 28, 40: 32, 50: 48, 70: 64, 4000: 64}
    assert {side: image_size(side) for side in sides} == sides
    for size in SIZES:
        grid = size / sized("convit_nano", size)["model.patch_size"]
        assert grid in (7, 8, 12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", list_models(family="cvt"))
def test_no_chosen_size_leaves_attention_with_one_key(model, size):
    config = replace(named_recipe("photos", {"model.name": model}), sized(model, size)).model
    for stage, grid in zip(config.stages, config.grids((size, size)), strict=True):
        for stride in stage.kv_stride:
            window = (stage.projection_kernel, stride, stage.kv_padding)
            assert projected_grid(grid, stage.projection, *window) > (1, 1)


@pytest.mark.parametrize(("load", "threads"), [(0.2, 4), (5.4, 3), (70.0, 1)])
def test_busy_processors_are_left_alone(load, threads, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("locality.machine.processors", lambda: 8)
    assert idle_processors(4) == threads


def test_the_images_alone_decide(tmp_path):
    root = photographs(tmp_path / "photos", 50)
    config = chosen("photos", given(root))[0]
    assert config.model.img_size == 48
    for other in ({"schedule.minutes": 60.0}, {"schedule.minutes": None, "schedule.steps": 9}):
        assert chosen("photos", given(root) | other)[0].model == config.model
    deit = chosen("photos", given(root) | {"model.name": "deit_nano"})[0]
    assert deit.model.img_size == 48 and deit.augment == config.augment
    cnn = chosen("photos", given(root) | {"model.name": "timm/test_resnet"})[0]
    size = cnn.model.img_size
    assert (size, cnn.optim, cnn.augment) == (48, config.optim, config.augment)
    large = {"model.name": "convit_mini", "model.img_size": 160, "model.patch_size": 16}
    assert chosen("photos", given(root) | large)[0].augment.auto_augment


@pytest.mark.parametrize(
    ("size", "squashed", "said"),
    [
        ((32, 32), False, ""),
        ((35, 32), False, "9%"),
        ((96, 32), True, "67%"),
        ((16, 96), True, "83%"),
    ],
)
def test_long_images_are_squashed(tmp_path, size, squashed, said):
    root = given(write_classes(tmp_path / "photos", {"a": 9, "b": 9}, size=size[::-1]))
    config, reasons = chosen("photos", root)
    assert (config.input.crop_mode == "squash") == squashed
    assert config.augment.crop == "pad" and said in reasons
    assert ("% of the pixels" in reasons) == bool(said)
    config, reasons = chosen("photos", root | {"input.crop_mode": "center"})
    assert config.input.crop_mode == "center" and said in reasons
    config, _ = chosen("photos", root | {"model.img_size": (size[1], size[0] // 8 * 8)})
    assert config.input.crop_mode == "center"


def test_fine_tuning_takes_architecture_and_preparation_from_the_weights(tmp_path):
    donor = tmp_path / "donor"
    train(tiny(input__crop_mode="squash"), donor)
    settings = settings_from_weights(str(donor))
    root = photographs(tmp_path / "photos", 20, classes=3)
    config = chosen("finetune", given(root) | settings)[0]
    assert config.model == tiny().model
    assert config.model.name == "convit_nano"
    expected = tiny(input__crop_mode="squash", input__decode="shrunk", input__crop_pct=1.0).input
    assert config.input == expected  # nothing is cut away
    # Small models train as from scratch; larger ones learn slowly.
    assert config.optim.layer_decay == 1.0
    assert named_recipe("finetune").optim.layer_decay == 0.75
    asked = given(root, weights=str(donor))  # `train photos/ --from donor` is `finetune`
    assert chosen("photos", asked) == chosen("finetune", asked)
    # A dataset by name has its own images, and the weights' model, too.
    digits = {"data.dataset": "digits", "weights": str(donor)}
    named = prepare("finetune", digits).config
    assert (named.model, named.input.crop_mode) == (config.model, "squash")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.yaml").write_text(to_yaml(named))
    larger = chosen("finetune", given(root) | settings | {"model.img_size": 16})[0]
    assert larger.model.img_size == 16
    donor.rename(tmp_path / "gone")  # a run that has begun needs its weights no more
    assert prepare("finetune", digits, tmp_path / "begun").config == named


@pytest.mark.slow
def test_one_word_trains_and_the_same_word_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    photographs(Path("photos"), 32)
    words = ["train", "photos/", "--minutes", "0.1", "--from", "scratch"]
    assert main([*words, "--dry_run"]) == 0
    assert not Path("runs").exists()
    assert main(words) == 0
    assert "chance 50.0%" in capsys.readouterr().err
    folder = Path("runs/photos/photos-0.1min-s0")
    config, result = read_config(folder), Run(folder).read_result() or {}
    assert evaluate_run(folder)["top1"] == pytest.approx(result["top1"])
    assert (config.recipe, config.data.exif) == ("photos", True)
    assert main(words) == 0
    assert read_run(words[1:])[0].config == config
    again = ["--config", str(folder / "config.yaml")]
    assert read_run(again)[0].config == config
    assert read_run([*again, "--minutes", "9"])[0].config.schedule.decay is None
    for _ in range(2):  # the second finds it finished
        assert main(["train", *again, "--output", "again"]) == 0
    assert main([*words[:2], "--minutes", "9", "--output", str(folder)]) == 2
    assert "0.1 minutes" in capsys.readouterr().err
    # Another model has another folder.
    assert main([*words, "--model", "deit_nano", "--dry_run"]) == 0


@pytest.mark.slow
def test_one_word_fine_tunes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photographs(Path("photos"), 16, classes=3)
    train(tiny(), tmp_path / "donor")
    words = ["finetune", "photos/", "--from", "donor", "--minutes", "0.02", "--quiet"]
    assert main([*words, "--output", "tuned"]) == 0
    assert len(Run("tuned").classes()) == 3
    assert (Run("tuned").read_result() or {})["recipe"] == "finetune"
