"""ConViT as its authors and timm write it: both use the same names.

Their gated layers split the projection in two, `attn.qk` and `attn.v`; ours is one, [q; k; v].
Their `attn.pos_proj` is a linear layer from (δ along the width, δ along the height, ‖δ‖²) to a
score per head; our `attn.v_pos` is its weight with the columns in the paper's order (‖δ‖², δ₁, δ₂).
"""

from __future__ import annotations

import torch
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


def dropped(config: ViTConfig) -> list[str]:
    """Their tensors that mean nothing, and that ours therefore lack.

    The bias of `pos_proj` adds the same number to the score of every key, and the softmax over keys
    cancels it.
    """
    return [f"blocks.{index}.attn.pos_proj.bias" for index in range(config.gpsa_layers)]


def from_convit(state: State, config: ViTConfig) -> dict[str, Tensor]:
    """The authors' or timm's ConViT → ours.

    Raises:
        UserError: if a name is missing or unknown, or a shape differs from `config`'s.
    """
    _require_gpsa(config)
    drop = dropped(config)
    check_keys(state, _theirs(blank_state(config), config), "ConViT's authors' or timm's", drop)
    ours = {}
    for name, tensor in state.items():
        if name in drop:
            continue
        block, _, leaf = name.rpartition(".attn.")
        if leaf == "pos_proj.weight":
            ours[f"{block}.attn.v_pos"] = tensor.flip(1)
        elif leaf == "gating_param":
            ours[f"{block}.attn.gating"] = tensor
        elif leaf.startswith("qk."):
            kind = leaf.removeprefix("qk.")
            values = state[f"{block}.attn.v.{kind}"]
            ours[f"{block}.attn.qkv.{kind}"] = torch.cat((tensor, values))
        elif not leaf.startswith("v."):
            ours[rename_from_timm(name)] = tensor
    return ours


def to_convit(state: State, config: ViTConfig) -> dict[str, Tensor]:
    """Ours → the authors' and timm's ConViT. The bias that the softmax cancels is written as zero.

    Raises:
        UserError: if `state` is not one of a ConViT with this configuration.
    """
    _require_gpsa(config)
    check_keys(state, blank_state(config), "locality's")
    return _theirs(state, config)


def infer_convit(state: State, like: ViTConfig | None = None) -> ViTConfig:
    """The architecture, read from the shapes; images are taken to be square.

    Args:
        state: the weights.
        like: take everything from this configuration but the image size, channels and classes.

    Raises:
        UserError: if the tensors that tell are not there.
    """
    if like is not None:
        return infer_like(state, like)
    depth = require_blocks(state, "blocks.")
    gpsa = [index for index in range(depth) if f"blocks.{index}.attn.gating_param" in state]
    if gpsa != list(range(len(gpsa))) or not gpsa:
        raise UserError(
            f"the gated layers have to be the first of the {depth} blocks; these weights have them "
            f"at {gpsa}"
        )
    return infer_common(
        state,
        depth=depth,
        gpsa_layers=len(gpsa),
        num_heads=len(state["blocks.0.attn.gating_param"]),
        qkv_bias="blocks.0.attn.qk.bias" in state,
    )


def _theirs(state: State, config: ViTConfig) -> dict[str, Tensor]:
    theirs = {}
    for name, tensor in state.items():
        block, _, leaf = name.rpartition(".attn.")
        if leaf == "v_pos":
            theirs[f"{block}.attn.pos_proj.weight"] = tensor.flip(1)
            theirs[f"{block}.attn.pos_proj.bias"] = tensor.new_zeros(config.num_heads)
        elif leaf == "gating":
            theirs[f"{block}.attn.gating_param"] = tensor
        elif leaf.startswith("qkv.") and f"{block}.attn.v_pos" in state:
            kind = leaf.removeprefix("qkv.")
            queries_keys, values = tensor.split([2 * config.embed_dim, config.embed_dim])
            # Copies, since formats that store each tensor once refuse two views of the same memory.
            theirs[f"{block}.attn.qk.{kind}"] = queries_keys.clone()
            theirs[f"{block}.attn.v.{kind}"] = values.clone()
        else:
            theirs[rename_to_timm(name)] = tensor
    return theirs


def _require_gpsa(config: ViTConfig) -> None:
    if config.gpsa_layers == 0 or config.positional_attention != "gpsa":
        raise UserError(
            "the ConViT layout holds models with gated positional layers; this configuration has "
            f"gpsa_layers={config.gpsa_layers}, positional_attention="
            f"'{config.positional_attention}'"
        )
