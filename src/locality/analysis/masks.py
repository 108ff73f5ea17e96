"""Parts of a trained model masked at test time (ConViT appendix F, Tables 5 and 6).

    with content_off(model, layers=3):
        evaluate(model, loader)      # σ(λ) = 1 in the first three gated layers
    # here every weight is what it was, bit for bit

Parameters are exchanged for others and put back; their values are never written to.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from timm.models.convit import GPSA
from torch import nn

from locality.errors import UserError
from locality.layers.attention import GatedPositionalSelfAttention


@contextlib.contextmanager
def position_embedding_off(model: nn.Module) -> Iterator[None]:
    """Add no absolute position embedding to the patches (Table 5).

    The class token's own entry, where the embedding has one (DeiT), is masked with the rest.

    Args:
        model: one of ours or of timm's with a `pos_embed`; CvT may have one in each stage.

    Raises:
        UserError: if it has none.
    """
    owners = [
        module for module in model.modules() if module._parameters.get("pos_embed") is not None
    ]
    if not owners:
        raise UserError(f"{_name(model)} has no position embedding to mask")
    with contextlib.ExitStack() as restored:
        for module in owners:
            restored.enter_context(_exchanged(module, "pos_embed", 0.0))
        yield


def content_off(
    model: nn.Module, layers: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Attend by position alone in the first `layers` gated layers: σ(λ) = 1 (Table 6).

    Args:
        model: a ConViT, ours or timm's.
        layers: how many of the gated layers, from the first; all unless given.

    Raises:
        UserError: if the model has fewer gated layers.
    """
    return _gates_at(model, math.inf, layers)


def position_off(
    model: nn.Module, layers: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Attend by content alone in the first `layers` gated layers: σ(λ) = 0 (Table 6).

    Args and raises as `content_off`.
    """
    return _gates_at(model, -math.inf, layers)


@contextlib.contextmanager
def _gates_at(model: nn.Module, value: float, layers: int | None) -> Iterator[None]:
    # The sigmoid of ±inf is exactly 1 or 0, so nothing of the masked part remains.
    gated = [
        (module, "gating" if isinstance(module, GatedPositionalSelfAttention) else "gating_param")
        for module in model.modules()
        if isinstance(module, (GatedPositionalSelfAttention, GPSA))
    ]
    if not gated:
        raise UserError(f"{_name(model)} has no gated layers to mask")
    if layers is not None and not 0 <= layers <= len(gated):
        raise UserError(f"the model has {len(gated)} gated layers; {layers} cannot be masked")
    with contextlib.ExitStack() as restored:
        for module, name in gated[:layers]:
            restored.enter_context(_exchanged(module, name, value))
        yield


@contextlib.contextmanager
def _exchanged(module: nn.Module, name: str, value: float) -> Iterator[None]:
    """A parameter replaced by one of the same shape with a constant value, for a while."""
    own = module._parameters[name]
    assert own is not None
    module._parameters[name] = nn.Parameter(torch.full_like(own, value), requires_grad=False)
    try:
        yield
    finally:
        module._parameters[name] = own


def _name(model: nn.Module) -> str:
    return getattr(model, "variant", None) or type(model).__name__
