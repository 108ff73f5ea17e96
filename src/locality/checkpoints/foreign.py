"""Key maps of other code: the authors' ConViT and DeiT, timm, Microsoft's CvT and transformers.

ConViT and DeiT use timm's tensor names. ConViT's gated layers split the projection in two,
`attn.qk` and `attn.v`; here it is one, [q; k; v]. Their `attn.pos_proj` is a linear layer from
(δ along the width, δ along the height, ‖δ‖²) to a score per head; `attn.v_pos` here is its weight
with the columns in the paper's order (‖δ‖², δ₁, δ₂).

Microsoft's CvT and transformers' have the same tensors under other names. Both have one setting per
stage where this library may have one per block, and some of their settings support only one value.
Weights without convolutions in their projections are refused: no public ones are known.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from locality.checkpoints.key_map import (
    NATIVE,
    KeyMap,
    State,
    check_keys,
    count_blocks,
    infer_img_size,
    meta_state_dict,
)
from locality.errors import UserError, some
from locality.layers.grid import mlp_ratio_of
from locality.models.config import CvTConfig, StageConfig, ViTConfig, token_grid

# Head width assumed without gates, which would tell the number of heads: that of all published
# DeiTs and CvTs, and of the ConViTs.
_HEAD_DIM, _CONVIT_HEAD_DIM = 64, 48

_RENAMES = (
    (r"^patch_embed\.", "patch_embed.proj."),
    (r"\.v_pos$", ".pos_proj.weight"),
    (r"\.gating$", ".gating_param"),
)


def _heads(width: int, head_dim: int, settings: Mapping[str, Any]) -> int:
    """The number of heads of a layer of `width`; 1 if `settings` overrides it."""
    if "num_heads" in settings:
        return 1
    heads, rest = divmod(width, head_dim)
    if rest:
        raise UserError(
            f"cannot infer the number of heads from a width of {width}; set num_heads, or give the "
            f"model's name"
        )
    return heads


class _ViT(KeyMap):
    """Base of both ViT key maps: gated blocks, if any, then plain ones."""

    families = (ViTConfig,)
    gated: ClassVar[bool]
    """Whether some block has gates."""

    def matches(self, state: State) -> bool:
        gated = any(name.endswith(".attn.gating_param") for name in state)
        return super().matches(state) and gated == self.gated

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

    def infer(self, state: State, settings: Mapping[str, Any]) -> ViTConfig:
        """Assumes square images, and without gates heads of width 64 (48 in a ConViT), unless
        set."""
        depth = count_blocks(state, "blocks.")
        gated = [index for index in range(depth) if f"blocks.{index}.attn.gating_param" in state]
        if gated != list(range(len(gated))):
            raise UserError(
                f"the gated layers must be the first of the {depth} blocks; these weights have "
                f"them at {gated}"
            )
        width, _, patch_size, _ = state["patch_embed.proj.weight"].shape
        hidden = len(state["blocks.0.mlp.fc1.weight"])
        size, class_entry = infer_img_size(state, patch_size, not gated, settings.get("img_size"))
        if gated:
            heads = len(state["blocks.0.attn.gating_param"])
        else:
            convit = not class_entry and width % _CONVIT_HEAD_DIM == 0
            heads = _heads(width, _CONVIT_HEAD_DIM if convit else _HEAD_DIM, settings)
        return ViTConfig(
            embed_dim=width,
            num_heads=heads,
            depth=depth,
            img_size=size,
            patch_size=patch_size,
            mlp_ratio=mlp_ratio_of(width, hidden),
            qkv_bias=f"blocks.0.attn.{'qk' if gated else 'qkv'}.bias" in state,
            gpsa_layers=len(gated),
            use_pos_embed="pos_embed" in state,
            embed_class_token=class_entry,
            class_token=False if len(gated) == depth else None,
        )

    def unspecified(self, config: ViTConfig) -> dict[str, Any]:
        return {"num_heads": config.num_heads, "img_size": config.img_size}


def _parts(name: str, config: ViTConfig) -> list[str]:
    """The two names that a gated layer's projection is split into; none for other tensors."""
    found = re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.\w+", name)
    gated = found and int(found[1]) < config.gpsa_layers
    return [name.replace("qkv", part) for part in ("qk", "v")] if gated else []


class _ConViT(_ViT):
    gated = True

    def unspecified(self, config: ViTConfig) -> dict[str, Any]:
        unspecified = {} if config.use_pos_embed else {"img_size": config.img_size}
        if not config.gpsa_layers:
            unspecified = super().unspecified(config)
        return unspecified | {"global_pool": config.global_pool}

    def to_native(self, state: State, config: ViTConfig) -> dict[str, Tensor]:
        self.require(config)
        return super().to_native(state, config)

    def accepted(self, config: ViTConfig) -> dict[str, tuple[Any, ...]]:
        gated = config.gpsa_layers == config.depth
        return {
            "positional_attention": ("gpsa",) if config.gpsa_layers else ("gpsa", "psa"),
            "embed_class_token": (False,) if config.use_pos_embed else (False, True),
            "global_pool": ("token",) if gated else ("token", "avg"),
            "has_class_token": (not gated,),
        }

    def require(self, config: ViTConfig) -> None:
        super().require(config)
        rows, columns = token_grid(config.img_size, config.patch_size)
        if config.gpsa_layers and rows != columns:
            raise UserError(
                f"{self.title} code supports only square patch grids, and this model has "
                f"{rows}×{columns}; use the format 'locality'"
            )


class _DeiT(_ViT):
    gated = False

    def accepted(self, config: ViTConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "gpsa_layers": (0,),
            "use_pos_embed": (True,),
            "embed_class_token": (True,),
            "global_pool": ("token",),
        }


CONVIT = _ConViT("convit", "ConViT's authors' and timm's", _RENAMES)
DEIT = _DeiT("deit", "DeiT's authors' and timm's", _RENAMES)


@dataclass(frozen=True)
class _CvT(KeyMap):
    """A CvT key map.

    Attributes:
        activations: those that the code supports.
    """

    activations: tuple[str, ...] = ()

    families = (CvTConfig,)

    def infer(self, state: State, settings: Mapping[str, Any]) -> CvTConfig:
        """Assumes the paper's strides, padding and heads, which weights do not determine: heads of
        width 64, stride 2 for keys and values, and embeddings that overlap by half."""
        stages = tuple(
            self._infer_stage(state, f"stages.{index}.", settings)
            for index in range(self._count(state, "stages."))
        )
        return CvTConfig(
            stages,
            global_pool="token" if any(key.endswith("cls_token") for key in state) else "avg",
        )

    def _count(self, state: State, blocks: str) -> int:
        return count_blocks(state, self.rename(blocks + "0.").removesuffix("0."))

    def _infer_stage(self, state: State, stage: str, settings: Mapping[str, Any]) -> StageConfig:
        width, _, kernel, _ = state[self.rename(f"{stage}embed.conv.weight")].shape
        depth = self._count(state, f"{stage}blocks.")
        ratios = tuple(
            mlp_ratio_of(width, len(state[self.rename(f"{stage}blocks.{index}.mlp.fc1.weight")]))
            for index in range(depth)
        )
        window = state.get(self.rename(f"{stage}blocks.0.attn.q.conv.weight"))
        if window is None:
            raise UserError(
                f"these weights have no convolutions in their projections, without which "
                f"{self.title} code is not supported"
            )
        overlapping = kernel % 2 == 1
        stride = (kernel + 1) // 2 if overlapping else kernel
        return StageConfig(
            embed_dim=width,
            num_heads=_heads(width, _HEAD_DIM, settings),
            depth=depth,
            embed_kernel=kernel,
            embed_stride=stride,
            embed_padding=stride // 2 if overlapping else 0,
            mlp_ratio=ratios[0] if len(set(ratios)) == 1 else ratios,
            projection_kernel=window.shape[-1],
            qkv_bias=self.rename(f"{stage}blocks.0.attn.q.linear.bias") in state,
        )

    def unspecified(self, config: CvTConfig) -> dict[str, Any]:
        """The settings these weights do not specify; lists if they differ between stages."""
        stages = config.stages
        unspecified: dict[str, Any] = {
            "num_heads": [stage.num_heads for stage in stages],
            "embed_stride": [stage.embed_stride for stage in stages],
            "embed_padding": [stage.embed_padding for stage in stages],
            "kv_stride": [stage.kv_strides[0] for stage in stages],
            "kv_padding": [stage.resolved_kv_padding for stage in stages],
        }
        return {name: x if len(set(x)) > 1 else x[0] for name, x in unspecified.items()}

    def accepted(self, config: CvTConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "activation": self.activations,
            "attention_scale": ("width",),
            "projection": ("conv",),
            "use_pos_embed": (False,),
            "global_pool": ("token" if config.has_class_token else "avg",),
        }

    def require(self, config: CvTConfig) -> None:
        super().require(config)
        for name in ("kv_strides", "mlp_ratios"):
            if any(len(set(getattr(stage, name))) > 1 for stage in config.stages):
                raise UserError(
                    f"{self.title} code supports one {name[:-1]} per stage, and in this model it "
                    f"differs between blocks"
                )


class _Transformers(_CvT):
    def unspecified(self, config: CvTConfig) -> dict[str, Any]:
        # Published weights use the authors' activation, weights trained by transformers its own.
        return super().unspecified(config) | {"activation": config.activation}

    def accepted(self, config: CvTConfig) -> dict[str, tuple[Any, ...]]:
        token = {"global_pool": ("token",), "has_class_token": (True,)}
        return super().accepted(config) | token

    def require(self, config: CvTConfig) -> None:
        super().require(config)
        for index, stage in enumerate(config.stages):
            if stage.depth <= index:  # transformers indexes a stage's blocks by the stage number
                raise UserError(
                    f"{self.title} code needs {index + 1} blocks or more in stage {index + 1}, and "
                    f"this model has {stage.depth}"
                )


MICROSOFT = _CvT(
    "cvt-microsoft",
    "Microsoft's CvT",
    renames=(
        (r"^stages\.", "stage"),
        (r"\bembed\.conv", "patch_embed.proj"),
        (r"\bembed\.norm", "patch_embed.norm"),
        (r"attn\.([qkv])\.conv", r"attn.conv_proj_\1.conv"),
        (r"attn\.([qkv])\.norm", r"attn.conv_proj_\1.bn"),
        (r"attn\.([qkv])\.linear", r"attn.proj_\1"),
    ),
    activations=("quick_gelu",),
)
_CONVOLVED = r"attention.attention.convolution_projection_\1.convolution_projection."
TRANSFORMERS = _Transformers(
    "cvt-transformers",
    "transformers' CvT",
    renames=(
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
    activations=("gelu",),
)


class _Timm(KeyMap):
    """Other models of timm, whose configuration is always known."""

    families = ()

    def _channels(self, stem: Tensor, like: Any) -> int:
        own = meta_state_dict(like).get(f"{like.stem}.weight")
        if own is None or own.dim() < 2 or own.dim() != stem.dim():
            return like.in_chans
        # A stem may take the pixels of a block as channels.
        return stem.shape[1] * like.in_chans // own.shape[1]

    def to_native(self, state: State, config: Any) -> dict[str, Tensor]:
        if config.num_classes:
            return super().to_native(state, config)
        # Without classes, timm removes more of some heads than the classifier.
        prefixes = tuple(self.rename(f"{name}.") for name in config.classifiers)
        state = {name: state[name] for name in state if not name.startswith(prefixes)}
        whole = meta_state_dict(dataclasses.replace(config, num_classes=1))
        rest = {name: tensor for name, tensor in whole.items() if self.rename(name) in state}
        names = meta_state_dict(config) | rest
        check_keys(state, self._foreign_state(names, config), self.title)
        return {name: self.read(name, state, config) for name in names}


TIMM = _Timm("timm", "timm's", ((r"^model\.", ""),))

KEY_MAPS = {row.name: row for row in (NATIVE, CONVIT, DEIT, MICROSOFT, TRANSFORMERS)}
"""All key maps by name."""

STEMS = {stem for row in KEY_MAPS.values() for stem in row.stems}
"""Names of the first layer's weight in all formats."""


def detect_key_map(state: State) -> KeyMap:
    """The key map whose names these tensors have.

    Raises:
        UserError: if none or several match, or for a distilled DeiT.
    """
    if "dist_token" in state:
        raise UserError(
            "these are weights of a distilled DeiT, whose distillation token no model here has; "
            "open it as timm's model, such as timm/deit_tiny_distilled_patch16_224"
        )
    found = [row for row in KEY_MAPS.values() if row.matches(state)]
    if len(found) == 1:
        return found[0]
    titles = ", ".join(row.title for row in found or KEY_MAPS.values())
    raise UserError(
        f"these weights are of {'more than one' if found else 'no known'} format ({titles}), whose "
        f"first layers are {', '.join(sorted(STEMS))}; their first tensors are "
        f"{some(state, quote='')}; if they are of a timm model, give its name, --model timm/NAME "
        f"in training and --variant timm/NAME elsewhere"
    )
