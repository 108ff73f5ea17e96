"""The attention of timm's vision transformers, in the same terms as ours.

timm's modules do not show their attention, so it is computed here from their weights: queries and
keys from `qkv` (or ConViT's `qk`), normalised where the module does so, scaled as it scales them.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.attention import Attention as TimmAttention
from timm.models.convit import GPSA, MHSA
from torch import Tensor, nn

from locality.layers.attention import AttentionMaps, prefix_length
from locality.layers.position import Grid, positional_attention


def is_known(module: nn.Module) -> bool:
    """Whether `timm_maps` can read this module."""
    return isinstance(module, (TimmAttention, GPSA, MHSA))


def timm_maps(module: nn.Module, x: Tensor, grid: Grid) -> AttentionMaps:
    """The attention of one of timm's modules on tokens (B, N, C), prefix tokens first."""
    if isinstance(module, GPSA):
        return _gated_maps(module, x, grid)
    assert isinstance(module, (TimmAttention, MHSA))
    q, k = _split_heads(module.qkv(x), 3, module.num_heads)[:2]
    if isinstance(module, TimmAttention):
        q, k = module.q_norm(q), module.k_norm(k)
    content = _softmax(q, k, module.scale)
    return AttentionMaps(content, content, None, None, grid, grid, prefix_length(x.shape[1], grid))


def grid_of(patch_embed: Any, height: int, width: int) -> Grid:
    """The grid that timm's patch embedding makes of an image of height × width pixels."""
    rows, columns = patch_embed.dynamic_feat_size((height, width))
    return rows, columns


def _gated_maps(module: GPSA, x: Tensor, grid: Grid) -> AttentionMaps:
    q, k = _split_heads(module.qk(x), 2, module.num_heads)
    content = _softmax(q, k, module.scale)
    # Columns there: along the width, along the height, squared distance. The bias is the same for
    # every key, so the softmax cancels it.
    position = positional_attention(module.pos_proj.weight[:, [2, 1, 0]], grid)
    gate = module.gating_param.sigmoid()
    share = gate[:, None, None]
    mixed = (1 - share) * content + share * position
    return AttentionMaps(mixed, content, position, gate, grid, grid, 0)


def _split_heads(projected: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(B, N, parts·h·d) → `parts` tensors of (B, h, N, d)."""
    batch, tokens, _ = projected.shape
    return projected.view(batch, tokens, parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def _softmax(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * scale, dim=-1)
