"""ConViT and DeiT: attention (Eq. 1–7), and the model (Table 1).

A ConViT is a vision transformer whose first blocks (10 of 12 in the paper) have positional
attention. The class token has no place on the grid, so it joins after them (ConViT §3, Fig. 4).
Without positional blocks it is a DeiT. Both add a learned position embedding to the patches. A
`Block` around an attention layer A is x + A(LayerNorm(x)), then x + MLP(LayerNorm(x)).

Shapes:  B batch · N tokens, patches row by row · C embed_dim · h heads · d = C/h head width
         (H, W) token grid; in positional layers N = H·W

    SA    softmax(QKᵀ/√d) V                                        Eq. 1–3
    PSA   softmax(QKᵀ/√d + v_pos·r) V                                Eq. 4
    GPSA  (1 − σ(λ)) softmax(QKᵀ/√d) V + σ(λ) softmax(v_pos·r) V    Eq. 7

r_δ = (‖δ‖², δ₁, δ₂) encodes the offset δ from a query to a key, δ₁ down and δ₂ right. Each head
learns a gate λ, 1 at first, and v_pos. With `conv_init` v_pos starts as −α (1, −2Δ₁, −2Δ₂), which
makes softmax(v_pos·r) a Gaussian around Δ, the head's place in a kernel of ⌊√h⌋×⌊√h⌋ patches; α is
`locality_strength` (Eq. 5).

A layer's formula is its `mix`, whatever computes it. `layers/position.py` computes
softmax(v_pos·r) V without an N×N matrix; `attention_maps` returns the matrices, for inspection.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from locality.layers import fast, position
from locality.layers.block import (
    AttentionMaps,
    Block,
    each_query_alone,
    identity,
    make_dropout,
    make_head,
    mix,
    prefix_length,
    trunc_normal_init_,
)
from locality.layers.grid import Grid, check_heads
from locality.models import transformer
from locality.models.config import ViTConfig


class SelfAttention(nn.Module):
    """Multi-head self-attention: softmax(QKᵀ/√d) V, heads concatenated and projected (Eq. 1–3).

    Args:
        dim: token width C.
        num_heads: number of heads h; divides C.
        qkv_bias: whether the query, key and value projections have a bias.
        proj_drop: dropout after the output projection.

    Attributes:
        attn_drop: dropout of the attention matrix.

    Raises:
        UserError: if C is not a multiple of the heads.
    """

    attn_drop: float = 0.0

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = False, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.dim, self.num_heads = dim, num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = make_dropout(proj_drop)
        trunc_normal_init_(self.qkv)
        trunc_normal_init_(self.proj)

    def forward(self, x: Tensor, grid: Grid, part: Any = None, first: bool = False) -> Tensor:
        """(B, N, C) → (B, N, C), or (B, 1, C) of the first token; see `Block.forward`."""
        if first and hasattr(self.mix, "each_query_alone"):
            q = fast.linear(self.qkv, x[:, :1], slice(self.dim))
            k, v = fast.linear(self.qkv, x, slice(self.dim, None)).split(self.dim, dim=-1)
        else:
            q, k, v = fast.linear(self.qkv, x).split(self.dim, dim=-1)
        q, k, v = map(self.split_heads, (q, k, v))
        heads = mix(self, q, k, v, grid, part)
        heads = heads[:, :, :1] if first else heads
        return self.proj_drop(fast.linear(self.proj, heads.transpose(1, 2).flatten(2)))

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, h, N, d)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    @each_query_alone
    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, part: Any = None) -> Tensor:
        """Attention times values, (B, h, N, d) → (B, h, N, d).

        Args:
            q, k, v: queries, keys and values. As values, the identity gives attention itself.
            grid: of the patches among the tokens.
            part: this layer's of `parts`; computed if None.
        """
        return fast.attend(q, k, v)  # softmax(QKᵀ/√d) V

    @staticmethod
    def parts(layers: Sequence[Any], grid: Grid, dtype: torch.dtype) -> Sequence[Any]:
        """What `mix` of layers of this class needs that depends on no token, for all at once."""
        return [None] * len(layers)

    def attention_maps(self, x: Tensor, grid: Grid) -> AttentionMaps:
        """The attention that `forward(x, grid)` uses, and its parts."""
        q, k, v = map(self.split_heads, self.qkv(x).split(self.dim, dim=-1))
        mixed = self.mix(q, k, identity(k), grid)
        q = q / math.sqrt(q.shape[-1])
        positional, gate = self.positional_maps(grid)
        content = mixed if positional is None else (q @ k.transpose(-2, -1)).softmax(dim=-1)
        prefix = prefix_length(x.shape[1], grid)
        return AttentionMaps(mixed, content, positional, gate, grid, grid, prefix, q, k, v)

    def positional_maps(self, grid: Grid) -> tuple[Tensor | None, Tensor | None]:
        """Positional attention, (h, N, N), and gates, (h,), if any."""
        return None, None

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"


class PositionalSelfAttention(SelfAttention):
    """Positional self-attention: one softmax over content and position, QKᵀ/√d + v_pos·r (Eq. 4).

    Eq. 4 is printed without 1/√d; here content is scaled as in Eq. 7. As in Eq. 5, the
    convolutional initialisation also sets W_qry and W_key to zero. Attention then stays purely
    positional, since neither gets a gradient while the other is zero.

    Args:
        dim, num_heads, qkv_bias, proj_drop: as in `SelfAttention`.
        locality_strength: α of Eq. 5, how sharply heads focus on their centre at initialisation.
        conv_init: start the positional part as a convolution whose random weights are those of
            `proj` (Eq. 5); otherwise v_pos and the values start truncated-normal, std 0.02.
    """

    zeroes_content = True  # whether `conv_init` sets W_qry and W_key to zero

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
        locality_strength: float = 1.0,
        conv_init: bool = True,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, proj_drop)
        self.v_pos = nn.Parameter(torch.empty(num_heads, 3))
        nn.init.trunc_normal_(self.v_pos, std=0.02)
        if conv_init:
            # Eq. 5: the offsets of a k×k kernel, k = ⌊√h⌋, row-major, to the first k² heads. Any
            # others keep α times their init, as in the authors' code.
            offsets = position.kernel_offsets(position.kernel_size(num_heads))
            centres = position.attention_centres(offsets, locality_strength)
            self.v_pos.data *= locality_strength
            self.v_pos.data[: len(centres)] = centres
            # Views of the weight.
            queries_and_keys, values = self.qkv.weight.detach().split((2 * dim, dim))
            nn.init.eye_(values)  # W_val = I
            if self.zeroes_content:
                nn.init.zeros_(queries_and_keys)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, part: Any = None) -> Tensor:
        """Eq. 4 times values, (B, h, N, d) → (B, h, N, d) with N = H·W."""
        return position.attend_jointly(q, k, v, self.v_pos, grid)

    def positional_maps(self, grid: Grid) -> tuple[Tensor | None, Tensor | None]:
        return position.positional_attention(self.v_pos, grid), None


class GatedPositionalSelfAttention(PositionalSelfAttention):
    """Gated positional self-attention (Eq. 7).

        A = (1 − σ(λ)) softmax(QKᵀ/√d) + σ(λ) softmax(v_pos·r),   one gate λ per head.

    Both terms have rows that sum to one, so the normalisation that Eq. 6 prints changes nothing.

    Args:
        dim, num_heads, qkv_bias, proj_drop, locality_strength, conv_init: as in
            `PositionalSelfAttention`; W_qry and W_key start truncated-normal whatever `conv_init`
            (§3).
        gating_init: initial λ of every head (1 in the paper).
    """

    zeroes_content = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
        locality_strength: float = 1.0,
        conv_init: bool = True,
        gating_init: float = 1.0,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, proj_drop, locality_strength, conv_init)
        self.gating = nn.Parameter(torch.full((num_heads,), float(gating_init)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, part: Any = None) -> Tensor:
        """Eq. 7 times values, (B, h, N, d) → (B, h, N, d) with N = H·W."""
        gate, positional = part or self.parts([self], grid, v.dtype)[0]
        content = fast.attend(q, k, v)  # softmax(QKᵀ/√d) V
        # (1 − gate) · content + gate · position, in one pass over memory instead of three
        return torch.lerp(content, positional.attend(v), gate)

    @staticmethod
    def parts(layers: Sequence[Any], grid: Grid, dtype: torch.dtype) -> Sequence[Any]:
        v_pos, gating = zip(*((layer.v_pos, layer.gating) for layer in layers), strict=True)
        return position.gated_parts(v_pos, gating, grid, dtype)

    def positional_maps(self, grid: Grid) -> tuple[Tensor | None, Tensor | None]:
        return position.positional_attention(self.v_pos, grid), self.gating.sigmoid()


class VisionTransformer(transformer.Transformer):
    """DeiT or ConViT (ConViT Table 1)."""

    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, config.embed_dim)
        width = config.embed_dim
        self.patch_embed = nn.Conv2d(
            config.in_chans, width, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.cls_token = transformer.embedding(1, width) if config.has_class_token else None
        ((rows, columns),) = config.native_grids
        entries = rows * columns + config.embed_class_token
        self.pos_embed = transformer.embedding(entries, width) if config.use_pos_embed else None
        # Stochastic depth grows linearly over the blocks.
        step = config.drop_path_rate / max(1, config.depth - 1)
        self.blocks = nn.ModuleList(
            Block(
                width,
                make_attention(config, index),
                mlp_ratio=config.mlp_ratio,
                proj_drop=config.proj_drop_rate,
                drop_path=step * index,
            )
            for index in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = make_head(width, config.num_classes)

    def forward_features(
        self, x: Tensor, maps: list[Tensor] | None = None, first: bool = False
    ) -> Tensor:
        x, grid = self.embed(x)
        parts = self.parts(x, grid) if self.shortcuts else [None] * len(self.blocks)
        for index, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            x = self.join_class_token(x, index)
            x = block(x, grid, part, first and index == len(self.blocks) - 1)
            if maps is not None:
                maps.append(x)
        return self.norm(x)

    def parts(self, x: Tensor, grid: Grid) -> list[Any]:
        """For each layer, what its attention needs that depends on no token; in few kernels."""
        device = x.device.type
        # The meta device has no autocast.
        autocast = not x.is_meta and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        kinds: list[list[Any]] = []  # not itertools.groupby, which breaks torch.compile's graph
        for block in self.blocks:
            if not kinds or type(kinds[-1][0]) is not type(block.attn):
                kinds.append([])
            kinds[-1].append(block.attn)
        return [part for each in kinds for part in type(each[0]).parts(each, grid, dtype)]

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """(B, C_in, H_in, W_in) → embedded patches, (B, N, C), and their grid."""
        grid = transformer.token_grids(self.config, x.shape)[0]
        # Contiguous, so that no later residual sum works on strided memory.
        x = self.patch_embed(x).flatten(2).transpose(1, 2).contiguous()
        if self.config.embed_class_token and self.cls_token is not None:
            x = transformer.prepend_class_token(self.cls_token, x)
        if self.pos_embed is not None:
            (native_grid,) = self.config.native_grids
            prefix = int(self.config.embed_class_token)
            x = x + transformer.position_embedding(self.pos_embed, native_grid, grid, prefix)
        return x, grid

    def join_class_token(self, x: Tensor, index: int) -> Tensor:
        """The input of block `index`: the class token joins after the positional blocks."""
        joins = index == self.config.gpsa_layers and not self.config.embed_class_token
        if joins and self.cls_token is not None:
            return transformer.prepend_class_token(self.cls_token, x)
        return x

    def truncate(self, maps: int) -> dict[str, Any]:
        config = self.config
        token = config.has_class_token and config.gpsa_layers < maps
        self.blocks = self.blocks[:maps]
        if not token:
            self.cls_token = None
        return {
            "depth": maps,
            "gpsa_layers": min(config.gpsa_layers, maps),
            "drop_path_rate": config.drop_path_rate * (maps - 1) / max(1, config.depth - 1),
            "class_token": token,
        }

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {
            "stem": r"^cls_token|^pos_embed|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """One map per block, all on the patch grid."""
        width, reduction = self.num_features, self.config.patch_size
        return [
            {"num_chs": width, "reduction": reduction, "module": f"blocks.{index}"}
            for index in range(self.config.depth)
        ]


def make_attention(config: ViTConfig, index: int) -> SelfAttention:
    """The attention layer of block `index`."""
    own = (config.embed_dim, config.num_heads, config.qkv_bias, config.proj_drop_rate)
    start = (config.locality_strength, config.conv_init)
    layer: SelfAttention
    if index >= config.gpsa_layers:
        layer = SelfAttention(*own)
    elif config.positional_attention == "psa":
        layer = PositionalSelfAttention(*own, *start)
    else:
        layer = GatedPositionalSelfAttention(*own, *start, config.gating_init)
        layer.gating.requires_grad_(not config.freeze_gating)
    layer.attn_drop = config.attn_drop_rate
    if config.freeze_gpsa and index < config.gpsa_layers:
        layer.requires_grad_(False)
    return layer
