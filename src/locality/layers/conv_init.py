"""How layers start: plainly, as a random convolution (ConViT Eq. 5), or as a given one.

A k×k kernel is one matrix C_in → C_out per offset. A positional layer has one head per offset: its
v_pos says where the head looks, its values and the output projection what it makes of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from locality.layers.grid import Window

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
    window = convolution_window(conv)
    if window.stride > 1 or window.before + window.after != window.kernel - 1:
        raise ValueError(
            f"a {window.kernel}×{window.kernel} convolution with stride {window.stride} and "
            f'padding {conv.padding} changes the size of the grid; use stride 1 and padding="same"'
        )
    offsets = window_offsets(window)
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
    left, scales, right = torch.linalg.svd(kernel_matrices(conv), full_matrices=False)
    rank = min(layer.value_dim, scales.shape[-1])
    root = scales[:, :rank].sqrt()
    values = layer.value_weight.view(layer.num_heads, layer.value_dim, layer.dim)
    outputs = layer.proj.weight.view(layer.out_dim, layer.num_heads, layer.value_dim)
    outputs.zero_()
    values[: len(root), :rank] = root[..., None] * right[:, :rank]
    outputs[:, : len(root), :rank] = (left[..., :rank] * root[:, None]).transpose(0, 1)
    if layer.qkv.bias is not None:
        nn.init.zeros_(layer.qkv.bias)
    nn.init.zeros_(layer.proj.bias)
    if conv.bias is not None:
        layer.proj.bias.copy_(conv.bias)
    layer.v_pos[: len(offsets)] = attention_centres(offsets.to(layer.v_pos), strength)
    if gating is not None:
        layer.gating.fill_(gating)
    return scales[:, rank:]


@torch.no_grad()
def as_whole_convolution(
    layer: GatedPositionalSelfAttention, conv: nn.Conv2d, strength: float, gating: float
) -> None:
    """Make `layer` of k² + 1 heads of full width compute `conv`; see its `from_conv2d`.

    Head Δ has the kernel's matrix K_Δ, less what follows, and all heads have one content attention
    C. With gates g, and 1 − g for the last head, which looks at the centre too, the layer computes

        g Σ B_Δ x(i+Δ) + (1−g) B_last x(i)  +  [(1−g) Σ B_Δ + g B_last] C x.

    B_last = −(1−g)/g · Σ B_Δ leaves no content, and the positional part is the convolution if
    B_Δ = K_Δ/g, and B_0 = (K_0 − (1−g) B_last)/g. That is solved by
    B_last = −(1−g)/(2g−1) Σ K_Δ.
    """
    offsets = window_offsets(layer.window).to(layer.v_pos)
    matrices = kernel_matrices(conv)
    gate = 1 / (1 + math.exp(-gating))
    last = -(1 - gate) / (2 * gate - 1) * matrices.sum(dim=0)
    centre = (offsets == 0).all(dim=1).to(matrices)[:, None, None]
    matrices = torch.cat(((matrices - (1 - gate) * centre * last) / gate, last[None]))
    # W_val = I as in Eq. 5, and W_out the kernel; or the other way round, if it has fewer rows.
    narrow = torch.eye(layer.value_dim).to(matrices).expand(len(matrices), -1, -1)
    values, outputs = (narrow, matrices) if layer.value_dim == layer.dim else (matrices, narrow)
    layer.value_weight.copy_(values.flatten(0, 1))
    layer.proj.weight.copy_(outputs.transpose(0, 1).flatten(1))
    if conv.bias is not None:
        layer.proj.bias.copy_(conv.bias)
    centres = torch.cat((offsets, torch.zeros_like(offsets[:1])))
    layer.v_pos.copy_(attention_centres(centres, strength))
    layer.gating.fill_(gating)
    layer.gating[-1] = -gating
    contents = layer.qkv.weight[: 2 * layer.num_heads * layer.head_dim]
    contents = contents.view(2, layer.num_heads, layer.head_dim, layer.dim)
    contents.copy_(contents[:, :1].clone())


def kernel_matrices(conv: nn.Conv2d) -> Tensor:
    """The matrix C_in → C_out at each offset of a kernel, (k², C_out, C_in); 0 between groups."""
    groups = conv.weight.detach().unflatten(0, (conv.groups, -1)).flatten(3)
    return torch.stack([torch.block_diag(*blocks) for blocks in groups.permute(3, 0, 1, 2)])


def window_offsets(window: Window) -> Tensor:
    """The offsets Δ (k², 2) of a kernel from the query at its centre, in the kernel's order."""
    places = torch.arange(window.kernel, dtype=torch.float32) - (window.kernel - 1) // 2
    return torch.cartesian_prod(places, places).view(-1, 2)


def convolution_window(conv: nn.Conv2d) -> Window:
    """The queries and the zero padding that make attention a given convolution.

    Raises:
        ValueError: if there is no such attention.
    """
    (height, width), (down, right) = conv.kernel_size, conv.stride
    if height != width or down != right:
        raise ValueError(
            f"kernel and stride have to be square, not {height}×{width} and {down}×{right}"
        )
    if conv.dilation != (1, 1):
        raise ValueError(f"the dilation has to be 1, not {conv.dilation[0]}×{conv.dilation[1]}")
    before, after = (height - 1) // 2, height // 2
    if conv.padding == "valid":
        before = after = 0
    elif not isinstance(conv.padding, str):
        rows, columns = conv.padding
        if rows != columns or rows > before:
            raise ValueError(
                f"a {height}×{width} kernel can have a padding of 0 to {before} on all sides, so "
                f"that its centre stays on the grid, not {rows}×{columns}"
            )
        before = after = rows
    return Window(height, down, before, after)
