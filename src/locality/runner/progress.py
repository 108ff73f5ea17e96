"""The progress bar over many runs."""

from __future__ import annotations

import sys

from tqdm import tqdm

from locality.runner.runs import Outcome
from locality.training.speed import format_duration


class RunsProgress:
    """A bar over runs on a terminal; elsewhere a line per run that ends.

    Args:
        total: how many runs.
        quiet: print nothing.
    """

    def __init__(self, total: int, quiet: bool = False) -> None:
        self._ended = 0
        # tqdm's None: only on a terminal.
        self._bar = tqdm(total=total, unit="run", disable=True if quiet or not total else None)
        self._quiet, self._total = quiet, total

    def __enter__(self) -> RunsProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def ended(self, outcome: Outcome) -> None:
        """Count a run that has its result, or failed."""
        self._ended += 1
        self._bar.update()
        if self._bar.disable and not self._quiet:
            line = f"[{self._ended}/{self._total}] {_outcome_line(outcome)}"
            print(line, file=sys.stderr, flush=True)
        elif outcome.error is not None and not self._quiet:
            self._bar.write(_outcome_line(outcome), file=sys.stderr)


def _outcome_line(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"{outcome.run.name} failed: {outcome.error}"
    result = outcome.run.result() or {}
    top1, seconds = result.get("top1"), result.get("seconds")
    parts = [f"{top1:.1f}% top-1"] if isinstance(top1, float) else []
    parts += [f"in {format_duration(seconds)}"] if isinstance(seconds, (int, float)) else []
    return f"{outcome.run.name}: {' '.join(parts) or 'finished'}"
