"""Numbers that an experiment asks for: measured over seeds, computed from others, or empty."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locality.analysis.statistics import Estimate, estimate
from locality.errors import UserError
from locality.files import write_atomic
from locality.runner.runs import Run

MEASURED = "experiments.json"
"""Where the measures of a run are kept, in its folder, so that none is taken twice."""


class Empty(Exception):
    """A quantity that has no value; the message says why, for people."""


@dataclass(frozen=True)
class Measure:
    """Something that can be measured on a finished run.

    Attributes:
        name: says all that the value depends on, since it is what the value is kept under.
        function: the run → a number, or a list or dictionary of numbers for a curve.
        kept: keep the value in the run folder, because taking it costs forward passes.
    """

    name: str
    function: Callable[[Run], Any] = field(compare=False)
    kept: bool = True

    def __call__(self, run: Run) -> Any:
        """The value on a finished run, measured now unless it was before."""
        if not self.kept:
            return self.function(run)
        path = run.folder / MEASURED
        known = _read(path)
        if self.name not in known:
            # Read again: another measure of the same run may have been added meanwhile.
            value = self.function(run)
            known = _read(path) | {self.name: value}
            write_atomic(path, json.dumps(known, allow_nan=False) + "\n")
        return known[self.name]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@dataclass(frozen=True)
class Values:
    """What a quantity came to.

    Attributes:
        by_seed: seed → value.
        problems: why seeds are missing, one sentence each.
    """

    by_seed: dict[int, Any]
    problems: tuple[str, ...] = ()

    def estimate(self) -> Estimate:
        """Mean and 95% interval over seeds."""
        return estimate(list(self.by_seed.values()))


@dataclass(frozen=True)
class Measured:
    """A measure of runs that differ in their seed alone."""

    runs: tuple[Run, ...]
    measure: Measure

    def evaluate(self, failures: Mapping[Path, str]) -> Values:
        """Measure every finished run.

        Args:
            failures: why runs failed, by folder.

        Raises:
            Empty: if none has a value.
        """
        found, problems = {}, []
        for run in self.runs:
            reason = failures.get(run.folder)
            if reason is None and not run.is_finished():
                reason = "not run yet"
            if reason is None:
                try:
                    found[run.config.seed] = self.measure(run)
                except (UserError, FileNotFoundError) as error:
                    reason = str(error)
            if reason is not None:
                problems.append(f"{run.name}: {reason}")
        if not found:
            raise Empty(_short(problems))
        return Values(found, tuple(problems))


def _short(problems: list[str]) -> str:
    """The first problem in words, without the name of the run if all have the same."""
    reasons = {problem.partition(": ")[2] for problem in problems}
    return reasons.pop() if len(reasons) == 1 else problems[0]


@dataclass(frozen=True)
class Combined:
    """A function of other quantities, computed seed by seed: what a seed does to all cancels."""

    function: Callable[..., Any] = field(compare=False)
    parts: tuple[Quantity, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Of all parts."""
        return tuple(run for part in self.parts for run in part.runs)

    def evaluate(self, failures: Mapping[Path, str]) -> Values:
        """Compute the function for every seed that all parts have.

        Raises:
            Empty: if there is none.
        """
        parts = [part.evaluate(failures) for part in self.parts]
        seeds = set.intersection(*(set(part.by_seed) for part in parts))
        if not seeds:
            raise Empty("no seed is common to what it is computed from")
        problems = tuple(dict.fromkeys(p for part in parts for p in part.problems))
        return Values(
            {seed: self.function(*(p.by_seed[seed] for p in parts)) for seed in sorted(seeds)},
            problems,
        )


@dataclass(frozen=True)
class Computed:
    """A number that needs no run, such as the parameters of a model."""

    function: Callable[[], Any] = field(compare=False)
    runs: tuple[Run, ...] = ()

    def evaluate(self, failures: Mapping[Path, str]) -> Values:
        """The number, as that of no seed in particular.

        Raises:
            Empty: if it cannot be had.
        """
        try:
            return Values({0: self.function()})
        except (UserError, FileNotFoundError) as error:
            raise Empty(str(error)) from error


@dataclass(frozen=True)
class Absent:
    """A cell that stays empty, and why."""

    reason: str
    runs: tuple[Run, ...] = ()

    def evaluate(self, failures: Mapping[Path, str]) -> Values:
        """Nothing.

        Raises:
            Empty: always.
        """
        raise Empty(self.reason)


Quantity = Measured | Combined | Computed | Absent


def difference(first: Quantity, second: Quantity) -> Quantity:
    """first − second."""
    return Combined(lambda a, b: a - b, (first, second))


def relative_gain(first: Quantity, second: Quantity) -> Quantity:
    """How much first is above second, in per cent of second (ConViT Table 2's "gap")."""
    return Combined(lambda a, b: 100 * (a - b) / b, (first, second))


def all_runs(quantities: Iterable[Quantity]) -> list[Run]:
    """The runs of some quantities, each folder once."""
    return list({run.folder: run for item in quantities for run in item.runs}.values())
