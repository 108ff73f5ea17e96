"""An interrupted run ends exactly as an uninterrupted one."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
import torch

from locality.checkpoints.run_state import load_best_state
from locality.errors import Interrupted, UserError
from locality.runs import Run
from locality.training import RunConfig, devices, replace, state
from locality.training.config import read_config
from locality.training.loop import Loop

from .conftest import EVERYTHING, assert_same_run, tiny, train, train_interrupted

STEPS = 8
Interrupt = Callable[..., Interrupted]


def run_in_pieces(config: RunConfig, folder: Path, stops: list[int], interrupt: Interrupt) -> None:
    for step in stops:
        interrupted = interrupt(config, folder, step)
        assert (interrupted.step, interrupted.exit_code) == (step + 1, 143)
    train(config, folder)


def assert_exact(config: RunConfig, folder: Path, stops: list[int], interrupt: Interrupt) -> None:
    """A run stopped at these steps is the run that was not."""
    train(config, folder / "whole")
    run_in_pieces(config, folder / "run", stops, interrupt)
    assert_same_run(folder / "run", folder / "whole")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of the default configuration."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(), folder)
    return folder


# First and last step, and the one after an evaluation; slow tests cover the others.
@pytest.mark.parametrize(
    "step",
    [pytest.param(n, marks=() if n in (0, 3, 7) else pytest.mark.slow) for n in range(STEPS)],
)
def test_resuming_after_any_step_is_exact(step, tmp_path, tmp_path_factory, interrupt):
    config = tiny(**{name.replace(".", "__"): value for name, value in EVERYTHING.items()})
    whole = tmp_path_factory.getbasetemp() / "whole"
    if not whole.exists():
        train(config, whole)
    run_in_pieces(config, tmp_path / "run", [step], interrupt)
    assert_same_run(tmp_path / "run", whole)


DEIT = {"depth": 2, "embed_dim": 16, "drop_path_rate": 0.2}
CVT = faults.MODELS["cvt_13"]
# With an argument of its own.
TIMM = {"model.name": "timm/test_resnet", "model.img_size": 16, "model.drop_path_rate": 0.1}
# Everything at once, with and without workers, other arithmetic, and other models.
CASES = [
    {"optim.name": "adamuon", "optim.position_lr_factor": 10},
    {"engine.channels_last": True, "optim.name": "adamw"},
    # Moments of other shapes than the weights'; counters of steps in the groups.
    *({"optim.name": name} for name in ("adafactor", "adafactorbv", "lamb", "adan")),
    {"engine.precision": "bf16-mixed", "augment.repeats": 3},
    {"data.workers": 2, **EVERYTHING},
    {"engine.accumulate": 4, **EVERYTHING},
    *(
        {"model.name": name, "model.img_size": 8, **EVERYTHING}
        | {f"model.{field}": value for field, value in fields.items()}
        for name, fields in (("deit_nano", DEIT), ("cvt_13", CVT))
    ),
    TIMM | EVERYTHING,
    pytest.param({"engine.accumulate": 4, "data.workers": 2, **EVERYTHING}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("changes", CASES)
def test_resuming_is_exact_whatever_is_on(changes, tmp_path, interrupt):
    assert_exact(replace(tiny(), changes), tmp_path, [1, 5], interrupt)


@pytest.mark.parametrize("crop", ["resized", "pad"])
def test_resuming_is_exact_on_shrunk_photographs(crop, tmp_path, class_folders, interrupt):
    images = class_folders(tmp_path / "images", {"ant": 12, "bee": 12}, size=(70, 90))
    data = {"data.dataset": "folder", "data.root": str(images), "data.fraction": 1.0}
    changes = {"input.decode": "shrunk", "augment.crop": crop, "data.val_fraction": 0.25}
    assert_exact(replace(tiny(), data | changes), tmp_path, [1, 5], interrupt)


@pytest.fixture
def half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """`engine.precision fp16-mixed` on a CPU.

    The scale starts where gradients overflow and grows every other step.
    """

    def scaler(device: str, enabled: bool) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device, 2.0**19, growth_interval=2, enabled=enabled)

    monkeypatch.setattr(devices, "choose_precision", lambda *_: "fp16-mixed")
    monkeypatch.setattr(state, "GradScaler", scaler)


@pytest.mark.usefixtures("half_precision")
def test_resuming_is_exact_in_half_precision(tmp_path, interrupt):
    assert_exact(tiny(optim__clip_grad=1.0), tmp_path, [1, 5], interrupt)
    scaler = load_best_state(tmp_path / "run")["scaler"]
    assert scaler["scale"] < 2.0**19 and scaler["growth_interval"] == 2


def test_resuming_is_exact_when_distilling(tmp_path, interrupt):
    train(tiny(schedule__steps=3), tmp_path / "teacher")
    config = tiny(objective__teacher=str(tmp_path / "teacher"), augment__mixup=0.8)
    assert_exact(config, tmp_path, [3], interrupt)


def test_the_number_of_workers_may_change_between_resumes(tmp_path, interrupt):
    config = replace(tiny(), EVERYTHING)
    train(config, tmp_path / "whole")
    for workers, step in ((2, 1), (0, 3), (1, 6)):
        interrupt(replace(config, {"data.workers": workers}), tmp_path / "run", step)
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_an_evaluation_that_was_interrupted_is_made_up_for(tmp_path, whole, monkeypatch):
    evaluate = Loop._evaluate

    def interrupted(self: Loop) -> dict[str, object]:
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self)

    monkeypatch.setattr(Loop, "_evaluate", interrupted)
    caught = train_interrupted(tiny(), tmp_path / "run")
    assert (caught.step, caught.exit_code) == (3, 130)
    monkeypatch.setattr(Loop, "_evaluate", evaluate)
    train(tiny(), tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "change",
    [
        None,
        lambda text: text.replace(",48,", ",49,"),
        lambda text: "no table\n1\n",
        # A repeated step and half a row, as left by a killed run.
        lambda text: text + text.splitlines(True)[1].replace("3,", "6,", 1) + "7,0.",
    ],
    ids=["deleted", "changed", "replaced", "grown"],
)
def test_the_rows_of_metrics_are_those_of_the_checkpoint(change, tmp_path, whole, interrupt):
    interrupt(tiny(), tmp_path / "run", 4)
    metrics = tmp_path / "run" / "metrics.csv"
    before = metrics.read_text()
    metrics.unlink()
    if change is not None:
        metrics.write_text(change(before))
        assert metrics.read_text() != before
    train(tiny(), tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_a_configuration_that_is_not_the_checkpoints_is_refused(tmp_path, interrupt):
    interrupt(tiny(), tmp_path / "run", 4)
    run = Run(tmp_path / "run")
    text = run.config_file.read_text()
    run.config_file.write_text(
        text.replace("lr: 0.0062", "lr: 0.001").replace("clip_grad: null", "clip_grad: 1")
    )
    with pytest.raises(UserError, match=r"config\.yaml.*optim\.lr"):
        train(read_config(run.path), tmp_path / "run")
    # Settings that may differ on resuming may be edited.
    run.config_file.write_text(text.replace("workers: 0", "workers: 1"))
    assert train(read_config(run.path), tmp_path / "run")["steps"] == STEPS
