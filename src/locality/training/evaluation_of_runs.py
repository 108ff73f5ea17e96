"""Evaluating models again: those of runs, on their own data or on another set, and opened ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from locality import checks
from locality.checkpoints.open import Classifier, open_model
from locality.data import DataConfig, DataSplits, Preprocessing, eval_loader, open_data
from locality.errors import UserError
from locality.models import ImageClassifier, count_macs
from locality.training.evaluation import evaluate
from locality.training.precision import choose_precision
from locality.training.runs import RunFolder
from locality.training.setup import resolve_accelerator


def evaluate_run(
    folder: Path | str,
    data: DataConfig | None = None,
    *,
    img_size: int | None = None,
    batch_size: int = 256,
    workers: int | None = None,
    precision: str = "fp32",
    accelerator: str = "auto",
) -> dict[str, Any]:
    """Top-1, top-5 and loss of a run's model.

    Args:
        folder: the run's.
        data: other data with the same classes, such as ImageNet-V2; None is the run's own.
        img_size: side of the images; None is the run's own.
        batch_size: images at once.
        workers: loading processes; None is the run's own number.
        precision: "fp32", "bf16-mixed" or "auto".
        accelerator: "auto", "cpu", "cuda" or "mps".

    Raises:
        UserError: if the folder is no run, or the data has other classes.
    """
    config = RunFolder(folder).config()
    data = config.data if data is None else data
    if workers is not None:
        data = dataclasses.replace(data, workers=workers)
    return evaluate_opened(
        open_model(folder),
        data,
        seed=config.seed,
        img_size=img_size,
        batch_size=batch_size,
        precision=precision,
        accelerator=accelerator,
    )


def evaluate_opened(
    opened: Classifier,
    data: DataConfig,
    *,
    seed: int = 0,
    img_size: int | None = None,
    batch_size: int = 256,
    precision: str = "fp32",
    accelerator: str = "auto",
) -> dict[str, Any]:
    """Top-1, top-5 and loss of an opened model on a dataset, its images prepared as it wants them.

    Args:
        opened: what `locality.checkpoints.open_model` gives.
        data: with as many classes as the model has.
        seed: of the data's own random splits.
        img_size, batch_size, precision, accelerator: as `evaluate_run`.

    Raises:
        UserError: if it is an exported graph, or the data has other classes.
    """
    model = opened.module()
    splits = open_data(data, seed)
    if len(splits.classes) != model.num_classes:
        raise UserError(
            f"{opened.name} tells {model.num_classes} classes apart and dataset '{data.dataset}' "
            f"has {len(splits.classes)}; give --data.dataset with the same ones"
        )
    preprocessing = opened.preprocessing
    return evaluate_on(
        model,
        splits,
        data,
        preprocessing if img_size is None else preprocessing.at(img_size),
        batch_size=batch_size,
        precision=precision,
        accelerator=accelerator,
    )


def evaluate_on(
    model: nn.Module,
    splits: DataSplits,
    data: DataConfig,
    preprocessing: Preprocessing,
    *,
    batch_size: int = 256,
    precision: str = "fp32",
    accelerator: str = "auto",
) -> dict[str, Any]:
    """Top-1, top-5 and loss of a model on the validation images of `splits`.

    Args:
        model: images → logits, moved to the device; one of ours if the precision is "auto".
        splits: what `open_data(data)` gives.
        data: says how images are loaded and what happens to damaged ones.
        preprocessing: what the images go through.
        batch_size, precision, accelerator: as `evaluate_run`.

    Raises:
        UserError: for a precision or accelerator that does not exist, or a damaged image.
    """
    checks.one_of("precision", precision, ("auto", "fp32", "bf16-mixed"))
    checks.integer("batch_size", batch_size, 1)
    device = torch.device(resolve_accelerator(accelerator))
    loader = eval_loader(
        splits.val,
        preprocessing,
        batch_size=batch_size,
        workers=data.workers,
        on_bad_image=data.on_bad(training=False),
        max_bad_images=data.max_bad_images,
        pin_memory=device.type == "cuda",
    )
    # Only an open choice depends on the model's cost.
    macs = (
        count_macs(cast(ImageClassifier, model), preprocessing.size) if precision == "auto" else 0
    )
    chosen = choose_precision(precision, device, macs)
    with torch.autocast(device.type, torch.bfloat16, enabled=chosen == "bf16-mixed"):
        result = evaluate(model.to(device), loader, device, label_sets=splits.val.label_sets)
    return result | {"dataset": data.dataset, "skipped": dict(loader.skipped)}
