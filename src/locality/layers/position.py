"""Relative positions of patches, and positional attention without an N×N matrix.

Shapes:  h heads · H×W token grid, rows first · N = H·W tokens, row-major · d head width

The positional score of ConViT's Eq. 4 and 7 is v_pos · r_δ with r_δ = (‖δ‖², δ₁, δ₂), where
δ = key − query, δ₁ along rows (down), δ₂ along columns (right), in token units. It is a sum of a
term in δ₁ and a term in δ₂,

    v · r_δ = (v₀ δ₁² + v₁ δ₁) + (v₀ δ₂² + v₂ δ₂) = s(q₁, k₁) + t(q₂, k₂),

for any v. So softmax(v·r) is the outer product of a softmax over rows and one over columns
(`Separable`): two small matrix products, O(N·(H+W)). And v·r = φ(q)·ψ(k), where φ(q) is one at
indices q₁ and H + q₂ and zero elsewhere, and ψ(k) = (s(·, k₁), t(·, k₂)) (`dot_product_form`),
which adds position to the scores of ordinary attention. The N×N matrix is only computed for
inspection (`positional_attention`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from locality.layers.grid import Grid, Window

ALL_QUERIES = Window()
Scores = tuple[Tensor, Tensor]

# e^−1000 is zero, and −1000 finite, in every dtype.
_LEAST_SCORE = -1000.0


def check_grid(tokens: Tensor, grid: Grid) -> None:
    """Check that tokens (B, N, C) are exactly the patches of `grid`."""
    if tokens.shape[1] != grid[0] * grid[1]:
        raise ValueError(
            f"a positional layer got {tokens.shape[1]} tokens for a grid of {grid[0]}×{grid[1]} "
            f"patches; add class tokens after the last positional layer"
        )


def relative_encodings(grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """The encodings r_δ of all (query, key) pairs, (N, N, 3) as (‖δ‖², δ₁, δ₂) (Eq. 5)."""
    height, width = grid
    rows = torch.arange(height, dtype=dtype).repeat_interleave(width)
    columns = torch.arange(width, dtype=dtype).repeat(height)
    down = rows[None, :] - rows[:, None]
    right = columns[None, :] - columns[:, None]
    return torch.stack((down.square() + right.square(), down, right), dim=-1)


def positional_scores(v_pos: Tensor, grid: Grid) -> Tensor:
    """The scores v_pos · r_ij before any softmax: (h, 3) → (h, N, N). Quadratic in N."""
    encodings = relative_encodings(grid, v_pos.dtype).to(v_pos.device)
    return torch.einsum("hp,qkp->hqk", v_pos, encodings)


def in_full(v_pos: Tensor) -> Tensor:
    """v_pos in fp32 at least: scores of distant pairs are large."""
    return v_pos.to(torch.promote_types(v_pos.dtype, torch.float32))


def axis_scores(v_pos: Tensor, grid: Grid, window: Window = ALL_QUERIES) -> Scores:
    """The scores along both axes, s and t above.

    Args:
        v_pos: (..., 3), for any number of heads and layers.
        grid: grid of the keys, (H, W).
        window: query positions and zero padding.

    Returns:
        (..., H', H + padding) over rows and (..., W', W + padding) over columns.
    """
    quadratic, *linear = v_pos[..., None, None, :].unbind(-1)
    scores = []
    for slope, length in zip(linear, grid, strict=True):
        keys = torch.arange(
            -window.before, length + window.after, device=v_pos.device, dtype=v_pos.dtype
        )
        queries = keys[window.before :][window.queries(length)]
        offsets = keys[None, :] - queries[:, None]
        scores.append(torch.addcmul(slope, quadratic, offsets) * offsets)
    return scores[0], scores[1]


class Separable(NamedTuple):
    """Positional attention as its factors, (h, H', H) over rows and (h, W', W) over columns.

    The attention of query (i₁, i₂) to key (j₁, j₂) is rows[h, i₁, j₁] · columns[h, i₂, j₂].
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, scores: Scores, grid: Grid, window: Window, dtype: torch.dtype) -> Separable:
        """The factors for any number of layers; padding counts in the softmax."""
        rows, columns = (
            score.softmax(dim=-1)[..., window.before : window.before + length].to(dtype)
            for score, length in zip(scores, grid, strict=True)
        )
        return cls(rows, columns)

    def attend(self, values: Tensor) -> Tensor:
        """softmax(v_pos·r) V: (B, h, H·W, d) → (B, h, H'·W', d)."""
        rows, columns = self
        batch, heads, _, width = values.shape
        (down, height), (right, breadth) = rows.shape[1:], columns.shape[1:]
        # Heads first, so that each factor multiplies the whole batch in one product per head.
        # Columns before rows leaves the tokens row-major without a final copy.
        v = values.unflatten(2, (height, breadth)).permute(1, 3, 2, 0, 4)
        v = torch.bmm(columns, v.reshape(heads, breadth, height * batch * width))
        v = v.view(heads, right, height, batch * width).transpose(1, 2)
        v = torch.bmm(rows, v.reshape(heads, height, right * batch * width))
        return v.view(heads, down * right, batch, width).permute(2, 0, 1, 3)


def dot_product_form(scores: Scores, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries φ (N, w) and keys ψ (h, N, w), w ≥ H + W, with φ·ψ = v·r less a term per query.

    The softmax of each axis is taken here in full precision: its backward pass removes the
    half-precision error common to all scores of a query. Scores are relative to each query's
    largest, so that those that matter are small and lose little precision.
    """
    height, breadth = (score.shape[-1] for score in scores)
    width = -(-(height + breadth) // 8) * 8  # fast kernels want a multiple of 8
    rows, columns = (score.log_softmax(dim=-1).transpose(-1, -2) for score in scores)
    shape = (*rows.shape[:-2], height, breadth)
    parts = (
        rows[..., :, None, :].expand(*shape, -1),
        columns[..., None, :, :].expand(*shape, -1),
        rows.new_zeros(()).expand(*shape, width - height - breadth),
    )
    keys = torch.cat(parts, dim=-1).flatten(-3, -2)
    keys = keys - keys.detach().amax(dim=-2, keepdim=True)
    places = torch.eye(height + breadth, width, dtype=dtype, device=rows.device)
    queries = places[:height, None] + places[None, height:]
    return queries.flatten(0, 1), keys.clamp(min=_LEAST_SCORE).to(dtype)


def attend_widely(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(QKᵀ) V: (B, h, N, w) twice and (B, h, N, d) → (B, h, N, d).

    Values are zero-padded to width w, since the fast kernels need equal widths.
    """
    width = values.shape[-1]
    if queries.shape[-1] > width:
        values = F.pad(values, (0, queries.shape[-1] - width))
    return F.scaled_dot_product_attention(queries, keys, values, scale=1.0)[..., :width]


def positional_factors(v_pos: Tensor, grid: Grid, window: Window = ALL_QUERIES) -> Separable:
    """The factors of positional attention: (h, 3) → (h, H', H) over rows, (h, W', W) over columns.

    The query grid (H', W') is the key grid unless `window` is given.
    """
    return Separable.of(axis_scores(v_pos, grid, window), grid, window, v_pos.dtype)


def positional_attention(v_pos: Tensor, grid: Grid, window: Window = ALL_QUERIES) -> Tensor:
    """softmax(v_pos · r_ij) as a matrix: (h, 3) → (h, N', N). For inspection; quadratic in N."""
    rows, columns = positional_factors(v_pos, grid, window)
    return torch.einsum("hik,hjl->hijkl", rows, columns).flatten(3).flatten(1, 2)
