"""Initialisations: truncated normal, a random convolution (ConViT Eq. 5), or a given convolution.

A k×k kernel is one matrix C_in → C_out per offset. A positional layer has one head per offset: its
v_pos encodes the offset, its values and output projection the matrix.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from locality.errors import UserError
from locality.layers.grid import Window

Weighted = TypeVar("Weighted", nn.Linear, nn.Conv2d)


def trunc_normal_init_(module: Weighted) -> Weighted:
    """Initialise weights from a truncated normal (std 0.02) and biases with zero, in place."""
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

    The attention is a discrete Gaussian around i + Δ, with variance 1/(2α) along each axis.
    """
    ones = torch.ones(len(offsets), 1, dtype=offsets.dtype, device=offsets.device)
    return -strength * torch.cat((ones, -2 * offsets), dim=1)


@torch.no_grad()
def init_random_convolution_(v_pos: Tensor, value_weight: Tensor, strength: float) -> None:
    """Eq. 5, in place: W_val = I, and the k² offsets of a k×k kernel, k = ⌊√h⌋, to the first heads.

    Offsets are row-major. Heads beyond k² keep α times their truncated-normal init, as in the
    authors' code.
    """
    offsets = kernel_offsets(kernel_size(len(v_pos)))
    v_pos *= strength
    v_pos[: len(offsets)] = attention_centres(offsets, strength)
    nn.init.eye_(value_weight)


def factorised(conv: nn.Conv2d, rank: int) -> tuple[Tensor, Tensor]:
    """Approximate the matrix at each kernel offset by a product of inner width r ≤ `rank`.

    Returns:
        outputs (k², C_out, r) and values (k², r, C_in), nearest in the Frobenius norm.
    """
    left, scales, right = torch.linalg.svd(kernel_matrices(conv), full_matrices=False)
    root = scales[:, :rank].sqrt()
    return left[..., :rank] * root[:, None], root[..., None] * right[:, :rank]


def whole_convolution(conv: nn.Conv2d, gating: float, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values for k² + 1 full-width heads that together compute `conv`.

    Head Δ has the kernel's matrix K_Δ with a correction, and all heads share one content attention
    C. With gate g, and 1 − g for the last head, which is centred too, the layer computes

        g Σ B_Δ x(i+Δ) + (1−g) B_last x(i)  +  [(1−g) Σ B_Δ + g B_last] C x.

    B_last = −(1−g)/g · Σ B_Δ cancels the content term. The positional part is the convolution if
    B_Δ = K_Δ/g for Δ ≠ 0 and B_0 = (K_0 − (1−g) B_last)/g. The solution is
    B_last = −(1−g)/(2g−1) Σ K_Δ.

    Args:
        conv: the convolution.
        gating: λ of the heads, g = σ(λ).
        width: width of a head's values, min(C_in, C_out).

    Returns:
        outputs (k² + 1, C_out, width) and values (k² + 1, width, C_in) with B = outputs · values,
        and the offset of each head, (k² + 1, 2).
    """
    offsets = window_offsets(convolution_window(conv)).to(conv.weight)
    matrices = kernel_matrices(conv)
    gate = 1 / (1 + math.exp(-gating))
    last = -(1 - gate) / (2 * gate - 1) * matrices.sum(dim=0)
    centre = (offsets == 0).all(dim=1).to(matrices)[:, None, None]
    matrices = torch.cat(((matrices - (1 - gate) * centre * last) / gate, last[None]))
    # W_val = I as in Eq. 5 and W_out the kernel, or the reverse if C_out < C_in.
    narrow = torch.eye(width).to(matrices).expand(len(matrices), -1, -1)
    offsets = torch.cat((offsets, torch.zeros_like(offsets[:1])))
    if width == conv.in_channels:
        return matrices, narrow, offsets
    return narrow, matrices, offsets


def kernel_matrices(conv: nn.Conv2d) -> Tensor:
    """The matrix C_in → C_out at each offset of a kernel, (k², C_out, C_in); 0 between groups."""
    groups = conv.weight.detach().unflatten(0, (conv.groups, -1)).flatten(3)
    return torch.stack([torch.block_diag(*blocks) for blocks in groups.permute(3, 0, 1, 2)])


def window_offsets(window: Window) -> Tensor:
    """The offsets Δ (k², 2) of a kernel from the query at its centre, in the kernel's order."""
    places = torch.arange(window.kernel, dtype=torch.float32) - (window.kernel - 1) // 2
    return torch.cartesian_prod(places, places).view(-1, 2)


def convolution_window(conv: nn.Conv2d) -> Window:
    """The query positions and zero padding with which attention can compute a convolution.

    Raises:
        UserError: if the kernel or stride is not square, the convolution is dilated, or its
            padding moves the kernel's centre off the grid.
    """
    (height, width), (down, right) = conv.kernel_size, conv.stride
    if height != width or down != right or conv.dilation != (1, 1):
        raise UserError(f"kernel and stride must be square and the dilation 1, not as in {conv}")
    before, after = (height - 1) // 2, height // 2
    if conv.padding == "valid":
        before = after = 0
    elif not isinstance(conv.padding, str):
        rows, columns = conv.padding
        if rows != columns or rows > before:
            raise UserError(
                f"the padding must be 0 to {before} on all sides, not as in {conv}; the kernel's "
                f"centre would leave the grid"
            )
        before = after = rows
    return Window(height, down, before, after)
