"""Convolutional vision transformers in PyTorch: ConViT, CvT and the DeiT baseline.

    >>> import locality
    >>> model = locality.create_model("convit_tiny", num_classes=10)

`create_model` builds the models of `list_models`; `save` and `load` store them; `train` trains, and
`fit` trains on a folder of images.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from locality.checkpoints import create_model as create_model
    from locality.checkpoints import load as load
    from locality.checkpoints import save as save
    from locality.commands.train import fit as fit
    from locality.models import list_models as list_models
    from locality.trained import TrainedRun as TrainedRun
    from locality.training import train as train

__version__ = "0.3.0"


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


__all__, __getattr__ = lazily(__name__, __file__)
__all__ += ["__version__"]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
