"""Initialisations of attention layers, in place on a built model.

Shapes:  C width · h heads · d = C/h head width · N = H·W tokens · Δ an offset in tokens

W_Q, W_K, W_V, W_O are written as in the papers, x W; a linear layer holds the transpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from locality.layers.grid import Grid
from locality.layers.position import kernel_offsets
from locality.models.convit import SelfAttention
from locality.models.cvt import ConvolutionalAttention

_SLOWEST = 10_000.0
_GAP = 3.0
"""Difference between the score of an impulse and those of neighbouring patches, in nats."""


@torch.no_grad()
def mimetic(model: nn.Module) -> None:
    """Attention that mimics a trained transformer's (Trockman & Kolter 2023, arXiv 2305.09828).

        W_Q W_Kᵀ ≈ 0.7 Z + 0.7 I per head,    W_V W_O ≈ 0.4 Z − 0.4 I,    Z_ij ~ N(0, 1/C),

    factorised by SVD, the first truncated to rank d. Position embeddings are sinusoidal.
    """
    set_sinusoidal_positions(model)
    for layer in model.modules():
        if not isinstance(layer, (SelfAttention, ConvolutionalAttention)):
            continue
        queries, keys, values = _projections(layer)
        rank = layer.dim // layer.num_heads
        for q, k in zip(queries.split(rank), keys.split(rank), strict=True):
            left, right = _factors(0.7, 0.7, q)
            q.copy_(left[:, :rank].T)
            k.copy_(right[:rank])
        left, right = _factors(0.4, -0.4, values)
        values.copy_(left.T)
        layer.proj.weight.copy_(right.T)


@torch.no_grad()
def impulse(model: nn.Module) -> None:
    """Content attention to a single neighbour (Zheng et al., NeurIPS 2025, arXiv 2505.19985).

        softmax(P W_Q W_Kᵀ Pᵀ/√d) ≈ the shift by Δ,    Δ random in a 3×3 window for each head,

    for sinusoidal positions P. The authors fit W_Q and W_K; here they have a closed form. Shifting
    P by Δ rotates each pair (sin ωi, cos ωi) by ωΔ. With W_Q = s·I on d/2 pairs and W_K = s·(I
    rotated), the score of offset δ is s²/√d Σ_ω cos ω(δ − Δ), largest at δ = Δ. The pairs of the
    highest frequencies on each axis are used, which distinguish neighbours best.
    """
    set_sinusoidal_positions(model)
    for layer in model.modules():
        if not isinstance(layer, SelfAttention):
            continue
        queries, keys, _ = _projections(layer)
        quarter, rank = layer.dim // 4, layer.dim // layer.num_heads
        pairs = rank // 4  # of each axis
        speeds, pair = _speeds(quarter)[:pairs], torch.arange(pairs)
        # After LayerNorm tokens have variance 1, so each pair has squared length 2.
        beside = 2 * float((1 - speeds.cos()).sum())
        scale = math.sqrt(_GAP * math.sqrt(rank) / beside)
        offsets = kernel_offsets(3)[torch.randint(9, (layer.num_heads,))]
        for q, k, offset in zip(queries.split(rank), keys.split(rank), offsets, strict=True):
            q.zero_()
            k.zero_()
            for axis, turn in enumerate(speeds * offset[:, None]):
                row, sine = 2 * (axis * pairs + pair), 2 * axis * quarter + pair
                cosine = sine + quarter
                q[row, sine] = q[row + 1, cosine] = scale
                # sin ω(j−Δ) and cos ω(j−Δ) for a key at j
                k[row, sine] = k[row + 1, cosine] = scale * turn.cos()
                k[row, cosine], k[row + 1, sine] = -scale * turn.sin(), scale * turn.sin()
            for weight in (q, k):
                # Rows that sum to zero ignore the mean that LayerNorm removes; the slowest sine,
                # which balances them, is about 0.
                weight[:, quarter - 1] -= weight.sum(dim=1)


INITIALISATIONS: dict[str, Callable[[nn.Module], None]] = {
    "mimetic": mimetic,
    "impulse": impulse,
}
"""Functions by the value of `init`."""


def sinusoidal_positions(grid: Grid, width: int) -> Tensor:
    """Position embeddings (H·W, C): sin ωi, cos ωi, sin ωj, cos ωj for C/4 frequencies ω."""
    height, breadth = grid
    speeds = _speeds(width // 4)
    rows = torch.arange(height).repeat_interleave(breadth)[:, None] * speeds
    columns = torch.arange(breadth).repeat(height)[:, None] * speeds
    waves = (rows.sin(), rows.cos(), columns.sin(), columns.cos())
    return nn.functional.pad(torch.cat(waves, dim=1), (0, width % 4))


def set_sinusoidal_positions(model: Any) -> None:
    """Initialise a model's learned position embedding, if any, with sinusoids."""
    if getattr(model, "pos_embed", None) is not None:
        (grid,) = model.config.native_grids
        model.pos_embed[:, -grid[0] * grid[1] :] = sinusoidal_positions(grid, model.embed_dim)


def _speeds(count: int) -> Tensor:
    return _SLOWEST ** -(torch.arange(count) / max(1, count - 1))


def _projections(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of queries, keys and values, each (C, C)."""
    if isinstance(layer, ConvolutionalAttention):
        return layer.q.linear.weight, layer.k.linear.weight, layer.v.linear.weight
    queries, keys, values = layer.qkv.weight.chunk(3)
    return queries, keys, values


def _factors(alpha: float, beta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors of αZ + βI with equal singular values."""
    width = like.shape[1]
    noise = torch.randn(width, width, device=like.device) / math.sqrt(width)
    left, scales, right = torch.linalg.svd(alpha * noise + beta * torch.eye(width).to(noise))
    return left * scales.sqrt(), scales.sqrt()[:, None] * right
