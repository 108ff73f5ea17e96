"""Self-attention, positional and gated positional self-attention.

Shapes:  B batch · N tokens · C width · h heads · d = C/h head width · (H, W) token grid

All three layers map tokens (B, N, C) and the patch grid to (B, N, C). `attention_maps` returns the
attention matrices explicitly, for inspection; the forward pass never materialises them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from locality.errors import UserError
from locality.layers.conv_init import (
    attention_centres,
    convolution_window,
    factorised,
    init_random_convolution_,
    trunc_normal_init_,
    whole_convolution,
    window_offsets,
)
from locality.layers.cpu import Linear, attend, linear
from locality.layers.grid import Grid, Window, check_heads
from locality.layers.position import (
    ALL_QUERIES,
    Separable,
    attend_widely,
    axis_scores,
    check_grid,
    dot_product_form,
    in_full,
    positional_attention,
    positional_scores,
)


@dataclass(frozen=True)
class AttentionMaps:
    """The attention of every head, for one layer and one batch of inputs.

    Attributes:
        mixed: the attention the layer uses, (B, h, queries, keys); rows sum to one, less any
            attention to zero padding.
        content: content attention, softmax(QKᵀ/√d), same shape.
        position: positional attention, (h, queries, keys); None for layers without one.
        gate: σ(λ), the weight of the positional part, (h,); None for layers without a gate.
        query_grid, key_grid: the grids of queries and keys.
        prefix_tokens: number of class tokens before the patches, in rows and columns.
        query, key: (B, h, queries, d) and (B, h, keys, d); content scores are query @ keyᵀ (the
            query is already scaled).
        key_stride: distance between neighbouring keys, in query tokens. CvT's keys have a coarser
            grid (CvT §3.2). If attention replaces a convolution of stride s, every s-th token is a
            query and keys are 1/s apart.
        key_offset: from the first query to the first key, in query tokens; not 0 for windows whose
            padding is not half their size.
    """

    mixed: Tensor
    content: Tensor
    position: Tensor | None
    gate: Tensor | None
    query_grid: Grid
    key_grid: Grid
    prefix_tokens: int
    query: Tensor
    key: Tensor
    key_stride: tuple[float, float] = (1, 1)
    key_offset: tuple[float, float] = (0, 0)


def prefix_length(tokens: int, grid: Grid) -> int:
    """Number of tokens before the patches of `grid`: 1 with a class token, else 0."""
    return tokens - grid[0] * grid[1]


@register_notrace_module
class _Attention(nn.Module):
    """Base of the three layers: a fused input projection and an output projection.

    Args:
        dim: token width C.
        num_heads: number of heads h; divides C unless both widths below are given.
        qkv_bias: whether the query, key and value projections have a bias.
        proj_drop: dropout after the output projection.
        head_dim: width d of each head's queries and keys; C/h unless given.
        value_dim: width of each head's values; C/h unless given.
        out_dim: width of the output; C unless given.

    Raises:
        UserError: if C is not a multiple of the heads.
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
        if head_dim is None or value_dim is None:
            check_heads(dim, num_heads)
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = head_dim or dim // num_heads
        self.value_dim = value_dim or dim // num_heads
        self.out_dim = out_dim or dim
        self.qkv = Linear(dim, num_heads * (2 * self.head_dim + self.value_dim), bias=qkv_bias)
        self.proj = Linear(num_heads * self.value_dim, self.out_dim)
        self.proj_drop = nn.Dropout(proj_drop)
        trunc_normal_init_(self.qkv)
        trunc_normal_init_(self.proj)

    @property
    def value_weight(self) -> Tensor:
        """W_val, the value rows of the fused projection, (h·d_v, C)."""
        return self.qkv.weight[2 * self.num_heads * self.head_dim :]

    def _queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, C) → q, k of (B, h, N, d) and v of (B, h, N, d_v)."""
        sizes = [self.num_heads * width for width in (self.head_dim, self.head_dim, self.value_dim)]
        parts = self.qkv(x).split(sizes, dim=-1)
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return q, k, v

    def _project(self, heads: Tensor) -> Tensor:
        """Concatenate the heads' outputs, (B, h, N, d_v), and project them to (B, N, C_out)."""
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))

    def _content_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """QKᵀ/√d, (B, h, N, N)."""
        return q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"


class SelfAttention(_Attention):
    """Multi-head self-attention: softmax(QKᵀ/√d) V, heads concatenated and projected (Eq. 1–3)."""

    def forward(self, x: Tensor, grid: Grid, class_token_only: bool = False) -> Tensor:
        """(B, N, C) → (B, N, C), or (B, 1, C) for the first token only.

        The grid is unused: content attention ignores position.
        """
        split = self._first_query_keys_values if class_token_only else self._queries_keys_values
        return self._project(attend(*split(x)))

    def _first_query_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Like `_queries_keys_values`, with the query of the first token only."""
        sizes, bias = [self.dim, 2 * self.dim], self.qkv.bias
        weights = self.qkv.weight.split(sizes)
        biases = (None, None) if bias is None else bias.split(sizes)
        q = linear(x[:, :1], weights[0], biases[0]).unflatten(2, (self.num_heads, -1))
        kv = linear(x, weights[1], biases[1]).unflatten(2, (2, self.num_heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        return q.transpose(1, 2), k, v

    def attention_maps(self, x: Tensor, grid: Grid) -> AttentionMaps:
        """The attention that `forward(x, grid)` uses."""
        q, k, _ = self._queries_keys_values(x)
        content = self._content_scores(q, k).softmax(dim=-1)
        prefix = prefix_length(x.shape[1], grid)
        q = q / math.sqrt(self.head_dim)
        return AttentionMaps(content, content, None, None, grid, grid, prefix, q, k)


class BasePositionalAttention(_Attention):
    """Base of PSA and GPSA: a learned v_pos per head, and the convolutional initialisation.

    Args:
        locality_strength: α of Eq. 5, how sharply heads focus on their centre at initialisation.
        conv_init: start as a random convolution (Eq. 5); otherwise v_pos and the values use the
            default init.
        kwargs: arguments of `SelfAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        locality_strength: float = 1.0,
        conv_init: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.locality_strength = locality_strength
        self.conv_init = conv_init
        self.v_pos = nn.Parameter(torch.empty(num_heads, 3))
        nn.init.trunc_normal_(self.v_pos, std=0.02)
        if conv_init:
            init_random_convolution_(self.v_pos, self.value_weight, locality_strength)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, locality_strength={self.locality_strength}, "
            f"conv_init={self.conv_init}"
        )


class PositionalSelfAttention(BasePositionalAttention):
    """Positional self-attention: one softmax over content and position, QKᵀ/√d + v_pos·r (Eq. 4).

    Content is scaled by 1/√d, so that this layer differs from GPSA only in the gate. As in Eq. 5,
    the convolutional initialisation also sets W_qry and W_key to zero. Attention then stays purely
    positional, since neither gets a gradient while the other is zero.
    """

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if self.conv_init:
            nn.init.zeros_(self.qkv.weight[: 2 * num_heads * self.head_dim].data)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) → (B, N, C) with N = H·W."""
        check_grid(x, grid)
        q, k, v = self._queries_keys_values(x)
        # QKᵀ/√d + v_pos·r = [q|φ]·[k|ψ]ᵀ: one SDPA call.
        queries, keys = dot_product_form(axis_scores(in_full(self.v_pos), grid), v.dtype)
        q = torch.cat((q / math.sqrt(self.head_dim), queries.expand(*q.shape[:2], -1, -1)), dim=-1)
        k = torch.cat((k, keys.expand(k.shape[0], -1, -1, -1)), dim=-1)
        return self._project(attend_widely(q, k, v))

    def attention_maps(self, x: Tensor, grid: Grid) -> AttentionMaps:
        """The attention that `forward(x, grid)` uses, and the softmax of each term alone."""
        check_grid(x, grid)
        q, k, _ = self._queries_keys_values(x)
        scores, q = self._content_scores(q, k), q / math.sqrt(self.head_dim)
        mixed = (scores + positional_scores(self.v_pos, grid)).softmax(dim=-1)
        content, position = scores.softmax(dim=-1), positional_attention(self.v_pos, grid)
        return AttentionMaps(mixed, content, position, None, grid, grid, 0, q, k)


class GatedPositionalSelfAttention(BasePositionalAttention):
    """Gated positional self-attention (Eq. 6–7).

        A = (1 − σ(λ)) softmax(QKᵀ/√d) + σ(λ) softmax(v_pos·r),   one gate λ per head.

    Both terms have rows that sum to one, so the paper's `normalize` changes nothing.

    Args:
        gating_init: initial λ of every head (1 in the paper). W_qry and W_key use the default init
            whatever `conv_init` (§3).
        window: query positions and zero padding of the keys, for a layer that replaces a
            convolution; by default every token and no padding.
        kwargs: arguments of `PositionalSelfAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        gating_init: float = 1.0,
        window: Window | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.gating = nn.Parameter(torch.full((num_heads,), float(gating_init)))
        self.window = window or Window()

    def forward(self, x: Tensor, grid: Grid, part: PositionalPart | None = None) -> Tensor:
        """(B, N, C) → (B, N', C_out) with N = H·W and N' query positions; Eq. 7 on values.

        Neither `attend` nor positional attention (see `position.py`) forms the N×N matrix, and
        `gated_sum` is one pass over memory.

        Args:
            x: the tokens.
            grid: their grid.
            part: token-independent terms, if the model computed them for all its layers at once
                (`positional_parts`).
        """
        check_grid(x, grid)
        q, k, v = self._queries_keys_values(x)
        if part is None:
            (part,) = positional_parts([self.v_pos], [self.gating], grid, v, self.window)
        content = attend(self._select_queries(q, grid), k, v)  # softmax(QKᵀ/√d) V
        position = part.position.attend(v)  # softmax(v_pos·r) V
        return self._project(gated_sum(content, position, part.gate))

    def _select_queries(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, …) → (B, h, N', …), the rows at the query positions."""
        if self.window.grid(grid) == grid:
            return x
        rows, columns = map(self.window.queries, grid)
        return x.unflatten(2, grid)[:, :, rows, columns].flatten(2, 3)

    def attention_maps(self, x: Tensor, grid: Grid) -> AttentionMaps:
        """The attention that `forward(x, grid)` uses, and its two parts (Eq. 7 as printed)."""
        check_grid(x, grid)
        gate = self.gating.sigmoid()[:, None, None]
        q, k, _ = self._queries_keys_values(x)
        content = self._select_queries(self._content_scores(q, k), grid).softmax(dim=-1)
        q = self._select_queries(q, grid) / math.sqrt(self.head_dim)
        position = positional_attention(self.v_pos, grid, self.window)
        mixed = (1 - gate) * content + gate * position
        queries, gates = self.window.grid(grid), gate.flatten()
        apart = 1 / self.window.stride
        places = ((apart,) * 2, (-self.window.first * apart,) * 2)
        return AttentionMaps(mixed, content, position, gates, queries, grid, 0, q, k, *places)

    @classmethod
    @torch.no_grad()
    def from_conv2d(
        cls, conv: nn.Conv2d, locality_strength: float, gating: float
    ) -> GatedPositionalSelfAttention:
        """The layer that computes a given convolution (Cordonnier et al.'s construction).

        One head per kernel offset attends to exactly one neighbour, and is as wide as the matrix at
        that offset has rank. Zero padding adds keys of value zero beyond the border; a stride
        leaves tokens without a query. One more head cancels the content attention of the others,
        so the layer equals the convolution in the limit of a large α for any λ > 0.

        Args:
            conv: k×k with any stride and groups, not dilated, its centre on the grid.
            locality_strength: α of Eq. 5. The attention to each neighbour of the centre is e^−α,
                and so are the error and the gradient of v_pos.
            gating: λ of every head, −λ of the last. The gradients of the content attention and of λ
                fall like e^−λ.

        Raises:
            UserError: if attention cannot compute `conv`, or if λ ≤ 0.
        """
        if not gating > 0:
            raise UserError(f"gating must be above 0, not {gating}")
        window = convolution_window(conv)
        heads, width = window.kernel**2 + 1, min(conv.in_channels, conv.out_channels)
        layer = cls(
            conv.in_channels,
            heads,
            window=window,
            conv_init=False,
            head_dim=max(1, conv.in_channels // heads),
            value_dim=width,
            out_dim=conv.out_channels,
        ).to(conv.weight)
        outputs, values, offsets = whole_convolution(conv, gating, width)
        layer.value_weight.copy_(values.flatten(0, 1))
        layer.proj.weight.copy_(outputs.transpose(0, 1).flatten(1))
        if conv.bias is None:  # a bias before batch norm would get no gradient
            layer.proj.register_parameter("bias", None)
        else:
            layer.proj.bias.copy_(conv.bias)
        layer.v_pos.copy_(attention_centres(offsets, locality_strength))
        layer.gating.fill_(gating)
        layer.gating[-1] = -gating
        # All heads share the content attention of the first.
        contents = layer.qkv.weight[: 2 * layer.num_heads * layer.head_dim]
        contents = contents.view(2, layer.num_heads, layer.head_dim, layer.dim)
        contents.copy_(contents[:, :1].clone())
        layer.locality_strength = locality_strength
        return layer

    @torch.no_grad()
    def init_from_conv2d_(self, conv: nn.Conv2d) -> None:
        """Initialise this layer, in place, as the best approximation of a given convolution.

        Each of the first k² heads takes one kernel offset and the rank-d approximation of its C×C
        matrix (truncated SVD, nearest in the Frobenius norm). The columns of W_out of heads beyond
        k² are zero. Borders differ: a convolution pads with zeros, attention falls on the nearest
        patch inside. In the limit of a large α the layer is the convolution with
        `padding_mode="replicate"`. α and λ are unchanged.

        Args:
            conv: k×k with k² ≤ h, this layer's width in and out, stride 1, same padding.

        Raises:
            UserError: if the kernel needs more heads, other widths, a stride or other padding.
        """
        window = convolution_window(conv)
        offsets = window_offsets(window).to(self.v_pos)
        heads, widths = len(offsets), (conv.in_channels, conv.out_channels)
        same_grid = window.stride == 1 and window.before + window.after == window.kernel - 1
        if not same_grid or heads > self.num_heads or widths != (self.dim, self.out_dim):
            raise UserError(
                f"a layer with {self.num_heads} heads from {self.dim} to {self.out_dim} channels "
                f"cannot start from {conv}, which needs {heads} heads; both must have the same "
                f"channels, and the convolution stride 1 and padding='same'"
            )
        wanted_outputs, wanted_values = factorised(conv, self.value_dim)
        rank = wanted_values.shape[1]
        values = self.value_weight.view(self.num_heads, self.value_dim, self.dim)
        outputs = self.proj.weight.view(self.out_dim, self.num_heads, self.value_dim)
        outputs.zero_()
        values[:heads, :rank] = wanted_values
        outputs[:, :heads, :rank] = wanted_outputs.transpose(0, 1)
        if self.qkv.bias is not None:
            nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.proj.bias)
        if conv.bias is not None:
            self.proj.bias.copy_(conv.bias)
        self.v_pos[:heads] = attention_centres(offsets, self.locality_strength)


class _GatedSum(torch.autograd.Function):
    """`torch.lerp` that saves two kernels in the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(content: Tensor, position: Tensor, gate: Tensor) -> Tensor:
        return torch.lerp(content, position, gate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        content, position, gate = ctx.saved_tensors
        of_position = grads[0] * gate
        of_gate = (grads[0] * (position - content)).sum_to_size(gate.shape)
        return grads[0] - of_position, of_position, of_gate


def gated_sum(content: Tensor, position: Tensor, gate: Tensor) -> Tensor:
    """(1 − gate) · content + gate · position, in one pass over memory instead of three."""
    trains = gate.requires_grad and torch.is_grad_enabled()
    if trains and gate.device.type != "cpu" and not torch.compiler.is_exporting():
        return _GatedSum.apply(content, position, gate)
    return torch.lerp(content, position, gate)


class PositionalPart(NamedTuple):
    """Token-independent terms of GPSA: σ(λ), (h, 1, 1), and positional attention."""

    gate: Tensor
    position: Separable


def positional_parts(
    v_pos: Sequence[Tensor],
    gating: Sequence[Tensor],
    grid: Grid,
    x: Tensor,
    window: Window = ALL_QUERIES,
) -> list[PositionalPart]:
    """The parts of several layers, in as many kernels as for one.

    Args:
        v_pos, gating: v_pos, (h, 3), and λ, (h,), of each layer.
        grid: grid of the tokens.
        x: any tensor with the layers' device and dtype.
        window: window of all the layers.
    """
    scores = axis_scores(in_full(torch.stack(list(v_pos))), grid, window)
    gates = torch.stack(list(gating)).sigmoid().to(x.dtype)[:, :, None, None]
    factors = zip(*Separable.of(scores, grid, window, x.dtype), strict=True)
    return [
        PositionalPart(gate, Separable(*pair)) for gate, pair in zip(gates, factors, strict=True)
    ]
