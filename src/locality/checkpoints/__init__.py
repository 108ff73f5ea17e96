"""Loading, converting, saving and exporting weights; public weights by name.

Names are imported on first use, so that public weights can be listed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality.lazy import lazily

if TYPE_CHECKING:
    from locality.checkpoints.adaptation import load_weights as load_weights
    from locality.checkpoints.api import Classifier as Classifier
    from locality.checkpoints.api import create_model as create_model
    from locality.checkpoints.api import load as load
    from locality.checkpoints.api import open_model as open_model
    from locality.checkpoints.exporting import convert as convert
    from locality.checkpoints.foreign import KEY_MAPS as KEY_MAPS
    from locality.checkpoints.foreign import detect_key_map as detect_key_map
    from locality.checkpoints.format import Checkpoint as Checkpoint
    from locality.checkpoints.format import save as save
    from locality.checkpoints.key_map import KeyMap as KeyMap
    from locality.checkpoints.onnx import export as export
    from locality.checkpoints.registry import SOURCES as SOURCES
    from locality.checkpoints.registry import Source as Source
    from locality.checkpoints.registry import source as source
    from locality.checkpoints.resolve import read as read
    from locality.data.config import Preprocessing as Preprocessing

__all__, __getattr__ = lazily(__name__, __file__)
