"""Building the network of a run for counting and timing: one of ours, or of timm's."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from locality.models import ImageClassifier, count_macs, create_model

TIMM = "timm/"
"""What the names of timm's models begin with, where both kinds may stand."""


def build_network(name: str, classes: int, settings: dict[str, Any]) -> nn.Module:
    """A network with fresh weights.

    Args:
        name: one of `locality models`, or "timm/" and one of timm's.
        classes: of its classifier.
        settings: fields of its configuration; image and patch size are left out for timm's.

    Raises:
        UserError: for a model or a field that does not exist.
    """
    if not name.startswith(TIMM):
        return create_model(name, num_classes=classes, **settings)
    fields = {key: value for key, value in settings.items() if not key.endswith("_size")}
    return timm.create_model(name.removeprefix(TIMM), num_classes=classes, **fields)


def image_size(network: nn.Module, settings: dict[str, Any]) -> tuple[int, int]:
    """The (height, width) of the images a network is trained on."""
    if isinstance(network, ImageClassifier):
        return network.img_size
    side = settings.get("img_size") or 224
    return side, side


def network_macs(network: nn.Module, settings: dict[str, Any]) -> int:
    """Multiply-accumulates of one image's forward pass; the network is on the meta device."""
    if isinstance(network, ImageClassifier):
        return count_macs(network)
    images = torch.empty(1, 3, *image_size(network, settings), device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network.eval()(images)
    return counter.get_total_flops() // 2
