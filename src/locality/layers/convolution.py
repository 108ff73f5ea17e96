"""Convolutional token embedding, convolutional projection, and attention over it (CvT §3).

Shapes:  B batch · N = H·W tokens · C width · h heads · d = C/h head width · (H, W) token grid
         p prefix tokens: 1 with a class token, which comes before the patches, else 0

Tokens (B, N, C) have the memory layout of a channels-last image (B, C, H, W). The convolutions here
work on that view, without a transpose.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from locality import checks
from locality.errors import UserError
from locality.layers.attention import AttentionMaps, GatedPositionalSelfAttention, prefix_length
from locality.layers.conv_init import trunc_normal_init_
from locality.layers.cpu import Linear
from locality.layers.grid import (
    AttentionScale,
    Grid,
    ProjectionName,
    check_heads,
    check_kernel,
    projected_grid,
)
from locality.layers.position import check_grid


def tokens_to_image(tokens: Tensor, grid: Grid) -> Tensor:
    """Patches (B, N, C) as a channels-last image (B, C, H, W): a view."""
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def image_to_tokens(image: Tensor) -> Tensor:
    """A channels-last image (B, C, H, W) as patches (B, N, C): a view."""
    return image.permute(0, 2, 3, 1).flatten(1, 2)


class ConvolutionalEmbedding(nn.Module):
    """Convolutional token embedding: a convolution, then LayerNorm over channels (§3.1, Eq. 1).

    With kernel = stride and no padding it is ViT's patch embedding (Table 6 a, b).

    Args:
        in_chans: channels of the image or token map.
        dim: token width C.
        kernel_size, stride, padding: the convolution's.
    """

    def __init__(
        self, in_chans: int, dim: int, kernel_size: int, stride: int, padding: int
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, kernel_size, stride, padding)
        self.norm = nn.LayerNorm(dim, eps=1e-5)

    def forward(self, image: Tensor) -> Tensor:
        """(B, C_in, H_in, W_in) → tokens (B, N, C) on the grid of Eq. 1."""
        # Channels last, in a way that `torch.vmap` supports.
        image = image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.norm(image_to_tokens(self.conv(image)))


def recomputing() -> bool:
    """Whether a checkpointed block is being recomputed in the backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class BatchNorm(nn.BatchNorm2d):
    """`nn.BatchNorm2d`; raises a clear error for a single value per channel.

    Gradient checkpointing updates the running statistics once.
    """

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C, H, W).

        Raises:
            UserError: for a single value per channel in training.
        """
        if self.training and image.shape[0] * image.shape[2] * image.shape[3] == 1:
            raise UserError(
                "BatchNorm cannot train on a batch of 1 whose projection is a 1×1 grid; use a "
                "larger batch or larger images"
            )
        if self.training and recomputing():
            mean, variance, _ = (buffer.clone() for buffer in self.buffers())
            return F.batch_norm(image, mean, variance, self.weight, self.bias, True, eps=self.eps)
        return super().forward(image)


class Projection(nn.Module):
    """Projection of tokens to queries, keys or values (§3.2).

    "conv": depth-wise convolution → BatchNorm → linear, a depth-wise separable convolution (Eq. 2).
        Stride 2 reduces keys and values (Fig. 3c). The class token takes only the linear part.
    "avg": average pooling instead of the convolution; padding does not count.
    "microsoft_avg": average pooling as in Microsoft's code: padding counts as zeros, the last
        window may extend beyond the border, and only keys and values are averaged.
    "linear": each token separately, as in ViT (Table 8). Keeps all tokens, whatever the stride.

    Args:
        dim: token width C.
        projection: one of these names.
        kernel_size: odd side of the window.
        stride: stride of the window.
        bias: whether the linear part has a bias.
        padding: padding of the token grid; half the window, which gives ⌈size / stride⌉, if None.

    Raises:
        UserError: for an unknown name, an even kernel or a stride below 1.
    """

    conv: nn.Module
    norm: nn.Module

    def __init__(
        self,
        dim: int,
        projection: ProjectionName = "conv",
        kernel_size: int = 3,
        stride: int = 1,
        bias: bool = True,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        checks.typed("projection", projection, ProjectionName)
        check_kernel(kernel_size)
        checks.integer("stride", stride, 1)
        self.projection = projection
        self.stride = 1 if projection == "linear" else stride
        padding = kernel_size // 2 if padding is None else padding
        self.window = (kernel_size, stride, padding)
        # The centre of the first window, in tokens.
        self.offset = 0 if projection == "linear" else kernel_size // 2 - padding
        if projection == "conv":
            self.conv = nn.Conv2d(dim, dim, *self.window, groups=dim, bias=False)
            self.norm = BatchNorm(dim)
        elif projection != "linear":
            theirs = projection == "microsoft_avg"
            self.conv = nn.AvgPool2d(*self.window, ceil_mode=theirs, count_include_pad=theirs)
            self.norm = nn.Identity()
        self.linear = trunc_normal_init_(Linear(dim, dim, bias=bias))

    def grid(self, grid: Grid) -> Grid:
        """The grid of the projections of tokens on `grid`."""
        return projected_grid(grid, self.projection, *self.window)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        """Tokens (B, p + N, C) → projections (B, p + N', C).

        Args:
            x: the tokens.
            image: their patches as an image (B, C, H, W), shared by queries, keys and values.
        """
        return self.linear(self.linear_input(x, image))

    def linear_input(self, x: Tensor, image: Tensor) -> Tensor:
        """The input of the linear layer: convolved patches (Eq. 2) and the class token."""
        if self.projection == "linear":
            return x
        patches = image_to_tokens(self.norm(self.conv(image)))
        prefix = prefix_length(x.shape[1], (image.shape[2], image.shape[3]))
        return torch.cat((x[:, :prefix], patches), dim=1) if prefix else patches

    def forward_without_update(self, x: Tensor, image: Tensor) -> Tensor:
        """Like `forward`, without updating BatchNorm's running statistics."""
        copies = {name: buffer.clone() for name, buffer in self.named_buffers()}
        return torch.func.functional_call(self, copies, (x, image))

    @torch.no_grad()
    def fold_batch_norm(self) -> None:
        """Fold BatchNorm in evaluation mode into the convolution before it, in place."""
        if self.projection == "conv" and isinstance(self.norm, BatchNorm):
            convolution = cast(nn.Conv2d, self.conv.eval())
            self.conv = fuse_conv_bn_eval(convolution, self.norm.eval())
            self.norm = nn.Identity()


@register_notrace_module
class ConvolutionalAttention(nn.Module):
    """Multi-head attention whose queries, keys and values are convolutional projections (§3.2).

        softmax(s · Q Kᵀ) V,   s = C^−½ in the authors' weights, d^−½ in the usual definition.

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

    Raises:
        UserError: if C is not a multiple of the heads, or for an unknown projection or scale.
    """

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
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        checks.typed("attention_scale", scale, AttentionScale)
        self.dim = dim
        self.num_heads = num_heads
        self.scale = (dim if scale == "width" else dim // num_heads) ** -0.5
        queries: ProjectionName = "linear" if projection == "microsoft_avg" else projection
        self.q = Projection(dim, queries, kernel_size, 1, qkv_bias)
        self.k = Projection(dim, projection, kernel_size, kv_stride, qkv_bias, kv_padding)
        self.v = Projection(dim, projection, kernel_size, kv_stride, qkv_bias, kv_padding)
        self.proj = trunc_normal_init_(Linear(dim, dim))
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, grid: Grid, class_token_only: bool = False) -> Tensor:
        """(B, p + N, C) → (B, p + N, C), or (B, 1, C) for the class token only."""
        image = self._image(x, grid)
        k, v = self._split_heads(self.k(x, image)), self._split_heads(self.v(x, image))
        q = self._split_heads(
            self._class_token_query(x, image) if class_token_only else self.q(x, image)
        )
        heads = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))

    def attention_maps(self, x: Tensor, grid: Grid) -> AttentionMaps:
        """The attention that `forward(x, grid)` uses; BatchNorm's statistics are not updated."""
        image = self._image(x, grid)
        q, k = (
            self._split_heads(part.forward_without_update(x, image)) for part in (self.q, self.k)
        )
        content = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        prefix = prefix_length(x.shape[1], grid)
        key_grid, places = self.k.grid(grid), ((self.k.stride,) * 2, (self.k.offset,) * 2)
        q = q * self.scale
        return AttentionMaps(content, content, None, None, grid, key_grid, prefix, q, k, *places)

    def _class_token_query(self, x: Tensor, image: Tensor) -> Tensor:
        if not self.training:
            return self.q.linear(x[:, :1])  # the class token is not convolved
        # In training, convolve all patches: BatchNorm needs their statistics, and data-parallel
        # training needs every parameter in the graph.
        return self.q.linear(self.q.linear_input(x, image)[:, :1])

    @staticmethod
    def _image(x: Tensor, grid: Grid) -> Tensor:
        """The patches of (B, p + N, C) as a dense channels-last image."""
        return tokens_to_image(x[:, prefix_length(x.shape[1], grid) :].contiguous(), grid)

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, h, N, d)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}, scale={self.scale:.4g}"


@register_notrace_module
class LocalConvolution(nn.Module):
    """A dense k×k convolution over the token grid, stride 1, same padding.

    Like a gated layer at initialisation whose heads each attend to exactly one neighbour, but with
    full rank at every offset, and fixed during training. `init_from_conv2d_` turns it back.

    Args:
        dim: token width C.
        kernel_size: side k of the kernel, odd or even.
    """

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        # The std of attention's output projection, which is the kernel of a random convolution
        # because W_val = I (ConViT Eq. 5).
        self.conv = trunc_normal_init_(nn.Conv2d(dim, dim, kernel_size, padding="same"))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) → (B, N, C) with N = H·W.

        Raises:
            ValueError: if N is not H·W.
        """
        check_grid(x, grid)
        image = x.transpose(1, 2).unflatten(2, grid)
        return self.conv(image).flatten(2).transpose(1, 2)


@register_notrace_module
class ImageAttention(nn.Module):
    """Gated attention that replaces a k×k convolution: images in, images out.

    Args:
        attn: a layer made by `GatedPositionalSelfAttention.from_conv2d`.
    """

    def __init__(self, attn: GatedPositionalSelfAttention) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C_out, H', W') with the stride and padding of the convolution."""
        grid = (x.shape[2], x.shape[3])
        return tokens_to_image(self.attn(image_to_tokens(x), grid), self.attn.window.grid(grid))
