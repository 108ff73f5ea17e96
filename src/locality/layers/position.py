"""Relative positions of patches, and positional attention in separable form.

Shapes:  h heads · H×W token grid, rows first · N = H·W tokens, row-major · d head width

The positional score of ConViT's Eq. 4 and 7 is v_pos · r_δ with r_δ = (‖δ‖², δ₁, δ₂), where
δ = key − query, δ₁ along rows (down), δ₂ along columns (right), in token units. It is a sum of a
term in δ₁ and a term in δ₂,

    v · r_δ = (v₀ δ₁² + v₁ δ₁) + (v₀ δ₂² + v₂ δ₂),

so its softmax over a full grid is the outer product of a softmax over rows and a softmax over
columns, for any v. This module computes it that way. The N×N matrix is only computed for
inspection (`positional_attention`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from locality.layers.grid import Grid, Window

_ALL_QUERIES = Window()


def check_grid(tokens: Tensor, grid: Grid) -> None:
    """Check that tokens (B, N, C) are exactly the patches of `grid`."""
    if tokens.shape[1] != grid[0] * grid[1]:
        raise ValueError(
            f"a positional layer got {tokens.shape[1]} tokens for a grid of {grid[0]}×{grid[1]} "
            f"patches; class tokens have to be added after the last of them"
        )


def relative_encodings(grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """The fixed encodings r_δ of every (query, key) pair: (N, N, 3) as (‖δ‖², δ₁, δ₂) (Eq. 5)."""
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


def axis_attention(
    quadratic: Tensor, linear: Tensor, length: int, window: Window = _ALL_QUERIES
) -> Tensor:
    """Attention along one axis: softmax over keys of quadratic·δ² + linear·δ.

    Args:
        quadratic, linear: the two coefficients of each head, (h,).
        length: number of tokens along the axis, L.
        window: the query positions and the zero padding.

    Returns:
        (h, Q, L), each row summing to one, less what falls on zero padding.
    """
    keys = torch.arange(
        -window.before, length + window.after, device=linear.device, dtype=linear.dtype
    )
    queries = keys[window.before :][window.queries(length)]
    offsets = keys[None, :] - queries[:, None]
    scores = (quadratic[:, None, None] * offsets + linear[:, None, None]) * offsets
    return scores.softmax(dim=-1)[..., window.before : window.before + length]


def positional_factors(
    v_pos: Tensor, grid: Grid, window: Window = _ALL_QUERIES
) -> tuple[Tensor, Tensor]:
    """The factors of positional attention: (h, 3) → (h, H', H) over rows, (h, W', W) over columns.

    The attention of query (i₁, i₂) to key (j₁, j₂) is rows[h, i₁, j₁] · columns[h, i₂, j₂]. The
    queries' grid (H', W') is the keys' unless a `window` says otherwise.
    """
    quadratic, down, right = v_pos.unbind(-1)
    return (
        axis_attention(quadratic, down, grid[0], window),
        axis_attention(quadratic, right, grid[1], window),
    )


def positional_attention(v_pos: Tensor, grid: Grid, window: Window = _ALL_QUERIES) -> Tensor:
    """softmax(v_pos · r_ij) as a matrix: (h, 3) → (h, N', N). For inspection; quadratic in N."""
    rows, columns = positional_factors(v_pos, grid, window)
    return torch.einsum("hik,hjl->hijkl", rows, columns).flatten(3).flatten(1, 2)


def apply_positional_attention(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Apply positional attention in its separable form: O(N·(H+W)) instead of O(N²).

    Args:
        rows, columns: factors of shape (h, H', H) and (h, W', W).
        values: (B, h, N, d) with N = H·W.

    Returns:
        (B, h, H'·W', d), equal to `positional_attention(...) @ values`.
    """
    batch, heads, _, width = values.shape
    (down, height), (right, breadth) = rows.shape[1:], columns.shape[1:]
    # Heads first: each factor then multiplies the whole batch in one matrix product per head, and
    # the order (columns, rows) leaves the tokens row-major without a last copy.
    v = values.unflatten(2, (height, breadth)).permute(1, 3, 2, 0, 4)
    v = torch.bmm(columns, v.reshape(heads, breadth, height * batch * width))
    v = v.view(heads, right, height, batch * width).transpose(1, 2)
    v = torch.bmm(rows, v.reshape(heads, height, right * batch * width))
    return v.view(heads, down * right, batch, width).permute(2, 0, 1, 3)
