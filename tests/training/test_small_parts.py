"""Randomness, tables, words, precision, dry runs."""

import random
import re
import threading

import numpy as np
import pytest
import torch

import locality
from locality.data.config import Preprocessing
from locality.errors import UserError
from locality.models import build
from locality.models.config import signature_diff
from locality.runs import Run
from locality.training import cost, devices, dry_run, recipe, replace
from locality.training.devices import choose_precision
from locality.training.job import Job
from locality.training.loop import seed_pass
from locality.training.model import initialize_model, saved_activations, settings_from_weights
from locality.training.recorder import Recorder
from locality.training.state import TrainState

from .conftest import tiny, train


def draws(seed: int, rank: int, step: int, micro: int) -> tuple[float, float, float]:
    seed_pass(seed, rank, step, micro, torch.device("cpu"))
    return torch.rand(()).item(), float(np.random.rand()), random.random()  # noqa: NPY002


def test_what_a_step_draws_depends_on_its_place_alone():
    expected = {(s, m): draws(0, 0, s, m) for s in (0, 1, 255, 256, 700) for m in range(4)}
    for place in reversed(expected):
        assert draws(0, 0, *place) == expected[place]


def test_no_news_of_a_run_that_could_not_start(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(Run, "record_start", full)
    with pytest.raises(OSError, match="no space left"):
        locality.train(tiny(), tmp_path / "run")
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_seeds_ranks_steps_and_micro_batches_draw_differently():
    found = {
        draws(seed, rank, step, micro)[number]
        for seed in range(3)
        for rank in range(3)
        for step in range(3)
        for micro in range(2)
        for number in range(3)
    }
    assert len(found) == 3 * 3 * 3 * 2 * 3


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(Job(tiny(schedule__steps=120), tmp_path).open(), TrainState())
    yield recorder
    recorder.close()


def test_a_closed_terminal_does_not_stop_a_run(recorder, monkeypatch):
    class Closed:
        tried = 0

        def write(self, text: str) -> int:
            self.tried += 1
            raise OSError(5, "Input/output error")

        flush = close = lambda self: None

    closed = Closed()
    monkeypatch.setattr("sys.stderr", closed)
    recorder.log("word")
    recorder.log("word")
    assert closed.tried == 1


def test_the_time_left_is_that_of_the_usual_step(recorder):
    for step in range(1, 21):
        recorder.log_step(TrainState(step=step, num_images=16), 60.0 if step < 6 else 2.0)
    line = recorder.status()
    assert line.startswith("step 20/120: ") and line.endswith(", 3 min left")


def test_precision_is_what_was_asked_for_or_what_pays(monkeypatch):
    assert choose_precision("bf16-mixed", "cpu", 1) == "bf16-mixed"
    assert choose_precision("fp32", "cpu", 1e12) == "fp32"
    assert choose_precision("fp16-mixed", "cuda", 1) == "fp16-mixed"
    for elsewhere in ("cpu", "mps"):
        with pytest.raises(UserError, match="fp16-mixed"):
            choose_precision("fp16-mixed", elsewhere, 1e12)
    for fast in (True, False):
        monkeypatch.setattr(devices, "has_fast_bf16", lambda fast=fast: fast)
        assert choose_precision("auto", "cpu", 1e11) == ("bf16-mixed" if fast else "fp32")
        assert choose_precision("auto", "cpu", 1e6) == "fp32"
    assert choose_precision("auto", "mps", 1e12) == "fp32"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The result of a run without options."""
    return train(tiny(), tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"engine.grad_checkpointing": True, "engine.channels_last": True}, 1e-5),
        # The loss of a model that was not trained differs by 4e-4, as does that of another seed.
        ({"engine.precision": "bf16-mixed"}, 3e-4),
        ({"engine.ema_decay": 0.5}, 1e-4),
    ],
)
def test_engine_options_train_the_same_model(changes, tolerance, plain, tmp_path):
    result = train(replace(tiny(), changes), tmp_path / "run")
    assert result["val_loss"] == pytest.approx(plain["val_loss"], rel=tolerance)
    assert tolerance == 1e-5 or result["val_loss"] != plain["val_loss"]


def test_the_cost_of_a_public_dataset_needs_no_images(cli):
    assert "without reading images" in cli("train", "deit_300", "--dry_run").out


def test_weights_are_read_before_the_first_step(tmp_path):
    config = tiny(weights=str(locality.save(build("cvt_pico"), tmp_path)))
    with pytest.raises(UserError, match="CvT"):
        Job(config, tmp_path / "run").open().check_start()


def test_a_dry_run_counts_and_touches_nothing(tmp_path, monkeypatch):
    # Half a millisecond each to read an image and to train on it, in turn.
    monkeypatch.setattr(cost, "time_loading", lambda run: 0.0005)
    monkeypatch.setattr(cost, "time_step", lambda *args: 0.0005)
    config = tiny(schedule__steps=800_000)
    text = dry_run(Job(config, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    # Evaluating an image costs a third of training on it.
    val = round(0.05 * 1797)
    hours = (800_000 * 16 + val / 3 * 800_000 / 3) / 1000 / 3600
    assert float(re.search(r"time +([\d.]+) h", text)[1]) == pytest.approx(hours, rel=0.02)
    assert "800,000 steps" in text and "16 images" in text
    measured = dry_run(Job(tiny(schedule__steps=None, schedule__minutes=3), tmp_path / "run"))
    assert "3 min" in measured and "bottleneck" in measured


@pytest.mark.parametrize("mode", ["fp32", "bf16-mixed"])
def test_counted_activations_are_those_of_a_real_pass(mode, tmp_path):
    job = Job(replace(recipe("digits"), {"engine.precision": mode}), tmp_path / "run").open()
    model = build("convit_nano", num_classes=10).train()
    model.shortcuts = True
    real = saved_activations(model, torch.randn(64, 3, 8, 8), job.autocast)
    assert job.activation_bytes == pytest.approx(real, rel=0.02)


def test_gradient_checkpointing_keeps_fewer_activations(tmp_path):
    config = recipe("digits")
    less = replace(config, {"engine.grad_checkpointing": True})
    fewer, more = (Job(each, tmp_path / "run").open() for each in (less, config))
    assert fewer.activation_bytes < 0.5 * more.activation_bytes


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("convit_nano", {"depth": 5, "gpsa_layers": 3}),
        ("convit_nano", {"global_pool": "avg", "img_size": (16, 32), "patch_size": 4}),
        ("cvt_nano", {"kv_stride": 1, "depth": (1, 2, 1), "img_size": (12, 16)}),
        ("timm/test_resnet", {"in_chans": 3}),
    ],
)
def test_a_run_from_a_saved_folder_has_its_architecture(model, changes, tmp_path):
    torch.manual_seed(0)
    saved = locality.create_model(model, num_classes=3, **changes)
    prepared = Preprocessing(saved.config.img_size, (0.1, 0.2, 0.3), crop_pct=0.7)
    locality.save(saved, tmp_path, preprocessing=prepared, classes=["a", "b", "c"])
    config = recipe("finetune", settings_from_weights(str(tmp_path)))
    started, _ = initialize_model(config, ["a", "b", "c"])
    assert not signature_diff(started.config, saved.config)
    assert started.img_size == saved.img_size
    assert config.input.mean == prepared.mean and config.input.crop_pct == 1  # nothing is cut away
    images = torch.randn(2, 3, *saved.img_size)
    torch.testing.assert_close(started.eval()(images), saved.eval()(images))
