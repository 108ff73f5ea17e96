"""Check values against types with bounds, by msgspec; errors name the setting."""

import contextlib
import re
import sys
import typing
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from locality.errors import UserError, unknown

_LARGEST = sys.float_info.max  # excludes infinity and NaN
_LARGEST_INT = 10**12  # products of a few are exact in 64 bits, or at least finite
_SHOWN = 60  # characters of a refused value

# Published models have at most 0.3 billion parameters, width 1,024, depth 24 and 384-pixel images.
# Values far beyond these, here and in `models.config`, are a mistake or a hostile file.
Natural = Annotated[int, Meta(ge=0, le=_LARGEST_INT)]
Count = Annotated[int, Meta(ge=1, le=_LARGEST_INT)]
Depth = Annotated[int, Meta(ge=1, le=512)]
StageDepth = Annotated[int, Meta(ge=0, le=512)]
UpTo4096 = Annotated[int, Meta(ge=0, le=4096)]
UpTo1024 = Annotated[int, Meta(ge=1, le=1024)]
Width = Annotated[int, Meta(ge=1, le=32_768)]
Pixels = Annotated[int, Meta(ge=1, le=8192)]
if TYPE_CHECKING:
    ImageSize = int | tuple[int, int]
else:  # msgspec 0.22 crashes on a bounded number in a union with tuple[Pixels, Pixels]
    ImageSize = Pixels | Annotated[tuple[Pixels, ...], Meta(min_length=2, max_length=2)]
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
NotNegative = Annotated[float, Meta(ge=0, le=_LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=_LARGEST)]
Ratio = Annotated[float, Meta(gt=0, le=64)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
ShareBelowOne = Annotated[float, Meta(ge=0, lt=1)]
ProperShare = Annotated[float, Meta(gt=0, lt=1)]

type_hints = cache(typing.get_type_hints)


def typed(name: str, value: Any, hint: Any) -> Any:
    """`value` converted to a type: lists become tuples, integers and "1e-3" floats, if required.

    Raises:
        UserError: with the setting, its value and what is accepted.
    """
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        if isinstance(value, str):
            with contextlib.suppress(ValueError, msgspec.ValidationError):
                return msgspec.convert(float(value), hint)
        names = choices(hint)
        parts = (hint,) if typing.get_origin(hint) is Literal else typing.get_args(hint)
        only = all(part is NoneType or typing.get_origin(part) is Literal for part in parts)
        for given in value if isinstance(value, (list, tuple)) else (value,):
            if names and (only or isinstance(given, str)) and given not in names:
                raise unknown(f"value of {name}", str(given), names) from None
        said = _in_words(error)
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
        raise UserError(f"{name} is {shown}; {said[0].lower()}{said[1:]}") from None


def _in_words(error: msgspec.ValidationError) -> str:
    """msgspec's message, with the place inside the value."""
    said, _, place = str(error).replace("array", "list").partition(" - at `$")
    said = said.replace(f"<= {_LARGEST}", "< inf").replace(f">= -{_LARGEST}", "> -inf")
    place = place.replace("[...]", ", an entry")
    place = re.sub(r"\[(\d+)\]", lambda item: f" item {int(item[1]) + 1}", place.rstrip("`"))
    return f"{said} in {place.lstrip(' .,')}" if place else said


def choices(hint: Any) -> list[str]:
    """The values of the `Literal`s in a type."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [part for part in parts if isinstance(part, str)]
    return list(dict.fromkeys(choice for part in parts for choice in choices(part)))


def integer(name: str, value: object, low: int, high: int = 2**63 - 1) -> None:
    """Check that `value` is an integer from `low` to `high`."""
    typed(name, value, Annotated[int, Meta(ge=low, le=high)])


def shaped(where: str, value: object, wanted: Any) -> None:
    """Check the structure of a value read from JSON or YAML.

    Args:
        where: name of the value in messages.
        value: the value.
        wanted: a type (float: any finite number), [structure of each item], or
            {name: structure of the entry}; other names are allowed. An entry whose name ends in "?"
            may be missing or null.
    """
    try:
        msgspec.convert(value, _as_type(wanted))
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {_in_words(error)}") from None


def _as_type(wanted: Any) -> Any:
    if isinstance(wanted, dict):
        kinds = {name: _as_type(part) for name, part in wanted.items()}
        entries = {
            name.removesuffix("?"): NotRequired[kind | None] if name.endswith("?") else kind
            for name, kind in kinds.items()
        }
        return TypedDict("Entries", entries)  # type: ignore[operator]
    if isinstance(wanted, list):
        return list[_as_type(wanted[0])]  # type: ignore[misc]
    return Finite if wanted is float else wanted
