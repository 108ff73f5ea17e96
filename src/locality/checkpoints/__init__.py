"""Weights: everyone's layouts, our own format, public weights by name, opening and export."""

from locality.checkpoints.adapt import create_model, load_into, load_weights
from locality.checkpoints.conversion import Conversion, convert
from locality.checkpoints.exporting import export
from locality.checkpoints.format import Checkpoint, save
from locality.checkpoints.hub import TrainedModel
from locality.checkpoints.layouts import LAYOUTS, Layout, recognise
from locality.checkpoints.open import Classifier, load, open_model, open_weights
from locality.checkpoints.sources import SOURCES, Source, list_pretrained, source
from locality.data.config import Preprocessing

__all__ = [
    "LAYOUTS",
    "SOURCES",
    "Checkpoint",
    "Classifier",
    "Conversion",
    "Layout",
    "Preprocessing",
    "Source",
    "TrainedModel",
    "convert",
    "create_model",
    "export",
    "list_pretrained",
    "load",
    "load_into",
    "load_weights",
    "open_model",
    "open_weights",
    "recognise",
    "save",
    "source",
]
