"""From a name to a model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from locality.errors import UserError
from locality.models.architecture import Architecture, sides
from locality.models.base import ImageClassifier
from locality.models.cvt import ConvolutionalVisionTransformer
from locality.models.cvt_config import CvTConfig
from locality.models.from_timm import TimmConfig, TimmModel
from locality.models.initialisations import INITIALISATIONS
from locality.models.variants import ALIASES, PREFIX, variant
from locality.models.vit import VisionTransformer
from locality.models.vit_config import ViTConfig

_MODELS: dict[type, Any] = {
    ViTConfig: VisionTransformer,
    CvTConfig: ConvolutionalVisionTransformer,
    TimmConfig: TimmModel,
}


def named(name: str, fields: dict[str, Any]) -> Any:
    """The configuration of the model called `name`, ours or "timm/NAME", with some fields changed.

    Raises:
        UserError: for an unknown name or field (with the nearest), or a value out of range.
    """
    own = TimmConfig.named(name) if name.startswith(PREFIX) else variant(name).config
    return own.with_overrides(**fields)


def build(model: str | Architecture | TimmConfig, **overrides: Any) -> ImageClassifier:
    """Build a model, with fresh weights drawn from torch's default generator.

    Args:
        model: one of `list_models()`, "timm/" and the name of one of timm's, or a configuration.
        overrides: fields of the configuration (`ViTConfig`, `CvTConfig`) to change, such as
            `num_classes`, `in_chans`, `img_size`; None leaves the model's own.

    Raises:
        UserError: for an unknown name or field (with the nearest), or a value out of range.
    """
    fields = {name: value for name, value in overrides.items() if value is not None}
    if isinstance(model, str):
        built = build(named(model, fields))
        built.variant = ALIASES.get(model, model)
        return built
    if type(model) not in _MODELS:
        raise UserError(f"no model is built from a {type(model).__name__}")
    made = _MODELS[type(model)](model.with_overrides(**fields))
    start = INITIALISATIONS.get(getattr(made.config, "init", ""))
    if start is not None and not next(made.parameters()).is_meta:
        start(made)
    return made


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model learns or carries as parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: ImageClassifier, img_size: int | tuple[int, int] | None = None) -> int:
    """Multiply-accumulates of one image's forward pass, attention's products included.

    Counted on the meta device, so it costs neither memory nor arithmetic. What is no matrix product
    or convolution (norms, softmax, activations) is left out, as in the papers' "FLOPs". All
    tokens of the last block are counted, as in the papers, though `forward` needs only one of them.

    Args:
        model: any of our models.
        img_size: pixels, a number or (height, width); the model's own unless given.
    """
    memo = {
        id(tensor): nn.Parameter(tensor.to("meta"), requires_grad=False)
        if isinstance(tensor, nn.Parameter)
        else tensor.to("meta")
        for tensor in (*model.parameters(), *model.buffers())
    }
    meta = copy.deepcopy(model, memo).eval()
    size = model.img_size if img_size is None else sides(img_size)
    images = torch.empty(1, model.in_chans, *size, device="meta")
    # The plain backend is made of counted products; the fused ones are opaque to the counter.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        meta.forward_head(meta.forward_features(images))
    return counter.get_total_flops() // 2
