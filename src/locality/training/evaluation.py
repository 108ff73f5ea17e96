"""How good a model is: top-1, top-5 and loss, each image counted once over all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locality.data import BatchLoader

# Adds up a tensor over all processes.
Sum = Callable[[Tensor], Tensor]


class EvaluationStopped(Exception):
    """An evaluation was asked to stop, by the signal whose number it carries."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: BatchLoader,
    device: torch.device | str = "cpu",
    *,
    label_sets: Sequence[tuple[int, ...]] | None = None,
    all_sum: Sum | None = None,
    rounds: int | None = None,
    stop: Callable[[], None] | None = None,
    channels_last: bool = False,
) -> dict[str, Any]:
    """Top-1 and top-5 accuracy in per cent, mean cross entropy, and the number of images.

    With several processes each evaluates its share and every one gets the totals.

    Args:
        model: images → logits; put into evaluation mode and back.
        loader: this process's batches.
        device: where the model is.
        label_sets: all right answers of every image (ReaL labels); the prediction counts as
            right if it is one of them. The loss is that of the first.
        all_sum: adds up a tensor over all processes.
        rounds: batches of the process that has most, so that all meet equally often.
        stop: called before every batch, in step over all processes; may raise to stop.
        channels_last: memory layout of the images.

    Raises:
        EvaluationStopped: from `stop`.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(4, dtype=exact(torch.device(device)), device=device)
    try:
        batches = iter(loader)
        for _ in range(len(loader) if rounds is None else rounds):
            if stop is not None:
                stop()
            batch = next(batches, None)
            if batch is None:
                continue
            images = batch.images.to(device, non_blocking=True)
            if channels_last:
                images = images.to(memory_format=torch.channels_last)
            targets = batch.targets.to(device, non_blocking=True)
            logits = model(images).float()
            right = _right(logits, targets, batch.indices.tolist(), label_sets)
            totals[0] += right[:, :1].sum()
            totals[1] += right.any(dim=1).sum()
            totals[2] += F.cross_entropy(logits, targets, reduction="sum")
            totals[3] += len(targets)
    finally:
        model.train(was_training)
    if all_sum is not None:
        totals = all_sum(totals)
    top1, top5, loss, count = totals.tolist()
    if not count:
        return {"top1": float("nan"), "top5": float("nan"), "loss": float("nan"), "n": 0}
    return {
        "top1": 100 * top1 / count,
        "top5": 100 * top5 / count,
        "loss": loss / count,
        "n": int(count),
    }


def exact(device: torch.device) -> torch.dtype:
    """The dtype to add up in: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def _right(
    logits: Tensor,
    targets: Tensor,
    indices: list[int],
    label_sets: Sequence[tuple[int, ...]] | None,
) -> Tensor:
    """Which of the (up to) five likeliest classes are right, (B, 5) bool, likeliest first."""
    likeliest = logits.topk(min(5, logits.shape[1]), dim=1).indices
    if label_sets is None:
        return likeliest == targets[:, None]
    answers = torch.zeros_like(logits, dtype=torch.bool)
    for row, index in enumerate(indices):
        answers[row, list(label_sets[index])] = True
    return answers.gather(1, likeliest)
