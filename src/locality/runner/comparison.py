"""Comparison of models on custom images with the same recipe, images and budget."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locality.data import open_data
from locality.data.checking import verify
from locality.data.sources import ImageFingerprint
from locality.errors import UserError, some
from locality.runner.runs import Request, content_folder
from locality.runs import Run
from locality.settings import replace
from locality.training import autofit
from locality.training.folder_checks import check_images
from locality.training.job import check_classes
from locality.training.model import settings_from_weights
from locality.training.recipes import is_small, recipe

SCRATCH = ("convit_nano", "deit_nano", "cvt_photo", "timm/test_resnet")
"""Models of at most half a million parameters, trainable within minutes on a CPU."""
PRETRAINED = ("convit_tiny.fb_in1k", "deit_tiny.fb_in1k", "cvt_13.ms_in1k", "timm/resnet18")


def comparison_runs(
    data: Mapping[str, Any],
    folder: Path,
    models: Sequence[str] = (),
    pretrained: bool = False,
    minutes: float = 10.0,
    steps: int | None = None,
    seeds: int = 3,
    folds: int | None = None,
    fractions: Sequence[float] = (1.0,),
    img_size: int | None = None,
    jobs: int = 2,
) -> tuple[list[Request], str, float]:
    """The runs of a comparison, what a centre crop drops of the images, as text, and the seconds
    that each run needs to read its images.

    The same arguments give the same runs, which resume.

    Args:
        data: data settings by dotted name.
        folder: the folder of the comparison.
        models: model names, or weights if `pretrained`; some small ones by default.
        pretrained: fine-tune weights instead of training from scratch.
        minutes: time in all, divided equally, unless `steps` is given.
        steps: length of each run.
        seeds: runs of each model on each fraction.
        folds: cross-validation instead of seeds.
        fractions: fractions of the training images; all runs have the same length.
        img_size: image size for training from scratch; by default as in `train`.
        jobs: number of parallel runs.

    Raises:
        UserError: the images cannot be used, or have changed since a run finished.
    """
    models = list(dict.fromkeys(models or (PRETRAINED if pretrained else SCRATCH)))
    if len(models) < 2:
        raise UserError(f"a comparison needs two models, not {len(models)}")
    if pretrained and len({Path(model).name for model in models}) < len(models):
        raise UserError(
            f"two of the weights {some(models)} have the same file name, by which runs are told "
            f"apart; rename one"
        )
    if 1.0 not in fractions:
        raise UserError("fractions must include 1: models are compared on all images")
    if folds == 1:
        raise UserError("folds is 1; give at least 2")
    name = "finetune" if pretrained else "photos"
    # No patience: the best of many evaluations favours models whose accuracy fluctuates.
    settings = {**data, "schedule.patience": None}
    settings |= {"data.fold": (0, folds)} if folds else {}
    settings |= {"data.workers": 0} if jobs > 1 else {}  # training uses all cores
    smallest = recipe(name, settings | {"data.fraction": min(fractions)})
    open_data(smallest.data, 0)  # no class is empty
    splits = open_data(recipe(name, settings).data, 0)
    check_classes(splits, None)
    started = time.perf_counter()
    verify(splits.val)
    reading = (time.perf_counter() - started) * (1 + len(splits.train) / len(splits.val))
    if folds:
        verify(splits.train)  # validation images of the other folds
    sizes = autofit.sampled_sizes(splits.train)
    side = img_size or autofit.image_size(autofit.median_shorter_side(sizes))
    crop, said = autofit.crop_settings(settings, sizes)
    settings |= crop
    rounds = math.ceil(len(models) * len(fractions) * (folds or seeds) / jobs)
    share = {"schedule.minutes": minutes / rounds}
    settings |= share if steps is None else {"schedule.steps": steps}
    configs = {
        model: recipe(name, settings | settings_from_weights(model) | crop)
        if pretrained
        else recipe(name, settings | {"model.name": model, **autofit.sized(model, side)})
        for model in models
    }
    for model, config in configs.items():
        batch = autofit.batch_size(len(splits.train), is_small(config.model.img_size))
        configs[model] = replace(config, {"engine.batch_size": batch})
    runs = []
    for number in range(folds or seeds):
        for fraction in sorted(fractions, reverse=True):
            for model, base in configs.items():
                changes = {"seed": number, "data.fraction": fraction}
                config = replace(base, changes | ({"data.fold": (number, folds)} if folds else {}))
                title = f"{model} {100 * fraction:g}% {'fold' if folds else 'seed'} {number}"
                # One folder per model.
                own = folder / "runs" / model.replace("/", "-")
                runs.append(Request(title, config, content_folder(own, config)))
    _check_images(runs)
    return runs, said, reading


def shortened(runs: Sequence[Request], seconds: float, jobs: int) -> list[Request]:
    """Runs of minutes, of which the comparison has spent `seconds`: at most half, shared alike."""
    share = seconds / math.ceil(len(runs) / jobs)
    return [
        dataclasses.replace(run, spent=min(share, 30 * run.config.schedule.length)) for run in runs
    ]


def expected_seconds(runs: Sequence[Request], jobs: int, starting: float, reading: float) -> float:
    """Seconds of runs of minutes, with the time to start and to read the images for each.

    Args:
        runs: the runs.
        jobs: number of parallel runs.
        starting: seconds to start a process.
        reading: seconds to read all images.
    """
    lengths = [60 * run.config.schedule.length for run in runs if not run.is_finished()]
    before = 3 * starting + reading  # the runs' processes, the page and the baselines
    share = before / max(1, math.ceil(len(lengths) / jobs))
    return before + sum(max(n - min(share, n / 2), reading) for n in lengths) / jobs


def _check_images(runs: Sequence[Request]) -> None:
    """Check that the images are those of a run that has finished."""
    if finished := next((run for run in runs if run.is_finished()), None):
        data, recorded = finished.config.data, (finished.result() or {}).get("images")
        images = ImageFingerprint.of(open_data(data, finished.config.seed))
        check_images(Run(finished.folder), data, images, recorded)
