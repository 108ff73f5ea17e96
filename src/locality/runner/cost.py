"""What runs cost: images, multiply-accumulates, and hours on the machine at hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from locality.data import open_data
from locality.data.config import DATASETS, DataConfig
from locality.errors import UserError
from locality.models import ImageClassifier, count_macs, count_parameters
from locality.runner.runs import Run
from locality.settings import from_yaml, to_yaml
from locality.training.config import ModelConfig, RunConfig
from locality.training.fitting import step_seconds, timed_images
from locality.training.load import meta_model
from locality.training.optim import make_plan

# Images to train on and to evaluate on, and classes, as in `datasets.yaml`.
_IMAGENET_22K = (14_197_122, 70_986, 21_841)
# A training step costs a forward pass, and twice as much for the gradients.
_STEP_FORWARDS = 3


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
    runs: Sequence[Run], measure: bool = True, threads: int = 1
) -> dict[Path, RunCost]:
    """The cost of each run, by folder.

    The speed of a network is taken from finished runs of it if there are any, else from a few
    training steps.

    Args:
        runs: any.
        measure: whether to time steps; without, seconds are 0 unless a finished run knows.
        threads: processor threads that a run will have.
    """
    results = {run.folder: run.result() or {} for run in runs if run.is_finished()}
    known: dict[str, float] = {}
    for run in runs:
        rate = results.get(run.folder, {}).get("images_per_second")
        if rate:
            known.setdefault(_speed_key(run.config), float(rate))
    timed = threads if measure else None
    return {run.folder: _cost(run.config, results.get(run.folder), known, timed) for run in runs}


def _cost(
    config: RunConfig,
    result: Mapping[str, Any] | None,
    known: Mapping[str, float],
    threads: int | None,
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
        if rate is None and threads is not None:
            rate = steps_rate(config.model, classes, batch, threads)
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
def _meta_network(architecture: str, classes: int) -> ImageClassifier:
    """A network without data in its tensors."""
    return meta_model(RunConfig(model=from_yaml(ModelConfig, architecture)), classes)


@cache
def _size(architecture: str, classes: int) -> tuple[int, int]:
    network = _meta_network(architecture, classes)
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
