"""The progress bar over many runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from locality.files import read_rows
from locality.runner.costs import RunCost, estimate_costs
from locality.runner.runs import Outcome, Run
from locality.training.speed import format_duration

_WATCH_SECONDS = 1.0


class RunsProgress:
    """One bar over all runs, weighted by their cost, with the time left.

    How far a run is, is read from its folder, so that it works wherever the run is computed. A
    terminal gets a bar, a file gets a line per run that ends.
    """

    def __init__(self, runs: Sequence[Run], quiet: bool = False) -> None:
        self._costs = estimate_costs([] if quiet else runs, timing="none")
        self._total = sum(cost.macs for cost in self._costs.values())
        self._ended: dict[Path, Outcome] = {}
        self._started = time.monotonic()
        # Steps that an earlier start has done already say nothing about today's speed.
        self._before = self._work()
        self._stopped = threading.Event()
        self._bar = tqdm(
            total=1.0,
            bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed}{postfix}",
            desc=f"0/{len(runs)} runs",
            disable=None if self._costs else True,  # None: without a terminal
        )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def __enter__(self) -> RunsProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._watcher.join()
        self._bar.n = self._fraction()[0]
        self._bar.close()

    def ended(self, outcome: Outcome) -> None:
        """A run has its result, or failed."""
        if not self._costs:
            return
        self._ended[outcome.run.folder] = outcome
        count = f"{len(self._ended)}/{len(self._costs)}"
        if self._bar.disable:
            done, left = self._fraction()
            said = f"[{count}] {_outcome_line(outcome)} ({100 * done:.0f}%{left and ', ' + left})"
            print(said, file=sys.stderr, flush=True)
            return
        failed = sum(each.error is not None for each in self._ended.values())
        failures = f", {failed} failed" if failed else ""
        self._bar.set_description_str(f"{count} runs{failures}", False)
        if outcome.error is not None:
            self._bar.write(_outcome_line(outcome), file=sys.stderr)

    def _watch(self) -> None:
        while not self._bar.disable and not self._stopped.wait(_WATCH_SECONDS):
            self._bar.n, left = self._fraction()
            self._bar.set_postfix_str(left)

    def _work(self) -> float:
        """Multiply-accumulates done so far."""
        return sum(
            cost.macs * (1.0 if folder in self._ended else progress_fraction(folder, cost))
            for folder, cost in self._costs.items()
        )

    def _fraction(self) -> tuple[float, str]:
        """How much of the work is done, from 0 to 1, and how long the rest takes."""
        work = self._work()
        today = work - self._before
        elapsed = time.monotonic() - self._started
        left = ""
        if today > 0 and work < self._total:
            left = f"about {format_duration(elapsed * (self._total - work) / today)} left"
        return (work / self._total if self._total else 1.0), left


def progress_fraction(folder: Path, cost: RunCost) -> float:
    """How much of a run is done, by the last evaluation in its folder, from 0 to 1."""
    try:
        return min(1.0, float(read_rows(folder / "metrics.csv")[-1]["images"]) / cost.images)
    except (FileNotFoundError, IndexError, KeyError, TypeError, ValueError):
        return 0.0  # not started, or a file that says nothing of it


def _outcome_line(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"{outcome.run.name} failed: {outcome.error}"
    result = outcome.run.result() or {}
    top1, seconds = result.get("top1"), result.get("seconds")
    parts = [f"{top1:.1f}% top-1"] if isinstance(top1, float) else []
    parts += [f"in {format_duration(seconds)}"] if isinstance(seconds, (int, float)) else []
    return f"{outcome.run.name}: {' '.join(parts) or 'finished'}"
