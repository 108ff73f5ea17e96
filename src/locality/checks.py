"""Range checks that settings share; each failure is one sentence naming the setting."""

from __future__ import annotations

import math
from collections.abc import Iterable

from locality.errors import UserError, unknown


def one_of(setting: str, given: str, accepted: Iterable[str]) -> None:
    """`given` has to be one of `accepted`.

    Raises:
        UserError: with the nearest name.
    """
    accepted = list(accepted)
    if given not in accepted:
        raise unknown(f"value of {setting}", str(given), accepted)


def choice(setting: str, given: object, accepted: Iterable[str]) -> None:
    """As `one_of`, where the choices are so few that the message lists them all."""
    accepted = list(accepted)
    if given not in accepted:
        listed = ", ".join(f"'{name}'" for name in accepted)
        raise UserError(f"{setting}={given!r} is not one of {listed}")


def integer(setting: str, value: object, low: int, high: int | None = None) -> None:
    """`value` has to be a whole number from `low` to `high`.

    Raises:
        UserError: if it is not.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
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
