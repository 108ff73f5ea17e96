"""The layers of both papers: attention, positional attention, convolution, and the block.

Names are imported on first use, so that grids and configurations load without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality.lazy import lazily

if TYPE_CHECKING:
    from locality.layers.attention import AttentionMaps as AttentionMaps
    from locality.layers.attention import BasePositionalAttention as BasePositionalAttention
    from locality.layers.attention import (
        GatedPositionalSelfAttention as GatedPositionalSelfAttention,
    )
    from locality.layers.attention import PositionalSelfAttention as PositionalSelfAttention
    from locality.layers.attention import SelfAttention as SelfAttention
    from locality.layers.block import Block as Block
    from locality.layers.convolution import ConvolutionalAttention as ConvolutionalAttention
    from locality.layers.convolution import ConvolutionalEmbedding as ConvolutionalEmbedding
    from locality.layers.convolution import ImageAttention as ImageAttention
    from locality.layers.convolution import LocalConvolution as LocalConvolution
    from locality.layers.convolution import Projection as Projection
    from locality.layers.grid import Grid as Grid

__all__, __getattr__ = lazily(__name__, __file__)
