"""config.json of timm and transformers: architecture, preprocessing, class names.

timm's `save_for_hf` writes the name and arguments of a timm model. transformers' `save_pretrained`
writes a format for each kind of model, of which CvT's is read, and the preprocessing in a second
file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm

from locality import checks
from locality.checkpoints.format import Checkpoint
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors
from locality.files import read_shaped
from locality.models.config import CvTConfig, StageConfig
from locality.models.factory import TimmConfig
from locality.models.variants import PREFIX, VARIANTS, variant
from locality.settings import from_dict

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
# timm's arguments that are fields of `ViTConfig`, and those converted or without effect here
_SAME = {
    *("num_classes", "in_chans", "img_size", "patch_size", "embed_dim", "depth", "num_heads"),
    *("mlp_ratio", "qkv_bias", "global_pool"),
}
# All other arguments must be off, except these.
_ON = {"final_norm", "proj_bias"}
_CONVIT = _SAME | {"use_pos_embed", "locality_strength"}
_DEIT = _SAME | {"class_token"}
_OTHERS = {
    *("local_up_to_layer", "no_embed_class", "drop_rate", "pos_drop_rate", "patch_drop_rate"),
    *("proj_drop_rate", "attn_drop_rate", "drop_path_rate", "weight_init", "dynamic_img_size"),
    "strict_img_size",
}

CVT_STAGES = {
    **{name: name for name in ("embed_dim", "num_heads", "depth", "mlp_ratio", "qkv_bias")},
    "patch_sizes": "embed_kernel",
    "patch_stride": "embed_stride",
    "patch_padding": "embed_padding",
    "kernel_qkv": "projection_kernel",
    "stride_kv": "kv_stride",
    "padding_kv": "kv_padding",
}
"""transformers' CvT settings, lists with one value per stage → fields of `StageConfig`."""

# In the order of Pillow's filter numbers.
_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
# From this size on, ConvNeXT's image processor (also CvT's) resizes without cropping.
_CONVNEXT_SQUASHES = 384
# Image processors that resize or normalise in a way that their settings do not say.
_OWN_ARITHMETIC = ("EfficientNet", "Levit", "PoolFormer")


def read_described(folder: Path, content: Mapping[str, Any]) -> Checkpoint | None:
    """Read the config.json of timm or transformers.

    Args:
        folder: the folder with the weights.
        content: content of its config.json.

    Returns:
        a checkpoint without weights, in the format of its `key_map`; None if the file was written
        by neither.

    Raises:
        UserError: if the model is not supported, or the file is invalid.
    """
    if isinstance(content.get("architecture"), str):
        return _timm(content)
    if "model_type" in content:
        return _transformers(folder, content)
    return None


def _timm(content: Mapping[str, Any]) -> Checkpoint:
    shape = {"num_classes?": int, "model_args?": dict, "pretrained_cfg?": dict, "global_pool?": str}
    checks.shaped("it", content, shape)
    name = content["architecture"].partition(".")[0]
    data = content.get("pretrained_cfg") or content  # timm before 0.6 had one level
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
    if (config := _ours(name, args, content.get("global_pool"))) is None:
        if not timm.is_model(name):
            raise UserError(f"timm has no architecture '{name}'")
        config = TimmConfig.named(name).with_overrides(**args)
    labels = content.get("label_names") or data.get("label_names") or content.get("labels")
    classes = class_names(labels, config.num_classes)
    title, key_map = None, "convit" if getattr(config, "gpsa_layers", 0) else "deit"
    if isinstance(config, TimmConfig):
        title, key_map = PREFIX + name, "timm"
    elif name.startswith(REGISTERED):
        key_map = "locality"
    return Checkpoint(config, {}, title, timm_preprocessing(data), classes, key_map)


def timm_preprocessing(data: Mapping[str, Any]) -> Preprocessing | None:
    """The preprocessing in timm's data configuration of a model, if any."""
    fields = {key: data[key] for key in PREPROCESSING_KEYS if data.get(key) is not None}
    if data.get("input_size") is not None:
        fields["img_size"] = data["input_size"][1:]
    return from_dict(Preprocessing, fields) if fields else None


def _ours(name: str, args: Mapping[str, Any], pool: str | None) -> Any:
    """The `ViTConfig` of a timm model with these arguments; None if it has no equivalent."""
    if name.startswith(REGISTERED):
        return variant(name.removeprefix(REGISTERED)).config.with_overrides(**args)
    if name not in _OURS:
        return None
    base = VARIANTS[_OURS[name]].config
    same = _CONVIT if base.gpsa_layers else _DEIT
    if any(bool(args[name]) != (name in _ON) for name in args.keys() - same - _OTHERS):
        return None
    if same is _DEIT and args.get("global_pool", "") not in ("token", "avg", ""):
        return None
    fields: dict[str, Any] = {"global_pool": pool or "token"}
    fields |= {name: value for name, value in args.items() if name in same}
    if same is _CONVIT:
        if "embed_dim" in fields:  # timm's is per head
            fields["embed_dim"] *= fields.get("num_heads", base.num_heads)
        depth = fields.get("depth", base.depth)
        fields["gpsa_layers"] = min(args.get("local_up_to_layer", base.gpsa_layers), depth)
        if fields["gpsa_layers"] == depth:
            fields["class_token"] = False
    else:
        token = fields.get("class_token", True)
        fields["embed_class_token"] = token and not args.get("no_embed_class", False)
        if fields["global_pool"] == "avg" and args.get("fc_norm") is not False:
            return None  # timm then normalises after pooling, not before
    return base.with_overrides(**fields)


def _transformers(folder: Path, content: Mapping[str, Any]) -> Checkpoint:
    if content["model_type"] != "cvt":
        raise UserError(
            f"it describes a transformers model of type '{content['model_type']}'; only 'cvt' is "
            f"supported"
        )
    checks.shaped(
        "it", content, {**dict.fromkeys((*CVT_STAGES, "cls_token"), list), "id2label?": dict}
    )
    kernels = content["kernel_qkv"]
    only = {
        "qkv_projection_method": ["dw_bn"] * len(kernels),  # the only one transformers can run
        "stride_q": [1] * len(kernels),
        "padding_q": [kernel // 2 for kernel in kernels],
        "cls_token": [False] * (len(kernels) - 1) + [True],
    }
    for name, value in only.items():
        if content.get(name, value) != value:
            raise UserError(
                f"{name} is {content[name]!r}; only {value} is supported in transformers' CvTs"
            )
    rows = zip(*(content[theirs] for theirs in CVT_STAGES), strict=True)
    labels = content.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # transformers' default
    prepared = _preprocessor(folder / PREPROCESSOR)
    config = CvTConfig(
        tuple(
            from_dict(StageConfig, dict(zip(CVT_STAGES.values(), row, strict=True))) for row in rows
        ),
        num_classes=len(labels),
        in_chans=content.get("num_channels", 3),
        img_size=224 if prepared is None else prepared.size,
        activation="gelu",
    )
    classes = class_names(labels, len(labels))
    return Checkpoint(config, {}, None, prepared, classes, "cvt-transformers")


def _preprocessor(path: Path) -> Preprocessing | None:
    """The preprocessing of transformers' image processor, or None without a file."""
    shape = {"image_mean": [float], "image_std": [float], "resample": int}
    given = read_shaped(path, shape | {"crop_pct?": float, "rescale_factor?": float})
    if given is None:
        return None
    with prefix_errors(path):
        rescales = math.isclose(given.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6)
        if not (given.get("do_resize", True) and given.get("do_rescale", True) and rescales):
            raise UserError("it must resize images and scale them to 0 … 1")
        size, share, mode = _cropping(given)
        normalises = given.get("do_normalize", True)
        fields = {
            "img_size": size,
            "mean": given["image_mean"] if normalises else (0.0,) * 3,
            "std": given["image_std"] if normalises else (1.0,) * 3,
            "interpolation": dict(enumerate(_RESAMPLE)).get(given["resample"], given["resample"]),
            "crop_pct": share,
            "crop_mode": mode,
        }
        return from_dict(Preprocessing, fields)


def _cropping(given: Mapping[str, Any]) -> tuple[tuple[int, int], float, str]:
    """Size, `crop_pct` and `crop_mode` of an image processor of transformers.

    Raises:
        UserError: if it prepares images in a way that these cannot express.
    """
    kind, cropped = str(given.get("image_processor_type")), given.get("do_center_crop")
    if kind.startswith(_OWN_ARITHMETIC):
        raise UserError(f"{kind} prepares images in a way of its own, which is not supported")
    size, (edge, width) = given.get("size"), _sides(given.get("size"))
    height, breadth = _sides(given["crop_size"] if cropped else size)
    convnext, mode = "ConvNext" in kind, "squash"
    if convnext and edge < _CONVNEXT_SQUASHES:
        edge = width = int(edge / (given.get("crop_pct") or 224 / 256))
        mode = "center"
    elif not convnext and isinstance(size, dict) and "shortest_edge" in size:
        mode = "center"
        if not cropped:
            raise UserError("without do_center_crop, images would differ in size; set it")
    share = height / edge
    if math.floor(height / share) < edge:
        share = math.nextafter(share, 0)
    if math.floor(breadth / share) != width:
        raise UserError(
            f"it resizes to {edge}×{width} and crops to {height}×{breadth}; both sides must be "
            f"cropped by the same share"
        )
    return (height, breadth), share, mode


def _sides(size: Any) -> tuple[int, int]:
    """(height, width) of a size in transformers' image processors."""
    given = size if isinstance(size, dict) else {"shortest_edge": size}
    edge: Any = given.get("shortest_edge")
    height, width = given.get("height", edge), given.get("width", edge)
    return checks.typed("img_size", (height, width), checks.ImageSize)


def class_names(labels: Any, count: int) -> tuple[str, ...] | None:
    """The names of `count` classes, numbers where a name is missing; None if all are missing."""
    if not labels:
        return None
    if isinstance(labels, list):
        return tuple(map(str, labels))
    named = {int(index): str(name) for index, name in labels.items()}
    if max(named) >= count:
        raise UserError(f"it names class {max(named)}, but there are {count} classes from 0")
    names = tuple(named.get(index, str(index)) for index in range(count))
    return None if names == tuple(f"LABEL_{index}" for index in range(count)) else names
