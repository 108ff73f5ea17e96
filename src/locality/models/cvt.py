"""CvT: transformers with convolutional token embedding and projection (Wu et al. 2021, Fig. 2).

Shapes:  B batch · stage s: tokens (B, p + N_s, C_s) on a grid (H_s, W_s), N_s = H_s·W_s
         p = 1 in the last stage, which adds the class token, else 0
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locality.layers.block import Block, Mlp
from locality.layers.convolution import (
    ConvolutionalAttention,
    ConvolutionalEmbedding,
    Projection,
    tokens_to_image,
)
from locality.layers.position import Grid
from locality.models import base
from locality.models.base import ImageClassifier, RunBlock
from locality.models.config import CvTConfig, StageConfig

_NORM_EPS = 1e-5


class QuickGELU(nn.Module):
    """x·σ(1.702x), the approximation of GELU that the authors' weights were trained with."""

    slope = 1.702

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, elementwise."""
        # With silu(y) = y·σ(y), the backward pass keeps one tensor instead of three.
        return F.silu(self.slope * x) / self.slope


def _fold_slope(mlp: Mlp) -> None:
    """Replace W₂·quick_gelu(W₁x) by the equal (W₂/1.702)·silu(1.702·W₁x), in place."""
    if isinstance(mlp.act, QuickGELU):
        for parameter in mlp.fc1.parameters():
            parameter.mul_(mlp.act.slope)
        mlp.fc2.weight.div_(mlp.act.slope)
        mlp.act = nn.SiLU(inplace=True)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"quick_gelu": QuickGELU, "gelu": nn.GELU}


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
        kernel, stride, padding = config.embed_kernel, config.embed_stride, config.embed_padding
        self.embed = ConvolutionalEmbedding(in_chans, width, kernel, stride, padding)
        patches = grid[0] * grid[1]
        self.pos_embed = base.embedding(patches, width) if config.use_pos_embed else None
        self.cls_token = base.embedding(1, width) if class_token else None
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
                    kv_padding=config.kv_padding,
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

    def embed_tokens(self, image: Tensor, grid: Grid) -> Tensor:
        """(B, C_in, H_in, W_in) → input tokens of the first block, (B, p + N, C)."""
        x = self.embed(image)
        if self.pos_embed is not None:
            x = x + base.position_embedding(self.pos_embed, self.native_grid, grid)
        return x if self.cls_token is None else base.prepend_class_token(self.cls_token, x)


class ConvolutionalVisionTransformer(ImageClassifier):
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
        self.norm = nn.LayerNorm(width, eps=_NORM_EPS)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = base.make_head(width, config.num_classes)

    def _fuse(self) -> None:
        """Fold BatchNorm into the convolution before it, and QuickGELU's slope into its MLP."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.fold_batch_norm()
            elif isinstance(module, Mlp):
                _fold_slope(module)

    def _tokens(self, x: Tensor, run: RunBlock, maps: int | None = None) -> Tensor:
        grids = base.token_grids(self.config, x.shape[1:])
        for index, stage in enumerate(self.stages[:maps]):
            assert isinstance(stage, Stage)
            image = x if index == 0 else tokens_to_image(x, grids[index - 1])
            x = stage.embed_tokens(image, grids[index])
            for block in stage.blocks:
                x = run(block, x, grids[index])
        return x

    def _feature_blocks(self) -> list[nn.Module]:
        return [cast(Stage, stage).blocks[-1] for stage in self.stages]

    def _truncate(self, maps: int) -> dict[str, Any]:
        stages = self.config.stages
        token = self.config.has_class_token and maps == len(stages)
        self.stages = self.stages[:maps]
        return {"stages": stages[:maps], "class_token": token}

    def unused_parameters(self) -> set[str]:
        """Names of trainable parameters that by design do not affect the output.

        The key projection's bias adds the same to the score of every key, which the softmax
        cancels. So does BatchNorm's bias on the keys in stages without a class token. If the
        classifier reads the class token, the last block's convolved queries are unused.
        """
        names, reads_token = set(), self.config.global_pool == "token" and self.num_prefix_tokens
        for name, module in self.named_modules():
            if isinstance(module, Stage):
                attentions = [f"{name}.blocks.{i}.attn" for i in range(len(module.blocks))]
                names |= {f"{attention}.k.linear.bias" for attention in attentions}
                if module.cls_token is None:
                    names |= {f"{attention}.k.norm.bias" for attention in attentions}
                elif reads_token:
                    query = f"{attentions[-1]}.q"
                    names |= {f"{query}.conv.weight", f"{query}.norm.weight", f"{query}.norm.bias"}
        return names & {name for name, _ in self.named_parameters()}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups of parameters by layer, for layer-wise learning rates (timm's convention).

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
