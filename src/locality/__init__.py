"""Convolutional vision transformers in PyTorch: ConViT, CvT and the DeiT baseline.

    >>> import locality
    >>> model = locality.create_model("convit_tiny", num_classes=10)

`create_model` and `list_models` make models, `save` and `load` keep them, `train` fits them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from locality._version import __version__

if TYPE_CHECKING:
    from locality.checkpoints import create_model, load, save
    from locality.models import list_models

__all__ = ["__version__", "create_model", "list_models", "load", "save"]

_ROOMS = {
    "create_model": "locality.checkpoints",
    "list_models": "locality.models",
    "load": "locality.checkpoints",
    "save": "locality.checkpoints",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the command line answers before torch has loaded.
    if name in _ROOMS:
        return getattr(importlib.import_module(_ROOMS[name]), name)
    raise AttributeError(f"module 'locality' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
