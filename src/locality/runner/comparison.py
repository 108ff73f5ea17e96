"""Comparison of models on custom images with the same recipe, images and budget.

The settings chosen for this machine are saved in the comparison's folder, so that the same command
resumes the same runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import yaml
from msgspec import Meta

from locality import checks, settings
from locality.checkpoints.run_state import BEST, LAST, PREVIOUS
from locality.data import open_data
from locality.data.sources import ImageFingerprint
from locality.data.validation import verify
from locality.errors import UserError, one_line, prefix_errors
from locality.files import read_shaped, read_yaml, write_atomic
from locality.machine import processors
from locality.runner.executors import visible_gpus
from locality.runner.runs import Run, content_folder, workload
from locality.runs import RunFolder
from locality.training import RunConfig, train
from locality.training.autofit import (
    batch_size,
    crop_settings,
    image_size,
    median_shorter_side,
    sampled_sizes,
    sized,
)
from locality.training.cost import format_duration, image_counts
from locality.training.devices import resolve_accelerator
from locality.training.folder_checks import describe_changes
from locality.training.model import build_model, settings_from_weights
from locality.training.optim import make_plan
from locality.training.recipes import SMALL_SIDE, recipe

SCRATCH = ("convit_nano", "deit_nano", "cvt_nano", "timm/test_resnet")
"""Models of at most half a million parameters, trainable within minutes on a CPU."""
PRETRAINED = ("convit_tiny.fb_in1k", "deit_tiny.fb_in1k", "cvt_13.ms_in1k", "timm/resnet18")

TASK = "locality.runner.comparison:train_and_tidy"
_PLAN, _SPEED, _RUNS = "plan.yaml", "inference.json", "runs"
# The share of the minutes for the baselines and the page.
_PAGE = 0.05
_ROUNDS = 15


@dataclass(frozen=True)
class ComparisonSpec:
    """The settings of a comparison.

    Attributes:
        data: data settings by dotted name.
        models: model names, or weights if `pretrained`.
        pretrained: fine-tune weights instead of training from scratch.
        minutes: time for all runs together, divided equally; None if `steps` is given.
        steps: length of each run.
        seeds: runs of each model on each fraction.
        folds: cross-validation instead of seeds.
        fractions: fractions of the training images; all runs have the same length.
        img_size: image size for training from scratch; by default as in `train`.
    """

    data: dict[str, Any]
    models: tuple[str, ...]
    pretrained: bool = False
    minutes: checks.Positive | None = 10.0
    steps: checks.Count | None = None
    seeds: checks.Count = 3
    folds: Annotated[int, Meta(ge=2)] | None = None
    fractions: tuple[checks.PositiveShare, ...] = (1.0,)
    img_size: checks.Count | None = None

    def __post_init__(self) -> None:
        settings.check(self)
        if len(set(self.models)) < 2:
            raise UserError(f"a comparison needs two models, not {len(set(self.models))}")
        if 1.0 not in self.fractions:
            raise UserError("fractions must include 1: models are compared on all images")

    @property
    def repeats(self) -> int:
        """Runs of each model on each fraction."""
        return self.folds or self.seeds

    @property
    def count(self) -> int:
        """Number of runs."""
        return len(self.models) * len(self.fractions) * self.repeats


def plan(spec: ComparisonSpec, folder: Path, jobs: int, keep: bool = True) -> dict[str, RunConfig]:
    """The configuration of each model, chosen once when a comparison starts.

    Args:
        spec: the comparison.
        folder: its folder.
        jobs: number of parallel runs.
        keep: save the plan in the folder.

    Raises:
        UserError: the folder holds a comparison with other settings or images, or the images
            cannot be used.
    """
    path = folder / _PLAN
    data = recipe("photos", spec.data).data

    def fingerprint() -> str:
        return ImageFingerprint.of(open_data(data, seed=0)).fingerprint

    if path.exists():
        there = read_yaml(path)
        shape = {"comparison": dict, "configurations": dict, "images?": str}
        checks.shaped(str(path), there, shape)
        with prefix_errors(path):
            before = settings.from_dict(ComparisonSpec, there["comparison"])
        if changed := list(settings.differences(before, spec)):
            raise UserError(
                f"{folder} holds another comparison ({describe_changes(changed)}); use another "
                f"--output"
            )
        if (recorded := there.get("images")) is not None and recorded != fingerprint():
            raise UserError(
                f"images, labels or classes in '{data.root}' have changed since {folder} was "
                f"started; restore them, or use another --output"
            )
        found = there["configurations"].items()
        return {model: settings.from_dict(RunConfig, values, str(path)) for model, values in found}
    images = fingerprint() if keep else None
    chosen = _choose_configs(spec, jobs)
    if keep:
        folder.mkdir(parents=True, exist_ok=True)
        configs = {model: settings.to_dict(config) for model, config in chosen.items()}
        compared = settings.to_dict(spec)
        values = {"comparison": compared, "configurations": configs, "images": images}
        write_atomic(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return chosen


def _choose_configs(spec: ComparisonSpec, jobs: int) -> dict[str, RunConfig]:
    started = perf_counter()
    name = "finetune" if spec.pretrained else "photos"
    # No patience: the best of many evaluations favours models whose accuracy fluctuates.
    given = spec.data | {"engine.tensorboard": False, "schedule.patience": None}
    given |= {"data.fold": (0, spec.folds)} if spec.folds else {}
    given |= {"data.workers": 0} if jobs > 1 else {}  # training uses all cores
    smallest = recipe(name, given | {"data.fraction": min(spec.fractions)}).data
    open_data(smallest, seed=0)  # fails if a class is empty
    splits = open_data(recipe(name, given).data, seed=0)
    verify(splits.val)
    if spec.folds:
        verify(splits.train)  # validation images of the other folds
    sizes = sampled_sizes(splits.train)
    side = spec.img_size or image_size(median_shorter_side(sizes))
    crop, _ = crop_settings(given, sizes)
    given |= crop
    if spec.minutes is None:
        given["schedule.steps"] = spec.steps
    else:
        at_once = min(jobs, spec.count, len(visible_gpus()) or processors())
        seconds = 60 * spec.minutes * (1 - _PAGE) - (perf_counter() - started)
        given["schedule.minutes"] = max(1.0, seconds * at_once / spec.count) / 60
        small = not spec.pretrained and side <= SMALL_SIDE
        given = {"engine.batch_size": batch_size(len(splits.train), small)} | given
    starts = {
        model: settings_from_weights(model) | crop
        if spec.pretrained
        else {"model.name": model, **sized(model, side)}
        for model in spec.models
    }
    return {model: recipe(name, given | of) for model, of in starts.items()}


def available(weights: Sequence[str]) -> tuple[list[str], list[str]]:
    """The weights that can be opened, and a sentence on each of the others."""
    found, missing = [], []
    for name in weights:
        try:
            settings_from_weights(name)
            found.append(name)
        except (UserError, OSError) as error:
            missing.append(f"{name} is skipped: {one_line(error)}")
    return found, missing


def comparison_runs(
    spec: ComparisonSpec, configs: Mapping[str, RunConfig], folder: Path
) -> list[Run]:
    """All runs; the first ones are one per model on all images, for an early report."""
    runs = []
    word = "fold" if spec.folds else "seed"
    for number in range(spec.repeats):
        for fraction in sorted(spec.fractions, reverse=True):
            for model, base in configs.items():
                changes: dict[str, Any] = {"seed": number, "data.fraction": fraction}
                if spec.folds:
                    changes["data.fold"] = (number, spec.folds)
                config = settings.replace(base, changes)
                name = f"{model} {100 * fraction:g}% {word} {number}"
                # One folder per model, as the digest identifies weights by file name only.
                own = folder / _RUNS / model.replace("/", "-")
                runs.append(Run(name, config, content_folder(own, config, TASK), task=TASK))
    return runs


def summary(
    spec: ComparisonSpec, runs: Sequence[Run], jobs: int, threads: int | None = None
) -> str:
    """The length of each model's runs and the total time, as text."""
    lines = []
    for run in runs[: len(spec.models)]:  # one of each model, on all images
        config = run.config
        images, length = image_counts(config)[0], f"{60 * config.schedule.length:.0f} s"
        if spec.minutes is None:
            plan = make_plan(config, images)
            length = f"{plan.steps:,} steps, {plan.images / images:.3g} passes"
        batch = config.engine.batch_size
        lines.append(f"{config.model.name}: {length}, {images:,} images in batches of {batch}")
    if spec.minutes is None:
        return "\n".join([*lines, workload(runs, jobs, threads)])
    waiting = sum(not run.is_finished() for run in runs)
    left = format_duration(60 * spec.minutes * waiting / len(runs))
    return "\n".join([*lines, f"{len(runs)} runs, {waiting} to do: about {left}, {jobs} at a time"])


def train_and_tidy(config: RunConfig, folder: Path) -> None:
    """Train; for runs on a fraction of the images, delete the weights."""
    train(config, folder)
    for name in (PREVIOUS, *([LAST, BEST] if config.data.fraction < 1 else ())):
        (RunFolder(folder).checkpoints / name).unlink(missing_ok=True)


def measure_inference(runs: Sequence[Run], folder: Path) -> dict[str, float]:
    """Milliseconds per image of each model at batch size 1, timed interleaved.

    Measured once, on untrained models, and saved in the folder.
    """
    path = folder / _SPEED
    wanted = {run.config.model.name: run for run in runs}
    known = read_shaped(path, dict[str, checks.Finite], {})
    if wanted.keys() <= known.keys():
        return known
    device = torch.device(resolve_accelerator("auto"))
    models = {
        name: build_model(run.config, len(RunFolder(run.folder).classes())).to(device).eval()
        for name, run in wanted.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            for name, model in models.items():
                image = torch.randn(1, 3, *model.img_size, device=device)
                start = perf_counter()
                model(image).cpu()  # waits for the GPU
                seconds[name].append(perf_counter() - start)
    speeds = {name: round(1000 * median(times), 3) for name, times in seconds.items()}
    write_atomic(path, json.dumps(speeds) + "\n")
    return speeds
