"""A comparison of models on custom images, with the same recipe, images and budget.

The settings chosen for this machine are written to the comparison's folder, so that the same
command resumes the same runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import yaml

from locality import checks, settings
from locality.benchmark.measure import inference, interleave
from locality.checkpoints.run_state import BEST, LAST, PREVIOUS
from locality.data import open_data
from locality.errors import UserError, one_line
from locality.files import read_json, read_yaml, write_atomic
from locality.layers.cpu import arithmetic_threads
from locality.machine import processors
from locality.models.variants import PREFIX, variant
from locality.runner.costs import Workload, image_counts
from locality.runner.executors import visible_gpus
from locality.runner.runs import Run, content_folder, threads_per_run
from locality.training import RunConfig, train
from locality.training.devices import resolve_accelerator
from locality.training.model import build_model, settings_from_weights
from locality.training.optim import make_plan
from locality.training.recipes import SMALL_SIDE, adjusted
from locality.training.run_folder import RunFolder
from locality.training.same_run import describe_changes
from locality.training.speed import format_duration
from locality.training.tuner import (
    MIN_EPOCHS,
    SLACK,
    Measured,
    baseline_seconds,
    batch_size,
    measured,
    median_shorter_side,
)


def _scratch(size: str) -> tuple[str, ...]:
    return (f"convit_{size}", f"deit_{size}", f"cvt_{size}", "timm/resnet10t")


SCRATCH = _scratch("mini")
"""Models of about 5 million parameters, for images of 64 pixels."""
# In the place of these, by cost, where time is short or images are small.
_SMALLER = (_scratch("nano"), _scratch("micro"))
PRETRAINED = ("convit_tiny.fb_in1k", "deit_tiny.fb_in1k", "cvt_13.ms_in1k", "timm/resnet18")

TASK = "locality.runner.comparison:train_and_tidy"
_PLAN, _SPEED, _RUNS = "plan.yaml", "inference.json", "runs"
# Start-up, last evaluation and saving of a run; the page at the end.
_RUN_SECONDS, _PAGE_SECONDS = 2.0, 10.0
# Smaller models are taken unless all of these see each image so often.
_ENOUGH_EPOCHS = 30
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
        reducible: names of the settings above that may be cut down where the time is too short.
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
    reducible: tuple[str, ...] = ()

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


@dataclass(frozen=True)
class ComparisonPlan:
    """What a comparison carries out.

    Attributes:
        spec: as asked for, or less, where the time is short.
        configs: the configuration of each model.
        said: what is less, in a sentence; "" if it is as asked for.
    """

    spec: ComparisonSpec
    configs: dict[str, RunConfig]
    said: str = ""


def plan(
    spec: ComparisonSpec, folder: Path, jobs: int, threads: int | None = None, keep: bool = True
) -> ComparisonPlan:
    """What a comparison carries out, chosen when it starts.

    Args:
        spec: the comparison as it is asked for.
        folder: its folder.
        jobs, threads: runs at a time, and CPU threads of each.
        keep: write the plan to the folder.

    Raises:
        UserError: if the folder is another comparison's, the time too short to learn anything in
            so many runs, or as `measured`.
    """
    path = folder / _PLAN
    if path.exists():
        there = read_yaml(path)
        checks.shaped(str(path), there, {"asked": dict, "configurations": dict, "planned": dict})
        before = settings.from_dict(ComparisonSpec, there["asked"])
        changed = [each for each in settings.differences(before, spec) if each[0] != "reducible"]
        if changed:
            raise UserError(
                f"{folder} holds another comparison ({describe_changes(changed)}); give another "
                f"--output"
            )
        found = there["configurations"].items()
        configs = {model: settings.from_dict(RunConfig, values) for model, values in found}
        planned = settings.from_dict(ComparisonSpec, there["planned"])
        return ComparisonPlan(planned, configs, _reduction(before, planned))
    planned, chosen = _choose_configs(spec, jobs, threads or threads_per_run(jobs))
    if keep:
        folder.mkdir(parents=True, exist_ok=True)
        found = {model: settings.to_dict(config) for model, config in chosen.items()}
        values = {"asked": settings.to_dict(spec), "planned": settings.to_dict(planned)}
        values |= {"configurations": found}
        write_atomic(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return ComparisonPlan(planned, chosen, _reduction(spec, planned))


def _reduction(asked: ComparisonSpec, planned: ComparisonSpec) -> str:
    """What is planned that was asked for otherwise, and why."""
    changes = []
    if planned.models != asked.models:
        changes.append(f"models {', '.join(planned.models)}")
    if planned.fractions != asked.fractions:
        changes.append("all images and no fractions")
    if planned.seeds != asked.seeds:
        changes.append(f"{planned.seeds} seeds")
    if not changes:
        return ""
    return (
        f"{asked.minutes:g} minutes are too short for all that is usual, so that this compares "
        f"{'; '.join(changes)}"
    )


class _Budget:
    """The time of a comparison, which includes its choices, baselines and page.

    Args:
        minutes: for everything, from now on.
        jobs: runs at a time.
    """

    def __init__(self, minutes: float, jobs: int) -> None:
        self._started, self.minutes, self._jobs = perf_counter(), minutes, jobs

    def _lanes(self, spec: ComparisonSpec) -> int:
        return min(self._jobs, spec.count, len(visible_gpus()) or processors())

    def _beside(self, spec: ComparisonSpec, found: Mapping[str, Measured]) -> float:
        """Seconds for all but the runs."""
        baselines = baseline_seconds(next(iter(found.values())))
        spent = perf_counter() - self._started
        return spent + baselines * spec.repeats * sum(spec.fractions) + _PAGE_SECONDS

    def each(self, spec: ComparisonSpec, found: Mapping[str, Measured]) -> float:
        """Seconds for each run, of what is left for all."""
        left = 60 * self.minutes - self._beside(spec, found)
        return left * self._lanes(spec) / spec.count - _RUN_SECONDS

    def passes(self, spec: ComparisonSpec, found: Mapping[str, Measured]) -> float:
        """How often the slowest model sees each image."""
        each = self.each(spec, found)
        return min(found[model].affordable_passes(each) for model in spec.models)

    def enough(self, spec: ComparisonSpec, found: Mapping[str, Measured]) -> int:
        """Minutes in which every model learns something."""
        longest = max(found[model].seconds_for(MIN_EPOCHS) for model in spec.models)
        runs = spec.count * (longest + _RUN_SECONDS) / self._lanes(spec)
        return math.ceil(SLACK * (runs + self._beside(spec, found)) / 60)


def _choose_configs(
    spec: ComparisonSpec, jobs: int, threads: int
) -> tuple[ComparisonSpec, dict[str, RunConfig]]:
    recipe = "finetune" if spec.pretrained else "photos"
    # The best of many evaluations would flatter the model whose accuracy varies most.
    given = spec.data | {"engine.tensorboard": False, "schedule.patience": None}
    given |= {"data.fold": (0, spec.folds)} if spec.folds else {}
    given |= {"data.workers": 0} if jobs > 1 else {}  # all cores are busy training
    budget = _Budget(spec.minutes or 0.0, jobs)
    smallest = adjusted(recipe, given | {"data.fraction": min(spec.fractions)}).data
    side = median_shorter_side(open_data(smallest, seed=0).train)  # fails if a class is empty
    size = spec.img_size or (64 if side >= 64 else 32)
    if spec.steps is not None:
        length = {"schedule.steps": spec.steps}
        starts = _starts(spec, spec.models, size)
        return spec, {model: adjusted(recipe, given | of | length) for model, of in starts.items()}
    splits = open_data(adjusted(recipe, given).data, seed=0)

    def changes(models: Sequence[str], size: int) -> dict[str, dict[str, Any]]:
        small = not spec.pretrained and size <= SMALL_SIDE
        alike = {"engine.batch_size": batch_size(len(splits.train), small)} | given
        return {model: alike | of for model, of in _starts(spec, models, size).items()}

    with arithmetic_threads(threads):

        def measure(models: Sequence[str], size: int) -> dict[str, Measured]:
            each = changes(models, size)
            return {model: measured(recipe, of, splits) for model, of in each.items()}

        (models, at), *larger = _candidate_models(spec, size)
        spec = replace(spec, models=models)
        first = found = measure(models, at)
        for models, at in larger:
            pairs = zip(first.values(), changes(models, at).items(), strict=True)
            slower = {model: one.slower(adjusted(recipe, of)) for one, (model, of) in pairs}
            wider = replace(spec, models=models)
            if budget.passes(wider, slower) < _ENOUGH_EPOCHS:
                break
            spec, found = wider, slower
        if found is not first:
            found = measure(spec.models, size)
    choices = _reductions(spec, found)
    for choice in choices:
        if budget.passes(choice, found) >= MIN_EPOCHS:
            each = budget.each(choice, found)
            return choice, {model: _fit(found[model], each) for model in choice.models}
    less = choices[-1]
    raise UserError(
        f"in {spec.minutes:g} minutes {spec.count} runs would see each image fewer than "
        f"{MIN_EPOCHS} times on this machine, which teaches nothing; give --minutes "
        f"{budget.enough(spec, found)}, or --minutes {budget.enough(less, found)} with "
        f"--fractions 1, {less.repeats} {'--folds' if spec.folds else '--seeds'} and "
        f"{len(less.models)} --models"
    )


def _starts(spec: ComparisonSpec, models: Sequence[str], size: int) -> dict[str, dict[str, Any]]:
    """What each model's settings are, of images of this size where it starts from scratch."""
    if spec.pretrained:
        return {weights: settings_from_weights(weights) for weights in models}
    return {model: _at_size(model, size) for model in models}


def _candidate_models(spec: ComparisonSpec, size: int) -> list[tuple[tuple[str, ...], int]]:
    """Models and their image size, by cost: those of the comparison, and before them smaller ones
    if it need not have its own."""
    if "models" not in spec.reducible or spec.pretrained:
        return [(spec.models, size)]
    nano, micro = _SMALLER
    smaller = [(nano, spec.img_size or SMALL_SIDE), (micro, size)]
    return smaller + ([(spec.models, size)] if size > SMALL_SIDE else [])


def _fit(found: Measured, seconds: float) -> RunConfig:
    """The run of this length, which saves about every minute."""
    fit = found.fit(seconds)
    schedule = fit.config.schedule
    every = max(schedule.eval_every, schedule.length * min(1, _SAVE_SECONDS / fit.seconds))
    return settings.replace(fit.config, {"schedule.save_every": every})


def _reductions(spec: ComparisonSpec, found: Mapping[str, Measured]) -> list[ComparisonSpec]:
    """The comparison, and what may become of it where time is short, by what is lost."""
    choices = [spec]
    if "fractions" in spec.reducible:
        choices.append(replace(choices[-1], fractions=(1.0,)))
    if "seeds" in spec.reducible and spec.folds is None and spec.seeds > 2:
        choices.append(replace(choices[-1], seeds=2))
    while "models" in spec.reducible and len(choices[-1].models) > 2:
        models = choices[-1].models
        slowest = max(models[1:], key=lambda model: found[model].speed.training)
        left = tuple(model for model in models if model != slowest)
        choices.append(replace(choices[-1], models=left))
    return choices


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
