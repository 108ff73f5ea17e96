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
from locality.checkpoints.key_maps import NATIVE, OTHER_TIMM, TIMM, TRANSFORMERS, KeyMap
from locality.checkpoints.native import Checkpoint
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors
from locality.files import read_shaped
from locality.models.config import CvTConfig, TimmConfig, to_2tuple
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
# timm's arguments that are fields of `ViTConfig`, and those converted.
_SAME = {
    *("num_classes", "in_chans", "img_size", "patch_size", "embed_dim", "depth", "num_heads"),
    *("mlp_ratio", "qkv_bias", "global_pool", "drop_rate", "proj_drop_rate", "drop_path_rate"),
}
_CONVIT = _SAME | {"use_pos_embed", "locality_strength"}
_DEIT = _SAME | {"class_token"}
_CONVERTED = {"local_up_to_layer", "no_embed_class", "fc_norm"}

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
# From this size on, ConvNeXT's image processor (also CvT's) resizes without cropping.
_CONVNEXT_SQUASHES = 384


def read_config(folder: Path, content: Mapping[str, Any]) -> tuple[Checkpoint, KeyMap] | None:
    """Read the config.json of timm or transformers.

    Args:
        folder: the folder with the weights.
        content: content of its config.json.

    Returns:
        a checkpoint without weights, and the key map of the weights; None if the file was written
        by neither.

    Raises:
        UserError: if the model is not supported, or the file is invalid.
    """
    if isinstance(content.get("architecture"), str):
        return _timm(content)
    if "model_type" in content:
        return _transformers(folder, content), TRANSFORMERS
    return None


def _timm(content: Mapping[str, Any]) -> tuple[Checkpoint, KeyMap]:
    shape = {"num_classes?": int, "model_args?": dict, "pretrained_cfg?": dict, "global_pool?": str}
    checks.shaped("it", content, shape)
    name = content["architecture"].partition(".")[0]
    data = dict(content.get("pretrained_cfg") or {})
    args = {"num_classes": content.get("num_classes"), **(content.get("model_args") or {})}
    args = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in args.items()
        if value is not None
    }
    if data.get("input_size") is not None:
        checks.shaped("input_size", data["input_size"], [int])
        if len(data["input_size"]) != 3:
            raise UserError("input_size must be three numbers: channels, height and width")
        channels, *sides = data["input_size"]
        args = {"img_size": tuple(sides), "in_chans": channels} | args
        # timm leaves input_size as it was if a model of any size is built for another.
        sides = to_2tuple(checks.typed("img_size", args["img_size"], checks.ImageSize))
        data["input_size"] = (channels, *sides)
    key_map: KeyMap = TIMM
    if name.startswith(REGISTERED):
        key_map = NATIVE
        config = variant(name.removeprefix(REGISTERED)).config.with_overrides(**args)
    elif (config := _ours(name, args, content.get("global_pool"))) is None:
        if not timm.is_model(name):
            raise UserError(f"timm has no architecture '{name}'")
        config, key_map = TimmConfig.named(name).with_overrides(**args), OTHER_TIMM
    classes = class_names(content.get("label_names") or data.get("label_names"), config.num_classes)
    title = PREFIX + name if key_map is OTHER_TIMM else None
    return Checkpoint(config, {}, title, timm_preprocessing(data), classes), key_map


def timm_preprocessing(data: Mapping[str, Any]) -> Preprocessing | None:
    """The preprocessing in timm's data configuration of a model, if any."""
    fields = {key: data[key] for key in PREPROCESSING_KEYS if data.get(key) is not None}
    if data.get("input_size") is not None:
        fields["img_size"] = data["input_size"][1:]
    return from_dict(Preprocessing, fields) if fields else None


def _ours(name: str, args: Mapping[str, Any], pool: str | None) -> Any:
    """The `ViTConfig` of a timm model with these arguments; None if it has no equivalent."""
    if name not in _OURS:
        return None
    base = VARIANTS[_OURS[name]].config
    same = _CONVIT if base.gpsa_layers else _DEIT
    if args.keys() - same - _CONVERTED:
        return None
    fields: dict[str, Any] = {"global_pool": pool or "token"}
    fields |= {name: value for name, value in args.items() if name in same}
    if same is _CONVIT:
        per_head = fields.get("embed_dim", base.embed_dim // base.num_heads)  # timm's embed_dim
        fields["embed_dim"] = per_head * fields.get("num_heads", base.num_heads)
        depth = fields.get("depth", base.depth)
        fields["gpsa_layers"] = min(args.get("local_up_to_layer", base.gpsa_layers), depth)
        if fields["gpsa_layers"] == depth:
            fields["class_token"] = False
    else:
        # timm normalises after pooling, unless told not to; a token only if told to.
        if args.get("fc_norm", fields["global_pool"] != "token"):
            return None
        if fields["global_pool"] not in ("token", "avg"):
            return None
        token = fields.get("class_token", True)
        fields["embed_class_token"] = token and not args.get("no_embed_class", False)
    return base.with_overrides(**fields)


def _transformers(folder: Path, content: Mapping[str, Any]) -> Checkpoint:
    if content["model_type"] != "cvt":
        raise UserError(
            f"it describes a transformers model of type '{content['model_type']}'; only 'cvt' is "
            f"supported"
        )
    lists = dict.fromkeys((*CVT_STAGES, "cls_token"), list)
    checks.shaped("it", content, {**lists, "id2label?": dict, "num_channels": int})
    kernels = content["kernel_qkv"]
    only = {
        "qkv_projection_method": ["dw_bn"] * len(kernels),  # the only one transformers can run
        "stride_q": [1] * len(kernels),
        "padding_q": [kernel // 2 for kernel in kernels],
        "cls_token": [False] * (len(kernels) - 1) + [True],
    }
    for name, value in only.items():
        if content.get(name) != value:
            raise UserError(
                f"{name} is {content.get(name)!r}; only {value} is supported in transformers' CvTs"
            )
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
    """The preprocessing of transformers' image processor, ConvNeXT's or ViT's; None without a file.

    Raises:
        UserError: if it is another, or prepares images in another way.
    """
    shape = {"image_mean": [float], "image_std": [float], "resample": int}
    content = read_shaped(path, shape | {"crop_pct?": float, "rescale_factor?": float})
    if content is None:
        return None
    with prefix_errors(path):
        kind = content.get("image_processor_type") or content.get("feature_extractor_type")
        rescaled = math.isclose(content.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6)
        if not (content.get("do_resize", True) and content.get("do_rescale", True) and rescaled):
            raise UserError("it must resize images and scale them to 0 … 1")
        convnext = str(kind or "ConvNext").startswith("ConvNext")  # CvT's own
        size = content.get("size")
        if isinstance(size, int):
            size = dict.fromkeys(["shortest_edge"] if convnext else ["height", "width"], size)
        sides = [size.get(s) for s in ("height", "width")] if isinstance(size, dict) else []
        if convnext and isinstance(size, dict):
            sides = [size.get("shortest_edge")] * 2
        if content.get("do_center_crop") or not (convnext or str(kind).startswith("ViT")):
            raise UserError(f"{kind} is not read; only ConvNextImageProcessor's and ViT's are")
        height, width = checks.typed("img_size", sides, checks.ImageSize)
        count, normalised = len(content["image_mean"]), content.get("do_normalize", True)
        centre = convnext and height < _CONVNEXT_SQUASHES
        fields = {
            "img_size": (height, width),
            "mean": content["image_mean"] if normalised else (0.0,) * count,
            "std": content["image_std"] if normalised else (1.0,) * count,
            "interpolation": dict(enumerate(_RESAMPLE)).get(
                content["resample"], content["resample"]
            ),
            "crop_pct": (content.get("crop_pct") or 224 / 256) if centre else 1.0,
            "crop_mode": "center" if centre else "squash",
        }
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
