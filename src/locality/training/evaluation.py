"""Evaluation: top-1, top-5 and loss, each image counted once over all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locality import checks
from locality.checkpoints.api import open_model
from locality.checkpoints.classifier import Classifier
from locality.data import (
    Batch,
    BatchLoader,
    DataConfig,
    DataSplits,
    eval_loader,
    open_data,
)
from locality.data.loader import translate_killed_worker
from locality.errors import UserError
from locality.models import count_macs
from locality.training.config import Precision, read_config
from locality.training.devices import (
    accumulation_dtype,
    autocast,
    choose_precision,
    resolve_accelerator,
)


def evaluate_run(
    folder: Path | str, data: DataConfig | None = None, **options: Any
) -> dict[str, Any]:
    """Top-1, top-5 and loss of a run's model.

    Args:
        folder: the run's.
        data: other data with the same classes, such as ImageNet-V2; None is the run's own.
        options: of `evaluate_opened`.

    Raises:
        UserError: if the folder is no run, or the data has other classes.
    """
    config = read_config(Path(folder))
    return evaluate_opened(
        open_model(folder), config.data if data is None else data, seed=config.seed, **options
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
    splits: DataSplits | None = None,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, Any]:
    """Top-1, top-5 and loss of an opened model on a dataset, with the model's preprocessing.

    Args:
        opened: what `locality.checkpoints.open_model` gives.
        data: with as many classes as the model has.
        seed: of the data's own random splits.
        img_size: side of the images; None is the model's own.
        batch_size: images at once.
        precision: as `engine.precision` of a run.
        accelerator: "auto", "cpu", "cuda" or "mps".
        splits: the data, if it is open already.
        on_batch: as for `evaluate`.

    Raises:
        UserError: if it is an exported graph, the data has other classes, there is no such
            precision or accelerator, an image is damaged, or logits are not finite.
    """
    checks.one_of("precision", precision, get_args(Precision))
    checks.integer("batch_size", batch_size, 1)
    device = torch.device(resolve_accelerator(accelerator))
    model = opened.module()
    splits = open_data(data, seed) if splits is None else splits
    if len(splits.classes) != model.num_classes:
        raise UserError(
            f"{opened.name} tells {model.num_classes} classes apart and dataset '{data.dataset}' "
            f"has {len(splits.classes)}; give --data.dataset with the same ones"
        )
    preprocessing = opened.preprocessing
    if img_size is not None:
        preprocessing = preprocessing.at(img_size)
    loader = eval_loader(
        splits.val,
        preprocessing,
        batch_size=batch_size,
        workers=data.workers,
        on_bad_image=data.on_bad(training=False),
        max_bad_images=data.max_bad_images,
        pin_memory=device.type == "cuda",
    )
    macs = count_macs(model, preprocessing.size) if precision == "auto" else 0
    chosen = choose_precision(precision, device.type, macs)

    def checked(batch: Batch, logits: Tensor) -> None:
        opened.check_logits(logits)
        if on_batch is not None:
            on_batch(batch, logits)

    with autocast(device.type, chosen):
        result = evaluate(
            model.to(device), loader, device, label_sets=splits.val.label_sets, on_batch=checked
        )
    return result | {"dataset": data.dataset, "skipped": dict(loader.skipped)}


@translate_killed_worker()
@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: BatchLoader,
    device: torch.device | str = "cpu",
    *,
    label_sets: Sequence[tuple[int, ...]] | None = None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    num_batches: int | None = None,
    before_batch: Callable[[], None] | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, Any]:
    """Top-1 and top-5 accuracy in per cent, mean cross entropy, and the number of images.

    With several processes each evaluates its part and every one gets the totals.

    Args:
        model: images → logits; put into evaluation mode and back.
        loader: this process's batches.
        device: where the model is.
        label_sets: all correct labels of every image (ReaL labels). The loss is that of the first.
        all_reduce: sums a tensor over all processes.
        num_batches: of the process that has most, so that all processes synchronise equally often.
        before_batch: called before every batch on all processes; may raise to stop.
        memory_format: of the images.
        on_batch: called with every batch of this process and its logits.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(4, dtype=accumulation_dtype(torch.device(device)), device=device)
    try:
        batches = iter(loader)
        for _ in range(len(loader) if num_batches is None else num_batches):
            if before_batch is not None:
                before_batch()
            batch = next(batches, None)
            if batch is None:
                continue
            images = batch.images.to(device, non_blocking=True, memory_format=memory_format)
            targets = batch.targets.to(device, non_blocking=True)
            logits = model(images).float()
            if on_batch is not None:
                on_batch(batch, logits)
            correct = _is_correct(logits, targets, batch.indices.tolist(), label_sets)
            totals[0] += correct[:, :1].sum()
            totals[1] += correct.any(dim=1).sum()
            totals[2] += F.cross_entropy(logits, targets, reduction="sum")
            totals[3] += len(targets)
    finally:
        model.train(was_training)
    if all_reduce is not None:
        totals = all_reduce(totals)
    top1, top5, loss, count = totals.tolist()
    total = count or float("nan")
    return {
        "top1": 100 * top1 / total,
        "top5": 100 * top5 / total,
        "loss": loss / total,
        "n": int(count),
    }


def _is_correct(
    logits: Tensor,
    targets: Tensor,
    indices: list[int],
    label_sets: Sequence[tuple[int, ...]] | None,
) -> Tensor:
    """Which of the (up to) five most likely classes are correct, (B, 5) bool, best first."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    if label_sets is None:
        return best == targets[:, None]
    answers = torch.zeros_like(logits, dtype=torch.bool)
    for row, index in enumerate(indices):
        answers[row, list(label_sets[index])] = True
    return answers.gather(1, best)
