"""Training a small convolutional net of timm's, as the teacher of distillation (ConViT app. B).

The paper's teacher is a public RegNetY-16GF. Where there is none for the data at hand, one of
timm's nets is trained first, by a plain loop over the same images, schedule and optimiser as its
students have. It is short and therefore starts again when interrupted.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import save_for_hf
from torch import nn

from locality.data import DataSplits, eval_loader, open_data, train_loader
from locality.errors import UserError
from locality.files import write_atomic
from locality.models import count_parameters
from locality.runner.networks import TIMM, build_network
from locality.training import RunConfig, evaluate
from locality.training.optim import create_optimizer, create_schedule
from locality.training.plan import make_plan
from locality.training.randomness import seed_initial_weights
from locality.training.runs import RunFolder
from locality.training.setup import resolve_accelerator

TRAIN_TIMM = "locality.runner.teachers:train_timm"
_EVAL_BATCH = 256


def teacher_in(folder: Path) -> str:
    """What `objective.teacher` says for the model that `train_timm` leaves in a folder."""
    return f"local-dir:{folder}"


def train_timm(config: RunConfig, folder: Path | str) -> dict[str, Any]:
    """Train `config.model.name` ("timm/NAME") on one device; leave timm's files and a result.

    Args:
        config: a run; label smoothing, mixing and distillation are not applied.
        folder: where timm's `config.json` and `model.safetensors`, and `result.json` go.

    Raises:
        UserError: if timm has no model of that name, or the folder is another run's.
    """
    run = RunFolder(folder)
    splits = open_data(config.data, config.seed)
    model = _build(config, splits)
    run.prepare(config)
    try:
        started = time.perf_counter()
        device = torch.device(resolve_accelerator(config.engine.accelerator))
        run.note_start(config, 0, str(device), "fp32")
        steps = _fit(model.to(device), config, splits, device)
        result = _judge(model, config, splits, device)
        seconds = time.perf_counter() - started
        save_for_hf(model, str(folder), safe_serialization=True)
        result = {
            "model": config.model.name,
            "dataset": config.data.dataset,
            "fraction": config.data.fraction,
            "seed": config.seed,
            "steps": steps,
            "top1": result["top1"],
            "top5": result["top5"],
            "val_loss": result["loss"],
            "parameters": count_parameters(model),
            "train_images": len(splits.train),
            "val_images": len(splits.val),
            "seconds": round(seconds, 3),
            "images_per_second": round(steps * config.engine.batch_size / seconds, 1),
        }
        write_atomic(run.result_file, json.dumps(result, indent=2) + "\n")
        return result
    finally:
        run.lock.release()


def _size(config: RunConfig) -> int:
    return config.model.img_size or 224


def _build(config: RunConfig, splits: DataSplits) -> nn.Module:
    name = config.model.name.removeprefix(TIMM)
    if not timm.is_model(name):
        raise UserError(f"timm has no model '{name}'")
    seed_initial_weights(config.seed)
    model = build_network(config.model.name, len(splits.classes), config.model.overrides)
    # What a student has to know to show the teacher its images.
    size = _size(config)
    model.pretrained_cfg = dict(model.pretrained_cfg) | {  # type: ignore[arg-type, assignment]
        "input_size": (3, size, size),
        "mean": config.input.mean,
        "std": config.input.std,
        "num_classes": len(splits.classes),
    }
    return model


def _fit(model: nn.Module, config: RunConfig, splits: DataSplits, device: torch.device) -> int:
    plan = make_plan(config, len(splits.train))
    optimizer = create_optimizer(model, config.optim, config.engine.batch_size)
    schedule = create_schedule(optimizer, config.schedule, plan)
    loader = train_loader(
        splits.train,
        config.augment,
        config.input.at(_size(config)),
        batch_size=config.engine.batch_size,
        seed=config.seed,
        stop_step=plan.steps,
        workers=config.data.workers,
    )
    model.train()
    for step, batch in enumerate(loader):
        schedule.step_update(step)
        logits = model(batch.images.to(device))
        F.cross_entropy(logits, batch.targets.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return plan.steps


def _judge(
    model: nn.Module, config: RunConfig, splits: DataSplits, device: torch.device
) -> dict[str, Any]:
    loader = eval_loader(splits.val, config.input.at(_size(config)), batch_size=_EVAL_BATCH)
    return evaluate(model, loader, device)
