"""The layers of both papers: attention with and without position, convolution, and the block."""

from locality.layers.attention import (
    AttentionMaps,
    GatedPositionalSelfAttention,
    PositionalSelfAttention,
    SelfAttention,
)
from locality.layers.block import Block
from locality.layers.convolution import (
    ConvolutionalAttention,
    ConvolutionalEmbedding,
    Projection,
)
from locality.layers.kernels import truncated_kernel
from locality.layers.local import LocalConvolution
from locality.layers.position import Grid

__all__ = [
    "AttentionMaps",
    "Block",
    "ConvolutionalAttention",
    "ConvolutionalEmbedding",
    "GatedPositionalSelfAttention",
    "Grid",
    "LocalConvolution",
    "PositionalSelfAttention",
    "Projection",
    "SelfAttention",
    "truncated_kernel",
]
