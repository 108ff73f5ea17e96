"""Runs small enough to be repeated many times."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from locality.checkpoints.run_state import load_best_state
from locality.errors import Interrupted
from locality.training import RunConfig, recipe, replace
from locality.training import train as train_run
from locality.training.loop import Loop
from locality.training.optim import create_schedule, make_plan

# Two blocks, one of them GPSA, 16 wide: a step takes 2 ms.
TINY_MODEL = {
    "model.depth": 2,
    "model.gpsa_layers": 1,
    "model.embed_dim": 16,
    "model.drop_path_rate": 0.2,
    "engine.precision": "fp32",
}
SHORT = {
    "data.fraction": 0.1,
    "data.val_fraction": 0.05,
    "engine.batch_size": 16,
    "schedule.steps": 8,
    "schedule.warmup": 2,
    "schedule.eval_every": 3,
}
FROM_OUTSIDE = r"killed from outside \(SIGKILL\), .* memory .*the same command resumes"
# Everything that draws random numbers or has state.
EVERYTHING = {
    "augment.mixup": 0.8,
    "augment.cutmix": 1.0,
    "augment.random_erasing": 0.5,
    "augment.repeats": 3,
    "engine.ema_decay": 0.9,
    "objective.label_smoothing": 0.1,
    "optim.clip_grad": 1.0,
}


def tiny(**changes: Any) -> RunConfig:
    """The digits recipe in miniature; changes by name, with __ for the dot."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    overrides = named.pop("overrides", {})
    config = replace(recipe("digits"), TINY_MODEL | SHORT | named)
    return replace(config, {f"model.{k}": v for k, v in overrides.items()})


def train(config: RunConfig, folder: Path) -> dict[str, Any]:
    return train_run(config, folder, quiet=True)


def rates(config: RunConfig, steps: int) -> list[float]:
    """The learning rates of the first steps, of 1000 images."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.optim.lr)
    schedule, found = create_schedule(optimizer, make_plan(config, 1000)), []
    for step in range(steps):
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Same weights, moments, counts and metrics, to the last bit."""
    assert_same(load_best_state(one), load_best_state(other))
    assert (one / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes()


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one.keys() - {"spent"}:  # the clock's
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{number}]")
    else:
        assert one == other, where


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the next runs act at the start of a step; None ends that."""
    original = Loop.train_step

    def arrange(step: int | None, act: Any = None) -> None:
        def acting(self: Loop, batches: Any) -> int:
            if self.state.step == step:
                act()
            return original(self, batches)

        monkeypatch.setattr(Loop, "train_step", acting)

    return arrange


def train_interrupted(config: RunConfig, folder: Path) -> Interrupted:
    with pytest.raises(Interrupted) as caught:
        train(config, folder)
    return caught.value


@pytest.fixture
def interrupt(before_step: Callable[..., None]) -> Callable[..., Interrupted]:
    """(configuration, folder, step, signal) → how a run ends that receives it at that step."""

    def interrupted(
        config: RunConfig, folder: Path, step: int, signum: int = signal.SIGTERM
    ) -> Interrupted:
        before_step(step, lambda: os.kill(os.getpid(), signum))
        error = train_interrupted(config, folder)
        before_step(None)
        return error

    return interrupted


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make evaluations return these (top-1, loss), by step."""

    def arrange(*expected: tuple[float, float]) -> None:
        numbers = iter(expected)

        def evaluate(_: object, loader: Any, *__: object, on_batch: Any, **___: object) -> Any:
            top1, loss = next(numbers)
            for batch in loader:
                wrong = torch.from_numpy(batch.indices) >= round(top1 * len(on_batch.table) / 100)
                on_batch(batch, nn.functional.one_hot((batch.targets + wrong) % 10, 10).float())
            return {"top1": top1, "top5": 100.0, "loss": loss, "n": 10}

        monkeypatch.setattr("locality.training.loop.evaluate", evaluate)

    return arrange
