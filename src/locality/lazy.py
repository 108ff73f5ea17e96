"""Packages whose names are imported on first use, so that asking for one does not load the rest."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any


def lazily(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """A package's `__all__`, and the `__getattr__` (PEP 562) that imports what is in it.

    The names are those that the package imports for type checkers, so that they are listed once.

    Args:
        package: its `__name__`.
        file: its `__file__`, with `from MODULE import NAME as NAME` for each name below
            `if TYPE_CHECKING:`. A module must not have the name of something it gives: once it is
            imported, Python puts the module itself in that place.

    Example:
        >>> __all__, __getattr__ = lazily(__name__, __file__)
    """
    with open(file, encoding="utf-8") as source:
        # Over several lines where the names are long.
        found = re.findall(r"^ +from (\S+) import \(?\s*(\w+) as", source.read(), re.MULTILINE)
    home = {name: module for module, name in found}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(home[name]), name)

    return list(home), load
