"""Tensor names of timm, transformers and the authors, converted in both directions.

ConViT and DeiT use timm's tensor names. ConViT's gated layers split the projection in two,
`attn.qk` and `attn.v`; here it is one, [q; k; v]. Their `attn.pos_proj` is a linear layer from
(δ along the width, δ along the height, ‖δ‖²) to a score per head; `attn.v_pos` here is its weight
with the columns in the paper's order (‖δ‖², δ₁, δ₂). Microsoft's CvT and transformers' have the
same tensors under other names. Both have one setting per stage where this library may have one per
block, and some of their settings support only one value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locality.checkpoints.native import meta_state_dict
from locality.checkpoints.state_dict import State, check_keys
from locality.errors import UserError
from locality.models.config import CvTConfig, ViTConfig


@dataclass(frozen=True)
class KeyMap:
    """The tensor names of one format; the base class renames the native ones.

    Attributes:
        name: the format name for `convert`.
        title: owner of the format, for messages.
        families: configuration classes of the models that the format holds.
        renames: replacements that turn a native name into this format's, in order, as (pattern,
            by).
    """

    name: str
    title: str
    families: tuple[Any, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    @property
    def stems(self) -> dict[str, Any]:
        """Name of the first layer's weight in this format → family."""
        return {self.rename(f"{family.stem}.weight"): family for family in self.families}

    def rename(self, name: str) -> str:
        """Native tensor name → this format's."""
        for pattern, by in self.renames:
            name = re.sub(pattern, by, name)
        return name

    def write(self, name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
        """Convert one native tensor to this format's tensors."""
        return {self.rename(name): tensor}

    def read(self, name: str, state: State, config: Any) -> Tensor:
        """Read one native tensor from a state dict in this format."""
        return state[self.rename(name)]

    def dropped(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of this format's tensors without effect, which have no native counterpart."""
        return {}

    def supported(self, config: Any) -> dict[str, bool]:
        """What this format's code requires of a model → whether the model is so."""
        return {}

    def to_native(self, state: State, config: Any) -> dict[str, Tensor]:
        """Convert weights of this format to native ones.

        Raises:
            UserError: if a name is missing or unknown, or a shape differs from `config`'s.
        """
        blank = meta_state_dict(config)
        expected = self._foreign_state(blank, config)
        for name in self.dropped(config).keys() - state.keys():
            del expected[name]
        check_keys(state, expected, self.title)
        return {name: self.read(name, state, config) for name in blank}

    def from_native(self, state: State, config: Any) -> dict[str, Tensor]:
        """Convert native weights to this format; tensors without effect are zeros.

        Raises:
            UserError: if the format cannot hold the model, or `state` does not fit `config`.
        """
        if not isinstance(config, self.families):
            raise UserError(f"the format '{self.name}' does not hold {config.title}")
        for requirement, met in self.supported(config).items():
            if not met:
                raise UserError(
                    f"{self.title} code requires {requirement}, which this model does not have; "
                    f"use the format 'locality', or --set it to write the weights anyway"
                )
        check_keys(state, meta_state_dict(config), "locality's")
        return self._foreign_state(state, config)

    def _foreign_state(self, state: State, config: Any) -> dict[str, Tensor]:
        theirs: dict[str, Tensor] = {}
        for name, tensor in state.items():
            theirs |= self.write(name, tensor, config)
        zeros = next(iter(state.values())).new_zeros
        return theirs | {name: zeros(shape) for name, shape in self.dropped(config).items()}


class _ViT(KeyMap):
    def dropped(self, config: ViTConfig) -> dict[str, tuple[int, ...]]:
        # The softmax cancels the bias of `pos_proj`, which is the same for every key. If every
        # block is gated, no class token joins and the classifier reads the first patch.
        shapes: dict[str, tuple[int, ...]] = {
            f"blocks.{index}.attn.pos_proj.bias": (config.num_heads,)
            for index in range(config.gpsa_layers)
        }
        if not config.has_class_token:
            shapes["cls_token"] = (1, 1, config.embed_dim)
        return shapes

    def write(self, name: str, tensor: Tensor, config: ViTConfig) -> dict[str, Tensor]:
        if parts := _parts(name, config):
            sizes = (2 * config.embed_dim, config.embed_dim)
            # Copies, since safetensors refuses views of shared memory.
            rows = (row.clone() for row in tensor.split(sizes))
            return dict(zip(parts, rows, strict=True))
        return {self.rename(name): tensor.flip(1) if name.endswith(".v_pos") else tensor}

    def read(self, name: str, state: State, config: ViTConfig) -> Tensor:
        if parts := _parts(name, config):
            return torch.cat([state[part] for part in parts])
        tensor = state[self.rename(name)]
        return tensor.flip(1) if name.endswith(".v_pos") else tensor

    def supported(self, config: ViTConfig) -> dict[str, bool]:
        ((rows, columns),) = config.native_grids
        gated, pool = config.gpsa_layers, config.global_pool
        return {
            "positional_attention=gpsa": not gated or config.positional_attention == "gpsa",
            "a square grid of patches": not gated or rows == columns,
            "use_pos_embed=true": config.use_pos_embed or not config.embed_class_token,
            "class_token=true unless all layers are gated": (
                config.has_class_token == (gated < config.depth)
            ),
            "global_pool=token": pool == "token"
            or (pool == "avg" and gated < config.depth and not config.embed_class_token),
        }


def _parts(name: str, config: ViTConfig) -> list[str]:
    """The two names that a gated layer's projection is split into; none for other tensors."""
    match = re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.\w+", name)
    gated = match and int(match[1]) < config.gpsa_layers
    return [name.replace("qkv", part) for part in ("qk", "v")] if gated else []


@dataclass(frozen=True)
class _CvT(KeyMap):
    """A CvT key map.

    Attributes:
        activation: the activation that the code computes.
        later_depth: transformers indexes a stage's blocks by the number of the stage, so it needs
            more of them in later stages, and a class token.
    """

    activation: str = "quick_gelu"
    later_depth: bool = False

    def supported(self, config: CvTConfig) -> dict[str, bool]:
        stages = list(enumerate(config.stages, 1))
        token = config.has_class_token
        requirements = {
            f"activation={self.activation}": config.activation == self.activation,
            "attention_scale=width": config.attention_scale == "width",
            "projection=conv": all(stage.projection == "conv" for _, stage in stages),
            "use_pos_embed=false": not any(stage.use_pos_embed for _, stage in stages),
            f"global_pool={'token' if token else 'avg'}": (
                config.global_pool == ("token" if token else "avg")
            ),
            "depth above 0 in every stage": all(stage.depth for _, stage in stages),
            "one kv_stride per stage": all(len({*stage.kv_stride}) < 2 for _, stage in stages),
            "one mlp_ratio per stage": all(len({*stage.mlp_ratio}) < 2 for _, stage in stages),
        }
        if self.later_depth:
            requirements["class_token=true"] = token
            enough = all(stage.depth >= number for number, stage in stages)
            requirements["depth of 1, 2, 3 or more"] = enough
        return requirements


TIMM = _ViT(
    "timm",
    "timm's",
    (ViTConfig,),
    (
        (r"^patch_embed\.", "patch_embed.proj."),
        (r"\.v_pos$", ".pos_proj.weight"),
        (r"\.gating$", ".gating_param"),
    ),
)
MICROSOFT = _CvT(
    "microsoft",
    "Microsoft's",
    (CvTConfig,),
    (
        (r"^stages\.", "stage"),
        (r"\bembed\.conv", "patch_embed.proj"),
        (r"\bembed\.norm", "patch_embed.norm"),
        (r"attn\.([qkv])\.conv", r"attn.conv_proj_\1.conv"),
        (r"attn\.([qkv])\.norm", r"attn.conv_proj_\1.bn"),
        (r"attn\.([qkv])\.linear", r"attn.proj_\1"),
    ),
)
_CONVOLVED = r"attention.attention.convolution_projection_\1.convolution_projection."
TRANSFORMERS = _CvT(
    "transformers",
    "transformers'",
    (CvTConfig,),
    (
        (r"^stages\.", "cvt.encoder.stages."),
        (r"^norm\.", "layernorm."),
        (r"^head\.", "classifier."),
        (r"\.blocks\.", ".layers."),
        (r"\bembed\.conv", "embedding.convolution_embeddings.projection"),
        (r"\bembed\.norm", "embedding.convolution_embeddings.normalization"),
        (r"norm1", "layernorm_before"),
        (r"norm2", "layernorm_after"),
        (r"attn\.proj", "attention.output.dense"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
        (r"attn\.q\.", "attn.query."),
        (r"attn\.k\.", "attn.key."),
        (r"attn\.v\.", "attn.value."),
        (r"attn\.(\w+)\.conv", _CONVOLVED + "convolution"),
        (r"attn\.(\w+)\.norm", _CONVOLVED + "normalization"),
        (r"attn\.(\w+)\.linear", r"attention.attention.projection_\1"),
    ),
    activation="gelu",
    later_depth=True,
)
NATIVE = KeyMap("locality", "locality's", (ViTConfig, CvTConfig))
OTHER_TIMM = KeyMap("timm", "timm's", renames=((r"^model\.", ""),))
"""timm's models that this library has under PREFIX, whose configuration is always known."""

KEY_MAPS = {row.name: row for row in (NATIVE, TIMM, MICROSOFT, TRANSFORMERS)}
"""All key maps by name."""
