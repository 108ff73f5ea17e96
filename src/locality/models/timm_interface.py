"""timm's further methods: feature maps, pruning, classifiers, groups of parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from timm.models import group_parameters
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from locality.errors import UserError
from locality.layers.block import Block, make_head
from locality.layers.grid import Grid
from locality.models.config import to_2tuple


class TimmInterface(nn.Module):
    """Methods of `ImageClassifier` with which timm's tools work."""

    config: Any
    norm: nn.Module
    head: nn.Module
    num_features: int
    num_prefix_tokens: int
    forward_features: Any

    @property
    def img_size(self) -> Grid:
        """The native image size (height, width)."""
        return to_2tuple(self.config.img_size)

    @property
    def global_pool(self) -> str | None:
        """The pooling, which timm saves with the weights."""
        return getattr(self.config, "global_pool", None)

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

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """One entry per feature map: its width (`num_chs`), `reduction` in pixels, and `module`."""
        raise NotImplementedError

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
        """Parameter name → layer index in timm's convention, starting with the stem."""
        matcher = self.group_matcher(coarse=False)
        return group_parameters(self, matcher, reverse=True)
