"""The cost of a forward pass, counted without computing anything."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from locality.models.base import ImageClassifier


def count_macs(model: ImageClassifier, img_size: int | tuple[int, int] | None = None) -> int:
    """Multiply-accumulates of one image's forward pass, attention's products included.

    Counted on the meta device, so it costs neither memory nor arithmetic. What is no matrix product
    or convolution (norms, softmax, activations) is left out, as in the papers' "FLOPs". All
    tokens of the last block are counted, as in the papers, though `forward` needs only one of them.

    Args:
        model: any of our models.
        img_size: pixels, a number or (height, width); the model's own unless given.
    """
    size = model.img_size if img_size is None else img_size
    height, width = (size, size) if isinstance(size, int) else size
    meta = _on_meta(model)
    images = torch.empty(1, model.in_chans, height, width, device="meta")
    # The plain backend is made of counted products; the fused ones are opaque to the counter.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        meta.forward_head(meta.forward_features(images))
    return counter.get_total_flops() // 2


def _on_meta(model: ImageClassifier) -> ImageClassifier:
    """A copy of the model without data, in evaluation mode."""
    memo = {
        id(tensor): nn.Parameter(tensor.to("meta"), requires_grad=False)
        if isinstance(tensor, nn.Parameter)
        else tensor.to("meta")
        for tensor in (*model.parameters(), *model.buffers())
    }
    return copy.deepcopy(model, memo).eval()
