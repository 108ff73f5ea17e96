"""Packages whose names are imported on first use, so that asking for one does not load the rest."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """A package's `__getattr__` and `__all__` (PEP 562).

    Args:
        package: its `__name__`.
        homes: module → the names it gives, separated by spaces. Modules are relative to the
            package if they begin with a dot.

    Example:
        >>> __getattr__, __all__ = lazily(__name__, {".config": "DataConfig", ".loader": "loader"})
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(home[name], package), name)

    return load, sorted(home)
