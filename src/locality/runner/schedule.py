"""Many runs: said beforehand what they will cost, carried out, watched, and resumed."""

from __future__ import annotations

import csv
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from locality.runner.cost import Cost, estimate_costs, span
from locality.runner.executors import Executor, Outcome, make_executor, threads_per_run
from locality.runner.runs import Run, waves, with_needs

_POLL_SECONDS = 1.0


class Plan:
    """What a set of runs asks for, before anything starts.

    Attributes:
        runs: all of them, each folder once, with everything they need.
        costs: what each asks for in full.
        jobs: how many go on side by side.
    """

    def __init__(self, runs: Iterable[Run], jobs: int = 2) -> None:
        self.runs = with_needs(runs)
        self.costs: dict[Path, Cost] = estimate_costs(self.runs, threads=threads_per_run(jobs))
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
        lines = [f"{len(self.runs)} runs: {len(self.runs) - len(waiting)} finished, "
                 f"{resumed} to resume, {len(waiting) - resumed} to start"]  # fmt: skip
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
) -> list[Outcome]:
    """Carry out runs and everything they need; finished ones are left alone, others resume.

    A run that fails is an outcome with an error; the others go on.

    Args:
        runs: in any order; the same folder may come up more than once.
        jobs: how many go on side by side.
        executor: "local", "submitit", "ray", or an object with their `map`.
        threads: processor threads per run; the machine's divided by `jobs` unless given.
        quiet: show no progress.

    Returns:
        one outcome per run given, in their order.
    """
    runs = list(runs)
    everything = with_needs(runs)
    chosen = (
        make_executor(executor, jobs, threads, _logs(everything))
        if isinstance(executor, str)
        else executor
    )
    outcomes = {run.folder: Outcome(run) for run in everything if run.is_finished()}
    waiting = [run for run in everything if run.folder not in outcomes]
    with Progress(waiting, quiet or not waiting) as progress:
        for wave in waves(waiting) if waiting else []:
            ready = []
            for run in wave:
                reason = _missing_need(run, outcomes)
                if reason is None:
                    ready.append(run)
                else:
                    outcomes[run.folder] = Outcome(run, reason)
                    progress.ended(outcomes[run.folder])
            for outcome in chosen.map(ready):
                outcomes[outcome.run.folder] = outcome
                progress.ended(outcome)
    return [Outcome(run, outcomes[run.folder].error) for run in runs]


def _missing_need(run: Run, outcomes: dict[Path, Outcome]) -> str | None:
    for needed in run.needs:
        error = outcomes[needed.folder].error
        if error is not None:
            return f"it needs {needed.name}, which failed: {error}"
    return None


def _logs(runs: Sequence[Run]) -> Path:
    return (runs[0].folder.parent if runs else Path("runs")) / "submitit"


class Progress:
    """One bar over all runs, weighted by their cost, with the time left.

    How far a run is, is read from its folder, so that it works wherever the run is computed. A
    terminal gets a bar, a file gets a line per run that ends.
    """

    def __init__(self, runs: Sequence[Run], quiet: bool = False) -> None:
        self._runs = {run.folder: run for run in runs}
        self._costs = {} if quiet else estimate_costs(runs, measure=False)
        self._ended = 0
        self._failed = 0
        self._started = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._going = dict(self._runs)
        self._total = sum(cost.macs for cost in self._costs.values())
        # Steps that an earlier start has done already say nothing about today's speed.
        self._before = self._work() if not quiet else 0.0
        self._bar: tqdm | None = None
        self._quiet = quiet
        if not quiet and sys.stderr.isatty():
            self._bar = tqdm(
                total=1.0,
                bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed}{postfix}",
                desc=f"0/{len(runs)} runs",
            )
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._bar is not None:
            self._watcher.join()
            self._bar.close()

    def ended(self, outcome: Outcome) -> None:
        """A run has its result, or failed."""
        if self._quiet:
            return
        with self._lock:
            self._going.pop(outcome.run.folder, None)
            self._ended += 1
            self._failed += outcome.error is not None
            said = _say(outcome)
            if self._bar is None:
                done, left = self._shares()
                print(
                    f"[{self._ended}/{len(self._runs)}] {said} ({100 * done:.0f}%{left})",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                if outcome.error is not None:
                    self._bar.write(said, file=sys.stderr)
                self._show()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            with self._lock:
                self._show()

    def _show(self) -> None:
        assert self._bar is not None
        done, left = self._shares()
        self._bar.n = done
        failed = f", {self._failed} failed" if self._failed else ""
        self._bar.set_description_str(f"{self._ended}/{len(self._runs)} runs{failed}", False)
        self._bar.set_postfix_str(left)

    def _work(self) -> float:
        """Multiply-accumulates done so far."""
        return sum(
            cost.macs * (done_share(self._runs[folder], cost) if folder in self._going else 1.0)
            for folder, cost in self._costs.items()
        )

    def _shares(self) -> tuple[float, str]:
        work = self._work()
        today = work - self._before
        elapsed = time.monotonic() - self._started
        left = ""
        if today > 0 and work < self._total:
            left = f", about {span(elapsed * (self._total - work) / today)} left"
        return (work / self._total if self._total else 1.0), left


def done_share(run: Run, cost: Cost) -> float:
    """How much of a run is done, by the last evaluation in its folder, from 0 to 1."""
    try:
        with open(run.folder / "metrics.csv", encoding="utf-8", newline="") as file:
            images = [row["images"] for row in csv.DictReader(file)]
        return min(1.0, float(images[-1]) / cost.images)
    except (FileNotFoundError, IndexError, KeyError, TypeError, ValueError):
        return 0.0  # not started, or a row that is being written


def _say(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"{outcome.run.name} failed: {outcome.error}"
    result = outcome.run.result() or {}
    top1, seconds = result.get("top1"), result.get("seconds")
    parts = [f"{top1:.1f}% top-1"] if isinstance(top1, float) else []
    parts += [f"in {span(seconds)}"] if isinstance(seconds, (int, float)) else []
    return f"{outcome.run.name}: {' '.join(parts) or 'finished'}"
