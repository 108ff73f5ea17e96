"""The best evaluation's weights are kept, and patience ends training."""

import itertools

import pytest
from safetensors.torch import load_file

from locality.checkpoints.run_state import BEST, load_best_state, read_checkpoint
from locality.predictions import Predictions
from locality.runs import Run
from locality.training import load_run
from locality.training.evaluation import evaluate_run

from .conftest import assert_same, assert_same_run, tiny, train


def test_training_ends_when_top1_has_not_risen_for_long(tmp_path, evaluations):
    evaluations((10, 2), (30, 1), (30, 1), (20, 0.5), *itertools.repeat((90, 0), 9))
    result = train(tiny(schedule__eval_every=1, schedule__patience=2), tmp_path)
    assert (result["top1"], result["best_step"], result["steps"]) == (30, 2, 4)
    assert (Run(tmp_path).read_result() or {})["steps"] == 4
    assert read_checkpoint(tmp_path / "checkpoints/last.ckpt")["step"] == 4


def test_the_weights_of_a_run_are_those_of_its_best_evaluation(tmp_path, evaluations, caplog):
    evaluations((10, 2), (30, 1), (30, 0.9), *itertools.repeat((20, 0.1), 5))
    best, short = tmp_path / "best", tmp_path / "short"
    train(tiny(schedule__eval_every=1, schedule__patience=8, schedule__save_every=4), best)
    assert load_best_state(best)["step"] == 3  # equal accuracy: the lower loss wins
    evaluations(*itertools.repeat((20, 0.1), 8))
    train(tiny(schedule__eval_every=1, schedule__snapshot_every=3), short)
    assert load_best_state(short)["step"] == 8
    kept = load_run(best)[0].state_dict()
    assert_same(dict(kept), load_file(short / "snapshots/step-00000003.safetensors"))
    assert not caplog.records
    (best / "checkpoints" / BEST).write_bytes(b"damaged")
    assert load_best_state(best)["step"] == 8
    assert f"{BEST} is damaged" in caplog.text and "last.ckpt is used" in caplog.text


def test_with_class_weights_the_mean_accuracy_of_the_classes_chooses(
    tmp_path, evaluations, monkeypatch
):
    evaluations((90, 1), (50, 1), (60, 1), *itertools.repeat((95, 1), 5))
    means = itertools.chain((50, 80, 60), itertools.repeat(50))
    macro = property(lambda _: {"balanced_accuracy": next(means), "macro_f1": 0.0})
    monkeypatch.setattr(Predictions, "macro", macro)
    every = {"schedule__eval_every": 1, "schedule__patience": 8}
    result = train(tiny(objective__class_weights=True, **every), tmp_path)
    assert (result["best_step"], result["top1"]) == (2, 50)


def test_what_is_reported_is_what_an_evaluation_of_the_run_gives(tmp_path):
    result = train(tiny(schedule__steps=30, schedule__patience=30, optim__lr=0.02), tmp_path)
    assert evaluate_run(tmp_path)["loss"] == pytest.approx(result["val_loss"])


def test_an_interrupted_run_keeps_the_same_best_weights(tmp_path, interrupt):
    config = tiny(schedule__eval_every=1, schedule__patience=3, optim__lr=0.05)
    whole, run = tmp_path / "whole", tmp_path / "run"
    expected = train(config, whole)
    for step in (1, 2, 3):
        interrupt(config, run, step)
    result = train(config, run)
    assert_same_run(run, whole)
    assert (result["steps"], result["best_step"]) == (expected["steps"], expected["best_step"])
    assert (run / "checkpoints" / BEST).exists()
