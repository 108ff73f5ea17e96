"""What runs cost: images, multiply-accumulates, and hours on the machine at hand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from locality.data import open_data
from locality.data.config import DataConfig
from locality.errors import UserError
from locality.models import count_parameters
from locality.runner.networks import build_network, image_size, network_macs
from locality.runner.runs import Run
from locality.training.config import ModelConfig, RunConfig
from locality.training.plan import make_plan
from locality.training.settings import to_yaml

# Training images of datasets that may not lie here, as their makers give them; a hundredth of a
# per cent more or less does not matter for a plan. (images, classes)
NOMINAL: dict[str, tuple[int, int]] = {
    "imagenet": (1_281_167, 1000),
    "imagenet22k": (14_197_122, 21_841),
    "imagenet100": (128_117, 100),
    "cifar10": (50_000, 10),
    "cifar100": (50_000, 100),
    "flowers102": (2_040, 102),
    "pets": (3_680, 37),
}
# A training step costs a forward pass, and twice as much for the gradients.
_STEP_FORWARDS = 3
_TIMED_MACS = 4e10
_REPEATS = 5


@dataclass(frozen=True)
class Cost:
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


def estimate_costs(runs: Sequence[Run], measure: bool = True, threads: int = 1) -> dict[Path, Cost]:
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
    return {
        run.folder: _spent(run.config, results.get(run.folder, {}))
        or _cost_or_problem(run.config, known, timed)
        for run in runs
    }


def _spent(config: RunConfig, result: Mapping[str, Any]) -> Cost | None:
    """What a finished run did cost, without opening its data; None if its result does not say."""
    if not {"steps", "macs", "seconds"} <= set(result):
        return None
    images = result["steps"] * config.engine.batch_size
    return Cost(images, _STEP_FORWARDS * result["macs"] * images, result["seconds"], "measured")


def _cost_or_problem(config: RunConfig, known: Mapping[str, float], threads: int | None) -> Cost:
    try:
        return _cost(config, known, threads)
    except (UserError, OSError) as error:
        return Cost(0, 0, 0, "estimated", str(error))


def _cost(config: RunConfig, known: Mapping[str, float], threads: int | None) -> Cost:
    images, classes = train_images(config)
    shown = make_plan(config, images).images
    macs = _STEP_FORWARDS * forward_macs(config.model, classes) * shown
    rate = known.get(_speed_key(config))
    basis = "estimated" if rate is None else "measured"
    if rate is None and threads is not None:
        rate = steps_rate(config.model, classes, config.engine.batch_size, threads)
    return Cost(shown, macs, shown / rate if rate else 0.0, basis)


def _speed_key(config: RunConfig) -> str:
    """What the speed of training depends on, of those settings that differ between experiments."""
    batch, teacher = config.engine.batch_size, config.objective.teacher
    return f"{_architecture(config.model)}{config.data.dataset}{batch}{teacher}"


def _architecture(model: ModelConfig) -> str:
    return to_yaml(ModelConfig(model.name, model.img_size, model.patch_size, None, model.overrides))


def train_images(config: RunConfig) -> tuple[int, int]:
    """How many images a run trains on, and of how many classes.

    Datasets with a known size need not be there.

    Raises:
        UserError: if the dataset has no known size and cannot be opened.
    """
    data = config.data
    known = "imagenet22k" if config.recipe == "cvt_22k" else data.dataset
    if known in NOMINAL:
        images, classes = NOMINAL[known]
        kept = min(data.first_classes or classes, classes)
        return round(images * kept / classes * data.fraction), kept
    return _opened(data, config.seed)


@cache
def _opened(data: DataConfig, seed: int) -> tuple[int, int]:
    splits = open_data(data, seed)
    return len(splits.train), len(splits.classes)


def forward_macs(model: ModelConfig, classes: int) -> int:
    """Multiply-accumulates of one image's forward pass."""
    return _forward_macs(_architecture(model), model.name, classes, _Settings(model))


def parameters(model: ModelConfig, classes: int) -> int:
    """How many numbers a model learns."""
    return _parameters(_architecture(model), model.name, classes, _Settings(model))


class _Settings:
    """A model's settings as an argument that a cache disregards."""

    def __init__(self, model: ModelConfig) -> None:
        self.given: dict[str, Any] = {
            "img_size": model.img_size,
            "patch_size": model.patch_size,
            **model.overrides,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings)

    def __hash__(self) -> int:
        return 0


@cache
def _forward_macs(key: str, name: str, classes: int, settings: _Settings) -> int:
    with torch.device("meta"):
        network = build_network(name, classes, settings.given)
        return network_macs(network, settings.given)


@cache
def _parameters(key: str, name: str, classes: int, settings: _Settings) -> int:
    with torch.device("meta"):
        return count_parameters(build_network(name, classes, settings.given))


def steps_rate(model: ModelConfig, classes: int, batch_size: int, threads: int) -> float:
    """Training images per second with so many threads, from a few steps on random images.

    A step that would take long here is timed on a part of its batch.
    """
    macs = _STEP_FORWARDS * forward_macs(model, classes)
    images = int(min(batch_size, max(1, _TIMED_MACS // macs)))
    whole = images == batch_size
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _steps_rate(
            _architecture(model), model.name, classes, images, whole, _Settings(model)
        )
    finally:
        torch.set_num_threads(before)


@cache
def _steps_rate(
    key: str, name: str, classes: int, images: int, whole: bool, settings: _Settings
) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        network = build_network(name, classes, settings.given)
    # Any weights cost the same; drawing those of a large network properly takes longer than a step.
    network = network.to_empty(device=device).train()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.ndim > 1:
            torch.nn.init.uniform_(tensor, -0.05, 0.05)
        elif tensor.is_floating_point():
            torch.nn.init.ones_(tensor)  # smaller norms would lead to slow, subnormal numbers
    optimiser = torch.optim.AdamW(network.parameters())
    batch = torch.randn(images, 3, *image_size(network, settings.given), device=device)
    labels = torch.zeros(images, dtype=torch.long, device=device)
    seconds: list[float] = []
    # A network that takes long is not timed more than twice.
    while len(seconds) < 2 or (len(seconds) < _REPEATS and sum(seconds) < 1):
        begin = time.perf_counter()
        F.cross_entropy(network(batch), labels).backward()
        if whole:  # the optimiser's cost is one per batch, not one per image
            optimiser.step()
        optimiser.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    # The fastest: everything else is what the machine was doing besides.
    return images / min(seconds)


def span(seconds: float) -> str:
    """A length of time for people: "19 s", "4 min", "2.5 h", "12 d"."""
    for unit, length in (("d", 86400), ("h", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
