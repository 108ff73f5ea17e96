"""Relative positions of patches, and positional attention without an N×N matrix.

Shapes:  h heads · H×W token grid, rows first · N = H·W tokens, row-major · d head width

The positional score of ConViT's Eq. 4 and 7 is v_pos · r_δ with r_δ = (‖δ‖², δ₁, δ₂). The offset
δ = j − i from the query at (i₁, i₂) to the key at (j₁, j₂) is in tokens, δ₁ down and δ₂ right. The
score is a term in δ₁ plus a term in δ₂, whatever v_pos = v is:

    v · r_δ = (v₀ δ₁² + v₁ δ₁) + (v₀ δ₂² + v₂ δ₂) = s(i₁, j₁) + t(i₂, j₂)

Eq. 7: softmax(v·r) is the outer product of a softmax over rows and one over columns (`Separable`).
Two small matrix products apply it, N·(H+W) multiplications per channel.

Eq. 4: one softmax over content and position. The scores of position are a mask of ordinary
attention, N×N per head (`attend_jointly`).

Functions marked `torch.fx.wrap` are one node in a traced graph, which takes any grid.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from locality.layers.grid import Grid

GatedPart = tuple[Tensor, "Separable"]
"""Of Eq. 7, what depends on no token: σ(λ), (h, 1, 1), and positional attention."""


@torch.fx.wrap
def gated_parts(
    v_pos: Sequence[Tensor], gating: Sequence[Tensor], grid: Grid, dtype: torch.dtype
) -> list[GatedPart]:
    """σ(λ) and softmax(v_pos·r) of layers, in as many kernels as for one: (h, 3), (h,) each."""
    gates = torch.stack([*gating]).sigmoid().to(dtype)[:, :, None, None]
    factors = zip(*Separable.of(torch.stack([*v_pos]), grid, dtype), strict=True)
    return list(zip(gates, itertools.starmap(Separable, factors), strict=True))


@torch.fx.wrap
def attend_jointly(q: Tensor, k: Tensor, v: Tensor, v_pos: Tensor, grid: Grid) -> Tensor:
    """softmax(QKᵀ/√d + v_pos·r) V: (B, h, N, d) three times → (B, h, N, d) (Eq. 4).

    The mask is log softmax(v_pos·r), since a constant per query changes nothing: the scores that
    matter are small, and with their gradients precise in half precision.
    """
    check_grid(v, grid)
    rows, columns = (score.log_softmax(dim=-1) for score in axis_scores(in_full(v_pos), grid))
    mask = (rows[:, :, None, :, None] + columns[:, None, :, None, :]).flatten(3).flatten(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))


def check_grid(values: Tensor, grid: Grid) -> None:
    """Check that tokens (..., N, d) are exactly the patches of `grid`."""
    if values.shape[-2] != grid[0] * grid[1]:
        raise ValueError(
            f"a positional layer got {values.shape[-2]} tokens for a grid of {grid[0]}×{grid[1]} "
            f"patches; add class tokens after the last positional layer"
        )


def in_full(v_pos: Tensor) -> Tensor:
    """v_pos in fp32 at least: scores of distant pairs are large."""
    return v_pos.to(torch.promote_types(v_pos.dtype, torch.float32))


def axis_scores(v_pos: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """s and t above, (..., H, H) over rows and (..., W, W) over columns, from v_pos (..., 3)."""
    quadratic, *linear = v_pos[..., None, None, :].unbind(-1)
    scores = []
    for slope, length in zip(linear, grid, strict=True):
        indices = torch.arange(length, device=v_pos.device, dtype=v_pos.dtype)
        offsets = indices[None, :] - indices[:, None]
        scores.append(torch.addcmul(slope, quadratic, offsets) * offsets)  # v₀δ² + v₁δ
    return scores[0], scores[1]


class Separable(NamedTuple):
    """Positional attention as its factors, (h, H, H) over rows and (h, W, W) over columns.

    The attention of query (i₁, i₂) to key (j₁, j₂) is rows[h, i₁, j₁] · columns[h, i₂, j₂].
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, v_pos: Tensor, grid: Grid, dtype: torch.dtype) -> "Separable":
        """The factors of v_pos, (…, h, 3) for any number of layers."""
        scores = axis_scores(in_full(v_pos), grid)
        rows, columns = (score.softmax(dim=-1).to(dtype) for score in scores)
        return cls(rows, columns)

    def attend(self, values: Tensor) -> Tensor:
        """softmax(v_pos·r) V: (B, h, H·W, d) → (B, h, H·W, d)."""
        rows, columns = self
        batch, heads, _, width = values.shape
        height, breadth = rows.shape[-1], columns.shape[-1]
        check_grid(values, (height, breadth))
        # Heads first, so that each factor multiplies the whole batch in one product per head.
        # Columns before rows leaves the tokens row-major without a final copy.
        v = values.unflatten(2, (height, breadth)).permute(1, 3, 2, 0, 4)
        v = torch.bmm(columns, v.reshape(heads, breadth, height * batch * width))
        v = v.view(heads, breadth, height, batch * width).transpose(1, 2)
        v = torch.bmm(rows, v.reshape(heads, height, breadth * batch * width))
        return v.view(heads, height * breadth, batch, width).permute(2, 0, 1, 3)


def positional_attention(v_pos: Tensor, grid: Grid) -> Tensor:
    """softmax(v_pos · r_ij) as a matrix: (h, 3) → (h, N, N). For inspection; quadratic in N."""
    rows, columns = Separable.of(v_pos, grid, v_pos.dtype)
    return torch.einsum("hik,hjl->hijkl", rows, columns).flatten(3).flatten(1, 2)


def kernel_size(num_heads: int) -> int:
    """The side k of the largest k×k kernel that `num_heads` heads can represent, ⌊√h⌋."""
    return math.isqrt(num_heads)


def kernel_offsets(kernel: int) -> Tensor:
    """The offsets Δ of a k×k kernel from its centre: (k², 2) as (down, right), row-major (Eq. 5).

    Even kernels have half-integer centres, so their offsets are ±½, ±3/2, …
    """
    offsets = torch.arange(kernel, dtype=torch.float32) - (kernel - 1) / 2
    return torch.cartesian_prod(offsets, offsets).view(-1, 2)


def attention_centres(offsets: Tensor, strength: float) -> Tensor:
    """The v_pos that centres attention on `offsets`: (n, 2) → (n, 3), −α (1, −2Δ₁, −2Δ₂) (Eq. 5).

    The attention is a discrete Gaussian around i + Δ, with variance 1/(2α) along each axis.
    """
    ones = torch.ones(len(offsets), 1, dtype=offsets.dtype, device=offsets.device)
    return -strength * torch.cat((ones, -2 * offsets), dim=1)
