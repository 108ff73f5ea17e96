"""ConViT and DeiT as their authors and timm write them: timm's names for a vision transformer.

ConViT's gated layers split the projection in two, `attn.qk` and `attn.v`; ours is one, [q; k; v].
Their `attn.pos_proj` is a linear layer from (δ along the width, δ along the height, ‖δ‖²) to a
score per head; our `attn.v_pos` is its weight with the columns in the paper's order (‖δ‖², δ₁, δ₂).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from locality.checkpoints.layouts import Layout, size_of
from locality.checkpoints.reading import State, require_blocks
from locality.errors import UserError
from locality.layers.grid import mlp_ratio_of
from locality.models.config import ViTConfig, token_grid

# Where no gates tell the number of heads: the width of DeiT's, and of a ConViT's without gates.
_HEAD_DIM, _CONVIT_HEAD_DIM = 64, 48

_RENAMES = (
    (r"^patch_embed\.", "patch_embed.proj."),
    (r"\.v_pos$", ".pos_proj.weight"),
    (r"\.gating$", ".gating_param"),
)


class _ViT(Layout):
    """What both layouts share: blocks whose attention is gated, if any, and then plain ones."""

    holds = ViTConfig

    def dropped(self, config: ViTConfig) -> dict[str, tuple[int, ...]]:
        # The bias of `pos_proj` adds the same number to the score of every key, and the softmax
        # cancels it. Where every block is gated no class token joins, and the first patch is read.
        shapes: dict[str, tuple[int, ...]] = {
            f"blocks.{index}.attn.pos_proj.bias": (config.num_heads,)
            for index in range(config.gpsa_layers)
        }
        if not config.has_class_token:
            shapes["cls_token"] = (1, 1, config.embed_dim)
        return shapes

    def write(self, name: str, tensor: Tensor, config: ViTConfig) -> dict[str, Tensor]:
        if parts := _parts(name, config):
            sizes = (2 * config.embed_dim, config.embed_dim)
            # Copies, since formats that store each tensor once refuse two views of the same memory.
            rows = (row.clone() for row in tensor.split(sizes))
            return dict(zip(parts, rows, strict=True))
        return {self.rename(name): tensor.flip(1) if name.endswith(".v_pos") else tensor}

    def read(self, name: str, state: State, config: ViTConfig) -> Tensor:
        if parts := _parts(name, config):
            return torch.cat([state[part] for part in parts])
        tensor = state[self.rename(name)]
        return tensor.flip(1) if name.endswith(".v_pos") else tensor

    def infer(self, state: State, settings: Mapping[str, Any]) -> ViTConfig:
        """Where they are not set, images are taken to be square, and heads without gates 64 wide
        (48 in a ConViT)."""
        depth = require_blocks(state, "blocks.")
        gated = [index for index in range(depth) if f"blocks.{index}.attn.gating_param" in state]
        if gated != list(range(len(gated))):
            raise UserError(
                f"the gated layers have to be the first of the {depth} blocks; these weights have "
                f"them at {gated}"
            )
        width, in_chans, patch_size, _ = self.told(state, "patch_embed.weight").shape
        hidden = len(self.told(state, "blocks.0.mlp.fc1.weight"))
        size, class_entry = size_of(state, patch_size, not gated, settings.get("img_size"))
        if gated:
            heads = len(state["blocks.0.attn.gating_param"])
        else:
            convit = not class_entry and width % _CONVIT_HEAD_DIM == 0
            heads, rest = divmod(width, _CONVIT_HEAD_DIM if convit else _HEAD_DIM)
            if "num_heads" in settings:
                heads = 1  # until it is set
            elif rest:
                raise UserError(
                    f"the number of heads cannot be told from a width of {width}; set num_heads, "
                    f"or give the model's name"
                )
        return ViTConfig(
            embed_dim=width,
            num_heads=heads,
            depth=depth,
            img_size=size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=len(state["head.weight"]) if "head.weight" in state else 0,
            mlp_ratio=mlp_ratio_of(width, hidden),
            qkv_bias=f"blocks.0.attn.{'qk' if gated else 'qkv'}.bias" in state,
            gpsa_layers=len(gated),
            use_pos_embed="pos_embed" in state,
            embed_class_token=class_entry,
            class_token=False if len(gated) == depth else None,
        )

    def untold(self, config: ViTConfig) -> dict[str, Any]:
        return {"num_heads": config.num_heads, "img_size": config.img_size}


def _parts(name: str, config: ViTConfig) -> list[str]:
    """The two that the projection of a gated layer is cut into; none for other tensors."""
    found = re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.\w+", name)
    gated = found and int(found[1]) < config.gpsa_layers
    return [name.replace("qkv", part) for part in ("qk", "v")] if gated else []


class _ConViT(_ViT):
    def untold(self, config: ViTConfig) -> dict[str, Any]:
        untold = {} if config.use_pos_embed else {"img_size": config.img_size}
        if not config.gpsa_layers:
            untold = super().untold(config)
        pool = config.global_pool
        return untold if pool == "token" else untold | {"global_pool": pool}

    def to_ours(self, state: State, config: ViTConfig) -> dict[str, Tensor]:
        self.require(config)
        return super().to_ours(state, config)

    def accepted(self, config: ViTConfig) -> dict[str, tuple[Any, ...]]:
        gated = config.gpsa_layers == config.depth
        return {
            "positional_attention": ("gpsa",) if config.gpsa_layers else ("gpsa", "psa", "conv"),
            "embed_class_token": (False,) if config.use_pos_embed else (False, True),
            "global_pool": ("token",) if gated else ("token", "avg"),
            "has_class_token": (not gated,),
        }

    def require(self, config: ViTConfig) -> None:
        super().require(config)
        rows, columns = token_grid(config.img_size, config.patch_size)
        if config.gpsa_layers and rows != columns:
            raise UserError(
                f"{self.title} code has square grids of patches only, and this model one of "
                f"{rows}×{columns}; keep it in our own format"
            )


class _DeiT(_ViT):
    def accepted(self, config: ViTConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "gpsa_layers": (0,),
            "use_pos_embed": (True,),
            "embed_class_token": (True,),
            "global_pool": ("token",),
        }


CONVIT = _ConViT(
    "convit",
    "ConViT's authors' and timm's",
    "convit",
    marks=(".patch_embed.proj.", ".attn.gating_param."),
    absent=(".stage0.",),
    renames=_RENAMES,
)
DEIT = _DeiT(
    "deit",
    "DeiT's authors' and timm's",
    "deit",
    marks=(".patch_embed.proj.", ".blocks.0.attn.qkv.", ".cls_token."),
    absent=(".attn.gating_param.", ".stage0."),
    renames=_RENAMES,
)
