"""Self-attention, positional self-attention and gated positional self-attention.

Shapes:  B batch · N tokens · C width · h heads · d = C/h head width · (H, W) token grid

All three layers take tokens (B, N, C) and the grid the patches lie on, and return (B, N, C). With
`attention_maps` they also show the attention they use, computed from the same weights in its
explicit, quadratic form; the forward pass never materialises it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from locality.layers.content import content_attention
from locality.layers.kernels import kernel_svd, same_padding_offsets
from locality.layers.linear import Linear, fast_linear
from locality.layers.position import (
    Grid,
    attend_to_positions,
    attention_centres,
    kernel_offsets,
    kernel_size,
    positional_attention,
    positional_factors,
    positional_scores,
)


@dataclass(frozen=True)
class AttentionMaps:
    """What every head looks at, for one layer and one batch of inputs.

    Attributes:
        mixed: the attention the layer uses, (B, h, queries, keys); rows sum to one.
        content: its content part, softmax(QKᵀ/√d), same shape; None where the layer has one softmax
            over the sum of both terms.
        position: its positional part, (h, N, N); None for layers without one.
        gate: σ(λ), the share of the positional part, (h,); None for layers without a gate.
        query_grid, key_grid: the grids that queries and keys lie on.
        prefix_tokens: how many rows and columns (class tokens) come before the patches.
    """

    mixed: Tensor
    content: Tensor | None
    position: Tensor | None
    gate: Tensor | None
    query_grid: Grid
    key_grid: Grid
    prefix_tokens: int


def prefix_length(tokens: int, grid: Grid) -> int:
    """How many of `tokens` come before the patches of `grid` (the class token, if any)."""
    return tokens - grid[0] * grid[1]


@register_notrace_module
class _Attention(nn.Module):
    """What the three layers share: fused projections in, one projection out.

    Args:
        dim: token width C.
        num_heads: number of heads h; divides C unless both widths below are given.
        qkv_bias: whether the query, key and value projections have a bias.
        proj_drop: dropout after the output projection.
        head_dim: width d of each head's queries and keys; C/h unless given.
        value_dim: width of each head's values; C/h unless given.
        out_dim: width of the output; C unless given.

    Raises:
        ValueError: if C cannot be divided between the heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_dim: int | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or ((head_dim is None or value_dim is None) and dim % num_heads):
            raise ValueError(
                f"a width of {dim} cannot be divided between {num_heads} heads; "
                f"embed_dim has to be a multiple of num_heads"
            )
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = head_dim or dim // num_heads
        self.value_dim = value_dim or dim // num_heads
        self.out_dim = out_dim or dim
        self.qkv = Linear(dim, num_heads * (2 * self.head_dim + self.value_dim), bias=qkv_bias)
        self.proj = Linear(num_heads * self.value_dim, self.out_dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.init_weights()

    def init_weights(self) -> None:
        """Truncated normal (std 0.02) for every weight, zero for every bias."""
        for linear in (self.qkv, self.proj):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    @property
    def value_weight(self) -> Tensor:
        """The rows of the fused projection that compute the values W_val, (h·d_v, C)."""
        return self.qkv.weight[2 * self.num_heads * self.head_dim :]

    def _queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, C) → q, k of (B, h, N, d) and v of (B, h, N, d_v)."""
        batch, tokens, _ = x.shape
        if self.value_dim == self.head_dim:
            qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, self.head_dim)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        sizes = [self.num_heads * width for width in (self.head_dim, self.head_dim, self.value_dim)]
        q, k, v = (
            part.reshape(batch, tokens, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(sizes, dim=-1)
        )
        return q, k, v

    def _project(self, heads: Tensor) -> Tensor:
        """Concatenate the heads' outputs, (B, h, N, d_v), and project them to (B, N, C_out)."""
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))

    def _content_attention(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)).softmax(dim=-1)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"


class SelfAttention(_Attention):
    """Multi-head self-attention: softmax(QKᵀ/√d) V, heads concatenated and projected (Eq. 1–3)."""

    def forward(self, x: Tensor, grid: Grid, class_token_only: bool = False) -> Tensor:
        """(B, N, C) → (B, N, C), or (B, 1, C) for the first token alone.

        The grid is not used: content attention ignores position.
        """
        split = self._first_query_keys_values if class_token_only else self._queries_keys_values
        return self._project(content_attention(*split(x)))

    def _first_query_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `_queries_keys_values`, with the query of the first token alone."""
        weights = self.qkv.weight.split([self.dim, 2 * self.dim])
        biases = (
            (None, None) if self.qkv.bias is None else self.qkv.bias.split([self.dim, 2 * self.dim])
        )
        q = fast_linear(x[:, :1], weights[0], biases[0]).unflatten(2, (self.num_heads, -1))
        kv = fast_linear(x, weights[1], biases[1]).unflatten(2, (2, self.num_heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        return q.transpose(1, 2), k, v

    def attention_maps(self, x: Tensor, grid: Grid) -> AttentionMaps:
        """The attention that `forward(x, grid)` uses."""
        q, k, _ = self._queries_keys_values(x)
        content = self._content_attention(q, k)
        return AttentionMaps(
            content, content, None, None, grid, grid, prefix_length(x.shape[1], grid)
        )


class _PositionedAttention(_Attention):
    """What PSA and GPSA share: a trained v_pos per head, and the convolutional initialisation.

    Args:
        locality_strength: α of Eq. 5, how sharply heads focus on their centre at initialisation.
        conv_init: initialise as a random convolution (Eq. 5); otherwise v_pos and the values are
            drawn like every other weight.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
        locality_strength: float = 1.0,
        conv_init: bool = True,
        **widths: int,
    ) -> None:
        self.locality_strength = locality_strength
        self.conv_init = conv_init
        super().__init__(dim, num_heads, qkv_bias, proj_drop, **widths)

    def init_weights(self) -> None:
        """The plain initialisation, then Eq. 5 on top of it if asked for.

        With h heads the k² offsets of a k×k kernel, k = ⌊√h⌋, go to the first k² heads in row-major
        order; heads beyond k² keep their plain initialisation. W_qry and W_key keep theirs too: the
        gate makes zeroing them needless.
        """
        super().init_weights()
        self.v_pos = nn.Parameter(torch.empty(self.num_heads, 3))
        nn.init.trunc_normal_(self.v_pos, std=0.02)
        if self.conv_init:
            offsets = kernel_offsets(kernel_size(self.num_heads))
            with torch.no_grad():
                self.v_pos[: len(offsets)] = attention_centres(offsets, self.locality_strength)
                nn.init.eye_(self.value_weight)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, locality_strength={self.locality_strength}, "
            f"conv_init={self.conv_init}"
        )

    @staticmethod
    def _check_grid(x: Tensor, grid: Grid) -> None:
        # Positional attention has nothing to say about a token without a place.
        if x.shape[1] != grid[0] * grid[1]:
            raise ValueError(
                f"positional attention got {x.shape[1]} tokens for a grid of {grid[0]}×{grid[1]} "
                f"patches; class tokens have to be added after the last positional layer"
            )


class PositionalSelfAttention(_PositionedAttention):
    """Positional self-attention: one softmax over content and position, QKᵀ/√d + v_pos·r (Eq. 4).

    Content is scaled by 1/√d so that this layer and the gated one differ in the gate alone.
    """

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) → (B, N, C) with N = H·W."""
        self._check_grid(x, grid)
        q, k, v = self._queries_keys_values(x)
        scores = positional_scores(self.v_pos, grid).to(q.dtype)
        return self._project(F.scaled_dot_product_attention(q, k, v, attn_mask=scores))

    def attention_maps(self, x: Tensor, grid: Grid) -> AttentionMaps:
        """The attention that `forward(x, grid)` uses, and what each term alone would give."""
        self._check_grid(x, grid)
        q, k, _ = self._queries_keys_values(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        mixed = (scores + positional_scores(self.v_pos, grid)).softmax(dim=-1)
        return AttentionMaps(
            mixed,
            scores.softmax(dim=-1),
            positional_attention(self.v_pos, grid),
            None,
            grid,
            grid,
            0,
        )


class GatedPositionalSelfAttention(_PositionedAttention):
    """Gated positional self-attention (Eq. 6–7).

        A = (1 − σ(λ)) softmax(QKᵀ/√d) + σ(λ) softmax(v_pos·r),   one gate λ per head.

    Both terms have rows that sum to one, so the paper's `normalize` changes nothing. Content goes
    through `scaled_dot_product_attention`; position costs O(N·(H+W)) (see `position.py`).

    Args:
        gating_init: initial λ of every head (the paper's 1).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
        locality_strength: float = 1.0,
        conv_init: bool = True,
        gating_init: float = 1.0,
        **widths: int,
    ) -> None:
        self.gating_init = gating_init
        super().__init__(
            dim, num_heads, qkv_bias, proj_drop, locality_strength, conv_init, **widths
        )

    def init_weights(self) -> None:
        """Eq. 5 for the positional part, λ = `gating_init` for every gate."""
        super().init_weights()
        self.gating = nn.Parameter(torch.full((self.num_heads,), float(self.gating_init)))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) → (B, N, C_out) with N = H·W."""
        self._check_grid(x, grid)
        q, k, v = self._queries_keys_values(x)
        rows, columns = positional_factors(self.v_pos, grid)
        position = attend_to_positions(rows.to(v.dtype), columns.to(v.dtype), v)
        content = content_attention(q, k, v)
        gate = self.gating.sigmoid().to(v.dtype)[:, None, None]
        return self._project(torch.lerp(content, position, gate))

    def attention_maps(self, x: Tensor, grid: Grid) -> AttentionMaps:
        """The attention that `forward(x, grid)` uses, and its two parts."""
        self._check_grid(x, grid)
        q, k, _ = self._queries_keys_values(x)
        content = self._content_attention(q, k)
        position = positional_attention(self.v_pos, grid)
        gate = self.gating.sigmoid()
        share = gate[:, None, None]
        mixed = (1 - share) * content + share * position
        return AttentionMaps(mixed, content, position, gate, grid, grid, 0)

    @classmethod
    def from_conv2d(
        cls, conv: nn.Conv2d, locality_strength: float = 100.0, gating: float = 30.0
    ) -> GatedPositionalSelfAttention:
        """The layer that computes a given convolution (Cordonnier et al.'s construction).

        One head per kernel offset, k² in all, each looking at exactly one neighbour. A head's
        values are as wide as the convolution's output: in a head of width C/h they could carry no
        more than rank C/h of the kernel at that offset.

        Beyond the border the two differ: a convolution pads with zeros, while attention, whose
        rows sum to one, falls on the nearest patch inside. In the limit of a large α the layer *is*
        the convolution with `padding_mode="replicate"`; it equals a zero-padded one wherever the
        kernel does not reach over the border.

        Args:
            conv: k×k, stride 1, same padding, neither dilated nor grouped.
            locality_strength: α of Eq. 5; the attention to the centre's neighbours is e^−α each.
            gating: λ of every head; content attention keeps a share of σ(−λ). Lower it for a
                layer that shall learn to leave the convolution: the gradient of λ shrinks with
                that share.

        Raises:
            ValueError: if `conv` is not such a convolution.
        """
        offsets = same_padding_offsets(conv)
        heads, width = len(offsets), conv.out_channels
        layer = cls(
            conv.in_channels,
            heads,
            locality_strength=locality_strength,
            gating_init=gating,
            head_dim=max(1, conv.in_channels // heads),
            value_dim=width,
            out_dim=width,
        ).to(conv.weight)
        with torch.no_grad():
            layer.v_pos.copy_(attention_centres(offsets.to(layer.v_pos), locality_strength))
            # (C_out, C_in, k, k) → one (C_out, C_in) matrix per offset, below each other.
            layer.value_weight.copy_(conv.weight.flatten(2).permute(2, 0, 1).flatten(0, 1))
            layer.proj.weight.copy_(torch.eye(width).repeat(1, heads))
            if conv.bias is not None:
                layer.proj.bias.copy_(conv.bias)
        return layer

    @torch.no_grad()
    def init_from_conv2d_(
        self,
        conv: nn.Conv2d,
        locality_strength: float | None = None,
        gating: float | None = None,
    ) -> Tensor:
        """Initialise this layer, in place, as nearly as it can compute a given convolution.

        Each of the first k² heads takes one kernel offset, and as much of that offset's C×C matrix
        as its width can carry: the truncated singular value decomposition of rank d, which is
        nearest to it in the Frobenius norm. Heads beyond k² start without a contribution to the
        output (their columns of W_out are zero). The layer differs from the convolution at the
        border as `from_conv2d` says.

        Args:
            conv: k×k with k² ≤ h, this layer's width in and out, stride 1, same padding.
            locality_strength: α of the new centres; the layer's own unless given.
            gating: a new λ for every head; the gates are left alone unless given.

        Returns:
            The discarded singular values, (k², C − d): the root of the sum of their squares is the
            Frobenius distance between the kernel and the one the layer now has.

        Raises:
            ValueError: if `conv` is not such a convolution.
        """
        offsets = same_padding_offsets(conv)
        if len(offsets) > self.num_heads:
            raise ValueError(
                f"a {conv.kernel_size[0]}×{conv.kernel_size[1]} kernel needs {len(offsets)} heads, "
                f"this layer has {self.num_heads}"
            )
        if (conv.in_channels, conv.out_channels) != (self.dim, self.out_dim):
            raise ValueError(
                f"the convolution maps {conv.in_channels} to {conv.out_channels} channels, "
                f"this layer {self.dim} to {self.out_dim}; they have to agree"
            )
        left, scales, right = kernel_svd(conv.weight)
        rank = min(self.value_dim, scales.shape[-1])
        root = scales[:, :rank].sqrt()
        values = self.value_weight.view(self.num_heads, self.value_dim, self.dim)
        outputs = self.proj.weight.view(self.out_dim, self.num_heads, self.value_dim)
        outputs.zero_()
        for head in range(len(offsets)):
            values[head, :rank] = root[head, :, None] * right[head, :rank]
            outputs[:, head, :rank] = left[head, :, :rank] * root[head]
        strength = self.locality_strength if locality_strength is None else locality_strength
        self.v_pos[: len(offsets)] = attention_centres(offsets.to(self.v_pos), strength)
        if self.qkv.bias is not None:
            nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.proj.bias)
        if conv.bias is not None:
            self.proj.bias.copy_(conv.bias)
        if gating is not None:
            self.gating.fill_(gating)
        return scales[:, rank:]
