"""The layers of both papers: attention with and without position, convolution, and the block."""

from locality.layers.attention import (
    AttentionMaps,
    GatedPositionalSelfAttention,
    PositionalSelfAttention,
    SelfAttention,
)
from locality.layers.block import Block
from locality.layers.kernels import truncated_kernel
from locality.layers.local import LocalConvolution
from locality.layers.position import Grid

__all__ = [
    "AttentionMaps",
    "Block",
    "GatedPositionalSelfAttention",
    "Grid",
    "LocalConvolution",
    "PositionalSelfAttention",
    "SelfAttention",
    "truncated_kernel",
]
