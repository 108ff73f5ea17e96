"""Instruments: what the layers of a model attend to, observed in its ordinary forward pass."""

from locality.analysis.recording import record
from locality.analysis.summary import measure_model, released_nonlocality
from locality.analysis.taps import LayerView, capture

__all__ = ["LayerView", "capture", "measure_model", "record", "released_nonlocality"]
