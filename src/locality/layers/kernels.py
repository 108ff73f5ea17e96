"""Convolution kernels as attention sees them: one matrix C_in → C_out per offset."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def truncated_kernel(weight: Tensor, rank: int) -> Tensor:
    """A kernel (C_out, C_in, k, k) whose matrix at each offset is cut to its best rank-r part."""
    left, scales, right = kernel_svd(weight)
    matrices = left[..., :rank] * scales[:, None, :rank] @ right[:, :rank]
    return matrices.permute(1, 2, 0).reshape(weight.shape)


def kernel_svd(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular value decomposition of the matrix at each of the k² offsets of a kernel."""
    left, scales, right = torch.linalg.svd(
        weight.detach().flatten(2).permute(2, 0, 1), full_matrices=False
    )
    return left, scales, right


def same_padding_offsets(conv: nn.Conv2d) -> Tensor:
    """The integer offsets (k², 2) that a same-padded convolution reads, in its kernel's order."""
    height, width = conv.kernel_size
    if height != width:
        raise ValueError(f"the kernel has to be square, not {height}×{width}")
    for name, expected in (("stride", (1, 1)), ("dilation", (1, 1)), ("groups", 1)):
        if getattr(conv, name) != expected:
            raise ValueError(f"the convolution's {name} has to be 1, not {getattr(conv, name)}")
    before = (height - 1) // 2
    # "same" pads even kernels by one more at the end; numbers can only pad evenly.
    padded = conv.padding == "same" or (height % 2 == 1 and conv.padding == (before, before))
    if not padded:
        raise ValueError(
            f"a {height}×{width} convolution with padding {conv.padding} changes the size of the "
            f'grid; use padding="same"'
        )
    places = torch.arange(height) - before
    return torch.cartesian_prod(places, places).view(-1, 2)
