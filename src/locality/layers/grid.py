"""Sizes of token grids after convolutions, and layer widths, without torch."""

from typing import Literal

from locality.errors import UserError

Grid = tuple[int, int]
"""Height and width, in tokens."""

ProjectionName = Literal["conv", "linear", "avg"]
AttentionScale = Literal["width", "head"]


def projected_grid(
    grid: Grid, projection: ProjectionName, kernel: int, stride: int, pad: int
) -> Grid:
    """The grid of the projections of tokens on `grid`, after a convolution (Eq. 1)."""
    if projection == "linear":
        return grid
    height, width = ((size + 2 * pad - kernel) // stride + 1 for size in grid)
    return height, width


def hidden_width(dim: int, mlp_ratio: float) -> int:
    """The hidden width of an MLP on tokens of width `dim`."""
    return int(dim * mlp_ratio)


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Check that the width is a multiple of the number of heads."""
    if num_heads < 1 or embed_dim % num_heads:
        raise UserError(
            f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; choose a multiple"
        )
