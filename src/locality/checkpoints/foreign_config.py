"""config.json of timm and transformers: architecture, preprocessing, class names.

timm's `save_for_hf` writes the name and arguments of a model. transformers' `save_pretrained`
writes a format for each kind of model, of which CvT's is read, and preprocessing in a second file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm

from locality import checks
from locality.checkpoints.native import Checkpoint
from locality.checkpoints.registry import FORMAT
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors
from locality.files import read_shaped
from locality.models.config import CvTConfig, TimmConfig
from locality.models.variants import PREFIX, VARIANTS, variant
from locality.settings import from_dict

_log = logging.getLogger("locality")

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
# timm's arguments → fields of `ViTConfig`.
_ARGUMENTS = {
    **{name: name for name in ("num_classes", "in_chans", "img_size", "patch_size", "embed_dim")},
    **{name: name for name in ("depth", "num_heads", "mlp_ratio", "qkv_bias", "global_pool")},
    **{name: name for name in ("drop_rate", "proj_drop_rate", "drop_path_rate")},
}
_CONVIT_ARGUMENTS = _ARGUMENTS | {
    "use_pos_embed": "use_pos_embed",
    "locality_strength": "locality_strength",
    "local_up_to_layer": "gpsa_layers",
}
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
    base = VARIANTS[_OURS[name]].config
    names = _CONVIT_ARGUMENTS if base.gpsa_layers else _ARGUMENTS
    fields = {names.get(name, name): value for name, value in args.items()}
    averages = fields.get("global_pool", "token") != "token"
    if args.keys() - names or (averages and not base.gpsa_layers):
        return None  # only timm's code computes it
    if base.gpsa_layers:
        depth, heads = fields.get("depth", base.depth), fields.get("num_heads", base.num_heads)
        per_head = fields.get("embed_dim", base.embed_dim // base.num_heads)  # timm's embed_dim
        fields["embed_dim"] = per_head * heads
        fields["gpsa_layers"] = min(fields.get("gpsa_layers", base.gpsa_layers), depth)
        fields["class_token"] = fields["gpsa_layers"] < depth
    return base.with_overrides(**fields)


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
        if not str(kind or "ConvNext").startswith("ConvNext") or content.get("do_center_crop"):
            raise UserError(f"{kind} is not read, only ConvNextImageProcessor, which is CvT's")
        scales = content.get("do_rescale", True) and content.get("rescale_factor", 1 / 255)
        if not content.get("do_resize", True) or not math.isclose(scales, 1 / 255, rel_tol=1e-6):
            raise UserError("it must resize images and scale them to 0 … 1")
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
