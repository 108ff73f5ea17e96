"""The models that ours are measured against: the same weights in another library's code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import timm
import torch
from torch import Tensor, nn

from locality.checkpoints.cvt import to_transformers
from locality.checkpoints.vit import to_convit, to_deit
from locality.errors import UserError, unknown
from locality.models import ImageClassifier, ViTConfig

AGAINST = ("timm", "transformers")

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
    if against == "timm":
        return _timm_peers(model)
    if against == "transformers":
        return {"transformers": _transformers_cvt(model)}
    raise unknown("library to measure against", against, AGAINST)


def _timm_peers(model: ImageClassifier) -> dict[str, nn.Module]:
    config = model.config
    if not isinstance(config, ViTConfig):
        raise UserError(
            f"timm has no {model.variant}; measure the CvT models with --against transformers"
        )
    found: dict[str, nn.Module] = {}
    if model.variant in _TIMM_NAMES:
        peer = timm.create_model(
            _TIMM_NAMES[model.variant], img_size=model.img_size, num_classes=model.num_classes
        )
        state: dict[str, Tensor] = model.state_dict()
        convert = to_convit if config.gpsa_layers else to_deit
        peer.load_state_dict(convert(state, config))
        found["timm"] = peer
    found["plain ViT"] = timm.models.VisionTransformer(
        img_size=model.img_size,
        patch_size=config.patch_size,
        num_classes=model.num_classes,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
    )
    return found


def _transformers_cvt(model: ImageClassifier) -> Any:
    try:
        from transformers import CvtForImageClassification
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "measuring against transformers needs it installed: pip install transformers"
        ) from error
    if isinstance(model.config, ViTConfig):
        raise UserError(
            f"transformers is the peer of the CvT models; measure {model.variant} with "
            f"--against timm"
        )
    # Its MLPs have the exact GELU, always.
    state = to_transformers(model.state_dict(), replace(model.config, activation="gelu"))
    peer = CvtForImageClassification(_cvt_config(model))
    peer.load_state_dict(state)
    return _LogitsOnly(peer)


def _cvt_config(model: ImageClassifier) -> Any:
    """transformers' configuration of a CvT of ours."""
    from transformers import CvtConfig as TheirConfig

    stages = model.config.stages
    settings: dict[str, Any] = {"num_labels": model.num_classes}
    return TheirConfig(
        **settings,
        num_channels=model.in_chans,
        patch_sizes=[stage.embed_kernel for stage in stages],
        patch_stride=[stage.embed_stride for stage in stages],
        patch_padding=[stage.embed_padding for stage in stages],
        embed_dim=[stage.embed_dim for stage in stages],
        num_heads=[stage.num_heads for stage in stages],
        depth=[stage.depth for stage in stages],
        mlp_ratio=[stage.mlp_ratios[0] for stage in stages],
        kernel_qkv=[stage.projection_kernel for stage in stages],
        padding_q=[stage.projection_kernel // 2 for stage in stages],
        padding_kv=[stage.padding_of_keys for stage in stages],
        stride_kv=[stage.kv_strides[0] for stage in stages],
        qkv_bias=[stage.qkv_bias for stage in stages],
        drop_path_rate=[0.0] * len(stages),
    )


class _LogitsOnly(nn.Module):
    """A transformers model called like ours: images in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits
