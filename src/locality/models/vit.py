"""DeiT and ConViT: one class, one configuration.

A ConViT is a vision transformer whose first blocks attend by position as well as by content, and
whose class token joins after the last of them (ConViT §3, Fig. 4). Without them it is a DeiT.

Shapes:  B batch · N = H·W patches · C embed_dim · (H, W) token grid
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from locality import checks
from locality.errors import UserError
from locality.layers import (
    Block,
    GatedPositionalSelfAttention,
    Grid,
    LocalConvolution,
    PositionalSelfAttention,
    SelfAttention,
)
from locality.layers.position import kernel_size
from locality.models.surface import ImageClassifier, make_head


@dataclass(frozen=True)
class ViTConfig:
    """The architecture of a DeiT or ConViT, complete.

    Attributes:
        img_size: image size the position embedding is made for, a number or (height, width). Any
            other multiple of the patch size works at run time.
        patch_size: side of a patch in pixels.
        embed_dim, depth, num_heads, mlp_ratio: as everywhere.
        qkv_bias: bias on queries, keys and values (DeiT has one, ConViT has none).
        gpsa_layers: how many of the first blocks have positional attention (10 of 12 in the paper).
        positional_attention: "gpsa" (gated, Eq. 7), "psa" (one softmax, Eq. 4; Fig. 9), or "conv",
            a convolution in its place with the kernel that the heads could represent.
        locality_strength: α of the convolutional initialisation (Eq. 5).
        conv_init: start the positional layers as random convolutions (Table 3 c, d: False).
        gating_init: initial λ of every gate.
        freeze_gating: do not train the gates (Table 3 b, d: with `gating_init=0`).
        freeze_gpsa: do not train the positional layers' attention at all (Table 3 f, g).
        use_pos_embed: add a learned absolute position embedding to the patches.
        embed_class_token: give the class token an entry in the position embedding (DeiT).
        drop_rate: dropout before the classifier.
        proj_drop_rate: dropout after every attention and inside every MLP.
        drop_path_rate: stochastic depth, rising linearly from 0 to this over the blocks.
    """

    embed_dim: int
    num_heads: int
    depth: int = 12
    img_size: int | tuple[int, int] = 224
    patch_size: int = 16
    in_chans: int = 3
    num_classes: int = 1000
    mlp_ratio: float = 4.0
    qkv_bias: bool = False
    gpsa_layers: int = 0
    positional_attention: Literal["gpsa", "psa", "conv"] = "gpsa"
    locality_strength: float = 1.0
    conv_init: bool = True
    gating_init: float = 1.0
    freeze_gating: bool = False
    freeze_gpsa: bool = False
    use_pos_embed: bool = True
    embed_class_token: bool = False
    drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    drop_path_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "depth", "patch_size", "in_chans"):
            checks.integer(name, getattr(self, name), 1)
        if self.embed_dim % self.num_heads:
            raise UserError(
                f"embed_dim={self.embed_dim} cannot be divided between num_heads={self.num_heads}; "
                f"choose a multiple"
            )
        checks.number("mlp_ratio", self.mlp_ratio, 0, above=True)
        checks.integer("gpsa_layers", self.gpsa_layers, 0, self.depth)
        if self.positional_attention not in ("gpsa", "psa", "conv"):
            raise UserError(
                f"positional_attention='{self.positional_attention}' is not one of 'gpsa', 'psa', "
                f"'conv'"
            )
        checks.number("locality_strength", self.locality_strength, 0, above=True)
        checks.number("gating_init", self.gating_init)
        for name in ("drop_rate", "proj_drop_rate", "drop_path_rate"):
            checks.number(name, getattr(self, name), 0, 1, below=True)
        if self.embed_class_token and self.gpsa_layers:
            raise UserError(
                "embed_class_token=True needs gpsa_layers=0: with positional layers the class "
                "token joins after the position embedding has been added"
            )
        token_grid(self.img_size, self.patch_size)


def token_grid(img_size: int | tuple[int, ...], patch_size: int) -> Grid:
    """The grid of patches on an image of `img_size` pixels, a number or (height, width).

    Raises:
        UserError: if the image cannot be cut into whole patches.
    """
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    if min(height, width) < patch_size or height % patch_size or width % patch_size:
        raise UserError(
            f"an image of {height}×{width} pixels cannot be cut into patches of {patch_size}×"
            f"{patch_size}; both sides have to be multiples of {patch_size}"
        )
    return height // patch_size, width // patch_size


class VisionTransformer(ImageClassifier):
    """DeiT or ConViT, as its configuration says (ConViT Table 1)."""

    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, config.embed_dim)
        width = config.embed_dim
        self.patch_embed = nn.Conv2d(
            config.in_chans, width, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.pos_embed: nn.Parameter | None = None
        if config.use_pos_embed:
            rows, columns = token_grid(config.img_size, config.patch_size)
            entries = rows * columns + config.embed_class_token
            self.pos_embed = nn.Parameter(torch.zeros(1, entries, width))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        # Stochastic depth grows linearly over the blocks.
        step = config.drop_path_rate / max(1, config.depth - 1)
        self.blocks = nn.ModuleList(
            Block(
                width,
                self._make_attention(index),
                mlp_ratio=config.mlp_ratio,
                proj_drop=config.proj_drop_rate,
                drop_path=step * index,
            )
            for index in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = make_head(width, config.num_classes)

    def _make_attention(self, index: int) -> nn.Module:
        c = self.config
        plain: dict[str, Any] = {"qkv_bias": c.qkv_bias, "proj_drop": c.proj_drop_rate}
        if index >= c.gpsa_layers:
            return SelfAttention(c.embed_dim, c.num_heads, **plain)
        if c.positional_attention == "conv":
            return LocalConvolution(c.embed_dim, kernel_size(c.num_heads))
        plain |= {"locality_strength": c.locality_strength, "conv_init": c.conv_init}
        attention: nn.Module
        if c.positional_attention == "psa":
            attention = PositionalSelfAttention(c.embed_dim, c.num_heads, **plain)
        else:
            attention = GatedPositionalSelfAttention(
                c.embed_dim, c.num_heads, gating_init=c.gating_init, **plain
            )
            attention.gating.requires_grad_(not c.freeze_gating)
        if c.freeze_gpsa:
            attention.requires_grad_(False)
        return attention

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → normalised tokens (B, 1 + N, C), the class token first."""
        return self.norm(self._stem_and_blocks(x))

    def _stem_and_blocks(
        self,
        x: Tensor,
        keep: Callable[[int, Tensor, Grid], None] | None = None,
        depth: int | None = None,
        class_token_only: bool = False,
    ) -> Tensor:
        grid = token_grid(tuple(x.shape[-2:]), self.config.patch_size)
        # Contiguous, or every residual sum down the network would work on strided memory.
        x = self.patch_embed(x).flatten(2).transpose(1, 2).contiguous()
        if self.config.embed_class_token:
            x = self._with_class_token(x)
        if self.pos_embed is not None:
            x = x + self._pos_embed(grid)
        if not self.config.embed_class_token and self.config.gpsa_layers == 0:
            x = self._with_class_token(x)
        # The class token has to be there before the last block for that block to compute it alone.
        shortcut = class_token_only and self.config.gpsa_layers < self.config.depth
        for index, block in enumerate(self.blocks[:depth]):
            last = index + 1 == self.config.depth
            x = self._run(block, x, grid, queries=1 if shortcut and last else None)
            if keep is not None:
                keep(index, x, grid)
            if index + 1 == self.config.gpsa_layers:
                x = self._with_class_token(x)
        return x

    def _with_class_token(self, x: Tensor) -> Tensor:
        return torch.cat((self.cls_token.to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1)

    def _pos_embed(self, grid: Grid) -> Tensor:
        """The position embedding for `grid`, resampled bicubically where it differs."""
        assert self.pos_embed is not None
        made_for = token_grid(self.config.img_size, self.config.patch_size)
        if grid == made_for:
            return self.pos_embed
        return resample_abs_pos_embed(
            self.pos_embed,
            new_size=list(grid),
            old_size=list(made_for),
            num_prefix_tokens=int(self.config.embed_class_token),
        )

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The class token and the position embedding."""
        return {"cls_token", "pos_embed"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How parameters group into layers, for layer-wise learning rates (timm's convention)."""
        return {
            "stem": r"^cls_token|^pos_embed|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """One map per block, all on the patch grid."""
        return [
            {
                "num_chs": self.num_features,
                "reduction": self.config.patch_size,
                "module": f"blocks.{index}",
            }
            for index in range(self.config.depth)
        ]
