"""Images in: datasets, subsets, decoding, augmentation, and loaders that resume exactly.

Names are imported when they are first used, so that the configurations alone load without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality.lazy import lazily

if TYPE_CHECKING:
    from locality.data.arrow import pack
    from locality.data.checking import CheckReport, ImageRecord, check, verify
    from locality.data.config import DATASETS, AugmentConfig, DataConfig, Decoding, Preprocessing
    from locality.data.datasets import open_data
    from locality.data.decoding import decode
    from locality.data.loader import Batch, BatchLoader, eval_loader, train_loader
    from locality.data.preprocessing import eval_transform, normalise, train_transform
    from locality.data.sampling import Stream, keys, preserved_generators, seed_generators
    from locality.data.sources import ArraySource, BadImage, DataSplits, ImageSource

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
        ".datasets": "open_data",
        ".checking": "CheckReport ImageRecord check verify",
        ".config": "DATASETS AugmentConfig DataConfig Decoding Preprocessing",
        ".decoding": "decode",
        ".sampling": "Stream keys preserved_generators seed_generators",
        ".loader": "Batch BatchLoader eval_loader train_loader",
        ".arrow": "pack",
        ".preprocessing": "eval_transform normalise train_transform",
        ".sources": "ArraySource BadImage DataSplits ImageSource",
    },
)
