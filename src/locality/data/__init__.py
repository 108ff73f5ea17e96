"""Datasets, subsets, decoding, augmentation, and loaders that resume at any step.

Names are imported when they are first used, so that the configurations alone load without torch.
"""

from typing import TYPE_CHECKING

from locality import lazily

if TYPE_CHECKING:
    from locality.data.checking import CheckReport as CheckReport
    from locality.data.checking import check as check
    from locality.data.config import AugmentConfig as AugmentConfig
    from locality.data.config import DataConfig as DataConfig
    from locality.data.config import Decoding as Decoding
    from locality.data.config import Preprocessing as Preprocessing
    from locality.data.crops import write_crops as write_crops
    from locality.data.datasets import open_data as open_data
    from locality.data.decoding import BadImage as BadImage
    from locality.data.loader import Batch as Batch
    from locality.data.loader import BatchLoader as BatchLoader
    from locality.data.loader import eval_loader as eval_loader
    from locality.data.loader import train_loader as train_loader
    from locality.data.sources import ArraySource as ArraySource
    from locality.data.sources import DataSplits as DataSplits
    from locality.data.sources import ImageSource as ImageSource

__all__, __getattr__ = lazily(__name__, __file__)
