"""What the ConViT and DeiT layouts share: timm's names for a plain vision transformer."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from locality.checkpoints.keys import State
from locality.errors import UserError
from locality.layers.block import mlp_ratio_of
from locality.models.vit import ViTConfig, token_grid


def rename_from_timm(name: str) -> str:
    """timm's name → ours: the same, but for the patch embedding, which here is a plain Conv2d."""
    return re.sub(r"^patch_embed\.proj\.", "patch_embed.", name)


def rename_to_timm(name: str) -> str:
    """Our name → timm's."""
    return re.sub(r"^patch_embed\.", "patch_embed.proj.", name)


def require_blocks(state: State, prefix: str) -> int:
    """How many blocks `prefix0`, `prefix1`, … there are.

    Raises:
        UserError: if their numbers have gaps, or there are none.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)\.")
    found = {int(match[1]) for name in state if (match := pattern.match(name))}
    if not found or found != set(range(len(found))):
        raise UserError(
            f"these weights have the blocks {sorted(found)}; they have to be numbered from 0 "
            f"without gaps"
        )
    return len(found)


def infer_like(state: State, like: ViTConfig) -> ViTConfig:
    """`like`, with the image size, channels and classes that the weights have.

    The image size stays as it is where the position embedding has that many patches, whatever
    their shape; otherwise it is read as a square.
    """
    rows, columns = token_grid(like.img_size, like.patch_size)
    entries = rows * columns + like.embed_class_token
    fits = "pos_embed" not in state or state["pos_embed"].shape[1] == entries
    found = infer_common(
        {name: tensor for name, tensor in state.items() if not (fits and name == "pos_embed")},
        num_heads=1,
        depth=like.depth,
        embed_class_token=like.embed_class_token,
    )
    size = like.img_size if fits else found.img_size
    return replace(like, img_size=size, in_chans=found.in_chans, num_classes=found.num_classes)


def infer_common(state: State, **fields: Any) -> ViTConfig:
    """The configuration of a vision transformer under timm's names, read from the shapes.

    The image is taken to be square, as all published weights have it.

    Args:
        fields: what the caller has read already.

    Raises:
        UserError: if a tensor that tells is missing.
    """
    try:
        width, in_chans, patch_size, _ = state["patch_embed.proj.weight"].shape
        hidden = len(state["blocks.0.mlp.fc1.weight"])
    except (KeyError, ValueError) as error:
        raise UserError(f"these weights have no {error}, which tells the architecture") from error
    class_entry = int(fields.get("embed_class_token", False))
    side = 14
    if "pos_embed" in state:
        patches = state["pos_embed"].shape[1] - class_entry
        side = math.isqrt(patches)
        if side * side != patches:
            raise UserError(
                f"the position embedding has {patches} patches, which is no square; give the "
                f"model's name and img_size"
            )
    return ViTConfig(
        embed_dim=width,
        in_chans=in_chans,
        patch_size=patch_size,
        img_size=side * patch_size,
        mlp_ratio=mlp_ratio_of(width, hidden),
        num_classes=len(state["head.weight"]) if "head.weight" in state else 0,
        use_pos_embed="pos_embed" in state,
        **fields,
    )
