"""A training run as a request: its configuration, its folder, what it needs first; and its cost.

Costs are images, multiply-accumulates, and hours on the machine at hand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from locality.data import open_data
from locality.data.config import DATASETS, DataConfig
from locality.errors import UserError
from locality.models import count_macs, count_parameters
from locality.settings import flatten, from_yaml, to_dict, to_yaml
from locality.training.config import ModelConfig, RunConfig
from locality.training.fitting import step_seconds, timed_images
from locality.training.optim import make_plan
from locality.training.preview import meta_model
from locality.training.runs import MAY_CHANGE, PATHS, RunFolder

TRAIN = "locality.training:train"

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
        module, _, function = self.task.partition(":")
        return getattr(importlib.import_module(module), function)


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
    percent = f"{100 * config.data.fraction:g}"
    name = config.model.name.replace("/", "-")
    return root / f"{name}-{percent}-s{config.seed}-{digest(config, task)}"


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


def waves(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs into groups that can go on side by side, one group after the other.

    Needed runs that are not among them (finished ones, say) are waited for by nobody.
    """
    depth: dict[Path, int] = {}
    for run in runs:
        needed = [depth[each.folder] for each in run.needs if each.folder in depth]
        depth[run.folder] = max(needed, default=-1) + 1
    groups: list[list[Run]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for run in runs:
        groups[depth[run.folder]].append(run)
    return groups


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
        return steps_rate(*like, threads) / size

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
        there, evaluated, classes = _images(config)
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
    return to_yaml(dataclasses.replace(model, weights=None))


def train_images(config: RunConfig) -> tuple[int, int]:
    """How many images a run trains on, and of how many classes.

    Datasets with a known size need not be there.

    Raises:
        UserError: if the dataset has no known size and cannot be opened.
    """
    images, _, classes = _images(config)
    return images, classes


def _images(config: RunConfig) -> tuple[int, int, int]:
    """How many images a run trains on and is evaluated on, and of how many classes."""
    data = config.data
    known = DATASETS[data.dataset].get("images")
    known = _IMAGENET_22K if config.recipe == "cvt_22k" else known
    if known is not None:
        images, evaluated, classes = known
        kept = min(data.first_classes or classes, classes) - data.skip_classes
        part = (data.train_part[1] - data.train_part[0]) * data.fraction
        part *= 1 - 1 / data.fold[1] if data.fold else 1
        return round(images * kept / classes * part), round(evaluated * kept / classes), kept
    return _opened(data, config.seed)


@cache
def _opened(data: DataConfig, seed: int) -> tuple[int, int, int]:
    splits = open_data(data, seed)
    return len(splits.train), len(splits.val), len(splits.classes)


@cache
def _size(architecture: str, classes: int) -> tuple[int, int]:
    network = meta_model(RunConfig(model=from_yaml(ModelConfig, architecture)), classes)
    return count_parameters(network), count_macs(network)


def parameters(model: ModelConfig, classes: int) -> int:
    """How many numbers a model learns."""
    return _size(_architecture(model), classes)[0]


def forward_macs(model: ModelConfig, classes: int) -> int:
    """Multiply-accumulates of one image's forward pass."""
    return _size(_architecture(model), classes)[1]


def steps_rate(model: ModelConfig, classes: int, batch_size: int, threads: int) -> float:
    """Training images per second with so many threads, from a few steps on random images.

    A step that would take long here is timed on a part of its batch.
    """
    macs = _STEP_FORWARDS * forward_macs(model, classes)
    images = timed_images(batch_size, macs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _steps_rate(_architecture(model), classes, images)
    finally:
        torch.set_num_threads(before)


@cache
def _steps_rate(architecture: str, classes: int, images: int) -> float:
    config = RunConfig(model=from_yaml(ModelConfig, architecture))
    seconds = step_seconds(config, classes, images)
    # The fastest: everything else is what the machine was doing besides.
    return images / min(seconds)
