"""A model's configuration as JSON and back, refusing what it does not understand."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from locality.errors import UserError, unknown
from locality.models.cvt_config import CvTConfig
from locality.models.from_timm import TimmConfig
from locality.models.vit import ViTConfig

FAMILIES: dict[str, type] = {"vit": ViTConfig, "cvt": CvTConfig, "timm": TimmConfig}
"""The configurations that a file may describe, by the name it gives them."""


def encode_config(config: Any) -> dict[str, Any]:
    """A configuration as a JSON object: its family, and every field.

    Raises:
        UserError: if it is none of ours.
    """
    for family, kind in FAMILIES.items():
        if type(config) is kind:
            return {"family": family, **dataclasses.asdict(typing.cast(Any, config))}
    raise UserError(
        f"a {type(config).__name__} is not the configuration of a model of this library"
    )


def decode_config(content: dict[str, Any]) -> Any:
    """The configuration that `encode_config` wrote.

    Fields that are missing take their defaults, so that files outlive the settings added later.

    Raises:
        UserError: for an unknown family or field, or a value of the wrong kind.
    """
    family = str(content.get("family"))
    if family not in FAMILIES:
        raise unknown("family of models", family, FAMILIES)
    return decode(FAMILIES[family], {key: content[key] for key in content if key != "family"})


def decode(kind: type, content: Any) -> Any:
    """A dataclass of the given kind from a JSON object.

    Raises:
        UserError: for an unknown or missing field, or a value of the wrong kind.
    """
    if not isinstance(content, dict):
        raise UserError(f"the {kind.__name__} is {content!r}, not an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in content:
        if name not in fields:
            raise unknown(f"setting of {kind.__name__}", name, fields)
    values = {
        name: _value(hints[name], value, f"{kind.__name__}.{name}")
        for name, value in content.items()
    }
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"the {kind.__name__} lacks {', '.join(missing)}")
    return kind(**values)


def _value(hint: Any, value: Any, name: str) -> Any:
    """`value` as the type `hint` says; JSON's lists become tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _value(option, value, name)
            except UserError:
                continue
    elif origin is typing.Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list):
            variadic = len(arguments) == 2 and arguments[1] is Ellipsis
            kinds = (arguments[0],) * len(value) if variadic else arguments
            if len(kinds) == len(value):
                pairs = zip(kinds, value, strict=True)
                return tuple(_value(kind, item, name) for kind, item in pairs)
    elif dataclasses.is_dataclass(hint):
        return decode(typing.cast(type, hint), value)
    elif hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise UserError(f"{name} is {value!r}, which is not a {_readable(hint)}")


def _readable(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint).replace("typing.", "")
