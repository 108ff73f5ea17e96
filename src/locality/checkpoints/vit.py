"""ConViT and DeiT as their authors and timm write them: timm's names for a vision transformer.

ConViT's gated layers split the projection in two, `attn.qk` and `attn.v`; ours is one, [q; k; v].
Their `attn.pos_proj` is a linear layer from (δ along the width, δ along the height, ‖δ‖²) to a
score per head; our `attn.v_pos` is its weight with the columns in the paper's order (‖δ‖², δ₁, δ₂).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from locality.checkpoints.reading import State, blank_state, check_keys, require_blocks
from locality.errors import UserError
from locality.layers.block import mlp_ratio_of
from locality.models.vit_config import ViTConfig, token_grid

# Where no gates tell the number of heads: the width of DeiT's, and of a ConViT's without gates.
_HEAD_DIM, _CONVIT_HEAD_DIM = 64, 48


def rename_from_timm(name: str) -> str:
    """timm's name → ours: the same, but for the patch embedding, which here is a plain Conv2d."""
    return re.sub(r"^patch_embed\.proj\.", "patch_embed.", name)


def rename_to_timm(name: str) -> str:
    """Our name → timm's."""
    return re.sub(r"^patch_embed\.", "patch_embed.proj.", name)


def dropped(config: ViTConfig) -> list[str]:
    """ConViT's tensors that mean nothing, and that ours therefore lack.

    The bias of `pos_proj` adds the same number to the score of every key, and the softmax over keys
    cancels it. Where every block is gated no class token joins, and the first patch is read.
    """
    biases = [f"blocks.{index}.attn.pos_proj.bias" for index in range(config.gpsa_layers)]
    return biases if config.has_class_token else ["cls_token", *biases]


def from_convit(state: State, config: ViTConfig) -> dict[str, Tensor]:
    """The authors' or timm's ConViT → ours.

    Raises:
        UserError: if a name is missing or unknown, a shape differs from `config`'s, or their code
            computes something else than ours with this configuration.
    """
    _require_convit(config)
    drop = dropped(config)
    check_keys(state, _as_convit(blank_state(config), config), "ConViT's authors' or timm's", drop)
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
            end = leaf.removeprefix("qk.")
            values = state[f"{block}.attn.v.{end}"]
            ours[f"{block}.attn.qkv.{end}"] = torch.cat((tensor, values))
        elif not leaf.startswith("v."):
            ours[rename_from_timm(name)] = tensor
    return ours


def to_convit(state: State, config: ViTConfig) -> dict[str, Tensor]:
    """Ours → the authors' and timm's ConViT. What means nothing there is written as zero.

    Raises:
        UserError: if `state` does not fit `config`, or their code cannot compute such a model.
    """
    _require_convit(config)
    check_keys(state, blank_state(config), "locality's")
    return _as_convit(state, config)


def from_deit(state: State, config: ViTConfig) -> dict[str, Tensor]:
    """The authors' or timm's DeiT, or a ConViT without gated layers, → ours.

    Raises:
        UserError: if a name is missing or unknown, or a shape differs from `config`'s.
    """
    expected = {rename_to_timm(name): tensor for name, tensor in blank_state(config).items()}
    check_keys(state, expected, "DeiT's authors' or timm's")
    return {rename_from_timm(name): tensor for name, tensor in state.items()}


def to_deit(state: State, config: ViTConfig) -> dict[str, Tensor]:
    """Ours → the authors' and timm's DeiT.

    Raises:
        UserError: if `state` does not fit `config`, or their code cannot compute such a model.
    """
    if config.gpsa_layers:
        raise UserError(
            f"the DeiT layout holds models without positional layers; this one has "
            f"gpsa_layers={config.gpsa_layers}"
        )
    if not (config.use_pos_embed and config.embed_class_token):
        raise UserError(
            "the DeiT layout holds models whose class token has an entry in the position "
            "embedding, and this one's has none; the ConViT layout holds it"
        )
    if config.global_pool != "token":
        raise UserError(
            f"the DeiT layout holds models whose classifier reads the class token; this one has "
            f"global_pool='{config.global_pool}'"
        )
    check_keys(state, blank_state(config), "locality's")
    return {rename_to_timm(name): tensor for name, tensor in state.items()}


def infer_vit(state: State, settings: Mapping[str, Any]) -> ViTConfig:
    """The architecture of weights under timm's names, read from the shapes.

    Args:
        state: the weights.
        settings: fields of the configuration that the reader has set. Where they are not, images
            are taken to be square, and heads without gates 64 wide (48 in a ConViT).

    Raises:
        UserError: if a tensor that tells is missing, or the weights do not tell enough.
    """
    depth = require_blocks(state, "blocks.")
    gated = [index for index in range(depth) if f"blocks.{index}.attn.gating_param" in state]
    if gated != list(range(len(gated))):
        raise UserError(
            f"the gated layers have to be the first of the {depth} blocks; these weights have them "
            f"at {gated}"
        )
    try:
        width, in_chans, patch_size, _ = state["patch_embed.proj.weight"].shape
        hidden = len(state["blocks.0.mlp.fc1.weight"])
    except (KeyError, ValueError) as error:
        raise UserError(f"these weights have no {error}, which tells the architecture") from error
    img_size, class_entry = _positions(state, patch_size, not gated, settings.get("img_size"))
    if gated:
        heads = len(state["blocks.0.attn.gating_param"])
    else:
        convit = not class_entry and width % _CONVIT_HEAD_DIM == 0
        heads, rest = divmod(width, _CONVIT_HEAD_DIM if convit else _HEAD_DIM)
        if "num_heads" in settings:
            heads = 1  # until it is set
        elif rest:
            raise UserError(
                f"the number of heads cannot be told from a width of {width}; set num_heads, or "
                f"give the model's name"
            )
    qkv = "qk" if gated else "qkv"
    return ViTConfig(
        embed_dim=width,
        num_heads=heads,
        depth=depth,
        img_size=img_size,
        patch_size=patch_size,
        in_chans=in_chans,
        num_classes=len(state["head.weight"]) if "head.weight" in state else 0,
        mlp_ratio=mlp_ratio_of(width, hidden),
        qkv_bias=f"blocks.0.attn.{qkv}.bias" in state,
        gpsa_layers=len(gated),
        use_pos_embed="pos_embed" in state,
        embed_class_token=class_entry,
        class_token=False if len(gated) == depth else None,
    )


def size_like(state: State, like: ViTConfig) -> int | tuple[int, int]:
    """The image size of `like` where the position embedding has that many patches, whatever their
    shape; otherwise that of a square."""
    held = math.prod(token_grid(like.img_size, like.patch_size)) + like.embed_class_token
    if "pos_embed" not in state or state["pos_embed"].shape[1] == held:
        return like.img_size
    return _positions(state, like.patch_size, like.embed_class_token, None)[0]


def untold_by_convit(config: ViTConfig) -> dict[str, Any]:
    """The settings that a ConViT's weights do not tell."""
    pool = {} if config.global_pool == "token" else {"global_pool": config.global_pool}
    if not config.gpsa_layers:
        return untold_by_deit(config) | pool
    return pool if config.use_pos_embed else {"img_size": config.img_size} | pool


def untold_by_deit(config: ViTConfig) -> dict[str, Any]:
    """The settings that a DeiT's weights do not tell."""
    return {"num_heads": config.num_heads, "img_size": config.img_size}


def _positions(
    state: State, patch_size: int, may_hold_class: bool, img_size: Any
) -> tuple[int | tuple[int, int], bool]:
    """The image size, and whether the class token has an entry in the position embedding."""
    if "pos_embed" not in state:
        return 14 * patch_size if img_size is None else img_size, False
    entries = state["pos_embed"].shape[1]
    if img_size is not None:
        return img_size, entries == math.prod(token_grid(img_size, patch_size)) + 1
    for class_entry in (False, True)[: 1 + may_hold_class]:
        side = math.isqrt(entries - class_entry)
        if side**2 == entries - class_entry:
            return side * patch_size, class_entry
    raise UserError(
        f"the position embedding has {entries} entries, which make no square of patches; set "
        f"img_size to the height and width of the images, such as img_size=[224,448]"
    )


def _as_convit(state: State, config: ViTConfig) -> dict[str, Tensor]:
    theirs = {}
    if not config.has_class_token:
        theirs["cls_token"] = state["patch_embed.weight"].new_zeros(1, 1, config.embed_dim)
    for name, tensor in state.items():
        block, _, leaf = name.rpartition(".attn.")
        if leaf == "v_pos":
            theirs[f"{block}.attn.pos_proj.weight"] = tensor.flip(1)
            theirs[f"{block}.attn.pos_proj.bias"] = tensor.new_zeros(config.num_heads)
        elif leaf == "gating":
            theirs[f"{block}.attn.gating_param"] = tensor
        elif leaf.startswith("qkv.") and f"{block}.attn.v_pos" in state:
            end = leaf.removeprefix("qkv.")
            queries_keys, values = tensor.split([2 * config.embed_dim, config.embed_dim])
            # Copies, since formats that store each tensor once refuse two views of the same memory.
            theirs[f"{block}.attn.qk.{end}"] = queries_keys.clone()
            theirs[f"{block}.attn.v.{end}"] = values.clone()
        else:
            theirs[rename_to_timm(name)] = tensor
    return theirs


def _require_convit(config: ViTConfig) -> None:
    """Refuse what the authors' code cannot compute, or computes otherwise."""
    if config.gpsa_layers and config.positional_attention != "gpsa":
        raise UserError(
            f"the ConViT layout holds models with gated positional layers; this one has "
            f"positional_attention='{config.positional_attention}'"
        )
    if config.embed_class_token and config.use_pos_embed:
        raise UserError(
            f"the ConViT layout holds models whose class token has no entry in the position "
            f"embedding; this one has gpsa_layers={config.gpsa_layers}, embed_class_token=True"
        )
    gated = config.gpsa_layers == config.depth
    if config.global_pool not in (("token",) if gated else ("token", "avg")):
        raise UserError(
            f"the ConViT layout holds no model of {config.gpsa_layers} gated blocks of "
            f"{config.depth} with global_pool='{config.global_pool}'"
        )
    if config.has_class_token == gated:
        raise UserError(
            "the ConViT layout holds models with a class token behind their gated blocks, and "
            "this one has none"
        )
    rows, columns = token_grid(config.img_size, config.patch_size)
    if config.gpsa_layers and rows != columns:
        raise UserError(
            f"the ConViT authors' and timm's code has square grids of patches only, and this model "
            f"one of {rows}×{columns}; keep it in our own format"
        )
