"""Costs of many runs: images, multiply-accumulates and time on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from locality.errors import UserError
from locality.runner.runs import Run, threads_per_run, with_needs
from locality.training.cost import (
    STEP_FORWARDS,
    Cost,
    Speed,
    format_duration,
    forward_macs,
    image_counts,
    training_speed,
)
from locality.training.optim import make_plan


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
        return RunCost(images, STEP_FORWARDS * result["macs"] * images, result["seconds"])
    try:
        training, validation, classes = image_counts(config)
        plan = make_plan(config, training)
        macs = forward_macs(config.model, classes)
        computing = STEP_FORWARDS * macs / training_speed(config, classes, threads)
        speed = Speed(0, computing, 0, on_processor=True)  # these images are small
        cost = Cost(training, validation, classes, macs, speed)
        seconds = cost.seconds(plan.images, plan.evaluations)
        return RunCost(plan.images, STEP_FORWARDS * macs * plan.images, seconds)
    except (UserError, OSError) as error:
        return RunCost(0, 0, 0, str(error))


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
