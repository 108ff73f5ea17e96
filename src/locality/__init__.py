"""Convolutional vision transformers in PyTorch: ConViT, CvT and the DeiT baseline.

    >>> import locality
    >>> model = locality.create_model("convit_tiny", num_classes=10)

`create_model` builds the models of `list_models`; `save` and `load` store them; `train` trains, and
`fit` trains on a folder of images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality.lazy import lazily

if TYPE_CHECKING:
    from locality.checkpoints import create_model as create_model
    from locality.checkpoints import load as load
    from locality.checkpoints import save as save
    from locality.commands.train import fit as fit
    from locality.models import list_models as list_models
    from locality.trained import TrainedRun as TrainedRun
    from locality.training import train as train

__version__ = "0.3.0"

__all__, __getattr__ = lazily(__name__, __file__)
__all__ += ["__version__"]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
