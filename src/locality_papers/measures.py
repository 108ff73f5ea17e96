"""Measures of finished runs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from locality.analysis.recording import measure_trajectory
from locality.checkpoints import open_model
from locality.data.loader import Batch
from locality.errors import UserError
from locality.runner.runs import Request
from locality.training.config import RunConfig, ScheduleConfig
from locality.training.cost import cost, image_counts
from locality.training.evaluation import evaluate_opened
from locality.training.optim import create_schedule, make_plan
from locality_papers.experiment import Effect, Experiment
from locality_papers.runs import Scale
from locality_papers.table import Key, Measure, Record, packed

_TRAJECTORY_IMAGES = 256


TOP1 = Measure(
    "top1",
    lambda record: float(record["result"]["top1"]),
    accuracy=True,
    right=lambda record: record.get("right"),
)
"""Final accuracy in per cent."""
TOP5 = Measure("top5", lambda record: float(record["result"]["top5"]), accuracy=True)


def _curve(record: Record) -> list[dict[str, float]]:
    curve: list[dict[str, float]] = record["curve"]
    if not curve:
        raise UserError("the run has no evaluations in metrics.csv")
    return curve


def _learning_curve(record: Record) -> dict[str, list[float]]:
    curve = _curve(record)
    return {"x": [row["epoch"] for row in curve], "y": [row["top1"] for row in curve]}


def _over_fraction(record: Record) -> dict[str, list[float]]:
    curve = _learning_curve(record)
    return {"x": [100 * epoch / curve["x"][-1] for epoch in curve["x"]], "y": curve["y"]}


LEARNING_CURVE = Measure("top-1 over epochs", _learning_curve)
BEST_TOP1 = Measure("best top1", lambda record: max(_learning_curve(record)["y"]), accuracy=True)
"""The highest top-1 of all evaluations, for Fig. 11."""
# Comparable between fractions of the data, whose epochs differ in length.
CURVE_OVER_FRACTION = Measure("top-1 over the fraction of training", _over_fraction)


def early(schedule: ScheduleConfig) -> float:
    """End of early training: warm-up plus a twentieth of the run (20 of the paper's epochs).

    In the schedule's unit, so the same number of steps for all models of a scale.
    """
    return schedule.warmup + schedule.length / 20


def _first_from(at: float, places: Sequence[float]) -> int:
    """Index of the first of `places` at or after `at`, else of the last."""
    return next((i for i, place in enumerate(places) if place >= at - 1e-6), len(places) - 1)


def top1_at(name: str, when: float | None = None) -> Measure:
    """Top-1 at the first evaluation at or after a part of the run; by default early in training."""

    def read(record: Record) -> float:
        config, curve = record["config"], _curve(record)
        unit = "epoch" if config.get("schedule.steps") is None else "step"
        length = config[f"schedule.{unit}s"]
        at = config["schedule.warmup"] + length / 20 if when is None else when * length
        index = _first_from(at, [row[unit] for row in curve])
        if index == len(curve) - 1:
            raise UserError("its runs are evaluated only later (schedule.eval_every)")
        return curve[index]["top1"]

    return Measure(f"top1 {name}", read, accuracy=True)


TOP1_EARLY = top1_at("early in training")


def _trajectory(run: Request) -> dict[str, Any]:
    found = measure_trajectory(run.folder, _TRAJECTORY_IMAGES)
    schedule = run.config.schedule
    return found | {"early": _first_from(early(schedule), found[schedule.unit])}


TRAJECTORY = Measure(f"attention over training, {_TRAJECTORY_IMAGES} images", take=_trajectory)
"""Nonlocality and gates of each layer over a run's snapshots, and the index of the early one."""


class Trajectory:
    """The values of `TRAJECTORY` as arrays, up to the end or to the first `snapshots`.

    Attributes:
        nonlocality: (layers, snapshots).
        growth: nonlocality at the end − before the first step, (layers,).
        early_drop: nonlocality before the first step − early in training, (layers,).
        late_growth: nonlocality at the end − early in training, (layers,).
        gates: σ(λ), mean over heads, (gated layers, snapshots).
        heads: nonlocality of each head, a layer (heads, snapshots) at a time.
    """

    def __init__(self, found: Mapping[str, Any], snapshots: int | None = None) -> None:
        gates = [layer["gates"][:snapshots] for layer in found["layers"] if layer["gates"]]
        self.nonlocality = np.array([layer["nonlocality"][:snapshots] for layer in found["layers"]])
        early = self.nonlocality[:, min(found["early"], self.nonlocality.shape[1] - 1)]
        self.growth = self.nonlocality[:, -1] - self.nonlocality[:, 0]
        self.early_drop = self.nonlocality[:, 0] - early
        self.late_growth = self.nonlocality[:, -1] - early
        self.gates = np.array([[fmean(heads) for heads in layer] for layer in gates])
        self.heads = [
            np.array(layer["nonlocality_per_head"][:snapshots]).T for layer in found["layers"]
        ]


def trajectory(name: str, number: Callable[[Trajectory], float]) -> Measure:
    """A number computed from a run's trajectory."""
    return TRAJECTORY.then(name, lambda found: float(number(Trajectory(found))))


def at_end(name: str, number: Callable[[Trajectory], float]) -> Measure:
    """A number computed from the end of a run's trajectory, and the same of its start."""
    before = TRAJECTORY.then(name, lambda found: float(number(Trajectory(found, 1))))
    return replace(trajectory(name, number), before=before)


def of_layer(name: str, n: int, *at: int) -> Callable[[Trajectory], float]:
    """A layer's entry in one of the arrays of a trajectory."""
    return lambda of: float(getattr(of, name)[(n, *at)])


def masked_top1(name: str, mask: Callable[[nn.Module], AbstractContextManager[Any]]) -> Measure:
    """Top-1 of the trained model with part of it masked, and the images that are right then.

    Args:
        name: name of the mask with its parameters.
        mask: model → context manager.
    """
    key = f"top1, {name}"

    def take(run: Request) -> dict[str, Any]:
        opened = open_model(run.folder)
        right: dict[int, bool] = {}

        def note(batch: Batch, logits: torch.Tensor) -> None:
            known = logits.argmax(dim=1).cpu() == batch.targets
            right.update(zip(batch.indices.tolist(), known.tolist(), strict=True))

        with mask(opened.module()):
            found = evaluate_opened(opened, run.config.data, seed=run.config.seed, on_batch=note)
        return {"top1": found["top1"], "right": packed(np.array([right[n] for n in sorted(right)]))}

    def kept(record: Record) -> dict[str, Any]:
        value = record["measures"][key]
        return value if isinstance(value, dict) else {"top1": value}  # until 2026-11-28

    return Measure(
        key,
        lambda record: float(kept(record)["top1"]),
        needs=Measure(key, take=take),
        accuracy=True,
        right=lambda record: kept(record).get("right"),
    )


def summed_rate(config: RunConfig) -> float:
    """The sum over a run's steps of the learning rate of v_pos and λ."""
    plan = make_plan(config, image_counts(config)[0])
    optimizer = torch.optim.SGD([torch.zeros(1)], config.optim.peak_lr(plan.batch_size))
    schedule, total = create_schedule(optimizer, plan), 0.0
    for step in range(plan.steps):
        schedule.step_update(step)
        total += optimizer.param_groups[0]["lr"]
    return config.optim.position_lr_factor * total


def count(t: Experiment, row: str, model: Callable[[], Any]) -> None:
    """Add a model's parameters in millions and multiply-accumulates in billions."""
    t.fixed(row, "parameters", lambda: cost(*model()).parameters / 1e6)
    t.fixed(row, "flops", lambda: cost(*model()).macs / 1e9)


def percent_saved(small: Key, large: Key) -> Effect:
    """How much less `small` is than `large`, in percent."""
    return lambda v: 100 * (1 - v[small] / v[large])


def ask_fewer(
    t: Experiment, small: str, large: str, column: str, paper: float, **others: Any
) -> None:
    """Does the first model have fewer parameters, or need fewer MACs, than the second?"""
    what = {"parameters": "have fewer parameters", "flops": "need fewer MACs"}[column]
    saved = percent_saved((small, column), (large, column))
    t.ask(f"Does {small} {what} than {large}?", saved, unit="%", paper=paper, **others)


def count_role(t: Experiment, s: Scale, row: str, role: str, **choices: Any) -> None:
    """The same of a role's model, or why the scale has none."""

    def model() -> tuple[Any, int]:
        config = s.runs(role, seeds=s.seeds[:1], **choices)[0].config
        return config.model, image_counts(config)[2]

    if role in s.models:
        count(t, row, model)
    else:
        for column in ("parameters", "flops"):
            t.missing(row, column, f"the scale has no model for {role}")
