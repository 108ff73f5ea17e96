"""The models: DeiT, ConViT and CvT under one surface."""

from locality.models.base import Architecture as Architecture
from locality.models.base import ImageClassifier as ImageClassifier
from locality.models.cvt import ConvolutionalVisionTransformer as ConvolutionalVisionTransformer
from locality.models.cvt_config import CvTConfig as CvTConfig
from locality.models.cvt_config import StageConfig as StageConfig
from locality.models.factory import build as build
from locality.models.factory import count_macs as count_macs
from locality.models.factory import count_parameters as count_parameters
from locality.models.factory import list_models as list_models
from locality.models.factory import variant as variant
from locality.models.variants import VARIANTS as VARIANTS
from locality.models.variants import Variant as Variant
from locality.models.vit import VisionTransformer as VisionTransformer
from locality.models.vit import ViTConfig as ViTConfig
