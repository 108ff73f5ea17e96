"""Images in: datasets, subsets, decoding, augmentation, and loaders that resume exactly."""

from locality.data.batches import Batch
from locality.data.catalog import open_data
from locality.data.config import DATASETS, AugmentConfig, DataConfig
from locality.data.keyed import Stream, keys, preserved_generators, seed_generators
from locality.data.loader import BatchLoader, eval_loader, train_loader
from locality.data.sources import ArraySource, BadImage, DataSplits, ImageSource
from locality.data.transforms import eval_transform, train_transform

__all__ = [
    "DATASETS",
    "ArraySource",
    "AugmentConfig",
    "BadImage",
    "Batch",
    "BatchLoader",
    "DataConfig",
    "DataSplits",
    "ImageSource",
    "Stream",
    "eval_loader",
    "eval_transform",
    "keys",
    "open_data",
    "preserved_generators",
    "seed_generators",
    "train_loader",
    "train_transform",
]
