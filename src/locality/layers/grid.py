"""Sizes of token grids after convolutions, and layer widths, without torch."""

from __future__ import annotations

from typing import Literal

from locality import checks
from locality.errors import UserError

Grid = tuple[int, int]
"""Height and width, in tokens."""

ProjectionName = Literal["conv", "linear", "avg"]
AttentionScale = Literal["width", "head"]


def convolved_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """The output length of a convolution on a length of `size` (Eq. 1)."""
    return (size + 2 * padding - kernel) // stride + 1


def projected_grid(
    grid: Grid, projection: ProjectionName, kernel: int, stride: int, pad: int
) -> Grid:
    """The grid of the projections of tokens on `grid`."""
    if projection == "linear":
        return grid
    height, width = (convolved_size(size, kernel, stride, pad) for size in grid)
    return height, width


def check_kernel(kernel: int) -> None:
    """Check that the kernel size of a projection is odd."""
    checks.integer("projection_kernel", kernel, 1, 1023)
    if kernel % 2 == 0:
        raise UserError(f"projection_kernel must be odd and above 0, not {kernel}")


def hidden_width(dim: int, mlp_ratio: float) -> int:
    """The hidden width of an MLP on tokens of width `dim`."""
    return int(dim * mlp_ratio)


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Check that the width is a multiple of the number of heads."""
    if num_heads < 1 or embed_dim % num_heads:
        raise UserError(
            f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; choose a multiple"
        )
