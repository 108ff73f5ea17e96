"""Configurations as plain values and YAML, and their differences.

A configuration is a frozen dataclass: annotations are types with bounds (`locality.checks`), the
docstring is the help. The settings of a field that has several types, a model's, are those of its
value.
"""

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import yaml

from locality.checks import type_hints, typed
from locality.errors import UserError, not_utf8, unknown
from locality.files import parse_yaml

T = TypeVar("T")

Role = Literal["execution", "label", "replicate", "output", "run", "interface", "data", "training"]
"""The role of a setting, in its field's metadata; most have none.

    execution   how a run is computed, not what; may change on resuming
    label       for people
    replicate   images and random numbers; runs of one group differ in it
    output      outputs and rounding; runs of one group may differ in it
    run         folder of another run, identified by its name
    interface   of a model: size of its images, to which weights can be adapted
    data        of a model: the same, decided by the data and so not a setting of a run
    training    of a model: no effect on the function of trained weights
"""


class Setting(NamedTuple):
    """A setting of a configuration: type, default, help from the class's docstring, and role."""

    hint: Any
    default: Any
    text: str
    role: Role | None


def settings_of(config: Any, prefix: str = "") -> dict[str, Setting]:
    """The settings of a configuration, or of a class of them, and its groups, by dotted name."""
    found: dict[str, Setting] = {}
    own = _own_settings(config if isinstance(config, type) else type(config))
    for name, setting in own.items():
        value = getattr(config, name, None)
        groups = [value] if dataclasses.is_dataclass(value) else _groups(setting.hint)
        if not groups:
            found[prefix + name] = setting
        for group in groups:
            found |= settings_of(group, f"{prefix}{name}.")
    return found


def _groups(hint: Any) -> list[Any]:
    return [part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)]


# Names and text of a docstring's attribute.
_ATTRIBUTE = re.compile(r"^ {4}(\w.*?): (.*(?:\n {8}.*)*)", re.MULTILINE)


@cache
def _own_settings(cls: Any) -> dict[str, Setting]:
    sections = (inspect.cleandoc(base.__doc__ or "") for base in reversed(cls.__mro__))
    texts = {
        name: " ".join(text.split())
        for section in sections
        for names, text in _ATTRIBUTE.findall(section.partition("Attributes:\n")[2])
        for name in names.split(", ")
    }
    hints, settings = type_hints(cls, include_extras=True), dict[str, Setting]()
    for field in dataclasses.fields(cls):
        name, role = field.name, field.metadata.get("role")
        if role != "data":
            settings[name] = Setting(hints[name], _plain(field.default), texts.get(name, ""), role)
    return settings


def setting(default: Any, role: Role) -> Any:
    """A dataclass field with a role."""
    return dataclasses.field(default=default, metadata={"role": role})


def with_role(cls: type, *roles: Role) -> frozenset[str]:
    """The settings of a configuration dataclass that have one of these roles, by dotted name."""
    return frozenset(name for name, of in settings_of(cls).items() if of.role in roles)


def check(config: Any, prefix: str = "") -> None:
    """Convert each value of a configuration to its setting's type; for `__post_init__`.

    Raises:
        UserError: for the first invalid value, with its name after `prefix`.
    """
    hints = type_hints(config.__class__, include_extras=True)
    for field in dataclasses.fields(config):
        if not dataclasses.is_dataclass(value := getattr(config, field.name)):
            if _groups(hints[field.name]):
                raise _not_a_group(prefix + field.name, value)
            value = typed(prefix + field.name, value, hints[field.name])
            object.__setattr__(config, field.name, value)
            if isinstance(value, str) and value != value.encode(errors="replace").decode():
                raise not_utf8(f"{prefix}{field.name} '{value}'")


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested plain values: dictionaries, lists, numbers, strings, None."""
    return {name: _plain(getattr(config, name)) for name in _own_settings(config.__class__)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Inverse of `to_dict`: the configuration of type `cls` with the given values.

    Missing settings get their defaults.

    Args:
        cls: a configuration dataclass.
        values: nested plain values.
        path: dotted name of the configuration, for messages.

    Raises:
        UserError: for an unknown setting (suggesting the nearest), a missing required one, a wrong
            type, or a value out of range.
    """
    if not isinstance(values, Mapping):
        raise _not_a_group(path or "the configuration", values)
    hints, given = type_hints(cls), dict[str, Any]()  # type: ignore[arg-type]
    for name, value in values.items():
        dotted = f"{path}.{name}" if path else str(name)
        if dataclasses.is_dataclass(hints.get(name)) and not isinstance(value, hints[name]):
            given[name] = from_dict(hints[name], value, dotted)
        elif name in hints:
            given[str(name)] = value
        else:
            first, *_ = [*flatten({dotted: value}), dotted]
            known = settings_of(cls, f"{path}." if path else "")
            texts = {name: setting.text for name, setting in known.items()}
            raise unknown("setting", first, texts, texts=texts)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            raise UserError(f"{path or 'the configuration'}: missing required setting {field.name}")
    return cls(**given)


def replace(config: T, changes: Mapping[str, Any], path: str = "") -> T:
    """`config` with some settings changed, by dotted name; only groups with changes are rebuilt.

    Example:
        >>> replace(recipe(), {"optim.lr": 1e-3, "model.locality_strength": 2.0})
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    groups = dict[str, dict[str, Any]]()
    for dotted, value in changes.items():
        group, _, name = dotted.partition(".")
        if name and dataclasses.is_dataclass(values.get(group)):
            groups.setdefault(group, {})[name] = value
        elif dataclasses.is_dataclass(values.get(dotted)) and not (
            isinstance(value, Mapping) or dataclasses.is_dataclass(value)
        ):
            raise _not_a_group(dotted, value)
        else:
            values[dotted] = value
    for group, inner in groups.items():
        if change := getattr(config, f"change_{group}", None):
            values[group] = change(inner)
        else:
            values[group] = replace(values[group], inner, f"{path}.{group}" if path else group)
    return from_dict(type(config), values, path)


def _not_a_group(name: str, value: object) -> UserError:
    return UserError(f"{name} is {value!r}; give settings by name")


def parse(text: str, hint: Any, name: str) -> Any:
    """Parse the text given for setting `name`: as YAML, unless `hint` is str.

    A list may be written without brackets.
    """
    if hint in (str, str | None):
        return None if hint is not str and text == "null" else text
    is_list = typing.get_origin(hint) is tuple or ("," in text and _accepts_list(hint))
    if is_list and not text.startswith("["):
        text = f"[{text}]"
    return typed(name, parse_yaml(text, name), hint)


def _accepts_list(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple or any(map(_accepts_list, typing.get_args(hint)))


def to_yaml(config: Any) -> str:
    """A configuration as YAML, in declaration order."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def from_yaml(cls: type[T], text: str, where: str = "the configuration") -> T:
    """Read a configuration from YAML.

    Args:
        cls: a configuration dataclass.
        text: YAML text.
        where: name of the text in messages, for example its path.
    """
    values = parse_yaml(text, where)
    return from_dict(cls, {} if values is None else values)


def flatten(
    values: Mapping[str, Any], groups: float = math.inf, prefix: str = ""
) -> dict[str, Any]:
    """Nested settings by dotted name.

    Args:
        values: settings by name, with groups as mappings.
        groups: number of levels to flatten.
        prefix: prefix of each name.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and groups:
            flat |= flatten(value, groups - 1, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def differences(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Settings with different values in two configurations, or their plain values: dotted name, old
    value, new value."""
    before, after = (flatten(x if isinstance(x, Mapping) else to_dict(x)) for x in (old, new))
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)
