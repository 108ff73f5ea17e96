"""Grids of tokens and what convolutions make of them: arithmetic alone, without torch."""

from __future__ import annotations

from typing import Literal

Grid = tuple[int, int]
"""Height and width, in tokens."""

ProjectionName = Literal["conv", "linear", "avg", "microsoft_avg"]
AttentionScale = Literal["width", "head"]

PROJECTIONS: tuple[ProjectionName, ...] = ("conv", "linear", "avg", "microsoft_avg")
ATTENTION_SCALES: tuple[AttentionScale, ...] = ("width", "head")


def convolved_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """The length that a convolution makes of a length of `size` (Eq. 1)."""
    return (size + 2 * padding - kernel) // stride + 1


def projected_grid(
    grid: Grid, projection: ProjectionName, kernel: int, stride: int, pad: int
) -> Grid:
    """The grid that projections of a `grid` of tokens lie on."""
    if projection == "linear":
        return grid
    height, width = (convolved_size(size, kernel, stride, pad) for size in grid)
    if projection == "microsoft_avg":  # rounded up, but no window begins beyond the grid
        height, width = (
            min(-(-(size + 2 * pad - kernel) // stride), (size + pad - 1) // stride) + 1
            for size in grid
        )
    return height, width
