"""Convolutional vision transformers in PyTorch: ConViT, CvT and the DeiT baseline.

    >>> import locality
    >>> model = locality.create_model("convit_tiny", num_classes=10)

`create_model` builds the models of `list_models`; `save` and `load` store them; `train` trains, and
`fit` trains on a folder of images; both end in a `Run`. `open` gives images → probabilities.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from locality.checkpoints import Classifier as Classifier
    from locality.checkpoints import create_model as create_model
    from locality.checkpoints import load as load
    from locality.checkpoints import open_model as open  # noqa: F401 (a public name)
    from locality.checkpoints import save as save
    from locality.commands.train import fit as fit
    from locality.models import list_models as list_models
    from locality.pages import Page as Page
    from locality.pages import explore_run as explore_run
    from locality.pages import report_run as report_run
    from locality.pages import show_run as show_run
    from locality.runs import Run as Run
    from locality.training import RunConfig as RunConfig
    from locality.training import evaluate_run as evaluate_run
    from locality.training import recipe as recipe
    from locality.training import train as train

__version__ = "0.3.0"


def lazily(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """A package's `__all__`, and a `__getattr__` (PEP 562) that imports its names on first use.

    The names are those that the package imports for type checkers.

    Args:
        package: its `__name__`.
        file: its `__file__`, with `from MODULE import NAME as ALIAS` for each name below
            `if TYPE_CHECKING:`. No submodule may have the same name as one of them: importing it
            would replace the name by the module.

    Example:
        >>> __all__, __getattr__ = lazily(__name__, __file__)
    """
    # Long imports span several lines.
    form, source = r"^ +from (\S+) import \(?\s*(\w+) as (\w+)", Path(file).read_text("utf-8")
    home = {alias: (module, name) for module, name, alias in re.findall(form, source, re.MULTILINE)}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module, own = home[name]
        return getattr(importlib.import_module(module), own)

    return list(home), load


__all__, __getattr__ = lazily(__name__, __file__)
__all__ += ["__version__"]
_NAMES = sorted(__all__)
__all__.remove("open")  # `from locality import *` keeps Python's


def __dir__() -> list[str]:
    return _NAMES
