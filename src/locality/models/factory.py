"""From a name to a model."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any

from torch import nn

from locality.errors import UnknownSetting, UserError, unknown
from locality.models.base import ImageClassifier
from locality.models.cvt import ConvolutionalVisionTransformer, CvTConfig
from locality.models.from_timm import PREFIX, TimmConfig, TimmModel
from locality.models.variants import VARIANTS, Variant
from locality.models.vit import VisionTransformer, ViTConfig


def list_models(filter: str = "", family: str | None = None) -> list[str]:
    """Names of the models, in the order of the table.

    Args:
        filter: a wildcard pattern ("convit_*") or a part of the name.
        family: only "convit", "deit" or "cvt".
    """
    return [name for name in matching(VARIANTS, filter) if family in (None, VARIANTS[name].family)]


def matching(names: Iterable[str], filter: str) -> list[str]:
    """Those of `names` that fit a wildcard pattern, or have `filter` as a part."""
    pattern = filter if any(mark in filter for mark in "*?[") else f"*{filter}*"
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def variant(name: str) -> Variant:
    """The row of the table with this name.

    Raises:
        UserError: if there is none, with the nearest names.
    """
    if name not in VARIANTS:
        raise unknown("model", name, VARIANTS)
    return VARIANTS[name]


def create_model(
    name: str,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    **overrides: Any,
) -> ImageClassifier:
    """Build a model by name, with fresh weights drawn from torch's default generator.

    Args:
        name: one of `list_models()`, or "timm/" and the name of one of timm's.
        num_classes, in_chans, img_size, patch_size: the variant's own unless given.
        overrides: any other field of the variant's configuration (`ViTConfig`, `CvTConfig`).

    Raises:
        UserError: for an unknown name or field (with the nearest), or a value out of range.
    """
    given = {
        "num_classes": num_classes,
        "in_chans": in_chans,
        "img_size": img_size,
        "patch_size": patch_size,
    }
    fields = {key: value for key, value in given.items() if value is not None} | overrides
    model = build(named(name, fields))
    model.variant = name
    return model


def named(name: str, fields: dict[str, Any]) -> Any:
    """The configuration of the model called `name`, ours or "timm/NAME", with some fields changed.

    Raises:
        UserError: for an unknown name or field (with the nearest), or a value out of range.
    """
    if name.startswith(PREFIX):
        return TimmConfig.named(name.removeprefix(PREFIX), fields)
    return configure(variant(name).config, fields)


def configure(config: Any, fields: dict[str, Any]) -> Any:
    """`config` with some fields changed; it may know shorthands (`with_overrides`).

    Raises:
        UserError: for a field it does not have, with the nearest.
    """
    if hasattr(config, "with_overrides"):
        return config.with_overrides(**fields)
    names = [field.name for field in dataclasses.fields(config)]
    for field in fields:
        if field not in names:
            raise unknown(f"setting of {type(config).__name__}", field, names, UnknownSetting)
    return dataclasses.replace(config, **fields)


def build(config: Any) -> ImageClassifier:
    """The model that a configuration describes."""
    if isinstance(config, ViTConfig):
        return VisionTransformer(config)
    if isinstance(config, CvTConfig):
        return ConvolutionalVisionTransformer(config)
    if isinstance(config, TimmConfig):
        return TimmModel(config)
    raise UserError(f"no model is built from a {type(config).__name__}")


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model learns or carries as parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
