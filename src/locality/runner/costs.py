"""Costs of runs: images, multiply-accumulates and hours on this machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from locality.data import open_data
from locality.data.config import DATASETS, DataConfig
from locality.errors import UserError
from locality.layers.cpu import arithmetic_threads
from locality.models import count_macs, count_parameters
from locality.runner.runs import Run, threads_per_run, with_needs
from locality.training.config import ModelConfig, RunConfig
from locality.training.model import meta_model
from locality.training.optim import make_plan
from locality.training.speed import format_duration, time_steps, timing_batch_size

# Images to train on and to evaluate on, and classes, as in `datasets.yaml`.
_IMAGENET_22K = (14_197_122, 70_986, 21_841)
# A training step costs a forward pass, and twice as much for the gradients.
_STEP_FORWARDS = 3


@dataclass(frozen=True)
class RunCost:
    """The cost of a run.

    Attributes:
        images: seen in training.
        macs: multiply-accumulates of training: three forward passes per image.
        seconds: on this machine, as the result of a finished run says or a few steps suggest.
        problem: why the run cannot start, if it cannot; its cost is then 0.
    """

    images: int
    macs: float
    seconds: float
    problem: str | None = None


def estimate_costs(runs: Sequence[Run], threads: int = 1) -> dict[Path, RunCost]:
    """The cost of each run, by folder.

    One network of each name is timed; the others of that name are assumed to be as fast per
    multiply-accumulate.

    Args:
        runs: any.
        threads: CPU threads that a run will have.
    """
    return {run.folder: _cost(run, threads) for run in runs}


def _cost(run: Run, threads: int) -> RunCost:
    config = run.config
    result = run.result() if run.is_finished() else None
    if result and {"steps", "macs", "seconds"} <= set(result):
        images = result["steps"] * config.engine.batch_size
        return RunCost(images, _STEP_FORWARDS * result["macs"] * images, result["seconds"])
    try:
        training, validation, classes = image_counts(config)
        images = make_plan(config, training).images
        macs = _STEP_FORWARDS * forward_macs(config.model, classes)
        evaluations = math.ceil(config.schedule.length / config.schedule.eval_every)
        passes = images + evaluations * validation / _STEP_FORWARDS
        seconds = macs * passes / training_speed(config, classes, threads)
        return RunCost(images, macs * images, seconds)
    except (UserError, OSError) as error:
        return RunCost(0, 0, 0, str(error))


# By the name of a network and CPU threads.
_SPEEDS: dict[tuple[str, int], float] = {}


def training_speed(config: RunConfig, classes: int, threads: int) -> float:
    """Multiply-accumulates per second of training, from a few steps on random images."""
    named = config.model.name, threads
    if named not in _SPEEDS:
        macs = _STEP_FORWARDS * forward_macs(config.model, classes)
        images = timing_batch_size(config.engine.batch_size, macs)
        with arithmetic_threads(threads):
            # The fastest step is the one least disturbed by other processes.
            fastest = min(time_steps(RunConfig(model=config.model), classes, images))
        _SPEEDS[named] = macs * images / fastest
    return _SPEEDS[named]


def image_counts(config: RunConfig) -> tuple[int, int, int]:
    """The number of training images, validation images and classes of a run.

    A dataset of known size is not opened.

    Raises:
        UserError: if the dataset has no known size and cannot be opened.
    """
    data = config.data
    known = DATASETS[data.dataset].get("images")
    known = _IMAGENET_22K if config.recipe == "cvt_22k" else known
    if known is not None:
        images, evaluated, classes = known
        kept = min(data.first_classes or classes, classes) - data.skip_classes
        share = kept / classes * (data.part[1] - data.part[0])
        if data.val_part is not None:
            evaluated = images * (data.val_part[1] - data.val_part[0])
        elif data.fold is not None:
            evaluated = images / data.fold[1]
        return round(images * share * data.train_share), round(evaluated * share), kept
    return _opened(data, config.seed)


@cache
def _opened(data: DataConfig, seed: int) -> tuple[int, int, int]:
    splits = open_data(data, seed)
    return len(splits.train), len(splits.val), len(splits.classes)


def parameters(model: ModelConfig, classes: int) -> int:
    """The number of parameters of a model."""
    return _size(model, classes)[0]


def forward_macs(model: ModelConfig, classes: int) -> int:
    """Multiply-accumulates of one image's forward pass."""
    return _size(model, classes)[1]


_SIZES: dict[str, tuple[int, int]] = {}


def _size(model: ModelConfig, classes: int) -> tuple[int, int]:
    architecture = dataclasses.replace(model, weights=None)
    named = repr((architecture, classes))
    if named not in _SIZES:
        network = meta_model(RunConfig(model=architecture), classes)
        _SIZES[named] = count_parameters(network), count_macs(network)
    return _SIZES[named]


class Workload:
    """The cost of a set of runs.

    Attributes:
        runs: the runs and all they need, each folder once.
        costs: the cost of each by folder.
        jobs: runs at a time.

    Args:
        threads: CPU threads per run; the machine's divided by `jobs` unless given.
    """

    def __init__(self, runs: Iterable[Run], jobs: int = 2, threads: int | None = None) -> None:
        self.runs, self.jobs = with_needs(runs), jobs
        self.costs = estimate_costs(self.runs, threads=threads or threads_per_run(jobs))

    def __str__(self) -> str:
        waiting = [run for run in self.runs if not run.is_finished()]
        resumed = sum(run.is_started() for run in waiting)
        costs = [self.costs[run.folder] for run in waiting]
        problems = sum(cost.problem is not None for cost in costs)
        finished = f"{len(self.runs)} runs: {len(self.runs) - len(waiting)} finished"
        lines = [f"{finished}, {resumed} to resume, {len(waiting) - resumed} to start"]
        if problems:
            lines.append(f"{problems} of them cannot start; the table of runs says why")
        if waiting:
            seconds = sum(cost.seconds for cost in costs) / self.jobs
            lines.append(
                f"to do: {sum(cost.images for cost in costs):.3g} images, "
                f"{sum(cost.macs for cost in costs):.3g} multiply-accumulates, "
                f"about {format_duration(seconds)} with {self.jobs} at a time on this machine"
            )
        return "\n".join(lines)

    def table(self) -> str:
        """A line per run: name, state and cost."""
        width = max((len(run.name) for run in self.runs), default=4)
        lines = [f"{'run':{width}}  {'state':8}  {'images':>9}  {'MACs':>9}  {'time':>8}"]
        for run in self.runs:
            cost = self.costs[run.folder]
            state = "finished" if run.is_finished() else "resume" if run.is_started() else "start"
            if cost.problem is not None:
                lines.append(f"{run.name:{width}}  cannot start: {cost.problem}")
                continue
            lines.append(
                f"{run.name:{width}}  {state:8}  {cost.images:9.3g}  {cost.macs:9.2e}  "
                f"{format_duration(cost.seconds):>8}"
            )
        return "\n".join(lines)
