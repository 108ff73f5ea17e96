"""Packages whose names are imported on first use, so that asking for one does not load the rest."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562).

    Args:
        package: its `__name__`.
        homes: module, relative to the package if it begins with a dot → the names it gives,
            separated by spaces. A module must not have the name of something it gives: once it is
            imported, Python puts the module itself in that place.

    Example:
        >>> __getattr__ = lazily(__name__, {".config": "DataConfig AugmentConfig"})
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(home[name], package), name)

    return load
