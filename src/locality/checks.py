"""Range checks that settings share; each failure is one sentence naming the setting."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

from locality.errors import UserError, unknown

# The published models have 0.3 billion parameters, widths to 1,024, depths to 24 and images to 384
# pixels; what lies far beyond, here and in the bounds of their settings, is a mistake or a hostile
# file.
MOST_PARAMETERS = 4_000_000_000


def shaped(where: str, value: object, wanted: Any) -> None:
    """A value read from a file has to be built as another program will use it.

    Args:
        where: whose value, for the message.
        value: of JSON or YAML.
        wanted: a type (float: any finite number); [what each item of a list is]; or
            {name: what the entry of that name is}, where more names may be there. A name that ends
            in "?" may be missing, or its value be null.

    Raises:
        UserError: if it is not, naming the place.
    """
    if isinstance(wanted, dict) and isinstance(value, dict):
        for name, part in wanted.items():
            key = name.removesuffix("?")
            if value.get(key) is not None or key == name:
                shaped(f"{where}: {key}", value.get(key), part)
    elif isinstance(wanted, list) and isinstance(value, list):
        for item in value:
            shaped(where, item, wanted[0])
    elif wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise UserError(f"{where} is {value!r}; a finite number belongs there")
    elif not isinstance(wanted, type) or not isinstance(value, wanted):
        names: dict[type, str] = {dict: "an object", list: "a list", str: "text"}
        names |= {float: "a number", int: "a whole number"}
        cls = wanted if isinstance(wanted, type) else type(wanted)
        given = "missing" if value is None else repr(value)
        raise UserError(f"{where} is {given}; {names.get(cls, cls.__name__)} belongs there")


def image_size(value: object) -> None:
    """`value` has to be a side in pixels, or a pair of them.

    Raises:
        UserError: if it is not.
    """
    sides = value if isinstance(value, (tuple, list)) else (value, value)
    if len(sides) != 2:
        raise UserError(f"img_size is {value!r}; give one number, or (height, width)")
    for side in sides:
        integer("img_size", side, 1, 8192)


def heads(embed_dim: int, num_heads: int) -> None:
    """A width has to be a multiple of the heads it is divided between.

    Raises:
        UserError: if it is not.
    """
    if num_heads < 1 or embed_dim % num_heads:
        raise UserError(
            f"embed_dim={embed_dim} cannot be divided between num_heads={num_heads}; "
            f"choose a multiple"
        )


def parameters(width: int, depth: int, mlp_ratio: float, others: int) -> None:
    """A transformer of `depth` blocks, with `others` around them, must not exceed all bounds.

    Raises:
        UserError: if it has more than `MOST_PARAMETERS`.
    """
    count = depth * width * width * (4 + 2 * mlp_ratio) + others
    if count > MOST_PARAMETERS:
        raise UserError(
            f"embed_dim={width} and depth={depth} make a model of about {count:.2g} parameters; "
            f"at most {MOST_PARAMETERS:.2g} are built"
        )


def one_of(setting: str, given: object, accepted: Iterable[str]) -> None:
    """`given` has to be one of `accepted`.

    Raises:
        UserError: with the nearest name.
    """
    accepted = list(accepted)
    if given not in accepted:
        raise unknown(f"value of {setting}", str(given), accepted)


type_hints = cache(typing.get_type_hints)


def bounded(
    default: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    role: str = "",
) -> Any:
    """A dataclass's field with bounds that `settings` checks; as `integer` or `number` has them.

    Its default may be `dataclasses.MISSING`; its role is one of `locality.settings.Role`.
    """
    bounds = {"low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={"bounds": bounds, "role": role})


def settings(config: Any, group: str = "") -> None:
    """Each setting of a dataclass has to be one of its `Literal`'s values, or within its bounds.

    Raises:
        UserError: for the first that is not; `group` comes before its name.
    """
    hints = type_hints(config.__class__)
    for field in dataclasses.fields(config):
        hint, value, name = hints[field.name], getattr(config, field.name), group + field.name
        types = typing.get_args(hint) or (hint,)
        if value is None and type(None) in types:
            continue
        choices = [each for each in (hint, *types) if typing.get_origin(each) is Literal]
        if choices:
            one_of(name, value, typing.get_args(choices[0]))
        elif bounds := field.metadata.get("bounds"):
            for each in value if isinstance(value, tuple) else (value,):
                if int in types:
                    integer(name, each, bounds["low"], bounds["high"])
                else:
                    number(name, each, **bounds)
        elif isinstance(value, str):
            # Runs keep their settings as text.
            try:
                value.encode()
            except UnicodeError:
                raise UserError(f"{name} is '{value}', which is not UTF-8; rename it") from None


def integer(setting: str, value: object, low: int, high: float = math.inf) -> None:
    """`value` has to be a whole number from `low` to `high`.

    Raises:
        UserError: if it is not.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value <= high:  # type: ignore[operator]
        limits = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        raise UserError(f"{setting} is {value!r}; give a whole number, {limits}")


def number(
    setting: str,
    value: object,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
) -> None:
    """`value` has to be a finite number from `low` to `high`, without them if `above`, `below`.

    Raises:
        UserError: if it is not.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        too_low = value < low or (above and value == low)
        too_high = value > high or (below and value == high)
        if not too_low and not too_high:
            return
    limits = []
    if not math.isinf(low):
        limits.append(f"{'above' if above else 'at least'} {low:g}")
    if not math.isinf(high):
        limits.append(f"{'below' if below else 'at most'} {high:g}")
    raise UserError(f"{setting} is {value!r}; give a finite number {' and '.join(limits)}".strip())
