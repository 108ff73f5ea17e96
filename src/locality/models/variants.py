"""The table of models: name → architecture."""

import dataclasses
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from locality.checks import typed
from locality.errors import UserError, lookup, near
from locality.models.config import PREFIX, CvTConfig, TimmConfig, ViTConfig, signature_diff


@dataclass(frozen=True)
class Variant:
    """One named architecture.

    Attributes:
        name: the name for `build` and `locality.create_model`.
        family: "convit", "deit" or "cvt".
        config: the complete architecture.
        source: where the sizes come from.
        baseline: the model of equal size to compare with, if any.
    """

    name: str
    family: str
    config: Any
    source: str
    baseline: str | None = None


def _vit(name: str, heads: int, width: int, source: str, baseline: str, **fields: Any) -> Variant:
    family, _, _ = name.partition("_")
    own: dict[str, Any] = {"gpsa_layers": 10}
    if family == "deit":
        own = {"qkv_bias": True, "embed_class_token": True}
    config = ViTConfig(name=name, embed_dim=width, num_heads=heads, **(own | fields))
    return Variant(name, family, config, source, baseline)


def _cvt(
    name: str,
    widths: tuple[int, ...],
    heads: tuple[int, ...],
    depths: tuple[int, ...],
    source: str,
    baseline: str | None = None,
    *,
    strides: tuple[int, ...] = (4, 2, 2),
    **fields: Any,
) -> Variant:
    config = CvTConfig(
        name=name,
        embed_dim=widths,
        num_heads=heads,
        depth=depths,
        embed_stride=strides,
        # The paper's are 7 and 2 for stride 4, 3 and 1 for 2. Stride 1, which is not in the paper,
        # gets 3 and 1, so that tokens overlap.
        embed_kernel=tuple(max(3, 2 * stride - 1) for stride in strides),
        embed_padding=tuple(max(1, stride // 2) for stride in strides),
        **fields,
    )
    return Variant(name, "cvt", config, source, baseline)


_TABLE_1 = "ConViT Table 1"
_CVT_TABLE_2 = "CvT Table 2"
_EQUAL = "ConViT's width and heads, for comparison at equal size"
_SMALL = "sized for small images"
_PHOTO = "sized for photographs of 28 to 64 pixels"

# Small images. A DeiT has the width, depth, heads and patches of its ConViT; a CvT of the same size
# name ends on the same patch grid.
_NANO = {"img_size": 8, "patch_size": 2, "depth": 4, "num_classes": 10}
_MICRO = {"img_size": 32, "patch_size": 4, "depth": 8, "num_classes": 100}
_MINI = {"img_size": 64, "patch_size": 8, "depth": 10, "num_classes": 200}
_TINY_IN200 = {"img_size": 64, "patch_size": 8, "depth": 5, "num_classes": 200}

# CvT §4.2 describes the result of its architecture search without publishing it: stride 2 and ratio
# 2 at both ends, stride 1 and ratio 4 in most of the middle, 18 M parameters, 4.1 GMACs. This is
# the closest such bottleneck that is not larger: 17.3 M parameters, 4.09 GMACs.
_NAS = "a reconstruction in CvT §4.2's search space; the authors never published their result"
_BOTTLENECK: dict[str, Any] = {
    "kv_stride": (2, (2, 2), (2, 1, 1, 1, 1, 2, 2, 2, 2, 2)),
    "mlp_ratio": (2.0, (2.0, 2.0), (4.0,) * 6 + (2.0,) * 4),
    "drop_path_rate": 0.1,
}

_ROWS = [
    #    name               heads  width  source     baseline
    _vit("convit_tiny",          4,  192, _TABLE_1, "deit_tiny_baseline"),
    _vit("convit_tiny_plus",     4,  256, _TABLE_1, "deit_tiny_plus"),
    _vit("convit_small",         9,  432, _TABLE_1, "deit_small_baseline"),
    _vit("convit_small_plus",    9,  576, _TABLE_1, "deit_small_plus"),
    _vit("convit_base",         16,  768, _TABLE_1, "deit_base_baseline"),
    _vit("convit_base_plus",    16, 1024, _TABLE_1, "deit_base_plus"),
    _vit("convit_nano",          4,   64, _SMALL, "deit_nano", gpsa_layers=3, **_NANO),
    _vit("convit_micro",         9,  144, _SMALL, "deit_micro", gpsa_layers=6, **_MICRO),
    _vit("convit_mini",          9,  216, _SMALL, "deit_mini", gpsa_layers=8, **_MINI),
    _vit("convit_photo",         4,   64, _PHOTO, "deit_photo", gpsa_layers=4, **_TINY_IN200),
    _vit("deit_tiny",            3,  192, _TABLE_1, "convit_tiny"),
    _vit("deit_tiny_plus",       4,  256, _TABLE_1, "convit_tiny_plus"),
    _vit("deit_small",           6,  384, _TABLE_1, "convit_small"),
    _vit("deit_small_plus",      9,  576, _TABLE_1, "convit_small_plus"),
    _vit("deit_base",           12,  768, _TABLE_1, "convit_base"),
    _vit("deit_base_plus",      16, 1024, _TABLE_1, "convit_base_plus"),
    _vit("deit_tiny_baseline",   4,  192, _EQUAL, "convit_tiny"),
    _vit("deit_small_baseline",  9,  432, _EQUAL, "convit_small"),
    _vit("deit_base_baseline",  16,  768, _EQUAL, "convit_base"),
    _vit("deit_nano",            4,   64, _SMALL, "convit_nano", **_NANO),
    _vit("deit_micro",           9,  144, _SMALL, "convit_micro", **_MICRO),
    _vit("deit_mini",            9,  216, _SMALL, "convit_mini", **_MINI),
    _vit("deit_photo",           4,   64, _PHOTO, "convit_photo", **_TINY_IN200),
    #    name        widths          heads      depths      source
    _cvt("cvt_13",  (64, 192, 384),   (1, 3, 6),   (1, 2, 10), _CVT_TABLE_2, drop_path_rate=0.1),
    _cvt("cvt_21",  (64, 192, 384),   (1, 3, 6),   (1, 4, 16), _CVT_TABLE_2, drop_path_rate=0.1),
    _cvt("cvt_w24", (192, 768, 1024), (3, 12, 16), (2, 2, 20), _CVT_TABLE_2, drop_path_rate=0.3),
    _cvt("cvt_13_nas", (64, 192, 384), (1, 3, 6), (1, 2, 10), _NAS, **_BOTTLENECK),
    _cvt("cvt_pico",  (24, 48, 84), (1, 2, 4), (1, 1, 1), _SMALL, strides=(1, 2, 1),
         img_size=8, num_classes=10),
    _cvt("cvt_nano",  (24, 60, 84), (1, 2, 4), (1, 1, 1), _SMALL, "convit_nano", strides=(1, 2, 1),
         img_size=8, num_classes=10),
    _cvt("cvt_photo", (16, 16, 24, 60, 84), (1, 1, 1, 2, 4), (0, 0, 1, 1, 1), _PHOTO,
         strides=(2, 1, 2, 2, 2), img_size=64, num_classes=10, global_pool="avg",
         embed_pool=(False, False, True, True, True)),
    _cvt("cvt_photo_plus", (16, 16, 48, 128, 256), (1, 1, 1, 2, 4), (0, 0, 1, 1, 1), _PHOTO,
         strides=(2, 1, 2, 2, 2), img_size=64, num_classes=200, global_pool="avg",
         embed_pool=(False, False, True, True, True)),
    _cvt("cvt_micro", (48, 96, 192), (1, 2, 4), (1, 2, 3), _SMALL, "convit_micro",
         strides=(2, 2, 1), img_size=32, num_classes=100),
    _cvt("cvt_mini",  (64, 128, 320), (1, 2, 5), (1, 2, 4), _SMALL, "convit_mini",
         strides=(4, 2, 1), img_size=64, num_classes=200),
]  # fmt: skip

VARIANTS: dict[str, Variant] = {row.name: row for row in _ROWS}
"""All models, by name."""

FAMILY_NAMES = {"convit": "ConViT", "deit": "DeiT", "cvt": "CvT"}
"""Display names of the families."""


def family_of(model: str | None) -> str:
    """The family of a model by name; "other" if it is not in the table."""
    return VARIANTS[model].family if model in VARIANTS else "other"


def list_models(filter: str = "", family: str | None = None) -> list[str]:
    """Names of the models, in the order of the table.

    Args:
        filter: a wildcard pattern ("convit_*") or part of the name.
        family: only "convit", "deit" or "cvt".

    Raises:
        UserError: for another family.
    """
    if family is not None:
        lookup("family", family, FAMILY_NAMES)
    return [name for name in matching(VARIANTS, filter) if family in (None, VARIANTS[name].family)]


def matching(names: Iterable[str], filter: str) -> list[str]:
    """Names that match a wildcard pattern, or contain `filter` if it has no wildcards."""
    pattern = filter if any(mark in filter for mark in "*?[") else f"*{filter}*"
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def variant(name: str) -> Variant:
    """The row of the table with this name.

    Raises:
        UserError: for an unknown name (suggesting the nearest).
    """
    if name not in VARIANTS and not near(name, VARIANTS):
        raise UserError(
            f"unknown model '{name}'; see `locality models`, or prefix a timm model: "
            f"'{PREFIX}{name}'"
        )
    return lookup("model", name, VARIANTS)


def named(name: str, **fields: Any) -> Any:
    """The configuration of a model by name, one of `VARIANTS` or "timm/NAME", with overrides.

    Raises:
        UserError: for an unknown name or field (suggesting the nearest), or a value out of range.
    """
    name = typed("name", name, str)
    config = TimmConfig.named(name) if name.startswith(PREFIX) else variant(name).config
    return config.with_overrides(**fields)


def identify(config: Any) -> tuple[str | None, Any]:
    """The row of the table that has this architecture, if any.

    Returns:
        the row's name and its configuration with the image size, channels and classes of `config`
        (training settings are the row's); or None and `config` itself.
    """
    for name, row in VARIANTS.items():
        if type(row.config) is type(config) and not signature_diff(row.config, config):
            ends = {n: getattr(config, n) for n in ("img_size", "in_chans", "num_classes")}
            return name, dataclasses.replace(row.config, **ends)
    return None, config


def nearest(config: Any) -> str:
    """The name of the model that differs least from a configuration."""
    alike = {n: row.config for n, row in VARIANTS.items() if type(row.config) is type(config)}
    return min(alike, key=lambda name: len(signature_diff(alike[name], config)))
