"""Images in: datasets, subsets, decoding, augmentation, and loaders that resume exactly.

Names are imported when they are first used, so that the configurations alone load without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality.lazy import lazily

if TYPE_CHECKING:
    from locality.data.batches import Batch
    from locality.data.catalog import open_data
    from locality.data.checking import CheckReport, check
    from locality.data.config import DATASETS, AugmentConfig, DataConfig, Decoding, Preprocessing
    from locality.data.decoding import decode
    from locality.data.keyed import Stream, keys, preserved_generators, seed_generators
    from locality.data.loader import BatchLoader, eval_loader, train_loader
    from locality.data.packing import pack
    from locality.data.preprocessing import eval_transform, normalise, train_transform
    from locality.data.sources import ArraySource, BadImage, DataSplits, ImageSource
    from locality.data.verifying import ImageRecord, verify

__all__ = [
    "DATASETS",
    "ArraySource",
    "AugmentConfig",
    "BadImage",
    "Batch",
    "BatchLoader",
    "CheckReport",
    "DataConfig",
    "DataSplits",
    "Decoding",
    "ImageRecord",
    "ImageSource",
    "Preprocessing",
    "Stream",
    "check",
    "decode",
    "eval_loader",
    "eval_transform",
    "keys",
    "normalise",
    "open_data",
    "pack",
    "preserved_generators",
    "seed_generators",
    "train_loader",
    "train_transform",
    "verify",
]

__getattr__ = lazily(
    __name__,
    {
        ".batches": "Batch",
        ".catalog": "open_data",
        ".checking": "CheckReport check",
        ".config": "DATASETS AugmentConfig DataConfig Decoding Preprocessing",
        ".decoding": "decode",
        ".keyed": "Stream keys preserved_generators seed_generators",
        ".loader": "BatchLoader eval_loader train_loader",
        ".packing": "pack",
        ".preprocessing": "eval_transform normalise train_transform",
        ".sources": "ArraySource BadImage DataSplits ImageSource",
        ".verifying": "ImageRecord verify",
    },
)
