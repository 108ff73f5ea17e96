"""Build models by name: this library's, or timm's ("timm/NAME") with the same interface."""

import dataclasses
from typing import Any

import timm
import torch
from timm.models import group_parameters
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from locality.errors import UnknownSetting, UserError, wrap_errors
from locality.layers.block import eval_mode, switched
from locality.models.base import ImageClassifier
from locality.models.config import Architecture, CvTConfig, TimmConfig, ViTConfig, to_2tuple
from locality.models.convit import VisionTransformer
from locality.models.cvt import ConvolutionalVisionTransformer
from locality.models.variants import named


class TimmModel(ImageClassifier):
    """A timm model.

    Raises:
        UserError: if timm cannot build it with these settings.
    """

    def __init__(self, config: TimmConfig) -> None:
        try:
            model: Any = timm.create_model(config.timm_name, **config.arguments)
        except TypeError as error:
            raise UnknownSetting(f"{config.name}: {error}") from error
        except (AssertionError, LookupError, RuntimeError, ValueError) as error:
            raise UserError(f"{config.name} cannot be built: {error}") from error
        super().__init__(config, model.num_features)
        self.head_hidden_size = getattr(model, "head_hidden_size", model.num_features)
        self.num_prefix_tokens = getattr(model, "num_prefix_tokens", 0)
        # Convolutions take 0.5 to 0.8 of their time on a CPU; other layers the same.
        self.model = model.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, num_classes)."""
        return self.model(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → timm's features, a map or tokens."""
        return self.model.forward_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features → logits, or the classifier's input if `pre_logits`."""
        return self.model.forward_head(x, pre_logits=pre_logits)

    def forward_intermediates(self, x: Tensor, *arguments: Any, **choices: Any) -> Any:
        """As in timm."""
        return self.model.forward_intermediates(x, *arguments, **choices)

    def prune_intermediate_layers(self, *arguments: Any, **choices: Any) -> Any:
        """As in timm."""
        return self.model.prune_intermediate_layers(*arguments, **choices)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return list(self.model.feature_info)

    @property
    def patch_embed(self) -> Any:
        """The timm model's patch embedding, if any."""
        return self.model.patch_embed

    def get_classifier(self) -> nn.Module:
        return self.model.get_classifier()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """As in timm, which may build other layers for another pooling: it is set when building.

        Raises:
            UserError: for a pooling.
        """
        if global_pool is not None:
            raise UserError(f"the pooling of {self.config.name} is set when it is built")
        self.model.reset_classifier(num_classes)
        self.num_classes = num_classes
        self.forget_classifier()
        self.config = dataclasses.replace(self.config, num_classes=num_classes)

    def no_weight_decay(self) -> set[str]:
        spared: set[str] = getattr(self.model, "no_weight_decay", set)()
        return {f"model.{name}" for name in spared}

    def layer_ids(self) -> dict[str, int]:
        if not hasattr(self.model, "group_matcher"):
            raise UserError(
                f"{self.config.name} does not number its layers, so rates cannot decay by "
                f"layer; give --optim.layer_decay 1"
            )
        numbers = group_parameters(self.model, self.model.group_matcher(), reverse=True)
        return {f"model.{name}": number for name, number in numbers.items()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        try:
            self.model.set_grad_checkpointing(enable)
        except (AssertionError, AttributeError) as error:
            raise UserError(f"{self.config.name} has no gradient checkpointing") from error


MODELS: dict[Any, Any] = {
    ViTConfig: VisionTransformer,
    CvTConfig: ConvolutionalVisionTransformer,
    TimmConfig: TimmModel,
}
"""Model classes by the configuration class of their family."""


def build(model: str | Architecture | TimmConfig, **overrides: Any) -> ImageClassifier:
    """Build a model with random weights from torch's default generator.

    Args:
        model: one of `list_models()`, "timm/NAME", or a configuration.
        overrides: fields of the configuration (`ViTConfig`, `CvTConfig`) to change, for example
            `num_classes`, `in_chans` or `img_size`; None keeps the default.

    Raises:
        UserError: for an unknown name or field (suggesting the nearest), or a value out of range.
    """
    config = named(model) if isinstance(model, str) else model
    if type(config) not in MODELS:
        raise UserError(f"a model is built from a name or a configuration, not from {model!r}")
    made = MODELS[type(config)](config.with_overrides(**overrides))
    made.variant = model if isinstance(model, str) else None
    return made


def count_parameters(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: ImageClassifier, img_size: int | tuple[int, int] | None = None) -> int:
    """Multiply-accumulates of one image's forward pass, including attention's matrix products.

    Counted on the meta device, without memory or arithmetic. As in the papers' "FLOPs", only matrix
    products and convolutions count (not norms, softmax or activations), and all tokens of the last
    block do, though `forward` may compute only one.

    Args:
        model: the model.
        img_size: pixels, a number or (height, width); the native size unless given.
    """
    size = model.img_size if img_size is None else to_2tuple(img_size)
    with torch.device("meta"):
        counted = model if next(model.parameters()).is_meta else build(model.config)
        images = torch.zeros(1, model.in_chans, *size)
    wrong = f"{model.variant} cannot take images of {size[0]}×{size[1]} pixels"
    counter = FlopCounterMode(display=False)
    evaluated, plain = eval_mode(counted), switched(counted, shortcuts=False)
    with evaluated, plain, counter, wrap_errors(wrong, RuntimeError, AssertionError):
        counted.forward_head(counted.forward_features(images))
    return counter.get_total_flops() // 2
