"""How layers start: plainly, as a random convolution (ConViT Eq. 5), or as a given one.

A k×k kernel is one matrix C_in → C_out per offset. A positional layer has one head per offset: its
v_pos says where the head looks, its values and the output projection what it makes of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from locality.layers.attention import GatedPositionalSelfAttention

Weighted = TypeVar("Weighted", nn.Linear, nn.Conv2d)


def plain(module: Weighted) -> Weighted:
    """The module with truncated-normal weights (std 0.02) and no bias yet. In place."""
    nn.init.trunc_normal_(module.weight, std=0.02)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
    return module


def kernel_size(num_heads: int) -> int:
    """The side k of the largest k×k kernel that `num_heads` heads can represent, ⌊√h⌋."""
    return math.isqrt(num_heads)


def kernel_offsets(kernel: int) -> Tensor:
    """The offsets Δ of a k×k kernel from its centre: (k², 2) as (down, right), row-major (Eq. 5).

    Even kernels have half-integer centres, so their offsets are ±½, ±3/2, …
    """
    places = torch.arange(kernel, dtype=torch.float32) - (kernel - 1) / 2
    return torch.cartesian_prod(places, places).view(-1, 2)


def corner_heads(num_heads: int) -> list[int]:
    """The heads of a kernel's corners as in ConViT's Fig. 3: (−, +), (−, −), (+, +), (+, −)."""
    k = kernel_size(num_heads)
    return [k - 1, 0, k * k - 1, k * (k - 1)]


def attention_centres(offsets: Tensor, strength: float) -> Tensor:
    """The v_pos that centres attention on `offsets`: (n, 2) → (n, 3), −α (1, −2Δ₁, −2Δ₂) (Eq. 5).

    The attention is then a discrete Gaussian around i + Δ, of variance 1/(2α) along each axis.
    """
    ones = torch.ones(len(offsets), 1, dtype=offsets.dtype, device=offsets.device)
    return -strength * torch.cat((ones, -2 * offsets), dim=1)


@torch.no_grad()
def as_random_convolution(v_pos: Tensor, value_weight: Tensor, strength: float) -> None:
    """Eq. 5, in place: W_val = I, and the k² offsets of a k×k kernel, k = ⌊√h⌋, to the first heads.

    Offsets are in row-major order. Heads beyond k² keep α times their plain start, as in the code
    released with the paper.
    """
    offsets = kernel_offsets(kernel_size(len(v_pos)))
    v_pos *= strength
    v_pos[: len(offsets)] = attention_centres(offsets, strength)
    nn.init.eye_(value_weight)


@torch.no_grad()
def as_convolution(
    layer: GatedPositionalSelfAttention, conv: nn.Conv2d, strength: float, gating: float | None
) -> Tensor:
    """Make `layer` compute `conv` as nearly as it can; see its `init_from_conv2d_`."""
    offsets = same_padding_offsets(conv)
    if len(offsets) > layer.num_heads:
        raise ValueError(
            f"a {conv.kernel_size[0]}×{conv.kernel_size[1]} kernel needs {len(offsets)} heads, "
            f"this layer has {layer.num_heads}"
        )
    if (conv.in_channels, conv.out_channels) != (layer.dim, layer.out_dim):
        raise ValueError(
            f"the convolution maps {conv.in_channels} to {conv.out_channels} channels, "
            f"this layer {layer.dim} to {layer.out_dim}; they have to agree"
        )
    left, scales, right = kernel_svd(conv.weight)
    rank = min(layer.value_dim, scales.shape[-1])
    root = scales[:, :rank].sqrt()
    values = layer.value_weight.view(layer.num_heads, layer.value_dim, layer.dim)
    outputs = layer.proj.weight.view(layer.out_dim, layer.num_heads, layer.value_dim)
    outputs.zero_()
    for head in range(len(offsets)):
        values[head, :rank] = root[head, :, None] * right[head, :rank]
        outputs[:, head, :rank] = left[head, :, :rank] * root[head]
    layer.v_pos[: len(offsets)] = attention_centres(offsets.to(layer.v_pos), strength)
    if layer.qkv.bias is not None:
        nn.init.zeros_(layer.qkv.bias)
    nn.init.zeros_(layer.proj.bias)
    if conv.bias is not None:
        layer.proj.bias.copy_(conv.bias)
    if gating is not None:
        layer.gating.fill_(gating)
    return scales[:, rank:]


def truncated_kernel(weight: Tensor, rank: int) -> Tensor:
    """A kernel (C_out, C_in, k, k) whose matrix at each offset is cut to its best rank-r part."""
    left, scales, right = kernel_svd(weight)
    matrices = left[..., :rank] * scales[:, None, :rank] @ right[:, :rank]
    return matrices.permute(1, 2, 0).reshape(weight.shape)


def kernel_svd(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular value decomposition of the matrix at each of the k² offsets of a kernel."""
    matrices = weight.detach().flatten(2).permute(2, 0, 1)
    left, scales, right = torch.linalg.svd(matrices, full_matrices=False)
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
