"""A convolution in attention's place: the hard form of the inductive bias that GPSA starts with."""

from __future__ import annotations

from timm.layers import register_notrace_module
from torch import Tensor, nn

from locality.layers.position import Grid


@register_notrace_module
class LocalConvolution(nn.Module):
    """A dense k×k convolution over the token grid, stride 1, same padding.

    What a gated layer is at initialisation if its heads look at exactly one neighbour each, but
    with full rank at every offset and no way to leave it. `init_from_conv2d_` turns it back.

    Args:
        dim: token width C.
        kernel_size: side k of the kernel, odd or even.
    """

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, kernel_size, padding="same")
        # As wide as the output projections of attention: with W_val = I (ConViT Eq. 5) those are
        # what a random convolution consists of.
        nn.init.trunc_normal_(self.conv.weight, std=0.02)
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) → (B, N, C) with N = H·W.

        Raises:
            ValueError: if there are other tokens than the grid's.
        """
        if x.shape[1] != grid[0] * grid[1]:
            raise ValueError(
                f"a convolution got {x.shape[1]} tokens for a grid of {grid[0]}×{grid[1]} patches; "
                f"class tokens have to be added after the last of them"
            )
        image = x.transpose(1, 2).unflatten(2, grid)
        return self.conv(image).flatten(2).transpose(1, 2)
