"""What experiments measure on a finished run: its result, its curves, its weights under masks."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from locality.analysis.recording import measure_trajectory
from locality.data import eval_loader, open_data
from locality.papers.quantities import Measure
from locality.runner.runs import Run
from locality.training import evaluate, load_run
from locality.training.setup import resolve_accelerator

Curve = dict[str, list[float]]

_EVAL_BATCH = 256
# The batch at which the paper gives its speeds.
_SPEED_BATCH, _SPEED_REPEATS = 128, 7


def _of_result(name: str) -> Measure:
    def read(run: Run) -> float:
        return float((run.result() or {})[name])

    return Measure(name, read, kept=False)


TOP1 = _of_result("top1")
TOP5 = _of_result("top5")
PARAMETERS = _of_result("parameters")


def _read_curve(run: Run) -> Curve:
    with open(run.folder / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        "x": [float(row["epoch"]) for row in rows],
        "y": [float(row["top1"]) for row in rows],
    }


def _over_share(run: Run) -> Curve:
    curve = _read_curve(run)
    return {"x": [100 * epoch / curve["x"][-1] for epoch in curve["x"]], "y": curve["y"]}


# Epochs of a fraction of the data are shorter; shares of the training compare.
CURVE_OVER_SHARE = Measure("top-1 over the share of training", _over_share, kept=False)
LEARNING_CURVE = Measure("top-1 over epochs", _read_curve, kept=False)


def top1_at(share: float) -> Measure:
    """Top-1 at the evaluation nearest to a share of the training, from 0 to 1."""

    def read(run: Run) -> float:
        curve = _read_curve(run)
        end = curve["x"][-1]
        nearest = min(range(len(curve["x"])), key=lambda i: abs(curve["x"][i] / end - share))
        return curve["y"][nearest]

    return Measure(f"top1 after {share:g} of training", read, kept=False)


BEST_TOP1 = Measure("best top1", lambda run: max(_read_curve(run)["y"]), kept=False)
"""The highest top-1 of all evaluations; Fig. 11 compares these."""

TRAJECTORY_IMAGES = 256
TRAJECTORY = Measure(
    f"attention over training on {TRAJECTORY_IMAGES} images",
    lambda run: measure_trajectory(run.folder, TRAJECTORY_IMAGES),
)
"""Nonlocality and gates of every layer over the snapshots of a run."""


Mask = Callable[[nn.Module], AbstractContextManager[Any]]


def masked_top1(name: str, mask: Mask) -> Measure:
    """Top-1 of the trained model with part of it masked.

    Args:
        name: of the mask, with its parameters.
        mask: a context manager that is given the model.
    """
    return Measure(f"top1, {name}", lambda run: judge(run, mask)["top1"])


@torch.no_grad()
def judge(run: Run, mask: Mask | None = None) -> dict[str, Any]:
    """Top-1, top-5 and loss of a run's model on its own validation images, under a mask."""
    model, config = load_run(run.folder)
    splits = open_data(config.data, config.seed)
    device = torch.device(resolve_accelerator("auto"))
    loader = eval_loader(
        splits.val,
        config.augment,
        model.img_size,
        batch_size=_EVAL_BATCH,
        workers=config.data.workers,
        on_bad_image=config.data.on_bad(training=False),
    )
    with nullcontext() if mask is None else mask(model):
        return evaluate(model.to(device), loader, device, label_sets=splits.val.label_sets)


@torch.no_grad()
def _inference_speed(run: Run) -> float:
    model, _ = load_run(run.folder)
    device = torch.device(resolve_accelerator("auto"))
    model = model.to(device)
    height, width = model.img_size
    images = torch.randn(_SPEED_BATCH, 3, height, width, device=device)
    seconds = []
    for _ in range(_SPEED_REPEATS):
        begin = time.perf_counter()
        model(images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return round(_SPEED_BATCH / min(seconds), 1)


def inference_speed() -> Measure:
    """Images per second of inference at batch 128 on this machine, the best of a few."""
    return Measure("inference images per second", _inference_speed)
