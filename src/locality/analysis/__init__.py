"""Instruments: what the layers of a model attend to, observed in its ordinary forward pass."""

from locality.analysis.explorer import write_explorer
from locality.analysis.masks import content_off, position_embedding_off, position_off
from locality.analysis.recording import OverTraining, record
from locality.analysis.summary import measure_model, released_nonlocality
from locality.analysis.taps import LayerView, capture

__all__ = [
    "LayerView",
    "OverTraining",
    "capture",
    "content_off",
    "measure_model",
    "position_embedding_off",
    "position_off",
    "record",
    "released_nonlocality",
    "write_explorer",
]
