"""Images in: datasets, subsets, decoding, augmentation, and loaders that resume exactly."""

from locality.data.batches import Batch
from locality.data.catalog import open_data
from locality.data.check import CheckReport, check
from locality.data.config import DATASETS, AugmentConfig, DataConfig, Decoding
from locality.data.decode import decode
from locality.data.imagenet import is_right
from locality.data.keyed import Stream, keys, preserved_generators, seed_generators
from locality.data.loader import BatchLoader, eval_loader, train_loader
from locality.data.pack import pack
from locality.data.sources import ArraySource, BadImage, DataSplits, ImageSource
from locality.data.transforms import eval_transform, normalise, train_transform

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
    "ImageSource",
    "Stream",
    "check",
    "decode",
    "eval_loader",
    "eval_transform",
    "is_right",
    "keys",
    "normalise",
    "open_data",
    "pack",
    "preserved_generators",
    "seed_generators",
    "train_loader",
    "train_transform",
]
