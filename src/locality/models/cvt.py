"""CvT: transformers that embed and project their tokens by convolution (Wu et al. 2021, Fig. 2).

Shapes:  B batch · stage s: tokens (B, p + N_s, C_s) on a grid (H_s, W_s), N_s = H_s·W_s
         p = 1 in the last stage, where the class token joins, 0 before
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp, resample_abs_pos_embed
from torch import Tensor, nn

from locality.errors import UserError
from locality.layers.block import Block
from locality.layers.convolution import (
    ConvolutionalAttention,
    ConvolutionalEmbedding,
    Projection,
    tokens_to_image,
)
from locality.layers.position import Grid
from locality.models.cvt_config import CvTConfig, StageConfig
from locality.models.surface import ImageClassifier, make_head

__all__ = ["ConvolutionalVisionTransformer", "CvTConfig", "QuickGELU", "Stage", "StageConfig"]

_NORM_EPS = 1e-5


class QuickGELU(nn.Module):
    """x·σ(1.702x), the approximation of GELU that the authors' weights were trained with."""

    slope = 1.702

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, elementwise."""
        # In terms of silu(y) = y·σ(y), one tensor is kept for the backward pass instead of three.
        return F.silu(self.slope * x) / self.slope


def _fold_slope(mlp: Mlp) -> None:
    """Turn W₂·quick_gelu(W₁x) into (W₂/1.702)·silu(1.702·W₁x), which is the same. In place."""
    if isinstance(mlp.act, QuickGELU):
        for parameter in mlp.fc1.parameters():
            parameter.mul_(mlp.act.slope)
        mlp.fc2.weight.div_(mlp.act.slope)
        mlp.act = nn.SiLU(inplace=True)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"quick_gelu": QuickGELU, "gelu": nn.GELU}


class Stage(nn.Module):
    """A token embedding and the blocks after it (Fig. 2a).

    Args:
        config: the stage's own configuration.
        in_chans: channels of the image or token map it is given.
        grid: the token grid that a position embedding is made for.
        class_token: whether a class token joins here.
        model: what all stages share.
    """

    def __init__(
        self, config: StageConfig, in_chans: int, grid: Grid, class_token: bool, model: CvTConfig
    ) -> None:
        super().__init__()
        width = config.embed_dim
        self.made_for = grid
        self.embed = ConvolutionalEmbedding(
            in_chans,
            width,
            config.embed_kernel,
            config.embed_stride,
            config.embed_padding,
            norm_eps=_NORM_EPS,
        )
        self.pos_embed: nn.Parameter | None = None
        if config.use_pos_embed:
            self.pos_embed = nn.Parameter(torch.zeros(1, grid[0] * grid[1], width))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.cls_token: nn.Parameter | None = None
        if class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.blocks = nn.ModuleList(
            Block(
                width,
                ConvolutionalAttention(
                    width,
                    config.num_heads,
                    projection=config.projection,
                    kernel_size=config.projection_kernel,
                    kv_stride=kv_stride,
                    qkv_bias=config.qkv_bias,
                    scale=model.attention_scale,
                    proj_drop=model.proj_drop_rate,
                ),
                mlp_ratio=mlp_ratio,
                act_layer=_ACTIVATIONS[model.activation],
                norm_eps=_NORM_EPS,
                proj_drop=model.proj_drop_rate,
                drop_path=drop_path,
            )
            for kv_stride, mlp_ratio, drop_path in zip(
                config.kv_strides, config.mlp_ratios, config.drop_path_rates, strict=True
            )
        )

    def embed_tokens(self, image: Tensor) -> tuple[Tensor, Grid]:
        """(B, C_in, H_in, W_in) → the tokens the first block is given, (B, p + N, C), and grid."""
        grid = self.embed.grid((image.shape[2], image.shape[3]))
        x = self.embed(image)
        if self.pos_embed is not None:
            x = x + self._pos_embed(self.pos_embed, grid)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1)
        return x, grid

    def _pos_embed(self, pos_embed: Tensor, grid: Grid) -> Tensor:
        """The position embedding for `grid`, resampled bicubically where it differs."""
        if grid == self.made_for:
            return pos_embed
        return resample_abs_pos_embed(
            pos_embed, new_size=list(grid), old_size=list(self.made_for), num_prefix_tokens=0
        )


class ConvolutionalVisionTransformer(ImageClassifier):
    """CvT, as its configuration says (Table 2)."""

    config: CvTConfig

    def __init__(self, config: CvTConfig) -> None:
        width = config.stages[-1].embed_dim
        super().__init__(config, width)
        self.fused = False
        self.num_prefix_tokens = int(config.global_pool == "token")
        inputs = [config.in_chans, *(stage.embed_dim for stage in config.stages)]
        grids = config.grids(self.img_size)
        last = len(config.stages) - 1
        self.stages = nn.ModuleList(
            Stage(stage, inputs[i], grids[i], bool(self.num_prefix_tokens) and i == last, config)
            for i, stage in enumerate(config.stages)
        )
        self.norm = nn.LayerNorm(width, eps=_NORM_EPS)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = make_head(width, config.num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → normalised tokens of the last stage (B, p + N, C), class token first.

        Raises:
            UserError: if the images are too small to survive the strides.
        """
        return self.norm(self._stem_and_blocks(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, p + N, C) → logits, or the features they are computed from if `pre_logits`."""
        if self.config.global_pool == "token":
            return super().forward_head(x, pre_logits)
        x = self.head_drop(x.mean(dim=1))
        return x if pre_logits else self.head(x)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a fresh one; 0 classes leaves the features.

        Raises:
            ValueError: if `global_pool` asks for another pooling than the model's own.
        """
        if global_pool not in (None, self.config.global_pool):
            raise ValueError(
                f"global_pool='{global_pool}' does not fit a model made with global_pool="
                f"'{self.config.global_pool}'; create it with the pooling it is to have"
            )
        super().reset_classifier(num_classes)

    def fuse(self) -> ConvolutionalVisionTransformer:
        """A copy for evaluation, with fewer steps and the same logits to rounding.

        Every BatchNorm is folded into the convolution before it, and the slope of every QuickGELU
        into the linear layers around it. The copy cannot train.
        """
        fused = copy.deepcopy(self).eval().requires_grad_(False)
        for module in fused.modules():
            if isinstance(module, Projection):
                module.fold_batch_norm()
            elif isinstance(module, Mlp):
                _fold_slope(module)
        fused.fused = True
        return fused

    def train(self, mode: bool = True) -> ConvolutionalVisionTransformer:
        """Training or evaluation mode.

        Raises:
            UserError: if a fused model is to train.
        """
        if mode and self.fused:
            raise UserError(
                "a fused model cannot train: its BatchNorms are folded into its convolutions; "
                "train the model it was fused from"
            )
        super().train(mode)
        return self

    def _stem_and_blocks(
        self,
        x: Tensor,
        keep: Callable[[int, Tensor, Grid], None] | None = None,
        depth: int | None = None,
        class_token_only: bool = False,
    ) -> Tensor:
        grid = (x.shape[2], x.shape[3])
        self.config.grids(grid)  # refuses images that are too small
        blocks_left = sum(stage.depth for stage in self.config.stages)
        shortcut = class_token_only and self.num_prefix_tokens == 1
        for index, stage in enumerate(self.stages[:depth]):
            assert isinstance(stage, Stage)
            x, grid = stage.embed_tokens(x if index == 0 else tokens_to_image(x, grid))
            for block in stage.blocks:
                blocks_left -= 1
                queries = 1 if shortcut and blocks_left == 0 else None
                x = self._run(block, x, grid, queries=queries)
            if keep is not None:
                keep(index, x, grid)
        return x

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The class token and position embeddings."""
        return {
            name for name, _ in self.named_parameters() if name.endswith(("cls_token", "pos_embed"))
        }

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How parameters group into layers, for layer-wise learning rates (timm's convention).

        Args:
            coarse: one group per stage instead of one per block.
        """
        if coarse:
            blocks: Any = r"^stages\.(\d+)"
        else:
            blocks = [
                (r"^stages\.(\d+)\.(?:embed|pos_embed|cls_token)", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ]
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
