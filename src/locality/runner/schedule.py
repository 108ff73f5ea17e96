"""Many runs: said beforehand what they will cost, carried out, watched, and resumed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from locality.files import read_rows
from locality.runner.executors import Executor, Outcome, make_executor, threads_per_run
from locality.runner.runs import Run, RunCost, estimate_costs, waves, with_needs
from locality.training.preview import span

_POLL_SECONDS = 1.0


class Workload:
    """What a set of runs asks for, before anything starts.

    Attributes:
        runs: all of them, each folder once, with everything they need.
        costs: what each asks for in full.
        jobs: how many go on side by side.

    Args:
        threads: processor threads per run; the machine's divided by `jobs` unless given.
    """

    def __init__(self, runs: Iterable[Run], jobs: int = 2, threads: int | None = None) -> None:
        self.runs = with_needs(runs)
        threads = threads or threads_per_run(jobs)
        self.costs: dict[Path, RunCost] = estimate_costs(self.runs, threads=threads)
        self.jobs = jobs

    @property
    def waiting(self) -> list[Run]:
        """Runs without a result."""
        return [run for run in self.runs if not run.is_finished()]

    @property
    def seconds(self) -> float:
        """About how long the runs without a result take with `jobs` side by side."""
        return sum(self.costs[run.folder].seconds for run in self.waiting) / self.jobs

    def __str__(self) -> str:
        waiting = self.waiting
        resumed = sum(run.is_started() for run in waiting)
        costs = [self.costs[run.folder] for run in waiting]
        problems = sum(cost.problem is not None for cost in costs)
        finished = f"{len(self.runs)} runs: {len(self.runs) - len(waiting)} finished"
        lines = [f"{finished}, {resumed} to resume, {len(waiting) - resumed} to start"]
        if problems:
            lines.append(f"{problems} of them cannot start; the table of runs says why")
        if waiting:
            lines.append(
                f"to do: {sum(cost.images for cost in costs):.3g} images, "
                f"{sum(cost.macs for cost in costs):.3g} multiply-accumulates, "
                f"about {span(self.seconds)} with {self.jobs} at a time "
                f"({costs[0].basis} on this machine)"
            )
        return "\n".join(lines)

    def table(self) -> str:
        """One line per run: its name, state and cost."""
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
                f"{span(cost.seconds):>8}"
            )
        return "\n".join(lines)


def run_all(
    runs: Iterable[Run],
    jobs: int = 2,
    executor: str | Executor = "local",
    threads: int | None = None,
    quiet: bool = False,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Carry out runs and everything they need; finished ones are left alone, others resume.

    A run that fails is an outcome with an error; the others go on.

    Args:
        runs: in any order; the same folder may come up more than once.
        jobs: how many go on side by side.
        executor: "local", "submitit", "ray", or an object with their `map`.
        threads: processor threads per run; the machine's divided by `jobs` unless given.
        quiet: show no progress.
        ended: called with the outcome of each run that was carried out, while the others go on.

    Returns:
        one outcome per run given, in their order.
    """
    runs = list(runs)
    everything = with_needs(runs)
    if isinstance(executor, str):
        logs = runs[0].folder.parent / "submitit" if runs else None
        executor = make_executor(executor, jobs, threads, logs)
    outcomes = {run.folder: Outcome(run) for run in everything if run.is_finished()}
    waiting = [run for run in everything if run.folder not in outcomes]
    with RunsProgress(waiting, quiet or not waiting) as progress:
        for wave in waves(waiting):
            ready = []
            for run in wave:
                reason = _missing_need(run, outcomes)
                if reason is None:
                    ready.append(run)
                else:
                    outcomes[run.folder] = Outcome(run, reason)
                    progress.ended(outcomes[run.folder])
            for outcome in executor.map(ready):
                outcomes[outcome.run.folder] = outcome
                progress.ended(outcome)
                ended(outcome)
    return [Outcome(run, outcomes[run.folder].error) for run in runs]


def _missing_need(run: Run, outcomes: dict[Path, Outcome]) -> str | None:
    for needed in run.needs:
        error = outcomes[needed.folder].error
        if error is not None:
            return f"it needs {needed.name}, which failed: {error}"
    return None


class RunsProgress:
    """One bar over all runs, weighted by their cost, with the time left.

    How far a run is, is read from its folder, so that it works wherever the run is computed. A
    terminal gets a bar, a file gets a line per run that ends.
    """

    def __init__(self, runs: Sequence[Run], quiet: bool = False) -> None:
        self._runs = () if quiet else runs
        self._costs = estimate_costs(self._runs, timing="none")
        self._total = sum(cost.macs for cost in self._costs.values())
        self._ended: dict[Path, Outcome] = {}
        self._started = time.monotonic()
        # Steps that an earlier start has done already say nothing about today's speed.
        self._before = self._work()
        self._over = threading.Event()
        self._bar: tqdm | None = None
        if self._runs and sys.stderr.isatty():
            self._bar = tqdm(
                total=1.0,
                bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed}{postfix}",
                desc=f"0/{len(runs)} runs",
            )
            self._watcher = threading.Thread(target=self._watch, args=(self._bar,), daemon=True)
            self._watcher.start()

    def __enter__(self) -> RunsProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._bar is not None:
            self._watcher.join()
            self._bar.n = self._fraction()[0]
            self._bar.close()

    def ended(self, outcome: Outcome) -> None:
        """A run has its result, or failed."""
        if not self._runs:
            return
        self._ended[outcome.run.folder] = outcome
        count = f"{len(self._ended)}/{len(self._runs)}"
        if self._bar is None:
            done, left = self._fraction()
            said = f"[{count}] {_say(outcome)} ({100 * done:.0f}%{left and ', ' + left})"
            print(said, file=sys.stderr, flush=True)
            return
        failed = sum(each.error is not None for each in self._ended.values())
        failures = f", {failed} failed" if failed else ""
        self._bar.set_description_str(f"{count} runs{failures}", False)
        if outcome.error is not None:
            self._bar.write(_say(outcome), file=sys.stderr)

    def _watch(self, bar: tqdm) -> None:
        while not self._over.wait(_POLL_SECONDS):
            bar.n, left = self._fraction()
            bar.set_postfix_str(left)

    def _work(self) -> float:
        """Multiply-accumulates done so far."""
        return sum(
            cost.macs * (1.0 if run.folder in self._ended else done_fraction(run, cost))
            for run in self._runs
            for cost in (self._costs[run.folder],)
        )

    def _fraction(self) -> tuple[float, str]:
        """How much of the work is done, from 0 to 1, and how long the rest takes."""
        work = self._work()
        today = work - self._before
        elapsed = time.monotonic() - self._started
        left = ""
        if today > 0 and work < self._total:
            left = f"about {span(elapsed * (self._total - work) / today)} left"
        return (work / self._total if self._total else 1.0), left


def done_fraction(run: Run, cost: RunCost) -> float:
    """How much of a run is done, by the last evaluation in its folder, from 0 to 1."""
    try:
        return min(1.0, float(read_rows(run.folder / "metrics.csv")[-1]["images"]) / cost.images)
    except (FileNotFoundError, IndexError, KeyError, TypeError, ValueError):
        return 0.0  # not started, or a file that says nothing of it


def _say(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"{outcome.run.name} failed: {outcome.error}"
    result = outcome.run.result() or {}
    top1, seconds = result.get("top1"), result.get("seconds")
    parts = [f"{top1:.1f}% top-1"] if isinstance(top1, float) else []
    parts += [f"in {span(seconds)}"] if isinstance(seconds, (int, float)) else []
    return f"{outcome.run.name}: {' '.join(parts) or 'finished'}"
