"""A comparison of models on custom images, with the same recipe, images and budget.

The settings chosen for this machine are written to the comparison's folder, so that the same
command resumes the same runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from locality import checks, settings
from locality.benchmark.measure import inference, interleave
from locality.checkpoints.run_state import BEST, LAST, PREVIOUS
from locality.data import open_data
from locality.errors import UserError, one_line
from locality.files import read_json, read_yaml, write_atomic
from locality.machine import processors
from locality.models.variants import PREFIX, variant
from locality.runner.costs import Workload, arithmetic_threads, image_counts
from locality.runner.executors import visible_gpus
from locality.runner.runs import Run, content_folder, threads_per_run
from locality.training import RunConfig, train
from locality.training.devices import resolve_accelerator
from locality.training.model import build_model, settings_from_weights
from locality.training.optim import make_plan
from locality.training.recipes import adjusted
from locality.training.run_folder import RunFolder
from locality.training.speed import format_duration
from locality.training.tuner import autofit, median_shorter_side

SCRATCH = ("convit_mini", "deit_mini", "cvt_mini", "timm/resnet10t")
"""Models of about 5 million parameters, for images of 64 pixels."""
PRETRAINED = ("convit_tiny.fb_in1k", "deit_tiny.fb_in1k", "cvt_13.ms_in1k", "timm/resnet18")

TASK = "locality.runner.comparison:train_and_tidy"
_PLAN, _SPEED, _RUNS = "plan.yaml", "inference.json", "runs"
# Start-up, last evaluation and saving of a run.
_RUN_SECONDS = 2.0
# Shorter runs save only at their end.
_SAVE_SECONDS = 60.0
_ROUNDS = 15


@dataclass(frozen=True)
class ComparisonSpec:
    """The settings of a comparison.

    Attributes:
        data: settings of the images, by dotted name.
        models: names of models; weights if `pretrained`.
        pretrained: fine-tune weights instead of training from scratch.
        minutes: for all runs together, in equal parts; None if `steps` is given.
        steps: length of every run.
        seeds: runs of each model on each fraction.
        folds: cross-validation instead of seeds.
        fractions: of the training images; all runs are equally long.
        img_size: for training from scratch; 64, or 32 for smaller images, unless given.
    """

    data: dict[str, Any]
    models: tuple[str, ...]
    pretrained: bool = False
    minutes: float | None = checks.bounded(10.0, 0, above=True)
    steps: int | None = checks.bounded(None, 1)
    seeds: int = checks.bounded(3, 1)
    folds: int | None = checks.bounded(None, 2)
    fractions: tuple[float, ...] = checks.bounded((0.25, 0.5, 1.0), 0, 1, above=True)
    img_size: int | None = checks.bounded(None, 1)

    def __post_init__(self) -> None:
        checks.settings(self)
        if len(set(self.models)) < 2:
            raise UserError(f"{len(set(self.models))} model is given; a comparison needs two")
        if 1.0 not in self.fractions:
            raise UserError("fractions leave out 1; models are compared on all images")

    @property
    def repeats(self) -> int:
        """Runs of each model on each fraction."""
        return self.folds or self.seeds

    @property
    def count(self) -> int:
        """Of all runs."""
        return len(self.models) * len(self.fractions) * self.repeats


def plan(
    spec: ComparisonSpec, folder: Path, jobs: int, threads: int | None = None, keep: bool = True
) -> dict[str, RunConfig]:
    """The configuration of each model, chosen when the comparison starts.

    Args:
        spec: the comparison.
        folder: its folder.
        jobs, threads: runs at a time, and CPU threads of each.
        keep: write the configurations to the folder.

    Raises:
        UserError: if the folder is another comparison's, the budget too small for so many runs, or
            as `autofit`.
    """
    path = folder / _PLAN
    if path.exists():
        there = read_yaml(path)
        checks.shaped(str(path), there, {"asked": dict, "configurations": dict})
        before = settings.from_dict(ComparisonSpec, there["asked"])
        if changed := [
            f"{name}: {old} there, {new} now"
            for name, old, new in settings.differences(before, spec)
        ]:
            raise UserError(
                f"{folder} holds another comparison ({'; '.join(changed)}); give another --output"
            )
        found = there["configurations"].items()
        return {model: settings.from_dict(RunConfig, values) for model, values in found}
    chosen = _choose_configs(spec, jobs, threads or threads_per_run(jobs))
    if keep:
        folder.mkdir(parents=True, exist_ok=True)
        found = {model: settings.to_dict(config) for model, config in chosen.items()}
        values = {"asked": settings.to_dict(spec), "configurations": found}
        write_atomic(path, settings.yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return chosen


def _choose_configs(spec: ComparisonSpec, jobs: int, threads: int) -> dict[str, RunConfig]:
    recipe = "finetune" if spec.pretrained else "photos"
    given = spec.data | {"engine.tensorboard": False}
    given |= {"data.fold": (0, spec.folds)} if spec.folds else {}
    given |= {"data.workers": 0} if jobs > 1 else {}  # all cores are busy training
    smallest = adjusted(recipe, given | {"data.fraction": min(spec.fractions)}).data
    splits = open_data(smallest, seed=0)  # fails if a class is empty
    if spec.pretrained:
        starts = {weights: settings_from_weights(weights) for weights in spec.models}
    else:
        size = spec.img_size or (64 if median_shorter_side(splits.train) >= 64 else 32)
        starts = {model: _at_size(model, size) for model in spec.models}
    if spec.steps is not None:
        length = {"schedule.steps": spec.steps}
        return {model: adjusted(recipe, given | start | length) for model, start in starts.items()}
    assert spec.minutes is not None
    lanes = min(jobs, spec.count, len(visible_gpus()) or processors())
    minutes = spec.minutes * lanes / spec.count - _RUN_SECONDS / 60
    if minutes <= 0:
        raise UserError(
            f"{spec.minutes:g} minutes for {spec.count} runs are less than it takes to begin "
            f"them; give more --minutes, or fewer --seeds, --folds or --fractions"
        )
    with arithmetic_threads(threads):
        return {
            model: _fit_to_time(recipe, given | start, minutes) for model, start in starts.items()
        }


def _fit_to_time(recipe: str, given: Mapping[str, Any], minutes: float) -> RunConfig:
    found = autofit(recipe, given, minutes)
    schedule = found.config.schedule
    every = max(schedule.eval_every, schedule.length * min(1, _SAVE_SECONDS / found.seconds))
    return settings.replace(found.config, {"schedule.save_every": every})


def _at_size(model: str, size: int) -> dict[str, Any]:
    """The settings of a model for square images: 8×8 patches of at most 16 pixels."""
    chosen: dict[str, Any] = {"model.name": model, "model.img_size": size}
    if not model.startswith(PREFIX) and hasattr(variant(model).config, "patch_size"):
        chosen["model.patch_size"] = max(1, min(16, size // 8))
    return chosen


def available(weights: Sequence[str]) -> tuple[list[str], list[str]]:
    """The weights that can be opened, and for each of the others why not."""
    found, missing = [], []
    for name in weights:
        try:
            settings_from_weights(name)
            found.append(name)
        except (UserError, OSError) as error:
            missing.append(f"{name} is left out: {one_line(error)}")
    return found, missing


def comparison_runs(
    spec: ComparisonSpec, configs: Mapping[str, RunConfig], folder: Path
) -> list[Run]:
    """All runs, first one of each model on all images, for an early report."""
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
                # The digest identifies weights by their file name only.
                own = folder / _RUNS / model.replace("/", "-")
                runs.append(Run(name, config, content_folder(own, config, TASK), task=TASK))
    return runs


def summary(
    spec: ComparisonSpec, runs: Sequence[Run], jobs: int, threads: int | None = None
) -> str:
    """How long each model trains, and how long all runs take."""
    lines = []
    for run in runs[: len(spec.models)]:  # one of each model, on all images
        images = image_counts(run.config)[0]
        plan = make_plan(run.config, images)
        lines.append(
            f"{run.config.model.name}: {plan.steps:,} steps of {plan.batch_size} images, each of "
            f"{images:,} {plan.images / images:.3g} times"
        )
    if spec.minutes is None:
        return "\n".join([*lines, str(Workload(runs, jobs, threads))])
    waiting = sum(not run.is_finished() for run in runs)
    left = format_duration(60 * spec.minutes * waiting / len(runs))
    return "\n".join([*lines, f"{len(runs)} runs, {waiting} to do: about {left}, {jobs} at a time"])


def train_and_tidy(config: RunConfig, folder: Path) -> None:
    """Train, and delete the weights of runs on a fraction of the images."""
    train(config, folder)
    for name in (PREVIOUS, *([LAST, BEST] if config.data.fraction < 1 else ())):
        (RunFolder(folder).checkpoints.path / name).unlink(missing_ok=True)


def measure_inference(runs: Sequence[Run], folder: Path) -> dict[str, float]:
    """Milliseconds per image of each model at batch size 1, interleaved.

    Measured once, on untrained models, and written to the folder.
    """
    path = folder / _SPEED
    wanted = {run.config.model.name: run for run in runs}
    if path.exists() and wanted.keys() <= read_json(path).keys():
        return read_json(path)
    device = torch.device(resolve_accelerator("auto"))
    work = {}
    for name, run in wanted.items():
        model = build_model(run.config, len(RunFolder(run.folder).classes())).to(device).eval()
        images = torch.randn(1, 3, *model.img_size, device=device)
        work[name] = inference(model, images, nullcontext)
    timing = interleave(work, device, _ROUNDS, warmup=3)
    found = {name: round(1000 * timing.median(name), 3) for name in work}
    write_atomic(path, json.dumps(found) + "\n")
    return found
