"""Convolutional vision transformers in PyTorch: ConViT, CvT and the DeiT baseline.

    >>> import locality
    >>> model = locality.create_model("convit_tiny", num_classes=10)

`create_model` and `list_models` make models, `save` and `load` keep them, `train` fits them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality._version import __version__
from locality.lazy import lazily

if TYPE_CHECKING:
    from locality.checkpoints import create_model, load, save
    from locality.models import list_models
    from locality.training import train

__all__ = ["__version__", "create_model", "list_models", "load", "save", "train"]

__getattr__ = lazily(
    __name__,
    {
        "locality.checkpoints": "create_model load save",
        "locality.models": "list_models",
        "locality.training": "train",
    },
)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
