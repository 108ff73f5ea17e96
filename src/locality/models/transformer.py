"""What our models share: pooling, classifier, feature maps, pruning, groups of parameters."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import group_parameters
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from locality.errors import UserError
from locality.layers import fast
from locality.layers.block import Block, make_head
from locality.layers.grid import Grid
from locality.models.base import ImageClassifier
from locality.models.config import Architecture


class Transformer(ImageClassifier):
    """A ViT, ConViT or CvT.

    Subclasses define `forward_features`, `truncate`, `feature_info` and `group_matcher`, and set
    `norm`, `head` and `head_drop`. p is the number of class tokens (0, 1).
    """

    norm: nn.Module
    head: nn.Module
    head_drop: nn.Module

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
        fused = super().fuse()
        fast.fold(fused)
        fused.shortcuts = True
        return fused

    @property
    def grad_checkpointing(self) -> bool:
        """Whether blocks are recomputed in the backward pass."""
        return any(isinstance(m, Block) and m.grad_checkpointing for m in self.modules())

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        for module in self.modules():
            if isinstance(module, Block):
                module.grad_checkpointing = enable

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
        self.config = self.config.with_overrides(**changed)
        self.num_classes = num_classes
        self.forget_classifier()
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
        changed = self.truncate(last + 1)
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

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        *,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Intermediate feature maps and the final features.

        Args:
            x: images (B, C, H, W).
            indices: which maps of `feature_info`: a list, the last n if a number, all if None.
            return_prefix_tokens: return (map, class tokens (B, p, C)) for each map; p is 0 before
                the class token joins.
            norm: apply the final norm to maps of the final width.
            stop_early: accepted; `prune_intermediate_layers` removes the layers after the last map.
            output_fmt: "NCHW", or "NLC" for tokens; both without class tokens.
            intermediates_only: return only the maps.

        Returns:
            maps, or (final features, maps).

        Raises:
            ValueError: for an unknown `output_fmt`.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt='{output_fmt}' is not one of 'NCHW', 'NLC'")
        chosen, _ = feature_take_indices(len(self.feature_info), indices)
        tokens: list[Tensor] = []
        features = self.forward_features(x, tokens)
        grids = self.config.grids(x.shape[2:])
        maps: list[Any] = []
        for index in chosen:
            grid = grids[min(index, len(grids) - 1)]
            patches = tokens[index]
            if norm and patches.shape[-1] == self.num_features:
                patches = self.norm(patches)
            prefix = patches.shape[1] - grid[0] * grid[1]
            class_tokens, patches = patches[:, :prefix], patches[:, prefix:]
            if output_fmt == "NCHW":
                patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
            maps.append((patches, class_tokens) if return_prefix_tokens else patches)
        return maps if intermediates_only else (features, maps)

    def truncate(self, maps: int) -> dict[str, Any]:
        """Keep the modules of the first `maps` feature maps.

        Returns:
            the changed fields of the configuration, with `class_token`.
        """
        raise NotImplementedError

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The class token and position embeddings; biases and norms are never decayed."""
        return {
            name for name, _ in self.named_parameters() if name.endswith(("cls_token", "pos_embed"))
        }

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups of parameters by layer, for layer-wise learning rates (timm's convention)."""
        raise NotImplementedError

    def layer_ids(self) -> dict[str, int]:
        return group_parameters(self, self.group_matcher(), reverse=True)


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
    """`config.grids` of images (B, C, H, W), as one node of a traced graph.

    Raises:
        UserError: if the model does not accept this image size or number of channels.
    """
    if len(images) != 4:
        raise UserError(
            f"the images have shape {tuple(images)}; give a batch, (B, C, H, W): one image as "
            f"image[None]"
        )
    _, channels, *size = images
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
