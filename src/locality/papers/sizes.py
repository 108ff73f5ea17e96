"""How large and costly the models of a scale are: numbers that need no training."""

from __future__ import annotations

from typing import Any

import torch

from locality.models import configure, count_macs, count_parameters, create_model, variant
from locality.papers.quantities import Computed, Quantity
from locality.papers.scales import Scale
from locality.runner.cost import forward_macs, parameters, train_images


def model_parameters(s: Scale, role: str, **changes: Any) -> Quantity:
    """Millions of parameters of a role's model."""

    def count() -> float:
        config = s.config(role, **changes)
        return parameters(config.model, train_images(config)[1]) / 1e6

    return Computed(count)


def model_macs(s: Scale, role: str, **changes: Any) -> Quantity:
    """Billions of multiply-accumulates of a role's forward pass."""

    def count() -> float:
        config = s.config(role, **changes)
        return forward_macs(config.model, train_images(config)[1]) / 1e9

    return Computed(count)


def built_parameters(name: str) -> Quantity:
    """Millions of parameters of one of our models as it comes."""

    def count() -> float:
        with torch.device("meta"):
            return count_parameters(create_model(name)) / 1e6

    return Computed(count)


def built_macs(name: str, img_size: int | None = None) -> Quantity:
    """Billions of multiply-accumulates of one of our models, at its own image size or another."""

    def count() -> float:
        with torch.device("meta"):
            return count_macs(create_model(name), img_size) / 1e9

    return Computed(count)


def _architecture(s: Scale, role: str) -> Any:
    name, overrides = s.models[role]
    return configure(variant(name).config, dict(overrides))


def depth_of(s: Scale, role: str) -> int:
    """Attention layers of a role's DeiT or ConViT."""
    return _architecture(s, role).depth


def gated_layers_of(s: Scale, role: str) -> int:
    """Gated layers of a role's ConViT."""
    return _architecture(s, role).gpsa_layers


def heads_of(s: Scale, role: str) -> int:
    """Heads of a role's DeiT or ConViT."""
    return _architecture(s, role).num_heads
