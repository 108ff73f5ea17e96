"""CvT: transformers with convolutional token embedding and projection (Wu et al. 2021, Fig. 2).

Shapes:  B batch · h heads · d = C/h head width
         stage s: tokens (B, p + N_s, C_s) on a grid (H_s, W_s), N_s = H_s·W_s
         p = 1 in the last stage of a model with a class token, else 0

    Table 2            stage 1          stage 2          stage 3
    embedding          7×7, stride 4    3×3, stride 2    3×3, stride 2
    projection         3×3 depth-wise and BatchNorm, stride 1 for queries, 2 for keys and values
    MLP ratio          4                4                4
                       C, h, blocks     C, h, blocks     C, h, blocks
    CvT-13              64, 1, 1        192,  3, 2        384,  6, 10
    CvT-21              64, 1, 1        192,  3, 4        384,  6, 16
    CvT-W24            192, 3, 2        768, 12, 2       1024, 16, 20

A `Block` is x + attention(LayerNorm(x)), then x + MLP(LayerNorm(x)). The classifier reads the class
token after the last stage and a LayerNorm.

Tokens (B, N, C) have the memory layout of a channels-last image (B, C, H, W). The convolutions here
work on that view, without a transpose.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locality.layers import fast
from locality.layers.block import (
    AttentionMaps,
    Block,
    each_query_alone,
    frozen_statistics,
    identity,
    make_dropout,
    make_head,
    mix,
    trunc_normal_init_,
)
from locality.layers.grid import AttentionScale, Grid, ProjectionName, check_heads, projected_grid
from locality.models import transformer
from locality.models.config import CvTConfig, StageConfig

_EPS = 1e-5


def tokens_to_image(tokens: Tensor, grid: Grid) -> Tensor:
    """Patches (B, N, C) as a channels-last image (B, C, H, W): a view."""
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def image_to_tokens(image: Tensor) -> Tensor:
    """A channels-last image (B, C, H, W) as patches (B, N, C): a view."""
    return image.permute(0, 2, 3, 1).flatten(1, 2)


class QuickGELU(nn.Module):
    """x·σ(1.702x), the approximation of GELU that the authors' weights were trained with."""

    slope = 1.702

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, elementwise."""
        # With silu(y) = y·σ(y), the backward pass keeps one tensor instead of three. The division
        # is in place, since allocating memory takes longer.
        return F.silu(self.slope * x).div_(self.slope)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"quick_gelu": QuickGELU, "gelu": nn.GELU}


class ConvolutionalEmbedding(nn.Module):
    """Convolutional token embedding: a convolution, then LayerNorm over channels (§3.1, Eq. 1).

    With kernel = stride and no padding it is ViT's patch embedding (Table 6 a, b).

    Args:
        in_chans: channels of the image or token map.
        dim: token width C.
        kernel_size, stride, padding: the convolution's; with `pool`, those of the max pooling.
        pool: take the maximum of each window, and convolve at stride 1. Not in the paper.
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        kernel_size: int,
        stride: int,
        padding: int,
        pool: bool = False,
    ) -> None:
        super().__init__()
        self.pool: nn.Module = nn.Identity()
        if pool:
            self.pool = nn.MaxPool2d(kernel_size, stride, padding)
            stride, padding = 1, kernel_size // 2
        self.conv = nn.Conv2d(in_chans, dim, kernel_size, stride, padding)
        self.norm = nn.LayerNorm(dim, eps=_EPS)

    def forward(self, image: Tensor) -> Tensor:
        """(B, C_in, H_in, W_in) → tokens (B, N, C) on the grid of Eq. 1."""
        # Channels last, in a way that `torch.vmap` supports.
        image = image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.norm(image_to_tokens(self.conv(self.pool(image))))


class Projection(nn.Module):
    """Projection of tokens to queries, keys or values (§3.2).

    "conv": depth-wise convolution → BatchNorm → linear, a depth-wise separable convolution (Eq. 2).
        Stride 2 reduces keys and values (Fig. 3c). The class token takes only the linear part.
    "avg": average pooling instead of the convolution; padding does not count.
    "linear": each token separately, as in ViT (Table 8). Keeps all tokens, whatever the stride.

    Args:
        dim: token width C.
        projection: one of these names.
        kernel_size: odd side of the window.
        stride: stride of the window.
        bias: whether the linear part has a bias.
        padding: padding of the token grid; half the window, which gives ⌈size / stride⌉, if None.
        class_token: whether a class token comes before the patches.
    """

    def __init__(
        self,
        dim: int,
        projection: ProjectionName = "conv",
        kernel_size: int = 3,
        stride: int = 1,
        bias: bool = True,
        padding: int | None = None,
        class_token: bool = False,
    ) -> None:
        super().__init__()
        self.projection, self.class_token = projection, class_token
        self.stride = 1 if projection == "linear" else stride
        padding = kernel_size // 2 if padding is None else padding
        self.window = (kernel_size, stride, padding)
        # The centre of the first window, in tokens.
        self.offset = 0 if projection == "linear" else kernel_size // 2 - padding
        if projection == "conv":
            self.conv: nn.Module = nn.Conv2d(dim, dim, *self.window, groups=dim, bias=False)
            self.norm: nn.Module = nn.BatchNorm2d(dim)
        elif projection == "avg":
            self.conv = nn.AvgPool2d(*self.window, count_include_pad=False)
            self.norm = nn.Identity()
        self.linear = trunc_normal_init_(nn.Linear(dim, dim, bias=bias))

    def grid(self, grid: Grid) -> Grid:
        """The grid of the projections of tokens on `grid`."""
        return projected_grid(grid, self.projection, *self.window)

    def forward(self, x: Tensor, image: Tensor, first: bool = False) -> Tensor:
        """Tokens (B, p + N, C) → projections (B, p + N', C).

        Args:
            x: the tokens.
            image: their patches as an image (B, C, H, W), shared by queries, keys and values.
            first: compute only the class token, (B, 1, C).
        """
        # In training, all patches are convolved: BatchNorm needs their statistics, and
        # data-parallel training needs every parameter in the graph.
        mixed = x if first and not self.training else self.convolve(x, image)
        return fast.linear(self.linear, mixed[:, :1] if first else mixed)

    def convolve(self, x: Tensor, image: Tensor) -> Tensor:
        """The input of the linear layer: convolved patches (Eq. 2) and the class token."""
        if self.projection == "linear":
            return x
        patches = image_to_tokens(self.norm(self.conv(image)))
        return torch.cat((x[:, :1], patches), dim=1) if self.class_token else patches


class ConvolutionalAttention(nn.Module):
    """Multi-head attention whose queries, keys and values are convolutional projections (§3.2).

        softmax(s · Q Kᵀ) V,   s = C^−½ by default, as in the authors' weights, or the usual d^−½.

    The grid of keys and values is coarser by `kv_stride`.

    Args:
        dim: token width C.
        num_heads: number of heads h; divides C.
        projection: kind of all three projections (see `Projection`).
        kernel_size: side of their window.
        kv_stride: stride of keys and values; queries have stride 1.
        qkv_bias: whether the projections' linear parts have a bias.
        scale: "width" for C^−½, "head" for d^−½.
        kv_padding: padding of keys and values; half the window if None.
        proj_drop: dropout after the output projection.
        class_token: whether a class token comes before the patches.

    Attributes:
        attn_drop: dropout of the attention matrix.

    Raises:
        UserError: if C is not a multiple of the heads.
    """

    attn_drop: float = 0.0

    def __init__(
        self,
        dim: int,
        num_heads: int,
        projection: ProjectionName = "conv",
        kernel_size: int = 3,
        kv_stride: int = 2,
        qkv_bias: bool = True,
        scale: AttentionScale = "width",
        kv_padding: int | None = None,
        proj_drop: float = 0.0,
        class_token: bool = False,
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.dim, self.num_heads, self.class_token = dim, num_heads, class_token
        self.scale = (dim if scale == "width" else dim // num_heads) ** -0.5
        kv = (projection, kernel_size, kv_stride, qkv_bias, kv_padding, class_token)
        self.q = Projection(dim, projection, kernel_size, 1, qkv_bias, None, class_token)
        self.k, self.v = Projection(dim, *kv), Projection(dim, *kv)
        self.proj = trunc_normal_init_(nn.Linear(dim, dim))
        self.proj_drop = make_dropout(proj_drop)

    def forward(self, x: Tensor, grid: Grid, part: None = None, first: bool = False) -> Tensor:
        """(B, p + N, C) → (B, p + N, C), or (B, 1, C) of the class token; see `Block.forward`."""
        image = self.image(x, grid)
        alone = first and hasattr(self.mix, "each_query_alone")
        projected = self.q(x, image, alone), self.k(x, image), self.v(x, image)
        q, k, v = map(self.split_heads, projected)
        heads = mix(self, q, k, v, grid, part)
        heads = heads[:, :, :1] if first else heads
        return self.proj_drop(fast.linear(self.proj, heads.transpose(1, 2).flatten(2)))

    @each_query_alone
    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, part: None = None) -> Tensor:
        """softmax(s·QKᵀ) V: (B, h, N, d), (B, h, N', d) twice → (B, h, N, d).

        As values, the identity gives attention itself. `part` is for other attention.
        """
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)

    def image(self, x: Tensor, grid: Grid) -> Tensor:
        """The patches of (B, p + N, C) as a dense channels-last image."""
        return tokens_to_image(x[:, int(self.class_token) :].contiguous(), grid)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, h, N, d)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def attention_maps(self, x: Tensor, grid: Grid) -> AttentionMaps:
        """The attention that `forward(x, grid)` uses; BatchNorm's statistics are not updated."""
        image = self.image(x, grid)
        with frozen_statistics(self):
            q, k, v = (self.split_heads(part(x, image)) for part in (self.q, self.k, self.v))
        mixed = self.mix(q, k, identity(k), grid)
        grids, prefix = (grid, self.k.grid(grid)), int(self.class_token)
        centres = ((self.k.stride,) * 2, (self.k.offset,) * 2)
        q = q * self.scale
        return AttentionMaps(mixed, mixed, None, None, *grids, prefix, q, k, v, *centres)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}, scale={self.scale:.4g}"


class Stage(nn.Module):
    """A token embedding and the blocks after it (Fig. 2a).

    Args:
        config: the stage's configuration.
        in_chans: channels of the input image or token map.
        grid: the native token grid, which a position embedding has.
        class_token: whether the stage adds a class token.
        model: the model's configuration.
    """

    def __init__(
        self, config: StageConfig, in_chans: int, grid: Grid, class_token: bool, model: CvTConfig
    ) -> None:
        super().__init__()
        width = config.embed_dim
        self.native_grid = grid
        window = (config.embed_kernel, config.embed_stride, config.embed_padding)
        self.embed = ConvolutionalEmbedding(in_chans, width, *window, config.embed_pool)
        entries = grid[0] * grid[1]
        self.pos_embed = transformer.embedding(entries, width) if config.use_pos_embed else None
        self.cls_token = transformer.embedding(1, width) if class_token else None
        act, drop = _ACTIVATIONS[model.activation], model.proj_drop_rate
        self.blocks = nn.ModuleList()
        # Stochastic depth grows linearly over the blocks.
        step = config.drop_path_rate / max(1, config.depth - 1)
        per_block = zip(config.kv_stride, config.mlp_ratio, strict=True)
        for index, (kv_stride, mlp_ratio) in enumerate(per_block):
            windows = (config.projection, config.projection_kernel, kv_stride, config.qkv_bias)
            scaled = (model.attention_scale, config.kv_padding, drop, class_token)
            attention = ConvolutionalAttention(width, config.num_heads, *windows, *scaled)
            attention.attn_drop = model.attn_drop_rate
            self.blocks.append(Block(width, attention, mlp_ratio, act, _EPS, drop, step * index))

    def forward(self, image: Tensor, grid: Grid, first: bool = False) -> Tensor:
        """(B, C_in, H_in, W_in) → tokens (B, p + N, C) on `grid`, or the class token alone."""
        x = self.embed(image)
        if not self.blocks:  # a stage of the convolutional stem
            x = F.gelu(x)
        if self.pos_embed is not None:
            x = x + transformer.position_embedding(self.pos_embed, self.native_grid, grid)
        if self.cls_token is not None:
            x = transformer.prepend_class_token(self.cls_token, x)
        for index, block in enumerate(self.blocks):
            x = block(x, grid, None, first and index == len(self.blocks) - 1)
        return x


class ConvolutionalVisionTransformer(transformer.Transformer):
    """CvT (Table 2)."""

    config: CvTConfig

    def __init__(self, config: CvTConfig) -> None:
        width = config.stages[-1].embed_dim
        super().__init__(config, width)
        inputs = [config.in_chans, *(stage.embed_dim for stage in config.stages)]
        grids = config.native_grids
        last = len(config.stages) - 1
        self.stages = nn.ModuleList(
            Stage(stage, inputs[i], grids[i], config.has_class_token and i == last, config)
            for i, stage in enumerate(config.stages)
        )
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = make_head(width, config.num_classes)

    def forward_features(
        self, x: Tensor, maps: list[Tensor] | None = None, first: bool = False
    ) -> Tensor:
        grids = transformer.token_grids(self.config, x.shape)
        for index, stage in enumerate(self.stages):
            image = x if index == 0 else tokens_to_image(x, grids[index - 1])
            x = stage(image, grids[index], first and index == len(self.stages) - 1)
            if maps is not None:
                maps.append(x)
        return self.norm(x)

    def truncate(self, maps: int) -> dict[str, Any]:
        token = self.config.has_class_token and maps == len(self.stages)
        self.stages = self.stages[:maps]
        kept = {name: self.config.per_stage(name)[:maps] for name in StageConfig._fields}
        return kept | {"class_token": token}

    def unused_parameters(self) -> set[str]:
        """Names of trainable parameters that by design do not affect the output.

        The key projection's bias adds the same to the score of every key, which the softmax
        cancels. So does BatchNorm's bias on the keys, unless a class token skips it. If the
        classifier reads the class token, the last block's convolved queries are unused.
        """
        unused, last = set(), ""
        for name, module in self.named_modules():
            if isinstance(module, ConvolutionalAttention):
                last = name if module.class_token else ""
                unused |= {f"{name}.k.linear.bias", *([] if last else [f"{name}.k.norm.bias"])}
        if last and self.config.global_pool == "token":
            unused |= {f"{last}.q.{part}" for part in ("conv.weight", "norm.weight", "norm.bias")}
        return unused & {name for name, _ in self.named_parameters()}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups of parameters; with `coarse`, one per stage instead of one per block."""
        fine = [
            (r"^stages\.(\d+)\.(?:embed|pos_embed|cls_token)", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),
        ]
        blocks = r"^stages\.(\d+)" if coarse else fine
        return {"stem": r"^stages\.0\.(?:embed|pos_embed|cls_token)", "blocks": blocks}

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """One map per stage, at strides 4, 8 and 16 in the paper's models."""
        entries, reduction = [], 1
        for index, stage in enumerate(self.config.stages):
            reduction *= stage.embed_stride
            entries.append(
                {"num_chs": stage.embed_dim, "reduction": reduction, "module": f"stages.{index}"}
            )
        return entries
