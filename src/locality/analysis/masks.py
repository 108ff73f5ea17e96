"""Parts of a trained model masked at test time (ConViT appendix F, Tables 5 and 6).

Context managers: the model has the mask inside the block and is bit for bit what it was after it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from locality.errors import UserError
from locality.models.surface import ImageClassifier


@contextlib.contextmanager
def position_embedding_off(model: nn.Module) -> Iterator[None]:
    """Add no absolute position embedding to the patches (Table 5).

    The class token's own entry, where the embedding has one (DeiT), is masked with the rest.

    Raises:
        UserError: if the model has none.
    """
    embeddings = [
        parameter
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] == "pos_embed"
    ]
    if not embeddings:
        raise UserError(f"{type(model).__name__} has no position embedding to mask")
    with _replaced(embeddings, 0.0):
        yield


@contextlib.contextmanager
def content_off(model: ImageClassifier, layers: int | None = None) -> Iterator[None]:
    """Attend by position alone in the first `layers` gated layers: σ(λ) = 1 (Table 6).

    Args:
        model: a ConViT.
        layers: how many; all unless given.

    Raises:
        UserError: if the model has fewer gated layers.
    """
    with _replaced(_gates(model, layers), math.inf):
        yield


@contextlib.contextmanager
def position_off(model: ImageClassifier, layers: int | None = None) -> Iterator[None]:
    """Attend by content alone in the first `layers` gated layers: σ(λ) = 0 (Table 6).

    Args and raises as `content_off`.
    """
    with _replaced(_gates(model, layers), -math.inf):
        yield


def _gates(model: ImageClassifier, layers: int | None) -> list[Tensor]:
    gates = [module.gating for _, module in model.attention_layers() if hasattr(module, "gating")]
    if not gates:
        raise UserError(f"{model.variant or type(model).__name__} has no gated layers to mask")
    if layers is not None and not 0 <= layers <= len(gates):
        raise UserError(f"the model has {len(gates)} gated layers; {layers} cannot be masked")
    return gates[:layers]


@contextlib.contextmanager
def _replaced(tensors: Sequence[Tensor], value: float) -> Iterator[None]:
    """Fill tensors with a value for the length of a block."""
    kept = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
