"""The models: DeiT, ConViT and CvT with one interface.

Names are imported on first use, so that the table and the configurations load without torch.
"""

from typing import TYPE_CHECKING

from locality import lazily

if TYPE_CHECKING:
    from locality.models.base import ImageClassifier as ImageClassifier
    from locality.models.config import Architecture as Architecture
    from locality.models.config import CvTConfig as CvTConfig
    from locality.models.config import TimmConfig as TimmConfig
    from locality.models.config import ViTConfig as ViTConfig
    from locality.models.convit import GatedPositionalSelfAttention as GatedPositionalSelfAttention
    from locality.models.convit import PositionalSelfAttention as PositionalSelfAttention
    from locality.models.convit import SelfAttention as SelfAttention
    from locality.models.convit import VisionTransformer as VisionTransformer
    from locality.models.cvt import ConvolutionalAttention as ConvolutionalAttention
    from locality.models.cvt import ConvolutionalVisionTransformer as ConvolutionalVisionTransformer
    from locality.models.factory import build as build
    from locality.models.factory import count_macs as count_macs
    from locality.models.factory import count_parameters as count_parameters
    from locality.models.variants import VARIANTS as VARIANTS
    from locality.models.variants import Variant as Variant
    from locality.models.variants import list_models as list_models
    from locality.models.variants import variant as variant

__all__, __getattr__ = lazily(__name__, __file__)
