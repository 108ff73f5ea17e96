"""The base class of all models, with timm's interface."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import group_parameters
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from locality.errors import UserError
from locality.layers.conv_init import trunc_normal_init_
from locality.layers.grid import Grid
from locality.models.config import Architecture, to_2tuple

RunBlock = Callable[..., Tensor]


class ImageClassifier(nn.Module):
    """A classifier of images (B, C, H, W), with timm's interface.

    Subclasses define `_tokens`, `_feature_blocks`, `_truncate`, `feature_info` and
    `group_matcher`, and set `norm`, `head` and `head_drop`. p is the number of class tokens (0, 1).

    Attributes:
        config: the complete architecture, a frozen dataclass.
        variant: the model name it was created with, or None.
        num_features: width of the final features; also `embed_dim` and `head_hidden_size`.
        num_prefix_tokens: p of the final tokens.
        pretrained_cfg: timm's data configuration; set by `create_model` and `load`.
    """

    pretrained_cfg: dict[str, Any]
    norm: nn.Module
    head: nn.Module
    head_drop: nn.Module

    def __init__(self, config: Any, num_features: int) -> None:
        super().__init__()
        self.config = config
        self.variant: str | None = None
        self.num_classes: int = config.num_classes
        self.in_chans: int = config.in_chans
        self.num_features = self.embed_dim = self.head_hidden_size = num_features
        self.num_prefix_tokens = int(config.has_class_token)
        self.grad_checkpointing = False
        self.fused = False

    @property
    def img_size(self) -> Grid:
        """The native image size (height, width)."""
        return to_2tuple(self.config.img_size)

    @property
    def global_pool(self) -> str | None:
        """The pooling, which timm saves with the weights."""
        return getattr(self.config, "global_pool", None)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → normalised tokens (B, p + N, width), the class token first."""
        return self.norm(self._tokens(x, self._run))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, p + N, width) → logits, or the classifier's input if `pre_logits`."""
        if self.config.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
        elif self.config.global_pool == "token":
            x = x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, num_classes).

        Equal to `forward_head(forward_features(x))`. If the classifier reads only the class token,
        the last block computes only that token, which saves a fifteenth of the work.
        """
        reads_one = self.config.global_pool == "token" and self.num_prefix_tokens
        return self.forward_head(self.norm(self._tokens(x, self._read if reads_one else self._run)))

    def fuse(self) -> Self:
        """A faster copy for evaluation, with the same logits up to rounding.

        Folds a CvT's BatchNorm into the convolutions and QuickGELU's slope into the linear layers;
        other models have nothing to fuse. The copy cannot train; load weights before fusing.
        """
        fused = copy.deepcopy(self).eval().requires_grad_(False)
        if not self.fused:
            fused._fuse()
        fused.fused = True
        return fused

    def _fuse(self) -> None:
        """Fuse in place."""

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode.

        Raises:
            UserError: for training mode of a fused model.
        """
        if mode and self.fused:
            raise UserError("a fused model cannot train; train the model it was fused from")
        return super().train(mode)

    def get_classifier(self) -> nn.Module:
        """The layer that maps features to logits."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a newly initialised one.

        Args:
            num_classes: number of classes; with 0, the model returns features.
            global_pool: pooling: "token", "avg", or "" for all tokens; unchanged if None.

        Raises:
            UserError: for "token" in a model without a class token.
        """
        if global_pool == "token" != self.config.global_pool and not self.num_prefix_tokens:
            raise UserError(
                "global_pool='token' needs a class token and this model has none; use "
                "global_pool='avg'"
            )
        changed: dict[str, Any] = {"num_classes": num_classes}
        if global_pool is not None:
            # Other pooling keeps the class token.
            changed |= {"global_pool": global_pool, "class_token": self.config.has_class_token}
        self.config = dataclasses.replace(self.config, **changed)
        self.num_classes = num_classes
        head = make_head(self.num_features, num_classes).to(next(self.parameters()))
        self.head = head.train(self.training)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the layers after the last chosen feature map, in place.

        Args:
            indices: as in `forward_intermediates`.
            prune_norm: also remove the final norm. Always removed if widths differ.
            prune_head: also remove the classifier. Always removed with its class token, or if
                widths differ.

        Returns:
            indices of the chosen maps, from 0.
        """
        chosen, last = feature_take_indices(len(self.feature_info), indices)
        had_token, width = self.num_prefix_tokens, self.num_features
        changed = self._truncate(last + 1)
        if had_token and not changed["class_token"]:
            changed["global_pool"] = ""
        self.config = dataclasses.replace(self.config, **changed)
        self.num_prefix_tokens = int(self.config.has_class_token)
        self.num_features = self.feature_info[-1]["num_chs"]
        self.embed_dim = self.head_hidden_size = self.num_features
        if prune_norm or self.num_features != width:
            self.norm = nn.Identity()
        if prune_head or had_token != self.num_prefix_tokens or self.num_features != width:
            self.reset_classifier(0, "")
        return chosen

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The class token and position embeddings; biases and norms are never decayed."""
        return {
            name for name, _ in self.named_parameters() if name.endswith(("cls_token", "pos_embed"))
        }

    def layer_ids(self) -> dict[str, int]:
        """Parameter name → layer index in timm's convention, starting with the stem."""
        matcher = self.group_matcher(coarse=False)  # type: ignore[operator]
        return group_parameters(self, matcher, reverse=True)

    def unused_parameters(self) -> set[str]:
        """Names of trainable parameters that by design do not affect the output."""
        return set()

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        stop_early: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Intermediate feature maps and the final features.

        Args:
            x: images (B, C, H, W).
            indices: which maps of `feature_info`: a list, the last n if a number, all if None.
            norm: apply the final norm to maps of the final width.
            output_fmt: "NCHW", or "NLC" for tokens; both without class tokens.
            intermediates_only: return only the maps.
            stop_early: skip the layers after the last chosen map (with `intermediates_only`).

        Returns:
            maps, or (final features, maps).

        Raises:
            ValueError: for an unknown `output_fmt`.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt='{output_fmt}' is not one of 'NCHW', 'NLC'")
        chosen, last = feature_take_indices(len(self.feature_info), indices)
        shown = {self._feature_blocks()[index] for index in chosen}
        maps: list[Tensor] = []

        def run(block: nn.Module, x: Tensor, grid: Grid, **given: Any) -> Tensor:
            x = self._run(block, x, grid, **given)
            if block in shown:
                tokens = self.norm(x) if norm and x.shape[-1] == self.num_features else x
                patches = tokens[:, tokens.shape[1] - grid[0] * grid[1] :]
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
                maps.append(patches)
            return x

        tokens = self._tokens(x, run, last + 1 if stop_early and intermediates_only else None)
        return maps if intermediates_only else (self.norm(tokens), maps)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """One entry per feature map: its width (`num_chs`), `reduction` in pixels, and `module`."""
        raise NotImplementedError

    def _tokens(self, x: Tensor, run: RunBlock, maps: int | None = None) -> Tensor:
        """Everything before the final norm: (B, C, H, W) → tokens (B, p + N, width).

        Args:
            x: images.
            run: called as `run(block, x, grid, **given)` for each block in turn.
            maps: number of feature maps to compute; all if None.
        """
        raise NotImplementedError

    def _feature_blocks(self) -> list[nn.Module]:
        """The blocks whose outputs are the feature maps."""
        raise NotImplementedError

    def _truncate(self, maps: int) -> dict[str, Any]:
        """Keep the modules of the first `maps` feature maps.

        Returns:
            the changed fields of the configuration, with `class_token`.
        """
        raise NotImplementedError

    def _run(self, block: nn.Module, x: Tensor, grid: Grid, **given: Any) -> Tensor:
        """One block, recomputed in the backward pass if gradient checkpointing is on."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, grid, use_reentrant=False, **given)
        return block(x, grid, **given)

    def _read(self, block: nn.Module, x: Tensor, grid: Grid, **given: Any) -> Tensor:
        """Like `_run`, but the last block computes only the class token."""
        last = block is self._feature_blocks()[-1]
        return self._run(block, x, grid, class_token_only=last, **given)


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


def make_head(width: int, num_classes: int) -> nn.Module:
    """A linear classifier with truncated-normal weights and zero bias; identity for 0 classes."""
    if num_classes == 0:
        return nn.Identity()
    return trunc_normal_init_(nn.Linear(width, num_classes))
