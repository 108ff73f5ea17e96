"""Checks of a state dict against the model that it is for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from locality.errors import UserError, some
from locality.models.factory import build

State = Mapping[str, Tensor]


def meta_state_dict(config: Any) -> dict[str, Tensor]:
    """The names and shapes of the model that `config` describes: a state dict without data."""
    with torch.device("meta"):
        return build(config).state_dict()


def check_keys(
    given: State, expected: State, owner: str, dropped: Collection[str] = frozenset()
) -> None:
    """Refuse a state dict that is not exactly what is expected.

    Args:
        given: the state dict to check.
        expected: names, shapes and kinds of number it has to have; `dropped` names may be absent.
        owner: whose names these are, for the message.
        dropped: names which are allowed, and which the conversion leaves out.

    Raises:
        UserError: naming what is missing, what is unknown and what has another shape.
    """
    wrong = []
    for name, tensor in given.items():
        wanted = expected.get(name)
        if wanted is None:
            continue
        if tensor.shape != wanted.shape:
            wrong.append(f"{name} is {tuple(tensor.shape)} instead of {tuple(wanted.shape)}")
        elif tensor.is_floating_point() != wanted.is_floating_point():
            wrong.append(f"{name} holds {tensor.dtype} instead of {wanted.dtype}")
    faults = {
        "missing": [name for name in expected if name not in given and name not in dropped],
        "unknown": [name for name in given if name not in expected and name not in dropped],
        "of another shape": wrong,
    }
    if any(faults.values()):
        said = "; ".join(
            f"{what}: {some(names, quote='')}" for what, names in faults.items() if names
        )
        raise UserError(f"these weights do not fit the model ({owner} names); {said}")


def count_blocks(state: State, prefix: str) -> int:
    """How many blocks `prefix0`, `prefix1`, … there are.

    Raises:
        UserError: if their numbers have gaps, or there are none.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(\d{{1,9}})\.")
    found = {int(match[1]) for name in state if (match := pattern.match(name))}
    if not found or found != set(range(len(found))):
        numbers = some(map(str, sorted(found)), quote="")
        raise UserError(
            f"these weights have the blocks {numbers}; they have to be numbered from 0 without gaps"
        )
    return len(found)


def check_finite(state: State) -> None:
    """Refuse weights that are not numbers.

    Raises:
        UserError: naming the tensors that contain NaN or infinity.
    """
    broken = [
        name
        for name, tensor in state.items()
        if tensor.is_floating_point() and not torch.isfinite(tensor).all()
    ]
    if broken:
        raise UserError(f"these weights contain NaN or infinity, in {some(broken, quote='')}")
