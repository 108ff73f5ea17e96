"""Lazy imports of a package's names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any


def lazily(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """A package's `__all__`, and a `__getattr__` (PEP 562) that imports its names on first use.

    The names are those that the package imports for type checkers.

    Args:
        package: its `__name__`.
        file: its `__file__`, with `from MODULE import NAME as NAME` for each name below
            `if TYPE_CHECKING:`. No submodule may have the same name as one of them: importing it
            would replace the name by the module.

    Example:
        >>> __all__, __getattr__ = lazily(__name__, __file__)
    """
    with open(file, encoding="utf-8") as source:
        # Long imports span several lines.
        found = re.findall(r"^ +from (\S+) import \(?\s*(\w+) as", source.read(), re.MULTILINE)
    home = {name: module for module, name in found}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(home[name]), name)

    return list(home), load
