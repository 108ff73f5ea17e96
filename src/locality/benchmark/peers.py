"""The models that ours are measured against: the same weights in another library's code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import timm
import torch
from torch import Tensor, nn

from locality.benchmark.config import AGAINST
from locality.checkpoints import LAYOUTS
from locality.errors import UserError, require, unknown
from locality.models import ImageClassifier, StageConfig, ViTConfig
from locality.models.from_timm import TimmModel

_TIMM_NAMES = {
    "convit_tiny": "convit_tiny",
    "convit_small": "convit_small",
    "convit_base": "convit_base",
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "deit_base": "deit_base_patch16_224",
}


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Move every weight and running statistic off its initial value, so that all of them matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(0.5 + noise.abs())
            else:
                tensor.add_(0.02 * noise)


def peers(model: ImageClassifier, against: str) -> dict[str, nn.Module]:
    """What to measure `model` against, by label; the first has its weights.

    Against timm: timm's model of the same name, and a plain timm ViT of the same width, depth and
    heads as the floor a transformer of this size has. Against transformers: its CvT.

    Raises:
        UserError: if that library has no such model.
    """
    if against not in AGAINST:
        raise unknown("library to measure against", against, AGAINST)
    return _timm_peers(model) if against == "timm" else {against: _transformers_cvt(model)}


def _timm_peers(model: ImageClassifier) -> dict[str, nn.Module]:
    config = model.config
    if isinstance(model, TimmModel):
        return {"timm": copy.deepcopy(model.model)}
    if not isinstance(config, ViTConfig):
        raise UserError(
            f"timm has no {model.variant}; measure the CvT models with --against transformers"
        )
    found: dict[str, nn.Module] = {}
    if model.variant in _TIMM_NAMES:
        peer = timm.create_model(
            _TIMM_NAMES[model.variant], img_size=model.img_size, num_classes=model.num_classes
        )
        layout = LAYOUTS["convit" if config.gpsa_layers else "deit"]
        peer.load_state_dict(layout.from_ours(model.state_dict(), config))
        found["timm"] = peer
    same = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    settings: dict[str, Any] = {name: getattr(config, name) for name in same}
    settings |= {"img_size": model.img_size, "num_classes": model.num_classes}
    found["plain ViT"] = timm.models.VisionTransformer(**settings)
    return found


def _transformers_cvt(model: ImageClassifier) -> nn.Module:
    require("measuring against transformers", "transformers", "transformers")
    from transformers import CvtConfig, CvtForImageClassification

    if isinstance(model.config, ViTConfig):
        raise UserError(
            f"transformers is the peer of the CvT models; measure {model.variant} with "
            f"--against timm"
        )
    # Its MLPs have the exact GELU, always.
    config = replace(model.config, activation="gelu")
    state = LAYOUTS["cvt-transformers"].from_ours(model.state_dict(), config)
    # transformers' name of a setting → ours, a list with an entry per stage.
    per_stage: dict[str, Callable[[StageConfig], Any]] = {
        "patch_sizes": lambda stage: stage.embed_kernel,
        "patch_stride": lambda stage: stage.embed_stride,
        "patch_padding": lambda stage: stage.embed_padding,
        "embed_dim": lambda stage: stage.embed_dim,
        "num_heads": lambda stage: stage.num_heads,
        "depth": lambda stage: stage.depth,
        "mlp_ratio": lambda stage: stage.mlp_ratios[0],
        "kernel_qkv": lambda stage: stage.projection_kernel,
        "padding_q": lambda stage: stage.projection_kernel // 2,
        "padding_kv": lambda stage: stage.padding_of_keys,
        "stride_kv": lambda stage: stage.kv_strides[0],
        "qkv_bias": lambda stage: stage.qkv_bias,
        "drop_path_rate": lambda stage: 0.0,
    }
    settings: dict[str, Any] = {
        name: [of(stage) for stage in model.config.stages] for name, of in per_stage.items()
    }
    settings |= {"num_labels": model.num_classes, "num_channels": model.in_chans}
    peer = CvtForImageClassification(CvtConfig(**settings))
    peer.load_state_dict(state)
    return _LogitsOnly(peer)


class _LogitsOnly(nn.Module):
    """A transformers model called like ours: images in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits
