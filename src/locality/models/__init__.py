"""The models: DeiT, ConViT and CvT under one surface."""

from locality.models.base import ImageClassifier
from locality.models.cvt import ConvolutionalVisionTransformer, CvTConfig, StageConfig
from locality.models.factory import (
    build,
    configure,
    count_parameters,
    create_model,
    list_models,
    variant,
)
from locality.models.flops import count_macs
from locality.models.search_space import Cost, SearchSpace, cost
from locality.models.variants import VARIANTS, Variant
from locality.models.vit import VisionTransformer, ViTConfig

__all__ = [
    "VARIANTS",
    "ConvolutionalVisionTransformer",
    "Cost",
    "CvTConfig",
    "ImageClassifier",
    "SearchSpace",
    "StageConfig",
    "Variant",
    "ViTConfig",
    "VisionTransformer",
    "build",
    "configure",
    "cost",
    "count_macs",
    "count_parameters",
    "create_model",
    "list_models",
    "variant",
]
