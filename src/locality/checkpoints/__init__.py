"""Loading, converting, saving and exporting weights; public weights by name.

Names are imported on first use, so that public weights can be listed without torch.
"""

from typing import TYPE_CHECKING

from locality import lazily

if TYPE_CHECKING:
    from locality.checkpoints.api import Classifier as Classifier
    from locality.checkpoints.api import create_model as create_model
    from locality.checkpoints.api import load as load
    from locality.checkpoints.api import open_model as open_model
    from locality.checkpoints.formats import KEY_MAPS as KEY_MAPS
    from locality.checkpoints.formats import KeyMap as KeyMap
    from locality.checkpoints.loading import convert as convert
    from locality.checkpoints.loading import load_weights as load_weights
    from locality.checkpoints.loading import read as read
    from locality.checkpoints.native import Checkpoint as Checkpoint
    from locality.checkpoints.native import save as save
    from locality.checkpoints.onnx import export as export
    from locality.checkpoints.registry import SOURCES as SOURCES
    from locality.checkpoints.registry import Source as Source
    from locality.checkpoints.registry import source as source
    from locality.data.config import Preprocessing as Preprocessing

__all__, __getattr__ = lazily(__name__, __file__)
