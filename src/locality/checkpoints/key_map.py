"""Key maps: the tensor names of each weight format, converted by way of the native names.

A key map has a foreign name for each native one, which serves both directions. `check_keys` and
`check_finite` compare a state dict with the model it is for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from locality.errors import UserError, some
from locality.models.config import CvTConfig, ViTConfig, token_grid
from locality.models.factory import build
from locality.models.variants import VARIANTS

State = Mapping[str, Tensor]


def meta_state_dict(config: Any) -> dict[str, Tensor]:
    """The state dict of the model of `config` on the meta device: names and shapes."""
    with torch.device("meta"):
        return build(config).state_dict()


def check_keys(given: State, expected: State, owner: str) -> None:
    """Check the names and shapes of a state dict.

    Args:
        given: the state dict to check.
        expected: the required names, with their shapes and whether they are floating-point.
        owner: whose names these are, for the message.

    Raises:
        UserError: naming missing and unknown tensors, and those of another shape or dtype.
    """
    wrong = []
    for name, tensor in given.items():
        wanted = expected.get(name)
        if wanted is None:
            continue
        if tensor.shape != wanted.shape:
            wrong.append(f"{name} is {tuple(tensor.shape)} instead of {tuple(wanted.shape)}")
        elif tensor.is_floating_point() != wanted.is_floating_point():
            wrong.append(f"{name} holds {tensor.dtype} instead of {wanted.dtype}")
    faults = {
        "missing": [name for name in expected if name not in given],
        "unknown": [name for name in given if name not in expected],
        "of another shape": wrong,
    }
    if any(faults.values()):
        said = "; ".join(
            f"{what}: {some(names, quote='')}" for what, names in faults.items() if names
        )
        raise UserError(f"these weights do not fit the model ({owner} names); {said}")


def count_blocks(state: State, prefix: str) -> int:
    """The number of blocks `prefix0`, `prefix1`, …"""
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)\.")
    found = {match[1] for name in state if (match := pattern.match(name))}
    if not found:
        raise KeyError(f"{prefix}0")
    return len(found)


def check_finite(state: State) -> None:
    """Check that all weights are finite.

    Raises:
        UserError: naming the tensors that contain NaN or infinity.
    """
    broken = [
        name
        for name, tensor in state.items()
        if tensor.is_floating_point() and not torch.isfinite(tensor).all()
    ]
    if broken:
        raise UserError(f"these weights contain NaN or infinity, in {some(broken, quote='')}")


@dataclass(frozen=True)
class KeyMap:
    """The tensor names of one format; the base class has the native names.

    Attributes:
        name: the format name for `convert`.
        title: owner of the format, for messages.
        renames: replacements that turn a native name into this format's, in order, as (pattern,
            by).
    """

    name: str
    title: str
    renames: tuple[tuple[str, str], ...] = ()

    families: ClassVar[tuple[Any, ...]] = (ViTConfig, CvTConfig)
    """Configuration classes of the models that the format holds."""

    @property
    def stems(self) -> dict[str, Any]:
        """Name of the first layer's weight in this format → family."""
        return {self.rename(f"{family.stem}.weight"): family for family in self.families}

    def matches(self, state: State) -> bool:
        """Whether the tensor names are in this format."""
        return not self.stems.keys().isdisjoint(state)

    def infer(self, state: State, settings: Mapping[str, Any]) -> Any:
        """Infer the architecture of weights, except classes and channels, from names and shapes.

        Args:
            state: the weights.
            settings: fields of the configuration set by the caller.

        Raises:
            KeyError: if a required tensor is missing.
            UserError: if shapes do not determine the architecture.
        """
        fitting = [
            name for name, row in VARIANTS.items() if self._fits(state, row.config, settings)
        ]
        if len(fitting) == 1:
            return VARIANTS[fitting[0]].config
        raise UserError(
            f"cannot infer the model from these weights (fitting: {', '.join(fitting) or 'none'}); "
            f"give the nearest by --model NAME in training and --variant NAME elsewhere, and the "
            f"settings that differ as --set or --model.depth"
        )

    def _fits(self, state: State, config: Any, settings: Mapping[str, Any]) -> bool:
        """Whether a model has these names and shapes, up to image size, channels and classes."""
        stem = state.get(f"{config.stem}.weight")
        if stem is None or len(stem) != getattr(config, "embed_dim", len(stem)):
            return False  # without building the model
        with contextlib.suppress(UserError):
            config = self._with_interface(state, config, settings.get("img_size"))
            check_keys(state, meta_state_dict(config), self.title)
            return True
        return False

    def unspecified(self, config: Any) -> dict[str, Any]:
        """The settings that weights in this format do not specify."""
        return {}

    def dropped(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of this format's tensors without effect, which have no native counterpart."""
        return {}

    def accepted(self, config: Any) -> dict[str, tuple[Any, ...]]:
        """The values that this format's code supports, for settings where it does not take all."""
        return {}

    def require(self, config: Any) -> None:
        """Check that this format's code supports the model.

        Raises:
            UserError: naming the unsupported setting.
        """
        for name, values in self.accepted(config).items():
            for part in (config, *getattr(config, "stages", ())):
                given, setting = getattr(part, name, values[0]), name.removeprefix("has_")
                if given not in values:
                    raise UserError(
                        f"{self.title} code supports only "
                        f"{setting}={' or '.join(map(repr, values))}, and this model has "
                        f"{setting}={given!r}; use the format 'locality', or set "
                        f"{setting}={values[0]} to write the weights anyway"
                    )

    def rename(self, name: str) -> str:
        """Native tensor name → this format's."""
        for pattern, by in self.renames:
            name = re.sub(pattern, by, name)
        return name

    def write(self, name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
        """Convert one native tensor to this format's tensors."""
        return {self.rename(name): tensor}

    def read(self, name: str, state: State, config: Any) -> Tensor:
        """Read one native tensor from a state dict in this format."""
        return state[self.rename(name)]

    def to_native(self, state: State, config: Any) -> dict[str, Tensor]:
        """Convert weights of this format to native ones.

        Raises:
            UserError: if a name is missing or unknown, or a shape differs from `config`'s.
        """
        blank = meta_state_dict(config)
        expected = self._foreign_state(blank, config)
        for name in self.dropped(config).keys() - state.keys():
            del expected[name]
        check_keys(state, expected, self.title)
        return {name: self.read(name, state, config) for name in blank}

    def from_native(self, state: State, config: Any) -> dict[str, Tensor]:
        """Convert native weights to this format; tensors without effect are zeros.

        Raises:
            UserError: if the format cannot hold the model, or `state` does not fit `config`.
        """
        if not isinstance(config, self.families):
            raise UserError(f"the format '{self.name}' does not hold {config.title}")
        self.require(config)
        check_keys(state, meta_state_dict(config), NATIVE.title)
        return self._foreign_state(state, config)

    def _foreign_state(self, state: State, config: Any) -> dict[str, Tensor]:
        theirs: dict[str, Tensor] = {}
        for name, tensor in state.items():
            theirs |= self.write(name, tensor, config)
        zeros = next(iter(state.values())).new_zeros
        return theirs | {name: zeros(shape) for name, shape in self.dropped(config).items()}

    def configuration(
        self, state: State, like: Any = None, settings: Mapping[str, Any] = {}
    ) -> Any:
        """The architecture of weights in this format, from `like` if given, else inferred.

        Args:
            state: the weights.
            like: the configuration of the model they are for.
            settings: fields of the configuration that override both.

        Raises:
            UserError: if it cannot be inferred, or `like` is of another family.
        """
        for stem, family in self.stems.items():
            if stem in state:
                check_config_class(family, like)
        found = self.infer(state, settings) if like is None else like
        found = self._with_interface(state, found, settings.get("img_size"))
        return found.with_overrides(**settings)

    def _with_interface(self, state: State, like: Any, img_size: Any) -> Any:
        """`like`, with classes, channels and image size (`img_size`, if given) of the weights."""
        heads = [state.get(self.rename(f"{name}.weight"), ()) for name in like.classifiers]
        ends: dict[str, Any] = {"num_classes": max(map(len, heads), default=like.num_classes)}
        stem = self.rename(f"{like.stem}.weight")
        if stem in state:
            ends["in_chans"] = self._channels(state[stem], like)
        if isinstance(like, ViTConfig) and "pos_embed" in state:
            # Keep the image size of `like` if it has as many patches; else assume square images.
            held = math.prod(token_grid(like.img_size, like.patch_size)) + like.embed_class_token
            if state["pos_embed"].shape[1] != held:
                classes = like.embed_class_token
                ends["img_size"] = infer_img_size(state, like.patch_size, classes, img_size)[0]
        return dataclasses.replace(like, **ends)

    def _channels(self, stem: Tensor, like: Any) -> int:
        """The number of channels that a first layer with this weight takes."""
        return stem.shape[1]


NATIVE = KeyMap("locality", "locality's")


def infer_img_size(
    state: State, patch_size: int, may_hold_class: bool, img_size: Any
) -> tuple[int | tuple[int, int], bool]:
    """The image size, and whether the position embedding includes the class token."""
    if "pos_embed" not in state:
        return 14 * patch_size if img_size is None else img_size, False
    entries = state["pos_embed"].shape[1]
    if img_size is not None:
        return img_size, entries == math.prod(token_grid(img_size, patch_size)) + 1
    for class_entry in (False, True)[: 1 + may_hold_class]:
        side = math.isqrt(entries - class_entry)
        if side**2 == entries - class_entry:
            return side * patch_size, class_entry
    raise UserError(
        f"the position embedding has {entries} entries, not a square number of patches; set "
        f"img_size to the height and width of the images, for example img_size=[224,448]"
    )


def format_settings(settings: Mapping[str, Any]) -> str:
    """Settings and their values in the syntax of `--set`."""
    shown = {name: json.dumps(value, separators=(",", ":")) for name, value in settings.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items()).replace('"', "")


def check_config_class(expected: Any, like: Any) -> None:
    """Check that a configuration, if given, is of the weights' family.

    Raises:
        UserError: naming both families.
    """
    if like is not None and not isinstance(like, expected):
        raise UserError(
            f"these weights do not fit the model: they are of {expected.title}, the model is "
            f"{like.title}"
        )
