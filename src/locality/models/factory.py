"""Build models by name: this library's, or timm's ("timm/NAME") with the same interface."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.models import PretrainedCfg, get_pretrained_cfg, group_parameters
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from locality import checks
from locality.errors import UnknownSetting, UserError, unknown, wrap_errors
from locality.layers.grid import Grid
from locality.models.base import ImageClassifier
from locality.models.config import Architecture, CvTConfig, ViTConfig, to_2tuple, weight_signature
from locality.models.convit import VisionTransformer
from locality.models.cvt import ConvolutionalVisionTransformer
from locality.models.initialisations import INITIALISATIONS
from locality.models.variants import PREFIX, VARIANTS, variant
from locality.settings import check, differences, setting, with_role

Scalar = str | bool | int | float | None


@dataclass(frozen=True)
class TimmConfig:
    """A timm model.

    Attributes:
        name: timm's name of the model.
        num_classes, in_chans: classes of the classifier, channels of the images.
        img_size: image size, a number or (height, width); used by models with a fixed input size.
        settings: other arguments of timm's model function, as (name, value).
    """

    name: str
    num_classes: checks.Natural = setting(1000, "interface")
    in_chans: checks.Natural = setting(3, "interface")
    img_size: checks.ImageSize = setting(224, "interface")
    settings: tuple[tuple[str, Scalar], ...] = ()

    has_class_token = False  # in the features of the wrapped model
    family = "timm"
    title = "a timm model"

    REMOVED = (("gpsa", ""), ("locality_strength", 7.0), ("gating_init", 1.0))

    def __post_init__(self) -> None:
        if not timm.is_model(self.name):
            raise unknown("model", PREFIX + self.name, [PREFIX + n for n in timm.list_models()])
        check(self)
        for name, value in self.settings:
            # A checkpoint could otherwise ask for any number of blocks.
            if isinstance(value, int) and not isinstance(value, bool):
                checks.integer(name, value, 0, 512 if name == "depth" else 32_768)

    @property
    def classifiers(self) -> tuple[str, ...]:
        """Names of the classifiers: distilled models have two."""
        names = _pretrained_cfg(self.name).classifier or ()
        return tuple(f"model.{name}" for name in ([names] if isinstance(names, str) else names))

    @property
    def stem(self) -> str:
        """Name of the first convolution, of several the first; "model." if timm names none."""
        names = _pretrained_cfg(self.name).first_conv or ("",)
        return f"model.{names if isinstance(names, str) else names[0]}"

    def embeddings(self) -> dict[str, Grid]:
        """Empty: position embeddings of timm models are not resampled."""
        return {}

    def weight_signature(self) -> dict[str, Any]:
        """As `Architecture.weight_signature`."""
        return weight_signature(self)

    def data_config(self) -> dict[str, Any]:
        """timm's data configuration of the model: input size, mean, std, interpolation, crop."""
        return timm.data.resolve_data_config(pretrained_cfg=_pretrained_cfg(self.name).to_dict())

    @classmethod
    def named(cls, name: str) -> TimmConfig:
        """timm's default configuration of the model "timm/NAME".

        Raises:
            UserError: if timm has no model of this name.
        """
        name = name.removeprefix(PREFIX)
        cfg = _pretrained_cfg(name)
        return cls(name, num_classes=cfg.num_classes, img_size=cfg.input_size[1:])

    def with_overrides(self, **fields: Any) -> TimmConfig:
        """This configuration with some settings changed; unknown ones are passed to timm.

        Raises:
            UserError: for an invalid value, or one passed to timm that is not a `Scalar`.
        """
        known = {field.name for field in dataclasses.fields(self)} - {"name", "settings"}
        own = {name: fields.pop(name) for name in known if name in fields}
        for name, value in fields.items():
            checks.typed(name, value, Scalar)
        settings = tuple(sorted((dict(self.settings) | fields).items()))
        return dataclasses.replace(self, settings=settings, **own)


def _pretrained_cfg(name: str) -> PretrainedCfg:
    return get_pretrained_cfg(name) or PretrainedCfg()


def published(name: str) -> tuple[TimmConfig, dict[str, Tensor]]:
    """timm's published weights of "timm/NAME": configuration and state dict.

    Raises:
        UserError: if timm has no model of this name, or its weights cannot be loaded.
    """
    config = TimmConfig.named(name)
    missing = (
        f"timm's weights of {name} could not be loaded; pass a file of a state dict instead, with "
        f"--variant {name} (variant= in Python)"
    )
    with wrap_errors(missing, OSError, RuntimeError), offline_unless_reachable():
        model = timm.create_model(config.name, pretrained=True)
    return config, {f"model.{key}": tensor for key, tensor in model.state_dict().items()}


class TimmModel(ImageClassifier):
    """A timm model.

    Raises:
        UserError: if timm cannot build it with these settings.
    """

    def __init__(self, config: TimmConfig) -> None:
        super().__init__(config, 0)
        settings: dict[str, Any] = dict(config.settings)
        if _pretrained_cfg(config.name).fixed_input_size:
            settings |= {"img_size": config.img_size}
        try:
            self.model: Any = timm.create_model(
                config.name, num_classes=config.num_classes, in_chans=config.in_chans, **settings
            )
        except TypeError as error:
            raise UnknownSetting(f"{PREFIX}{config.name}: {error}") from error
        except (AssertionError, LookupError, RuntimeError, ValueError) as error:
            raise UserError(f"{PREFIX}{config.name} cannot be built: {error}") from error
        width: Any = self.model.num_features
        self.num_features = self.embed_dim = self.head_hidden_size = width

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, num_classes)."""
        return self.model(x)

    faster = forward

    def forward_features(self, x: Tensor, maps: list[Tensor] | None = None) -> Tensor:
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
            UserError: for another pooling than the model's.
        """
        inner = getattr(self.model, "head", None)
        own = getattr(self.model, "global_pool", getattr(inner, "global_pool", None))
        if global_pool not in (None, getattr(own, "pool_type", own)):
            raise UserError(
                f"the pooling of {PREFIX}{self.config.name} cannot be reset; build it with "
                f"global_pool={global_pool!r}"
            )
        self.model.reset_classifier(num_classes)
        self.num_classes = num_classes
        self.config = dataclasses.replace(self.config, num_classes=num_classes)

    def no_weight_decay(self) -> set[str]:
        spared: set[str] = getattr(self.model, "no_weight_decay", set)()
        return {f"model.{name}" for name in spared}

    def layer_ids(self) -> dict[str, int]:
        if not hasattr(self.model, "group_matcher"):
            raise UserError(
                f"{PREFIX}{self.config.name} does not number its layers, so rates cannot decay by "
                f"layer; give --optim.layer_decay 1"
            )
        numbers = group_parameters(self.model, self.model.group_matcher(), reverse=True)
        return {f"model.{name}": number for name, number in numbers.items()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        try:
            self.model.set_grad_checkpointing(enable)
        except (AssertionError, AttributeError) as error:
            raise UserError(f"{PREFIX}{self.config.name} has no gradient checkpointing") from error


MODELS: dict[Any, Any] = {
    ViTConfig: VisionTransformer,
    CvTConfig: ConvolutionalVisionTransformer,
    TimmConfig: TimmModel,
}
"""Model classes by the configuration class of their family."""


def named(name: str, fields: dict[str, Any]) -> Any:
    """The configuration of a model by name, one of `VARIANTS` or "timm/NAME", with overrides.

    Raises:
        UserError: for an unknown name or field (suggesting the nearest), or a value out of range.
    """
    if name not in VARIANTS and timm.is_model(name):
        raise UserError(f"unknown model '{name}'; for timm's model, use '{PREFIX}{name}'")
    own = TimmConfig.named(name) if name.startswith(PREFIX) else variant(name).config
    return own.with_overrides(**fields)


def describe(config: Any, name: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name and fields with which `named` reproduces a configuration, except its interface.

    Args:
        config: configuration of any family.
        name: the model it was made from; by default the one that differs least.
    """
    interface = with_role(type(config), "interface")

    def differing(other: Any) -> dict[str, Any]:
        return {n: value for n, _, value in differences(other, config) if n not in interface}

    if isinstance(config, TimmConfig):
        fields = differing(TimmConfig.named(config.name))
        return PREFIX + config.name, fields | dict(fields.pop("settings", ()))
    rows = VARIANTS if name not in VARIANTS else [name]
    alike = {
        n: differing(VARIANTS[n].config) for n in rows if type(VARIANTS[n].config) is type(config)
    }
    nearest = min(alike, key=lambda n: len(alike[n]))
    return nearest, alike[nearest]


def build(model: str | Architecture | TimmConfig, **overrides: Any) -> ImageClassifier:
    """Build a model with random weights from torch's default generator.

    Args:
        model: one of `list_models()`, "timm/NAME", or a configuration.
        overrides: fields of the configuration (`ViTConfig`, `CvTConfig`) to change, for example
            `num_classes`, `in_chans` or `img_size`; None keeps the default.

    Raises:
        UserError: for an unknown name or field (suggesting the nearest), or a value out of range.
    """
    fields = {name: value for name, value in overrides.items() if value is not None}
    if isinstance(model, str):
        built = build(named(model, fields))
        built.variant = model
        return built
    if type(model) not in MODELS:
        raise UserError(f"a model is built from a name or a configuration, not from {model!r}")
    made = MODELS[type(model)](model.with_overrides(**fields))
    start = INITIALISATIONS.get(getattr(made.config, "init", ""))
    if start is not None and not next(made.parameters()).is_meta:
        start(made)
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
        on_meta = next(model.parameters()).is_meta
        counted = model if on_meta else build(model.config)
        images = torch.zeros(1, model.in_chans, *size)
    wrong = f"{model.variant} cannot take images of {size[0]}×{size[1]} pixels"
    counter = FlopCounterMode(display=False)
    # The math backend consists of counted products; fused ones are opaque to the counter.
    training = counted.training
    counted.eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter, wrap_errors(wrong, RuntimeError):
        counted.forward_head(counted.forward_features(images))
    counted.train(training)
    return counter.get_total_flops() // 2


_TIMEOUT = 3  # seconds


@contextlib.contextmanager
def offline_unless_reachable() -> Iterator[None]:
    """Within the block, use only the Hugging Face cache unless the hub responds within 3 seconds.

    The hub's client retries for half a minute.
    """
    from huggingface_hub import constants, utils

    offline = constants.HF_HUB_OFFLINE
    try:
        utils.get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # its type depends on the client's HTTP library
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
