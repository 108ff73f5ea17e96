"""What can be measured on an attention map: pure functions of tensors.

Shapes:  B images · h heads · Nq queries · Nk keys · (H, W) token grid, rows first

An attention map is (B, h, Nq, Nk) with rows that sum to one. `prefix_tokens` rows and columns come
before the patches (class tokens; the columns of a coarser key grid have them too). Distances are in
units of query tokens. Everything returned is one number per image and head, (B, h), so that
means and variances over images, heads or layers are the caller's to take.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from locality.layers.grid import Grid

Stride = tuple[float, float]


def infer_key_stride(query_grid: Grid, key_grid: Grid) -> Stride:
    """The stride per axis that turns `query_grid` into `key_grid` with same padding: ⌈H/s⌉ keys.

    Raises:
        ValueError: if no stride does.
    """

    def along(queries: int, keys: int) -> int:
        for stride in range(1, queries + 1):
            if -(-queries // stride) == keys:
                return stride
        raise ValueError(
            f"keys on a {key_grid[0]}×{key_grid[1]} grid cannot come from queries on a "
            f"{query_grid[0]}×{query_grid[1]} grid by any stride"
        )

    return along(query_grid[0], key_grid[0]), along(query_grid[1], key_grid[1])


def token_distances(
    query_grid: Grid,
    key_grid: Grid | None = None,
    key_stride: Stride | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Distances ‖δ‖ between the centres of queries and keys, in units of query tokens: (Nq, Nk).

    Args:
        query_grid: where the queries lie.
        key_grid: where the keys lie; the same grid unless given.
        key_stride: the stride of the convolution that made the keys. A kernel of odd width s with
            padding (s − 1)/2 centres key j on query stride·j, so that is where it lies. Inferred
            from the two grids unless given.
        dtype: of the result.
    """
    key_grid = key_grid or query_grid
    stride = key_stride or infer_key_stride(query_grid, key_grid)
    queries = _places(query_grid, (1, 1), dtype)
    keys = _places(key_grid, stride, dtype)
    # Not torch.cdist: its matrix-product path loses half the digits.
    return (keys[None] - queries[:, None]).square().sum(dim=-1).sqrt()


def _places(grid: Grid, stride: Stride, dtype: torch.dtype) -> Tensor:
    rows, columns = (
        torch.arange(length, dtype=dtype) * step for length, step in zip(grid, stride, strict=True)
    )
    return torch.cartesian_prod(rows, columns).view(-1, 2)


def patch_attention(attention: Tensor, prefix_tokens: int) -> tuple[Tensor, Tensor | None]:
    """Attention among patches, at least in single precision: prefix rows and columns left out.

    (…, Nq + prefix, Nk + prefix) → (…, Nq, Nk), and what each row then sums to, (…, Nq); None
    without prefix, where it is one. Measures divide by that sum: it is cheaper than to renormalise
    the rows, and the same.
    """
    patches = attention[..., prefix_tokens:, prefix_tokens:]
    if patches.dtype in (torch.float16, torch.bfloat16):
        patches = patches.float()
    return patches, patches.sum(dim=-1) if prefix_tokens else None


def nonlocality(
    attention: Tensor,
    query_grid: Grid,
    key_grid: Grid | None = None,
    prefix_tokens: int = 0,
    key_stride: Stride | None = None,
) -> Tensor:
    """How far attention looks, in token units: D_loc = (1/N) Σ_ij A_ij ‖δ_ij‖ (Eq. 8).

    The class token's row and column are left out and the rows renormalised. Rows that gave all
    their attention to the class token say nothing about distance and are left out of the mean.

    Args:
        attention: (B, h, Nq + prefix, Nk + prefix), or (h, Nq, Nk) for positional attention, which
            does not depend on the image.
        query_grid, key_grid, key_stride: see `token_distances`.
        prefix_tokens: number of class tokens, which come first, among queries and keys alike.

    Returns:
        (B, h), or (h,) for a three-dimensional input.

    Raises:
        ValueError: if the grids do not fit the attention's shape.
    """
    key_grid = key_grid or query_grid
    _check_shape(attention, query_grid, key_grid, prefix_tokens)
    patches, mass = patch_attention(attention, prefix_tokens)
    away = token_distances(query_grid, key_grid, key_stride, torch.float64).to(patches)
    looked = (patches * away).sum(dim=-1)
    # 0/0 for a row that gave everything to the class token: nan, which the mean leaves out.
    return (looked if mass is None else looked / mass).nanmean(dim=-1)


def entropy(attention: Tensor, prefix_tokens: int = 0) -> Tensor:
    """How spread out attention is, in nats: −Σ_j A_ij ln A_ij, averaged over query patches.

    0 where every query looks at a single key, ln(Nk) where attention is uniform. The class
    token is treated as in `nonlocality`. (B, h, Nq, Nk) → (B, h).
    """
    patches, mass = patch_attention(attention, prefix_tokens)
    # Four times as fast as torch.special.entr; 0 · log(tiny) is the 0 that the limit is.
    logs = patches.clamp_min(torch.finfo(patches.dtype).tiny).log()
    spread = -(patches * logs).sum(dim=-1)
    # With p = a/m: −Σ p ln p = (−Σ a ln a)/m + ln m.
    return (spread if mass is None else spread / mass + mass.log()).nanmean(dim=-1)


def class_token_attention(attention: Tensor, prefix_tokens: int = 1) -> Tensor:
    """What the class token looks at: its row of attention over the patches, (…, Nk).

    Not renormalised: what is missing to one is what the class token pays to itself and to other
    prefix tokens. (…, Nq + prefix, Nk + prefix), the class token first.
    """
    return attention[..., 0, prefix_tokens:]


def class_token_share(attention: Tensor, prefix_tokens: int) -> Tensor:
    """How much of their attention patches pay to the class token, averaged over patches: (B, h)."""
    return attention[..., prefix_tokens:, :prefix_tokens].sum(dim=-1).mean(dim=-1)


class Focus(NamedTuple):
    """Where the positional attention of each head is centred and how wide it is.

    Attributes:
        centre: Δ = (down, right) in token units, (h, 2); nan for a head without a centre (α ≤ 0,
            attention grows towards the border).
        strength: α, (h,).
        span: standard deviation along each axis of the Gaussian, 1/√(2α), in token units, (h,);
            inf for a head without a centre.
    """

    centre: Tensor
    strength: Tensor
    span: Tensor


def positional_focus(v_pos: Tensor) -> Focus:
    """Read α and Δ back from v_pos = −α (1, −2Δ₁, −2Δ₂): (h, 3) → `Focus` (Eq. 5).

    v_pos · r_δ = −α ‖δ − Δ‖² + const for any v_pos with v₀ < 0, trained or not: positional
    attention stays a discrete Gaussian however it is trained.
    """
    strength = -v_pos[:, 0]
    centred = strength > 0
    safe = torch.where(centred, strength, torch.ones_like(strength))
    centre = torch.where(centred[:, None], v_pos[:, 1:] / (2 * safe[:, None]), torch.nan)
    span = torch.where(centred, (2 * safe).rsqrt(), torch.inf)
    return Focus(centre, strength, span)


def _check_shape(attention: Tensor, query_grid: Grid, key_grid: Grid, prefix_tokens: int) -> None:
    expected = tuple(grid[0] * grid[1] + prefix_tokens for grid in (query_grid, key_grid))
    if tuple(attention.shape[-2:]) != expected:
        raise ValueError(
            f"attention of {attention.shape[-2]} queries to {attention.shape[-1]} keys does not "
            f"fit grids {query_grid[0]}×{query_grid[1]} and {key_grid[0]}×{key_grid[1]} with "
            f"{prefix_tokens} class tokens, which make {expected[0]} and {expected[1]}"
        )
