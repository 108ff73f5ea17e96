"""DeiT and ConViT: one class, one configuration.

A ConViT is a vision transformer whose first blocks have positional attention, after which the class
token joins (ConViT §3, Fig. 4). Without positional blocks it is a DeiT.

Shapes:  B batch · N = H·W patches · C embed_dim · (H, W) token grid
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from locality.layers import (
    Block,
    GatedPositionalSelfAttention,
    LocalConvolution,
    PositionalSelfAttention,
    SelfAttention,
)
from locality.layers.attention import PositionalPart, positional_parts, stacked_scores
from locality.layers.conv_init import kernel_size
from locality.layers.grid import Grid
from locality.layers.position import Scores
from locality.models import base
from locality.models.base import ImageClassifier, RunBlock
from locality.models.config import ViTConfig


def _positional_kwargs(c: ViTConfig) -> dict[str, Any]:
    """The arguments that PSA and GPSA share."""
    return {
        "dim": c.embed_dim,
        "num_heads": c.num_heads,
        "qkv_bias": c.qkv_bias,
        "proj_drop": c.proj_drop_rate,
        "locality_strength": c.locality_strength,
        "conv_init": c.conv_init,
    }


# Attention of the first blocks by name. To add one, write a class, a row here, and a name in
# `PositionalAttention` of `models/config.py`; see docs/architecture.md.
POSITIONAL: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "gpsa": lambda c: GatedPositionalSelfAttention(
        gating_init=c.gating_init, **_positional_kwargs(c)
    ),
    "psa": lambda c: PositionalSelfAttention(**_positional_kwargs(c)),
    "conv": lambda c: LocalConvolution(c.embed_dim, kernel_size(c.num_heads)),
}


@torch.fx.wrap
def _positional_parts(
    v_pos: Sequence[Tensor],
    gating: Sequence[Tensor],
    grid: Grid,
    x: Tensor,
    width: int,
    kept: tuple[Grid, Scores] | None,
) -> list[PositionalPart]:
    """The parts of several layers; `kept` is a grid and the precomputed scores on it."""
    scores = kept[1] if kept and kept[0] == grid else stacked_scores(v_pos, grid)
    return positional_parts(scores, gating, grid, x, width)


class VisionTransformer(ImageClassifier):
    """DeiT or ConViT (ConViT Table 1)."""

    config: ViTConfig
    row_scores: Tensor
    column_scores: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, config.embed_dim)
        width = config.embed_dim
        self.patch_embed = nn.Conv2d(
            config.in_chans, width, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.cls_token = base.embedding(1, width) if config.has_class_token else None
        ((rows, columns),) = config.native_grids
        entries = rows * columns + config.embed_class_token
        self.pos_embed = base.embedding(entries, width) if config.use_pos_embed else None
        # Stochastic depth grows linearly over the blocks.
        step = config.drop_path_rate / max(1, config.depth - 1)
        self.blocks = nn.ModuleList(
            Block(
                width,
                self._make_attention(index),
                mlp_ratio=config.mlp_ratio,
                proj_drop=config.proj_drop_rate,
                drop_path=step * index,
            )
            for index in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = base.make_head(width, config.num_classes)
        self.fuses = bool(self._gated_layers())

    def _make_attention(self, index: int) -> nn.Module:
        c = self.config
        if index >= c.gpsa_layers:
            return SelfAttention(c.embed_dim, c.num_heads, c.qkv_bias, c.proj_drop_rate)
        attention = POSITIONAL[c.positional_attention](c)
        if isinstance(attention, GatedPositionalSelfAttention):
            attention.gating.requires_grad_(not c.freeze_gating)
        if c.freeze_gpsa and c.positional_attention != "conv":
            attention.requires_grad_(False)
        return attention

    def _tokens(self, x: Tensor, run: RunBlock, maps: int | None = None) -> Tensor:
        grid = base.token_grids(self.config, x.shape[1:])[0]
        # Contiguous, so that no later residual sum works on strided memory.
        x = self.patch_embed(x).flatten(2).transpose(1, 2).contiguous()
        parts = self._positional_parts(x, grid)
        token: Tensor | None = self.cls_token
        prefix = int(self.config.embed_class_token)
        if token is not None and prefix:
            x, token = base.prepend_class_token(token, x), None
        if self.pos_embed is not None:
            (native_grid,) = self.config.native_grids
            x = x + base.position_embedding(self.pos_embed, native_grid, grid, prefix)
        for index, block in enumerate(self.blocks[:maps]):
            if index == self.config.gpsa_layers and token is not None:
                x = base.prepend_class_token(token, x)
            x = run(block, x, grid, **parts.get(index, {}))
        return x

    def _positional_parts(self, x: Tensor, grid: Grid) -> dict[int, dict[str, PositionalPart]]:
        """Extra arguments of the gated blocks for tokens (B, N, C), by block index."""
        layers = self._gated_layers()
        if not layers:
            return {}
        v_pos = [layer.v_pos for layer in layers.values()]
        gating = [layer.gating for layer in layers.values()]
        width = next(iter(layers.values())).value_dim
        kept = None
        if self.fused:  # layers may have been pruned after fusing
            rows, columns = self.row_scores[: len(layers)], self.column_scores[: len(layers)]
            kept = self.config.native_grids[0], (rows, columns)
        parts = _positional_parts(v_pos, gating, grid, x, width, kept)
        return {index: {"part": parts[place]} for place, index in enumerate(layers)}

    def _gated_layers(self) -> dict[int, GatedPositionalSelfAttention]:
        """The gated layers by block index."""
        layers = ((index, block.attn) for index, block in enumerate(self.blocks))
        return {i: a for i, a in layers if isinstance(a, GatedPositionalSelfAttention)}

    def _fuse(self) -> None:
        if layers := self._gated_layers():
            scores = stacked_scores([a.v_pos for a in layers.values()], self.config.native_grids[0])
            for name, score in zip(("row_scores", "column_scores"), scores, strict=True):
                self.register_buffer(name, score, persistent=False)

    def _feature_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def _truncate(self, maps: int) -> dict[str, Any]:
        config = self.config
        token = config.has_class_token and config.gpsa_layers < maps
        self.blocks = self.blocks[:maps]
        if not token:
            self.cls_token = None
        return {
            "depth": maps,
            "gpsa_layers": min(config.gpsa_layers, maps),
            "drop_path_rate": config.drop_path_rate * (maps - 1) / max(1, config.depth - 1),
            "class_token": token,
        }

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups of parameters by layer, for layer-wise learning rates (timm's convention)."""
        return {
            "stem": r"^cls_token|^pos_embed|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """One map per block, all on the patch grid."""
        return [
            {
                "num_chs": self.num_features,
                "reduction": self.config.patch_size,
                "module": f"blocks.{index}",
            }
            for index in range(self.config.depth)
        ]
