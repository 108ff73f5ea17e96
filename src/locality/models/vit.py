"""DeiT and ConViT: one class, one configuration.

A ConViT is a vision transformer whose first blocks attend by position as well as by content, and
whose class token joins after the last of them (ConViT §3, Fig. 4). Without them it is a DeiT.

Shapes:  B batch · N = H·W patches · C embed_dim · (H, W) token grid
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
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
from locality.layers.conv_init import kernel_size
from locality.models import base
from locality.models.base import Architecture, ImageClassifier, Run


@dataclass(frozen=True)
class ViTConfig(Architecture):
    """The architecture of a DeiT or ConViT, complete; see `Architecture` for the other fields.

    A class token is of use where a block attends to it: behind the positional ones. Images of any
    multiple of the patch size work at run time.

    Attributes:
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
        drop_path_rate: stochastic depth, rising linearly from 0 to this over the blocks.
    """

    embed_dim: int
    num_heads: int
    depth: int = 12
    patch_size: int = 16
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
    drop_path_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embed_dim", "num_heads", "depth", "patch_size"):
            checks.size(name, getattr(self, name))
        checks.heads(self.embed_dim, self.num_heads)
        checks.number("mlp_ratio", self.mlp_ratio, 0, checks.LARGEST["mlp_ratio"], above=True)
        checks.integer("gpsa_layers", self.gpsa_layers, 0, self.depth)
        checks.choice("positional_attention", self.positional_attention, POSITIONAL)
        checks.number("locality_strength", self.locality_strength, 0, above=True)
        checks.number("gating_init", self.gating_init)
        checks.number("drop_path_rate", self.drop_path_rate, 0, 1, below=True)
        reads_token = self.global_pool == "token" and self.class_token is None
        if self.gpsa_layers == self.depth and (self.class_token or reads_token):
            raise UserError(
                f"gpsa_layers={self.gpsa_layers} of depth={self.depth} leaves no block in which a "
                f"class token could attend to the patches; lower gpsa_layers or give "
                f"global_pool='avg' without class_token"
            )
        if self.embed_class_token and (self.gpsa_layers or not self.has_class_token):
            raise UserError(
                "embed_class_token=True needs a class token and gpsa_layers=0: with positional "
                "layers the class token joins after the position embedding has been added"
            )
        ((rows, columns),) = self.home_grids
        entries = rows * columns * self.use_pos_embed + self.num_classes
        entries += self.in_chans * self.patch_size**2
        checks.parameters(self.embed_dim, self.depth, self.mlp_ratio, self.embed_dim * entries)

    @property
    def has_class_token(self) -> bool:
        """Whether a class token joins before the first block that is not positional."""
        return self.gpsa_layers < self.depth if self.class_token is None else self.class_token

    def grids(self, size: Sequence[int]) -> list[Grid]:
        """The one grid of patches on an image of `size` (height, width).

        Raises:
            UserError: if the image cannot be cut into whole patches.
        """
        return [token_grid(size, self.patch_size)]


def token_grid(img_size: int | Sequence[int], patch_size: int) -> Grid:
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


def _shared(c: ViTConfig) -> dict[str, Any]:
    """What PSA and GPSA are both made with."""
    return {
        "dim": c.embed_dim,
        "num_heads": c.num_heads,
        "qkv_bias": c.qkv_bias,
        "proj_drop": c.proj_drop_rate,
        "locality_strength": c.locality_strength,
        "conv_init": c.conv_init,
    }


# What stands in the first blocks, by name: another attention is a class and a row here.
POSITIONAL: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "gpsa": lambda c: GatedPositionalSelfAttention(gating_init=c.gating_init, **_shared(c)),
    "psa": lambda c: PositionalSelfAttention(**_shared(c)),
    "conv": lambda c: LocalConvolution(c.embed_dim, kernel_size(c.num_heads)),
}


class VisionTransformer(ImageClassifier):
    """DeiT or ConViT, as its configuration says (ConViT Table 1)."""

    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, config.embed_dim)
        width = config.embed_dim
        self.patch_embed = nn.Conv2d(
            config.in_chans, width, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.cls_token: nn.Parameter | None = None
        if config.has_class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.pos_embed: nn.Parameter | None = None
        if config.use_pos_embed:
            ((rows, columns),) = config.home_grids
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
        self.head = base.make_head(width, config.num_classes)

    def _make_attention(self, index: int) -> nn.Module:
        c = self.config
        if index >= c.gpsa_layers:
            return SelfAttention(c.embed_dim, c.num_heads, c.qkv_bias, c.proj_drop_rate)
        attention = POSITIONAL[c.positional_attention](c)
        if isinstance(attention, GatedPositionalSelfAttention):
            attention.gating.requires_grad_(not c.freeze_gating)
        if c.freeze_gpsa and c.positional_attention != "conv":
            attention.requires_grad_(False)
        return attention

    def _tokens(self, x: Tensor, run: Run, maps: int | None = None) -> Tensor:
        grid = base.token_grids(self.config, (x.shape[2], x.shape[3]))[0]
        # Contiguous, or every residual sum down the network would work on strided memory.
        x = self.patch_embed(x).flatten(2).transpose(1, 2).contiguous()
        token: Tensor | None = self.cls_token
        prefix = int(self.config.embed_class_token)
        if token is not None and prefix:
            x, token = base.with_class_token(token, x), None
        if self.pos_embed is not None:
            (made_for,) = self.config.home_grids
            x = x + base.position_embedding(self.pos_embed, made_for, grid, prefix)
        for index, block in enumerate(self.blocks[:maps]):
            if index == self.config.gpsa_layers and token is not None:
                x = base.with_class_token(token, x)
            x = run(block, x, grid)
        return x

    def _map_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def _cut(self, maps: int) -> None:
        config = self.config
        token = config.has_class_token and config.gpsa_layers < maps
        self.blocks = self.blocks[:maps]
        if not token:
            self.cls_token = None
        self.config = dataclasses.replace(
            config,
            depth=maps,
            gpsa_layers=min(config.gpsa_layers, maps),
            drop_path_rate=config.drop_path_rate * (maps - 1) / max(1, config.depth - 1),
            global_pool="" if config.has_class_token and not token else config.global_pool,
            class_token=token,
        )

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
