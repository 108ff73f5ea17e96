"""DeiT as its authors and timm write it: timm's names for a vision transformer."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from locality.checkpoints.keys import State, blank_state, check_keys
from locality.checkpoints.vit import (
    infer_common,
    infer_like,
    rename_from_timm,
    rename_to_timm,
    require_blocks,
)
from locality.errors import UserError
from locality.models.vit import ViTConfig

# Every published DeiT has heads of this width; the weights themselves do not tell.
_HEAD_DIM = 64

DROPPED: frozenset[str] = frozenset()
"""Nothing: every tensor of theirs has its place in ours."""


def from_deit(state: State, config: ViTConfig) -> dict[str, Tensor]:
    """The authors' or timm's DeiT → ours.

    Raises:
        UserError: if a name is missing or unknown, or a shape differs from `config`'s.
    """
    _require_plain(config)
    expected = {rename_to_timm(name): tensor for name, tensor in blank_state(config).items()}
    check_keys(state, expected, "DeiT's authors' or timm's", DROPPED)
    return {rename_from_timm(name): tensor for name, tensor in state.items()}


def to_deit(state: State, config: ViTConfig) -> dict[str, Tensor]:
    """Ours → the authors' and timm's DeiT.

    Raises:
        UserError: if `state` is not one of a DeiT with this configuration.
    """
    _require_plain(config)
    check_keys(state, blank_state(config), "locality's")
    return {rename_to_timm(name): tensor for name, tensor in state.items()}


def infer_deit(state: State, like: ViTConfig | None = None) -> ViTConfig:
    """The architecture, read from the shapes; heads are taken to be 64 wide, as in every DeiT.

    Args:
        state: the weights.
        like: take everything from this configuration but the image size, channels and classes.

    Raises:
        UserError: if the tensors that tell are not there, or the width is no multiple of 64.
    """
    if like is not None:
        return infer_like(state, like)
    depth = require_blocks(state, "blocks.")
    config = infer_common(
        state,
        depth=depth,
        num_heads=1,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        embed_class_token=True,
    )
    if config.embed_dim % _HEAD_DIM:
        raise UserError(
            f"the number of heads cannot be told from a DeiT of width {config.embed_dim}; give the "
            f"model's name"
        )
    return replace(config, num_heads=config.embed_dim // _HEAD_DIM)


def _require_plain(config: ViTConfig) -> None:
    if config.gpsa_layers:
        raise UserError(
            f"the DeiT layout holds models without positional layers; this configuration has "
            f"gpsa_layers={config.gpsa_layers}"
        )
