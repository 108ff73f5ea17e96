"""The base class of all models: features, pooling, classifier, and the fused copy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from locality.errors import UserError
from locality.layers import fast
from locality.layers.grid import Grid
from locality.models.config import Architecture
from locality.models.timm_interface import TimmInterface


class ImageClassifier(TimmInterface):
    """A classifier of images (B, C, H, W), with timm's interface.

    Subclasses define `forward_features`, `truncate`, `feature_info` and `group_matcher`, and set
    `norm`, `head` and `head_drop`. p is the number of class tokens (0, 1).

    Attributes:
        config: the complete architecture, a frozen dataclass.
        variant: the model name it was created with, or None.
        num_features: width of the final features; also `embed_dim` and `head_hidden_size`.
        num_prefix_tokens: p of the final tokens.
        pretrained_cfg: timm's data configuration; set by `create_model` and `load`.
        shortcuts: compute the positional attention of all layers at once, and in `forward` only
            the class token of the last block if the classifier reads no other; set by training and
            `fuse`.
    """

    pretrained_cfg: dict[str, Any]
    head_drop: nn.Module

    def __init__(self, config: Any, num_features: int) -> None:
        super().__init__()
        self.config = config
        self.variant: str | None = None
        self.num_classes: int = config.num_classes
        self.in_chans: int = config.in_chans
        self.num_features = self.embed_dim = self.head_hidden_size = num_features
        self.num_prefix_tokens = int(config.has_class_token)
        self.fused = self.shortcuts = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, num_classes)."""
        token = self.num_prefix_tokens > 0 and self.config.global_pool == "token"
        return self.forward_head(self.forward_features(x, first=token and self.shortcuts))

    def forward_features(
        self, x: Tensor, maps: list[Tensor] | None = None, first: bool = False
    ) -> Tensor:
        """(B, C, H, W) → normalised tokens (B, p + N, width), the class token first.

        Args:
            x: images.
            maps: if given, the tokens of each feature map are appended to it.
            first: return the class token alone, (B, 1, width).
        """
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, p + N, width) → logits, or the classifier's input if `pre_logits`."""
        if self.config.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
        elif self.config.global_pool == "token":
            x = x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def fuse(self) -> Self:
        """A faster copy for evaluation, with the same logits up to rounding.

        It takes `shortcuts` and merges layers (`fast.fold`). The copy cannot train; load weights
        before fusing.
        """
        fused = copy.deepcopy(self).eval().requires_grad_(False)
        fast.fold(fused)
        fused.fused = fused.shortcuts = True
        return fused

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode.

        Raises:
            UserError: for training mode of a fused model.
        """
        if mode and self.fused:
            raise UserError("a fused model cannot train; train the model it was fused from")
        return super().train(mode)

    def token_grids(self, x: Tensor) -> list[Grid]:
        """The token grids of images (B, C, H, W)."""
        return token_grids(self.config, x.shape[1:])

    def unused_parameters(self) -> set[str]:
        """Names of trainable parameters that by design do not affect the output."""
        return set()


def embedding(entries: int, width: int) -> nn.Parameter:
    """A learned class token or position embedding (1, entries, width), truncated-normal."""
    learned = nn.Parameter(torch.zeros(1, entries, width))
    nn.init.trunc_normal_(learned, std=0.02)
    return learned


def prepend_class_token(token: Tensor, patches: Tensor) -> Tensor:
    """Prepend a class token (1, 1, C) to the patches: (B, N, C) → (B, 1 + N, C)."""
    return torch.cat((token.to(patches.dtype).expand(patches.shape[0], -1, -1), patches), dim=1)


@torch.fx.wrap
def token_grids(config: Architecture, images: Sequence[int]) -> list[Grid]:
    """`config.grids` of images (C, H, W), as one node of a traced graph.

    Raises:
        UserError: if the model does not accept this image size or number of channels.
    """
    channels, *size = images
    if channels != config.in_chans:
        raise UserError(
            f"these images have {channels} channels, the model takes {config.in_chans}; convert "
            f"them, or create the model with in_chans={channels}"
        )
    return config.grids(size)


@torch.fx.wrap
def position_embedding(embedding: Tensor, native_grid: Grid, grid: Grid, prefix: int = 0) -> Tensor:
    """A position embedding (1, p + N, C) for `grid`, resampled bicubically where it differs."""
    if grid == native_grid:
        return embedding
    return resample_abs_pos_embed(
        embedding, new_size=list(grid), old_size=list(native_grid), num_prefix_tokens=prefix
    )
