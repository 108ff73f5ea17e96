"""Configurations as plain values and YAML, and what differs between two of them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import yaml

from locality.checks import one_of, type_hints
from locality.errors import UserError, unknown
from locality.files import parse_yaml

T = TypeVar("T")

Role = Literal["how", "label", "sample", "incidental", "run", "interface", "training"]
"""The role of a setting, in its field's metadata; most have none.

    how         how a run is computed: may change on resuming, not part of its identity
    label       for people, not part of a run's identity
    sample      which images and random numbers: runs of one group differ in it
    incidental  what a run writes, and rounding: runs of one group may differ in it
    run         the folder of another run, which its name identifies wherever it lies
    interface   of a model: sizes of inputs and outputs, to which weights can be adapted
    training    of a model: has no effect on what its trained weights compute
"""


class Setting(NamedTuple):
    """A setting of a configuration.

    Attributes:
        hint: its type.
        text: what its class's docstring says of it.
    """

    hint: Any
    text: str


def settings_of(cls: type, prefix: str = "") -> dict[str, Setting]:
    """The settings of a configuration dataclass by dotted name, those of its groups among them."""
    section = inspect.getdoc(cls).partition("Attributes:\n")[2]  # type: ignore[union-attr]
    texts = {
        name: " ".join(text.split())
        for names, text in re.findall(r"^ {4}(\w.*?): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
        for name in names.split(", ")
    }
    found: dict[str, Setting] = {}
    for name, hint in type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= settings_of(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = Setting(hint, texts.get(name, ""))
    return found


def setting(default: Any, role: Role) -> Any:
    """A dataclass's field with a role."""
    return dataclasses.field(default=default, metadata={"role": role})


def with_role(cls: type, *roles: Role) -> frozenset[str]:
    """The settings of a configuration dataclass that have one of these roles, by dotted name."""
    found = {field.name for field in dataclasses.fields(cls) if field.metadata.get("role") in roles}
    for name, hint in type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= {f"{name}.{inner}" for inner in with_role(typing.cast(type, hint), *roles)}
    return frozenset(found)


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested plain values: dictionaries, lists, numbers, strings, None."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """The configuration of type `cls` that `to_dict` turned into `values`.

    What is missing takes its default. Settings that the class no longer has may still be there
    with the value in its `REMOVED`, by which nothing changes.

    Args:
        cls: a configuration dataclass.
        values: nested plain values.
        path: dotted name of the whole, for messages.

    Raises:
        UserError: for a setting that does not exist (with the nearest) or has to be given, a wrong
            type, or a value out of range.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{path or 'the configuration'} is {values!r}; give settings by name")
    hints = type_hints(cls)  # type: ignore[arg-type]
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{path}.{name}" if path else str(name)
        if name not in hints:
            if (name, value) in getattr(cls, "REMOVED", ()):
                continue
            raise _unknown(dotted, cls, f"{path}." if path else "")
        given[name] = _typed(hints[name], value, dotted)
    for field in fields:
        has_default = not field.default is field.default_factory is dataclasses.MISSING
        if field.name not in given and not has_default:
            raise UserError(f"{path or 'the configuration'} lacks {field.name}")
    return cls(**given)


def replace(config: T, changes: Mapping[str, Any]) -> T:
    """`config` with some settings changed, by dotted name.

    Example:
        >>> replace(recipe(), {"optim.lr": 1e-3, "data.fraction": 0.1})

    Raises:
        UserError: as `from_dict`.
    """
    hints = type_hints(type(config))  # type: ignore[arg-type]
    touched = {dotted.partition(".")[0] for dotted in changes} & set(hints)
    values = {name: _plain(getattr(config, name)) for name in touched}
    for dotted, value in changes.items():
        *groups, name = dotted.split(".")
        place = values
        for group in groups:
            place = place.get(group)  # type: ignore[assignment]
            if not isinstance(place, dict):
                raise _unknown(dotted, type(config))
        if name not in place and groups[-1:] != ["overrides"]:
            raise _unknown(dotted, type(config))
        place[name] = _plain(value)
    typed = {name: _typed(hints[name], value, name) for name, value in values.items()}
    return dataclasses.replace(config, **typed)  # type: ignore[type-var]


def typed(cls: type, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a configuration of type `cls` by dotted name, each as the type of its setting.

    What is no setting by itself, such as a group or one of a model's fields, stays as it is.

    Raises:
        UserError: for a wrong type.
    """
    known = settings_of(cls)
    return {
        name: _typed(known[name].hint, value, name) if name in known else value
        for name, value in changes.items()
    }


def parse(text: str, hint: Any, name: str) -> Any:
    """The value of type `hint` that somebody typed as `text`, which is YAML unless it is text.

    Raises:
        UserError: if it is none; `name` says whose.
    """
    try:
        if hint is str:
            return text
        if hint == (str | None):
            return None if text == "null" else text
        return _typed(hint, parse_yaml(text, name), name)
    except UserError:
        raise UserError(f"{name} is {text or repr(text)}; give {described(hint)}") from None


def _unknown(name: str, cls: type, prefix: str = "") -> UserError:
    """The error for a setting that `cls` does not have."""
    texts = {known: setting.text for known, setting in settings_of(cls, prefix).items()}
    return unknown("setting", name, texts, texts=texts)


def _typed(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type `hint` asks for: lists become tuples, whole numbers become floats."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None and len(options) < len(typing.get_args(hint)):
            return None
        # Of several types, one for values of several parts comes first for such a value.
        several = isinstance(value, (list, tuple))
        options.sort(key=lambda option: (typing.get_origin(option) is tuple) != several)
        for option in options[:-1]:
            with contextlib.suppress(UserError):
                return _typed(option, value, path)
        return _typed(options[-1], value, path)
    if origin is Literal:
        one_of(path, value, typing.get_args(hint))
        return value
    if origin is tuple:
        parts = typing.get_args(hint)
        if parts[1:] == (...,) and isinstance(value, (list, tuple)):
            parts = parts[:1] * len(value)
        if not isinstance(value, (list, tuple)) or len(value) != len(parts):
            raise UserError(f"{path} is {value!r}; give {len(parts)} values in a list")
        return tuple(_typed(part, item, path) for part, item in zip(parts, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{path} is {value!r}; give settings by name")
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, path)
    if hint is Any:
        return value
    is_bool = isinstance(value, bool)
    if hint is float and isinstance(value, (int, float)) and not is_bool:
        return float(value)
    if isinstance(value, hint) and is_bool == (hint is bool):
        return value
    raise UserError(f"{path} is {value!r}; give {described(hint)}")


def described(hint: Any) -> str:
    """What a setting of this type accepts, in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin in (typing.Union, types.UnionType):
        several = [described(part) for part in parts if part is not type(None)]
        return " or ".join(several + (["null"] if type(None) in parts else []))
    if origin in (tuple, list):
        count = "" if origin is list or parts[1:] == (...,) else f"of {len(parts)} "
        return f"a list {count}such as [{'0.1, 0.2' if float in parts else '1, 2'}]"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, "settings by name, such as {name: value}")


def to_yaml(config: Any) -> str:
    """A configuration as YAML, in the order it was declared."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def from_yaml(cls: type[T], text: str, where: str = "the configuration") -> T:
    """The configuration that a YAML text describes.

    Args:
        cls: a configuration dataclass.
        text: YAML.
        where: what to call the text in messages, such as its path.

    Raises:
        UserError: if it is not YAML, or as `from_dict`.
    """
    values = parse_yaml(text, where)
    return from_dict(cls, {} if values is None else values)


def flatten(
    values: Mapping[str, Any], groups: float = math.inf, prefix: str = ""
) -> dict[str, Any]:
    """Nested settings by dotted name.

    Args:
        values: by name; groups of them in a mapping.
        groups: so many levels of them are flattened: of a run's configuration, 1 keeps
            `model.overrides` whole.
        prefix: what comes before each name.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and groups:
            flat |= flatten(value, groups - 1, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def differences(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Settings with different values in two configurations: dotted name, old value, new value."""
    before, after = flatten(to_dict(old)), flatten(to_dict(new))
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)
