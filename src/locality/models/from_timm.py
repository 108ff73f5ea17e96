"""timm's models under the surface of ours: named "timm/NAME" wherever a model is named."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import timm
from timm.models import get_pretrained_cfg, group_parameters
from torch import Tensor, nn

from locality import checks
from locality.errors import UnknownSetting, UserError, saying, unknown
from locality.layers.grid import Grid
from locality.machine import hub_asked_once
from locality.models.architecture import meaning
from locality.models.base import ImageClassifier
from locality.models.transform import GATING, STRENGTH, put_attention
from locality.models.variants import PREFIX

Plain = str | bool | int | float | None


@dataclass(frozen=True)
class TimmConfig:
    """One of timm's models.

    Attributes:
        name: as timm calls it.
        num_classes, in_chans: of the classifier and of the images.
        img_size: (height, width) of the images; only models of a fixed size are built for it.
        gpsa: the convolutions that gated attention replaces, as `transform` takes them; "" none.
        locality_strength, gating_init: what α and λ these layers start with.
        settings: other arguments of timm's function for the model, as (name, value).
    """

    name: str
    num_classes: int = checks.bounded(1000, 0)
    in_chans: int = checks.bounded(3, 0)
    img_size: int | tuple[int, int] = checks.bounded(224, 1)
    gpsa: str | int = ""
    locality_strength: float = checks.bounded(STRENGTH, 0, above=True)
    gating_init: float = checks.bounded(GATING, 0, above=True)
    settings: tuple[tuple[str, Plain], ...] = ()

    has_class_token = False  # among what the wrapped model hands out as features
    family = "timm"
    title = "a model of timm's"

    def __post_init__(self) -> None:
        if not timm.is_model(self.name):
            raise unknown("model", PREFIX + self.name, [PREFIX + n for n in timm.list_models()])
        checks.settings(self)

    @property
    def classifier(self) -> str:
        """The module that makes the logits."""
        return f"model.{_own(self.name).classifier}"

    @property
    def stem(self) -> str:
        """The module that reads the image."""
        return f"model.{_own(self.name).first_conv}"

    def embeddings(self) -> dict[str, Grid]:
        """None that is known here."""
        return {}

    def meaning(self) -> dict[str, Any]:
        """As of `Architecture`."""
        return meaning(self)

    @classmethod
    def named(cls, name: str) -> TimmConfig:
        """timm's own settings for the model called "timm/" and its name.

        Raises:
            UserError: for a name that timm does not have.
        """
        name = name.removeprefix(PREFIX)
        own = dataclasses.asdict(_own(name)) if timm.is_model(name) else {}
        size = tuple(own.get("input_size", (3, 224, 224))[1:])
        return cls(name, num_classes=own.get("num_classes", 1000), img_size=size)

    def with_overrides(self, **fields: Any) -> TimmConfig:
        """This configuration with some settings changed; those it does not name are timm's.

        Raises:
            UserError: for a setting that is no plain value.
        """
        known = {field.name for field in dataclasses.fields(self)} - {"name", "settings"}
        own = {name: fields.pop(name) for name in known if name in fields}
        for name, value in fields.items():
            if not isinstance(value, Plain):
                raise UserError(f"{name} is {value!r}; timm's models take plain values here")
        settings = tuple((dict(self.settings) | fields).items())
        return dataclasses.replace(self, settings=settings, **own)


def _own(name: str) -> Any:
    return get_pretrained_cfg(name)


def published(name: str) -> tuple[TimmConfig, dict[str, Tensor], dict[str, Any]]:
    """timm's own weights for "timm/NAME": configuration, state dict, and its data configuration.

    Raises:
        UserError: if timm has no such model, or no weights that are here or to be had.
    """
    config = TimmConfig.named(name)
    missing = f"timm's weights of {name} could not be loaded"
    with saying(missing, OSError, RuntimeError), hub_asked_once():
        model = timm.create_model(config.name, pretrained=True)
    state = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    return config, state, timm.data.resolve_model_data_config(model)


class TimmModel(ImageClassifier):
    """A model of timm's.

    Raises:
        UserError: if timm does not build it with these settings.
    """

    def __init__(self, config: TimmConfig) -> None:
        super().__init__(config, 0)
        settings: dict[str, Any] = dict(config.settings)
        if _own(config.name).fixed_input_size:
            settings |= {"img_size": config.img_size}
        try:
            self.model: Any = timm.create_model(
                config.name, num_classes=config.num_classes, in_chans=config.in_chans, **settings
            )
        except TypeError as error:
            raise UnknownSetting(f"{PREFIX}{config.name}: {error}") from error
        except (AssertionError, LookupError, RuntimeError, ValueError) as error:
            raise UserError(f"{PREFIX}{config.name} cannot be built: {error}") from error
        if config.gpsa:
            put_attention(self, config.gpsa, config.locality_strength, config.gating_init)
        width: Any = self.model.num_features
        self.num_features = self.embed_dim = self.head_hidden_size = width

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, num_classes)."""
        return self.model(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → features as timm's model has them: a map, or tokens."""
        return self.model.forward_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features → logits, or what they are read from if `pre_logits`."""
        return self.model.forward_head(x, pre_logits=pre_logits)

    def forward_intermediates(self, x: Tensor, *arguments: Any, **choices: Any) -> Any:
        """As timm's model does it."""
        return self.model.forward_intermediates(x, *arguments, **choices)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return list(self.model.feature_info)

    @property
    def patch_embed(self) -> Any:
        """What cuts images into patches, where timm's model has such a part."""
        return self.model.patch_embed

    def get_classifier(self) -> nn.Module:
        return self.model.get_classifier()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.model.reset_classifier(num_classes, global_pool)
        self.num_classes = num_classes
        self.config = dataclasses.replace(self.config, num_classes=num_classes)

    def no_weight_decay(self) -> set[str]:
        spared: set[str] = getattr(self.model, "no_weight_decay", set)()
        return {f"model.{name}" for name in spared}

    def layer_numbers(self) -> dict[str, int]:
        numbers = group_parameters(self.model, self.model.group_matcher(), reverse=True)
        return {f"model.{name}": number for name, number in numbers.items()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        try:
            self.model.set_grad_checkpointing(enable)
        except (AssertionError, AttributeError) as error:
            raise UserError(f"{PREFIX}{self.config.name} has no gradient checkpointing") from error
