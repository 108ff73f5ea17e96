"""Run requests: configuration, folder, dependencies and cost."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locality.errors import UserError
from locality.machine import processors
from locality.progress import format_duration
from locality.runs import RunFolder, is_run_folder
from locality.settings import flatten, settings_of, to_dict, with_role
from locality.training.config import RunConfig, read_config
from locality.training.cost import STEP_FORWARDS, estimate_cost

_RUNS = with_role(RunConfig, "run")
# Settings that do not affect a run's results.
_NO_NUMBER = with_role(RunConfig, "how", "label")


@dataclass(frozen=True)
class Run:
    """A requested training run.

    Attributes:
        name: display name, such as "convit_nano 5% seed 0".
        config: the full configuration.
        folder: the run folder.
        needs: runs that must finish first (a teacher, initial weights).
        spent: how many seconds of a run of minutes have gone when it starts.
    """

    name: str
    config: RunConfig
    folder: Path
    needs: tuple[Run, ...] = ()
    spent: float = 0.0

    def result(self) -> dict[str, Any] | None:
        """The content of result.json, or None if the run has not finished.

        Raises:
            UserError: the file exists but cannot be read.
        """
        return RunFolder(self.folder).read_result()

    def is_finished(self) -> bool:
        """Whether the folder holds the result of this configuration."""
        if self.result() is None:
            return False
        return digest(read_config(self.folder)) == digest(self.config)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        run: the run.
        error: why the run has no result; None if it has one.
    """

    run: Run
    error: str | None = None


def digest(config: RunConfig) -> str:
    """Twelve hexadecimal digits that identify what a run computes.

    Only settings that differ from the default of their field count, so that adding one keeps
    existing folders.
    """
    known = settings_of(config)
    values = {
        name: _folder_name(value) if name in _RUNS else value
        for name, value in flatten(to_dict(config)).items()
        if name not in _NO_NUMBER and (name not in known or value != known[name].default)
    }
    text = json.dumps(["locality.training:train", values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _folder_name(value: str | None) -> str | None:
    """The name of a run folder, which identifies its content regardless of location."""
    return None if value is None else Path(value).name


def content_folder(root: Path, config: RunConfig) -> Path:
    """The folder of a configuration under `root`: model, fraction, seed and digest."""
    name = config.model.name.replace("/", "-")
    return root / f"{name}-{config.data.percent}-s{config.seed}-{digest(config)}"


def with_needs(runs: Iterable[Run]) -> list[Run]:
    """Runs and their dependencies, each folder once, dependencies first."""
    ordered: dict[Path, Run] = {}
    for run in runs:
        for each in (*with_needs(run.needs), run):
            ordered.setdefault(each.folder, each)
    return list(ordered.values())


def threads_per_run(jobs: int) -> int:
    """CPU threads for each of `jobs` parallel runs, at least 1."""
    return max(1, processors() // jobs)


@dataclass(frozen=True)
class RunCost:
    """The cost of a run.

    Attributes:
        state: "finished", "resume" or "start".
        images: images seen in training, with repetition.
        macs: multiply-accumulates of training: three forward passes per image.
        seconds: recorded time of a finished run, else an estimate for this machine.
        problem: why the run cannot start, or None; with a problem, the cost is 0.
    """

    state: str
    images: int = 0
    macs: float = 0.0
    seconds: float = 0.0
    problem: str | None = None


def run_cost(run: Run, threads: int = 1) -> RunCost:
    """The cost of a run: recorded, or as by `estimate_cost`.

    Args:
        run: the run.
        threads: its CPU threads.
    """
    config, state = run.config, "resume" if is_run_folder(run.folder) else "start"
    if run.is_finished():
        state, result = "finished", run.result() or {}
        if {"steps", "macs", "seconds"} <= set(result):
            images = result["steps"] * config.engine.batch_size
            macs = STEP_FORWARDS * result["macs"] * images
            return RunCost(state, images, macs, result["seconds"])
    try:
        plan, macs, seconds = estimate_cost(config, threads)
        if config.schedule.minutes is not None:
            return RunCost(state, seconds=60 * config.schedule.minutes)
        return RunCost(state, plan.images, macs * plan.images, seconds)
    except (UserError, OSError) as error:
        return RunCost(state, problem=str(error))


def workload(
    runs: Iterable[Run], jobs: int = 2, threads: int | None = None, each: bool = False
) -> str:
    """The cost of runs and their dependencies, as text.

    Args:
        runs: the runs, in any order.
        jobs: number of parallel runs.
        threads: CPU threads per run; the machine's divided by `jobs` by default.
        each: add a table with name, state and cost of each run.
    """
    threads = threads or threads_per_run(jobs)
    costs = [(run.name, run_cost(run, threads)) for run in with_needs(runs)]
    states = Counter(cost.state for _, cost in costs)
    waiting = [cost for _, cost in costs if cost.state != "finished"]
    lines = [
        f"{len(costs)} runs: {states['finished']} finished, {states['resume']} to resume, "
        f"{states['start']} to start"
    ]
    if problems := sum(cost.problem is not None for cost in waiting):
        lines.append(f"{problems} of them cannot start; see the table of runs")
    if waiting:
        seconds = sum(cost.seconds for cost in waiting) / jobs
        images, macs = (sum(getattr(cost, n) for cost in waiting) for n in ("images", "macs"))
        # Runs of minutes have no number of images before they end.
        counted = f"{images:.3g} images, {macs:.3g} multiply-accumulates, " if images else ""
        lines.append(
            f"to do: {counted}about {format_duration(seconds)} with {jobs} at a time on this "
            f"machine"
        )
    if each:
        width = max((len(name) for name, _ in costs), default=4)
        lines += ["", f"{'run':{width}}  {'state':8}  {'images':>9}  {'MACs':>9}  {'time':>8}"]
        for name, cost in costs:
            shown = f"{cost.state:8}  {cost.images:9.3g}  {cost.macs:9.2e}  "
            shown += f"{format_duration(cost.seconds):>8}"
            problem = cost.problem and f"cannot start: {cost.problem}"
            lines.append(f"{name:{width}}  {problem or shown}")
    return "\n".join(lines)
