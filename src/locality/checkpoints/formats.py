"""The formats of timm, transformers and the authors: tensor names in both directions, config.json.

ConViT and DeiT use timm's tensor names. ConViT's gated layers split the projection in two,
`attn.qk` and `attn.v`; here it is one, [q; k; v]. Their `attn.pos_proj` is a linear layer from
(δ along the width, δ along the height, ‖δ‖²) to a score per head; `attn.v_pos` here is its weight
with the columns in the paper's order (‖δ‖², δ₁, δ₂). Microsoft's CvT and transformers' have the
same tensors under other names. Both have one setting per stage where this library may have one per
block, and some of their settings support only one value.

timm's `save_for_hf` writes the name and arguments of a model. transformers' `save_pretrained`
writes a format for each kind of model, of which CvT's is read, and preprocessing in a second file.
"""

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from locality import checks
from locality.checkpoints.native import (
    Checkpoint,
    State,
    check_keys,
    meta_state_dict,
    several_entries,
)
from locality.checkpoints.registry import FORMAT
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors, some
from locality.files import read_shaped
from locality.models.config import CvTConfig, TimmConfig, ViTConfig
from locality.models.variants import PREFIX, VARIANTS, variant
from locality.settings import from_dict

_log = logging.getLogger("locality")


@dataclass(frozen=True)
class KeyMap:
    """The tensor names of one format, converted in both directions.

    Attributes:
        name: the format name for `convert`.
        title: owner of the format, for messages.
        families: configuration classes of the models that the format holds.
        renames: replacements that turn a native name into this format's, in order, as (pattern,
            by).
        gated: whether gated layers are as timm's, see above.
        activation: the activation that a CvT's code computes.
        requires: configuration → what the format's code requires, and whether it is so.
    """

    name: str
    title: str
    families: tuple[Any, ...]
    renames: tuple[tuple[str, str], ...] = ()
    gated: bool = False
    activation: str | None = None
    requires: Callable[[Any], dict[str, bool]] = lambda config: {}

    def rename(self, name: str) -> str:
        """Native tensor name → this format's."""
        for pattern, by in self.renames:
            name = re.sub(pattern, by, name)
        return name

    def to_native(self, state: State, config: Any) -> dict[str, Tensor]:
        """Convert weights of this format to native ones.

        Raises:
            UserError: if a name is missing or unknown, or a shape differs from `config`'s.
        """
        blank = meta_state_dict(config)
        expected = self._written(blank, config)
        for name in self._without_effect(config).keys() - state.keys():
            del expected[name]
        check_keys(state, expected, self.title)
        native = {}
        for name in blank:
            parts = [state[part] for part in self._parts(name, config)]
            tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
            native[name] = tensor.flip(1) if self.gated and name.endswith(".v_pos") else tensor
        return native

    def from_native(self, state: State, config: Any) -> dict[str, Tensor]:
        """Convert native weights to this format; tensors without effect are zeros.

        Raises:
            UserError: if the format cannot hold the model.
        """
        if not isinstance(config, self.families):
            families = " or ".join(family.title for family in self.families)
            raise UserError(
                f"the format '{self.name}' holds {families} of this library; this is {config.title}"
            )
        for requirement, met in self.requires(config).items():
            if not met:
                raise UserError(
                    f"{self.title} code requires {requirement}, which this model does not have; "
                    f"use the format 'locality', or, if no weight depends on it, --set it"
                )
        return self._written(state, config)

    def _written(self, state: State, config: Any) -> dict[str, Tensor]:
        theirs: dict[str, Tensor] = {}
        for name, tensor in state.items():
            parts = self._parts(name, config)
            if self.gated and name.endswith(".v_pos"):
                theirs[parts[0]] = tensor.flip(1)
            elif len(parts) > 1:  # copies, since safetensors refuses views of shared memory
                rows = tensor.tensor_split([len(tensor) * 2 // 3])
                theirs |= zip(parts, (row.clone() for row in rows), strict=True)
            else:
                theirs[parts[0]] = tensor
        zeros = next(iter(state.values())).new_zeros
        return theirs | {name: zeros(size) for name, size in self._without_effect(config).items()}

    def _parts(self, name: str, config: Any) -> list[str]:
        """The names of a native tensor in this format: two for a gated layer's projection."""
        match = re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.\w+", name) if self.gated else None
        if match and int(match[1]) < config.gpsa_layers:
            return [name.replace("qkv", "qk"), name.replace("qkv", "v")]
        return [self.rename(name)]

    def _without_effect(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of this format's tensors that have no effect, and no native counterpart."""
        if not self.gated:
            return {}
        # The softmax cancels the bias of `pos_proj`, which is the same for every key. If every
        # block is gated, no class token joins and the classifier reads the first patch.
        biases = [f"blocks.{index}.attn.pos_proj.bias" for index in range(config.gpsa_layers)]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(biases, (config.num_heads,))
        if not config.has_class_token:
            shapes["cls_token"] = (1, 1, config.embed_dim)
        return shapes


def _timms(config: ViTConfig) -> dict[str, bool]:
    ((rows, columns),) = config.native_grids
    gated, mixed = config.gpsa_layers > 0, config.gpsa_layers < config.depth
    averages = config.global_pool == "avg" and mixed and not config.embed_class_token
    return {
        "positional_attention=gpsa": not gated or config.positional_attention == "gpsa",
        "a square grid of patches": not gated or rows == columns,
        "use_pos_embed=true": config.use_pos_embed or not config.embed_class_token,
        "class_token=true unless all layers are gated": config.has_class_token == mixed,
        "global_pool=token": config.global_pool == "token" or averages,
    }


def _cvts(config: CvTConfig, activation: str, by_number: bool = False) -> dict[str, bool]:
    """What Microsoft's and transformers' code requires.

    Args:
        config: the configuration.
        activation: the activation that the code computes.
        by_number: transformers indexes a stage's blocks by the number of the stage, so it needs
            more of them in later stages, and a class token.
    """
    stages, token = config.stages, config.has_class_token
    pool = "token" if token else "avg"
    return {
        f"activation={activation}": config.activation == activation,
        "attention_scale=width": config.attention_scale == "width",
        "projection=conv": all(stage.projection == "conv" for stage in stages),
        "use_pos_embed=false": not any(stage.use_pos_embed for stage in stages),
        "embed_pool=false": not any(stage.embed_pool for stage in stages),
        f"global_pool={pool}": config.global_pool == pool,
        "one kv_stride and one mlp_ratio in each stage, and depth above 0": all(
            len({*stage.kv_stride}) == len({*stage.mlp_ratio}) == 1 for stage in stages
        ),
        "class_token=true and a depth of 1, 2, 3 or more": not by_number
        or (token and all(stage.depth >= number for number, stage in enumerate(stages, 1))),
    }


TIMM = KeyMap(
    "timm",
    "timm's",
    (ViTConfig,),
    (
        (r"^patch_embed\.", "patch_embed.proj."),
        (r"\.v_pos$", ".pos_proj.weight"),
        (r"\.gating$", ".gating_param"),
    ),
    gated=True,
    requires=_timms,
)
MICROSOFT = KeyMap(
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
    activation="quick_gelu",
    requires=partial(_cvts, activation="quick_gelu"),
)
_CONVOLVED = r"attention.attention.convolution_projection_\1.convolution_projection."
TRANSFORMERS = KeyMap(
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
    requires=partial(_cvts, activation="gelu", by_number=True),
)
NATIVE = KeyMap("locality", "locality's", (ViTConfig, CvTConfig))
_OTHER_TIMM = KeyMap("timm", "timm's", (TimmConfig,), ((r"^model\.", ""),))

KEY_MAPS = {row.name: row for row in (NATIVE, TIMM, MICROSOFT, TRANSFORMERS)}
"""All key maps by name."""


def recognise(state: State, config: Any) -> tuple[KeyMap, dict[str, Tensor]]:
    """The format of a model's weights, and its tensors without a wrapper's prefix.

    Prefixes are those of wrappers (`module.`, `_orig_mod.`, `model.`, any attribute of a Lightning
    module).

    Args:
        state: the state dict.
        config: the model's configuration.

    Raises:
        UserError: if they are of another model, of no known format, or of several models.
    """
    stems = {
        key_map.rename(f"{family.stem}.weight"): (key_map, family)
        for key_map in KEY_MAPS.values()
        for family in key_map.families
    }
    if isinstance(config, TimmConfig):
        stems = {_OTHER_TIMM.rename(next(iter(meta_state_dict(config)))): (_OTHER_TIMM, TimmConfig)}
    owners = {
        name.removesuffix(stem): owner
        for name in state
        for stem, owner in stems.items()
        if f".{name}".endswith(f".{stem}")
    }
    # The names of one model may end like those of another: the shortest prefix is the model's.
    prefixes = [one for one in owners if not any(one.startswith(o) for o in owners if o != one)]
    if len(prefixes) > 1:
        raise several_entries("these weights", sorted(prefix.rstrip(".") for prefix in prefixes))
    if not prefixes:
        raise UserError(
            f"these weights are of no known format, whose first layers are {', '.join(stems)}; "
            f"their first tensors are {some(state, quote='')}; if they are of a timm model, give "
            f"its name, --model timm/NAME in training and --variant timm/NAME elsewhere"
        )
    (prefix,) = prefixes
    key_map, family = owners[prefix]
    if not isinstance(config, family):
        raise UserError(f"these weights are of {family.title}, the model is {config.title}")
    own = {n.removeprefix(prefix): tensor for n, tensor in state.items() if n.startswith(prefix)}
    if others := [name for name in state if not name.startswith(prefix)]:
        _log.warning(f"tensors outside {prefix[:-1]} are ignored: {some(others, quote='')}")
    return key_map, own


def fit_interface(state: State, key_map: KeyMap, config: Any, fixed: Collection[str] = ()) -> Any:
    """`config`, with the classes, channels and square image size of the weights.

    Args:
        state, key_map: the weights and their format.
        config: the model's configuration.
        fixed: fields that are kept.
    """
    heads = [key_map.rename(f"{name}.weight") for name in config.classifiers]
    fields: dict[str, Any] = {}
    if heads:
        fields["num_classes"] = max(len(state.get(head, ())) for head in heads)
    if not isinstance(config, TimmConfig):
        fields["in_chans"] = state[key_map.rename(f"{config.stem}.weight")].shape[1]
    if isinstance(config, ViTConfig) and "pos_embed" in state:
        # Keep the image size if it has as many patches.
        patches = state["pos_embed"].shape[1] - config.embed_class_token
        side = math.isqrt(patches)
        if side**2 == patches != math.prod(config.native_grids[0]):
            fields["img_size"] = side * config.patch_size
    return replace(config, **{name: value for name, value in fields.items() if name not in fixed})


# -- config.json -----------------------------------------------------------------------------------

PREPROCESSOR = "preprocessor_config.json"
PREPROCESSING_KEYS = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
"""Fields of `Preprocessing` with the same names in timm's configurations."""

REGISTERED = "locality_"
"""Prefix of the models that `locality.timm` registers in timm."""

TIMM_NAMES = {f"convit_{size}": f"convit_{size}" for size in ("tiny", "small", "base")} | {
    f"deit_{size}": f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")
}
"""Model name → timm's name of the same architecture."""

_OURS = {theirs: ours for ours, theirs in TIMM_NAMES.items()} | {
    "deit_base_patch16_384": "deit_base"
}
# timm's arguments that are fields of `ViTConfig`.
_ARGUMENTS = {
    *("num_classes", "in_chans", "img_size", "patch_size", "embed_dim", "depth", "num_heads"),
    *("mlp_ratio", "qkv_bias", "global_pool", "drop_rate", "proj_drop_rate", "drop_path_rate"),
}
_CONVIT_ARGUMENTS = {"use_pos_embed", "locality_strength", "local_up_to_layer"}
CVT_STAGES = {
    **{name: name for name in ("embed_dim", "num_heads", "depth", "mlp_ratio", "qkv_bias")},
    "patch_sizes": "embed_kernel",
    "patch_stride": "embed_stride",
    "patch_padding": "embed_padding",
    "kernel_qkv": "projection_kernel",
    "stride_kv": "kv_stride",
    "padding_kv": "kv_padding",
    "drop_path_rate": "drop_path_rate",
}
"""transformers' CvT settings, lists with one value per stage → fields of `CvTConfig`."""

_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's numbers
# From this size on, ConvNeXT's image processor, which is CvT's, resizes without cropping.
_CONVNEXT_SQUASHES = 384


def read_config(folder: Path, content: Mapping[str, Any]) -> Checkpoint | None:
    """Read the config.json of this library, timm or transformers.

    Args:
        folder: the folder with the weights.
        content: content of its config.json.

    Returns:
        a checkpoint without weights; None if the file was written by none of them.

    Raises:
        UserError: if the model is not supported, or the file is invalid.
    """
    if content.get("format") == FORMAT:
        return Checkpoint.from_description(content)
    if isinstance(content.get("architecture"), str):
        return _timm(content)
    return _transformers(folder, content) if "model_type" in content else None


def _timm(content: Mapping[str, Any]) -> Checkpoint:
    name = content["architecture"].partition(".")[0]
    data = content.get("pretrained_cfg") or {}
    args = {"num_classes": content.get("num_classes"), **(content.get("model_args") or {})}
    args = {name: value for name, value in args.items() if value is not None}
    if data.get("input_size"):
        channels, *sides = data["input_size"]
        args = {"img_size": tuple(sides), "in_chans": channels} | args
    if name.startswith(REGISTERED):
        config = variant(name.removeprefix(REGISTERED)).config.with_overrides(**args)
    elif (config := _ours(name, args)) is None:
        if not timm.is_model(name):
            raise UserError(f"timm has no architecture '{name}'")
        config = TimmConfig.named(PREFIX + name).with_overrides(**args)
    classes = class_names(content.get("label_names") or data.get("label_names"), config.num_classes)
    title = config.name if isinstance(config, TimmConfig) else None
    return Checkpoint(config, {}, title, timm_preprocessing(data), classes)


def timm_preprocessing(data: Mapping[str, Any]) -> Preprocessing | None:
    """The preprocessing in timm's data configuration of a model, if any, without an image size."""
    fields = {key: data[key] for key in PREPROCESSING_KEYS if data.get(key) is not None}
    return from_dict(Preprocessing, fields) if fields else None


def _ours(name: str, args: Mapping[str, Any]) -> Any:
    """The `ViTConfig` of a timm model with these arguments; None if it has no equivalent."""
    if name not in _OURS:
        return None
    base, fields = VARIANTS[_OURS[name]].config, dict(args)
    if base.gpsa_layers:
        depth, heads = fields.get("depth", base.depth), fields.get("num_heads", base.num_heads)
        per_head = fields.get("embed_dim", base.embed_dim // base.num_heads)  # timm's embed_dim
        gated = min(fields.pop("local_up_to_layer", base.gpsa_layers), depth)
        fields |= {"embed_dim": per_head * heads, "gpsa_layers": gated}
        known = args.keys() <= _ARGUMENTS | _CONVIT_ARGUMENTS
        return base.with_overrides(**fields, class_token=gated < depth) if known else None
    known = args.keys() <= _ARGUMENTS and fields.get("global_pool", "token") == "token"
    return base.with_overrides(**fields) if known else None  # only timm's code computes it


def _transformers(folder: Path, content: Mapping[str, Any]) -> Checkpoint:
    if content["model_type"] != "cvt":
        raise UserError(
            f"it describes a transformers model of type '{content['model_type']}'; only 'cvt' is "
            f"supported"
        )
    kernels = content["kernel_qkv"]
    only = {
        "qkv_projection_method": ["dw_bn"] * len(kernels),  # the only one transformers can run
        "stride_q": [1] * len(kernels),
        "padding_q": [kernel // 2 for kernel in kernels],
        "cls_token": [False] * (len(kernels) - 1) + [True],
    }
    for name, value in only.items():
        if content[name] != value:
            raise UserError(f"{name} is {content[name]!r}; only {value} is supported")
    for name in ("drop_rate", "attention_drop_rate"):
        if any(content.get(name) or ()):
            _log.warning(f"{name}={content[name]} of the weights' configuration is not used here")
    labels = content.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # transformers' default
    prepared = _preprocessor(folder / PREPROCESSOR)
    config = CvTConfig(
        **{ours: content[theirs] for theirs, ours in CVT_STAGES.items()},
        num_classes=len(labels),
        in_chans=content["num_channels"],
        img_size=224 if prepared is None else prepared.size,
        activation="gelu",
    )
    classes = class_names(labels, len(labels))
    return Checkpoint(config, {}, None, prepared, classes, content.get("problem_type"))


def _preprocessor(path: Path) -> Preprocessing | None:
    """The preprocessing of ConvNeXT's image processor, which is CvT's; None without a file.

    Raises:
        UserError: if it is another, or prepares images in another way.
    """
    content = read_shaped(path, {"image_mean": [float], "image_std": [float], "resample": int})
    if content is None:
        return None
    with prefix_errors(path):
        kind = content.get("image_processor_type") or content.get("feature_extractor_type")
        steps = {"do_resize": True, "do_rescale": True, "do_center_crop": False}
        scales = math.isclose(content.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6)
        usual = all(bool(content.get(step, value)) is value for step, value in steps.items())
        if not str(kind or "ConvNext").startswith("ConvNext") or not usual or not scales:
            raise UserError(
                f"{kind} is not read: only ConvNextImageProcessor, which is CvT's, that resizes "
                f"images and scales them to 0 … 1"
            )
        size = content.get("size")
        side = size.get("shortest_edge") if isinstance(size, dict) else size
        crops = checks.typed("img_size", side, checks.Pixels) < _CONVNEXT_SQUASHES
        fields = {
            "img_size": side,
            "mean": content["image_mean"],
            "std": content["image_std"],
            "interpolation": dict(enumerate(_RESAMPLE)).get(content["resample"], "unknown"),
            "crop_pct": (content.get("crop_pct") or 224 / 256) if crops else 1.0,
            "crop_mode": "center" if crops else "squash",
        }
        if not content.get("do_normalize", True):
            fields |= {"mean": (0.0,) * len(fields["mean"]), "std": (1.0,) * len(fields["std"])}
        return from_dict(Preprocessing, fields)


def class_names(labels: Any, count: int) -> tuple[str, ...] | None:
    """The names of `count` classes, numbers where a name is missing; None if all are missing."""
    if not labels:
        return None
    if isinstance(labels, list):
        return tuple(map(str, labels))
    named = {int(index): str(name) for index, name in labels.items()}
    if min(named) < 0 or max(named) >= count:
        raise UserError(f"it names class {max(named)}, but there are {count} classes from 0")
    names = tuple(named.get(index, str(index)) for index in range(count))
    return None if names == tuple(f"LABEL_{index}" for index in range(count)) else names
