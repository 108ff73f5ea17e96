"""A training run as a request: its configuration, its folder, what it needs first; what runs cost,
in images, multiply-accumulates and hours on the machine at hand; and how far they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from locality.data import open_data
from locality.data.config import DATASETS, DataConfig
from locality.errors import UserError
from locality.files import read_rows
from locality.machine import processors
from locality.models import count_macs, count_parameters
from locality.settings import flatten, from_dict, to_dict
from locality.training.config import ModelConfig, RunConfig, make_plan
from locality.training.fitting import step_seconds, timed_images
from locality.training.preview import meta_model, span
from locality.training.runs import MAY_CHANGE, PATHS, RunFolder

TRAIN = "locality.training:train"

_WATCH_SECONDS = 1.0
# Settings that change no number of a run.
_LABELS = {"recipe"} | MAY_CHANGE


@dataclass(frozen=True)
class Run:
    """One training run that somebody wants the result of.

    Attributes:
        name: for people, such as "convit_nano 5% seed 0".
        config: the whole configuration.
        folder: where it goes: one configuration in, one result.json out.
        needs: runs that have to be finished before this one can start (a teacher, a network to
            take weights from).
        task: "module:function" that is called with (config, folder) to carry the run out.
    """

    name: str
    config: RunConfig
    folder: Path
    needs: tuple[Run, ...] = ()
    task: str = TRAIN

    def result(self) -> dict[str, Any] | None:
        """The content of result.json, or None while the run is not finished.

        Raises:
            UserError: if the file is there and cannot be read.
        """
        return RunFolder(self.folder).result()

    def is_finished(self) -> bool:
        """Whether the folder holds the result of this very configuration.

        A folder that belongs to another one does not count; training in it is refused with the
        list of differences.
        """
        if self.result() is None:
            return False
        if self.task != TRAIN:
            return True  # a task may complete the configuration it is given
        changed = RunFolder(self.folder).changed(self.config, _same_name)
        return all(name in _LABELS for name, *_ in changed)

    def is_started(self) -> bool:
        """Whether there is something to resume."""
        return (self.folder / "config.yaml").exists()

    def load_task(self) -> Callable[[RunConfig, Path], object]:
        """The function that carries the run out."""
        return pkgutil.resolve_name(self.task)


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        run: which one.
        error: None if its folder holds a result, else one sentence saying why not.
    """

    run: Run
    error: str | None = None


def digest(config: RunConfig, task: str = TRAIN) -> str:
    """Twelve letters and digits that two configurations share if their runs do the same.

    The recipe's name, the number of loading processes and the like do not count, and a setting
    counts only where it is not its default: a new one changes the folder of no run without it.
    """
    default = flatten(to_dict(RunConfig()))
    values = {
        name: _folder_name(value) if name in PATHS else value
        for name, value in flatten(to_dict(config)).items()
        if name not in _LABELS and (name not in default or value != default[name])
    }
    text = json.dumps([task, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _same_name(old: str | None, new: str | None) -> bool:
    return _folder_name(old) == _folder_name(new)


def _folder_name(value: str | None) -> str | None:
    """Folders of other runs are named by their content: the place they lie in does not matter."""
    return None if value is None else Path(value).name


def content_folder(root: Path, config: RunConfig, task: str = TRAIN) -> Path:
    """The folder under `root` that any experiment with this configuration shares.

    The name begins with what a person would look for: model, fraction and seed.
    """
    name = config.model.name.replace("/", "-")
    return root / f"{name}-{config.data.percent}-s{config.seed}-{digest(config, task)}"


def with_needs(runs: Iterable[Run]) -> list[Run]:
    """The runs and all they need, each folder once, whatever is needed before what needs it."""
    ordered: dict[Path, Run] = {}

    def add(run: Run) -> None:
        if run.folder not in ordered:
            for needed in run.needs:
                add(needed)
            ordered[run.folder] = run

    for run in runs:
        add(run)
    return list(ordered.values())


def threads_per_run(jobs: int) -> int:
    """This process's part of the processor for each of `jobs` runs at a time, at least 1."""
    return max(1, processors() // jobs)


# Images to train on and to evaluate on, and classes, as in `datasets.yaml`.
_IMAGENET_22K = (14_197_122, 70_986, 21_841)
# A training step costs a forward pass, and twice as much for the gradients.
_STEP_FORWARDS = 3

Timing = Literal["every network", "one of a name", "none"]


@dataclass(frozen=True)
class RunCost:
    """What one run asks for.

    Attributes:
        images: shown to the network in training.
        macs: multiply-accumulates of training: three forward passes per image.
        seconds: on this machine.
        basis: where the seconds come from: "measured" from the run's own result or a run of the
            same network, "estimated" from a few training steps.
        problem: why the run cannot start, if it cannot; the rest is 0 then.
    """

    images: int
    macs: float
    seconds: float
    basis: str
    problem: str | None = None


def estimate_costs(
    runs: Sequence[Run], timing: Timing = "every network", threads: int = 1
) -> dict[Path, RunCost]:
    """The cost of each run, by folder.

    The speed of a network is taken from finished runs of it if there are any, else from a few
    training steps.

    Args:
        runs: any.
        timing: what to time steps of: of "one of a name", others are taken to be as fast per
            multiply-accumulate; of "none", seconds are 0 unless a finished run knows.
        threads: processor threads that a run will have.
    """
    timed: dict[str, tuple[ModelConfig, int, int]] = {}

    def timed_rate(model: ModelConfig, classes: int, batch: int) -> float | None:
        if timing == "none":
            return None
        name = model.name if timing == "one of a name" else _architecture(model)
        like = timed.setdefault(name, (model, classes, batch))
        size = forward_macs(model, classes) / forward_macs(*like[:2])
        return _steps_rate(_architecture(like[0]), *like[1:], threads) / size

    results = {run.folder: run.result() or {} for run in runs if run.is_finished()}
    known: dict[str, float] = {}
    for run in runs:
        rate = results.get(run.folder, {}).get("images_per_second")
        if rate:
            known.setdefault(_speed_key(run.config), float(rate))
    return {
        run.folder: _cost(run.config, results.get(run.folder), known, timed_rate) for run in runs
    }


def _cost(
    config: RunConfig,
    result: Mapping[str, Any] | None,
    known: Mapping[str, float],
    timed_rate: Callable[[ModelConfig, int, int], float | None],
) -> RunCost:
    """A run's cost; of a finished one, without opening its data, if its result says so."""
    batch = config.engine.batch_size
    if result and {"steps", "macs", "seconds"} <= set(result):
        images = result["steps"] * batch
        macs = _STEP_FORWARDS * result["macs"] * images
        return RunCost(images, macs, result["seconds"], "measured")
    try:
        there, evaluated, classes = image_counts(config)
        images = make_plan(config, there).images
        macs = _STEP_FORWARDS * forward_macs(config.model, classes) * images
        rate = known.get(_speed_key(config))
        basis = "estimated" if rate is None else "measured"
        shown = float(images)
        if rate is None:
            rate = timed_rate(config.model, classes, batch)
            # A finished run's speed knows of its evaluations.
            times = math.ceil(config.schedule.length / config.schedule.eval_every)
            shown += times * evaluated / _STEP_FORWARDS
        return RunCost(images, macs, shown / rate if rate else 0.0, basis)
    except (UserError, OSError) as error:
        return RunCost(0, 0, 0, "estimated", str(error))


def _speed_key(config: RunConfig) -> str:
    """What the speed of training depends on, of those settings that differ between experiments."""
    batch, teacher = config.engine.batch_size, config.objective.teacher
    return f"{_architecture(config.model)}{config.data.dataset}{batch}{teacher}"


def _architecture(model: ModelConfig) -> str:
    """What the network depends on, as text."""
    return json.dumps(to_dict(model) | {"weights": None})


def image_counts(config: RunConfig) -> tuple[int, int, int]:
    """How many images a run trains on and is evaluated on, and of how many classes.

    Datasets with a known size need not be there.

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
        return round(images * share * data.train_share), round(evaluated * share), kept
    return _opened(data, config.seed)


@cache
def _opened(data: DataConfig, seed: int) -> tuple[int, int, int]:
    splits = open_data(data, seed)
    return len(splits.train), len(splits.val), len(splits.classes)


@cache
def _size(architecture: str, classes: int) -> tuple[int, int]:
    network = meta_model(RunConfig(model=from_dict(ModelConfig, json.loads(architecture))), classes)
    with arithmetic_threads(1):  # several only wait for each other at products so small
        return count_parameters(network), count_macs(network)


def parameters(model: ModelConfig, classes: int) -> int:
    """How many numbers a model learns."""
    return _size(_architecture(model), classes)[0]


def forward_macs(model: ModelConfig, classes: int) -> int:
    """Multiply-accumulates of one image's forward pass."""
    return _size(_architecture(model), classes)[1]


@cache
def _steps_rate(architecture: str, classes: int, batch_size: int, threads: int) -> float:
    """Training images per second with so many threads, from a few steps on random images.

    A step that would take long here is timed on a part of its batch.
    """
    config = RunConfig(model=from_dict(ModelConfig, json.loads(architecture)))
    images = timed_images(batch_size, _STEP_FORWARDS * forward_macs(config.model, classes))
    with arithmetic_threads(threads):
        # The fastest: everything else is what the machine was doing besides.
        return images / min(step_seconds(config, classes, images))


@contextlib.contextmanager
def arithmetic_threads(count: int) -> Iterator[None]:
    """So many processor threads for torch in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
                f"about {span(seconds)} with {self.jobs} at a time "
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
        self._over = threading.Event()
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
        self._over.set()
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
            said = f"[{count}] {_say(outcome)} ({100 * done:.0f}%{left and ', ' + left})"
            print(said, file=sys.stderr, flush=True)
            return
        failed = sum(each.error is not None for each in self._ended.values())
        failures = f", {failed} failed" if failed else ""
        self._bar.set_description_str(f"{count} runs{failures}", False)
        if outcome.error is not None:
            self._bar.write(_say(outcome), file=sys.stderr)

    def _watch(self) -> None:
        while not self._bar.disable and not self._over.wait(_WATCH_SECONDS):
            self._bar.n, left = self._fraction()
            self._bar.set_postfix_str(left)

    def _work(self) -> float:
        """Multiply-accumulates done so far."""
        return sum(
            cost.macs * (1.0 if folder in self._ended else done_fraction(folder, cost))
            for folder, cost in self._costs.items()
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


def done_fraction(folder: Path, cost: RunCost) -> float:
    """How much of a run is done, by the last evaluation in its folder, from 0 to 1."""
    try:
        return min(1.0, float(read_rows(folder / "metrics.csv")[-1]["images"]) / cost.images)
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
