"""What every model here offers, under the names that timm gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from locality.layers import Grid


class ImageClassifier(nn.Module):
    """A classifier of images (B, C, H, W), with timm's surface around its `forward_features`.

    Subclasses define `forward_features`, `_stem_and_blocks` for feature maps, `no_weight_decay`
    and `group_matcher`, and set `norm`, `head` and `head_drop`.

    Attributes:
        config: the complete architecture, a frozen dataclass.
        variant: the name it was created under, or None.
        num_features: width of the final features; `embed_dim` and `head_hidden_size` are the same.
    """

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
        self.num_prefix_tokens = 1
        self.grad_checkpointing = False

    @property
    def img_size(self) -> Grid:
        """The image size (height, width) that the model was made for."""
        size = self.config.img_size
        return (size, size) if isinstance(size, int) else (size[0], size[1])

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → normalised tokens (B, 1 + N, width), the class token first."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, 1 + N, width) → logits, or the class token's features if `pre_logits`."""
        x = self.head_drop(x[:, 0])
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, num_classes).

        The same as `forward_head(forward_features(x))`. The classifier reads the class token alone,
        so the last block computes that token alone: a fifteenth of the work saved, exactly.
        """
        return self.forward_head(self.norm(self._stem_and_blocks(x, class_token_only=True)))

    def get_classifier(self) -> nn.Module:
        """The layer from features to logits."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a fresh one; 0 classes leaves the features.

        Raises:
            ValueError: if `global_pool` asks for anything but the class token.
        """
        if global_pool not in (None, "token"):
            raise ValueError(
                f"global_pool='{global_pool}' is not available: these models read the class token "
                f"(global_pool='token')"
            )
        self.num_classes = num_classes
        self.head = make_head(self.num_features, num_classes).to(self._any_parameter())

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay leaves alone, beside biases and norms."""
        raise NotImplementedError

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
        """Feature maps of chosen depths, and the final features.

        Args:
            x: images (B, C, H, W).
            indices: which maps (see `feature_info` for what there is): a list, the last n if a
                number, all if None.
            norm: apply the final norm to maps of the final width.
            output_fmt: "NCHW", or "NLC" for tokens; class tokens are left out of both.
            intermediates_only: return the maps alone.
            stop_early: do not compute what lies after the last chosen map (with
                `intermediates_only`).

        Returns:
            maps, or (final features, maps).

        Raises:
            ValueError: for an unknown format.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt='{output_fmt}' is not one of 'NCHW', 'NLC'")
        chosen, last = feature_take_indices(len(self.feature_info), indices)
        maps: list[Tensor] = []

        def keep(index: int, tokens: Tensor, grid: Grid) -> None:
            if index not in chosen:
                return
            if norm and tokens.shape[-1] == self.num_features:
                tokens = self.norm(tokens)
            patches = tokens[:, tokens.shape[1] - grid[0] * grid[1] :]
            if output_fmt == "NCHW":
                patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
            maps.append(patches)

        depth = last + 1 if stop_early and intermediates_only else None
        tokens = self._stem_and_blocks(x, keep, depth)
        return maps if intermediates_only else (self.norm(tokens), maps)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """One entry per feature map: its width (`num_chs`), `reduction` in pixels, and `module`."""
        raise NotImplementedError

    def _stem_and_blocks(
        self,
        x: Tensor,
        keep: Callable[[int, Tensor, Grid], None] | None = None,
        depth: int | None = None,
        class_token_only: bool = False,
    ) -> Tensor:
        """Everything before the final norm: (B, C, H, W) → tokens (B, 1 + N, width).

        Args:
            x: images.
            keep: called as `keep(index, tokens, grid)` for each feature map.
            depth: how many feature maps to compute; all if None.
            class_token_only: let the last block compute the class token alone where it can; the
                result may then be (B, 1, width).
        """
        raise NotImplementedError

    def _run(self, block: nn.Module, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:
        """One block, recomputed in the backward pass if gradient checkpointing is on."""
        if self.grad_checkpointing and torch.is_grad_enabled() and not torch.jit.is_scripting():
            return checkpoint(block, x, grid, queries, use_reentrant=False)
        return block(x, grid, queries)

    def _any_parameter(self) -> Tensor:
        return next(self.parameters())


def make_head(width: int, num_classes: int) -> nn.Module:
    """A linear classifier with truncated-normal weights and zero bias; identity for 0 classes.

    Raises:
        ValueError: for a negative number of classes.
    """
    if num_classes < 0:
        raise ValueError(f"num_classes has to be 0 (features only) or more, not {num_classes}")
    if num_classes == 0:
        return nn.Identity()
    head = nn.Linear(width, num_classes)
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head
