"""Key maps: how each format names the tensors of a state dict, with our own names as the hub.

A key map names each of our tensors once. Both directions follow from that: the keys that our code
expects, renamed, are those that their file has to hold, and where each of our tensors is found.
A state dict is compared with the model that it is for: `check_keys`, `check_finite`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from locality.errors import UserError, some
from locality.models.config import CvTConfig, ViTConfig, token_grid
from locality.models.factory import build
from locality.models.variants import VARIANTS
from locality.settings import from_dict, to_dict

State = Mapping[str, Tensor]


def meta_state_dict(config: Any) -> dict[str, Tensor]:
    """The names and shapes of the model that `config` describes: a state dict without data."""
    with torch.device("meta"):
        return build(config).state_dict()


def check_keys(
    given: State, expected: State, owner: str, dropped: Collection[str] = frozenset()
) -> None:
    """Refuse a state dict that is not exactly what is expected.

    Args:
        given: the state dict to check.
        expected: names, shapes and kinds of number it has to have; `dropped` names may be absent.
        owner: whose names these are, for the message.
        dropped: names which are allowed, and which the conversion leaves out.

    Raises:
        UserError: naming what is missing, what is unknown and what has another shape.
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
        "missing": [name for name in expected if name not in given and name not in dropped],
        "unknown": [name for name in given if name not in expected and name not in dropped],
        "of another shape": wrong,
    }
    if any(faults.values()):
        said = "; ".join(
            f"{what}: {some(names, quote='')}" for what, names in faults.items() if names
        )
        raise UserError(f"these weights do not fit the model ({owner} names); {said}")


def count_blocks(state: State, prefix: str) -> int:
    """How many blocks `prefix0`, `prefix1`, … there are.

    Raises:
        UserError: if their numbers have gaps, or there are none.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(\d{{1,9}})\.")
    found = {int(match[1]) for name in state if (match := pattern.match(name))}
    if not found:
        raise UserError(
            f"these weights have no tensors {prefix}0.…, from which the architecture is inferred"
        )
    if found != set(range(len(found))):
        numbers = some(map(str, sorted(found)), quote="")
        raise UserError(
            f"these weights have the blocks {numbers} of {prefix}…, which have to be numbered from "
            f"0 without gaps; tensors are missing"
        )
    return len(found)


def check_finite(state: State) -> None:
    """Refuse weights that are not numbers.

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
    """One way of naming a model's tensors; this class itself is our own.

    Attributes:
        name: as given to `convert`.
        title: whose it is, in messages.
        marks: parts of tensor names that only this key map has; all of them are there.
        absent: parts that this key map's tensors never have.
        renames: what to replace in our name of a tensor, one after the other, as (pattern, by).
    """

    name: str
    title: str
    marks: tuple[str, ...]
    absent: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    holds: ClassVar[Any] = None
    """The configurations of the models it holds; None for all."""

    def infer(self, state: State, settings: Mapping[str, Any]) -> Any:
        """The architecture of weights with these keys, inferred from their shapes.

        Args:
            state: the weights.
            settings: fields of the configuration that the reader has set, under our names.

        Raises:
            UserError: if a required tensor is missing, or shapes do not determine the architecture.
        """
        fitting = [name for name, row in VARIANTS.items() if self._fits(state, row.config)]
        if len(fitting) == 1:
            return self._like(state, VARIANTS[fitting[0]].config)
        how = "--model NAME in training, --variant NAME elsewhere"
        if fitting:
            raise UserError(
                f"these weights fit {' and '.join(fitting)}, which differ in what weights do not "
                f"show; give the model's name ({how})"
            )
        raise UserError(
            f"these weights do not say which model they are of, and fit none in the table; give "
            f"the name of the nearest ({how}), and what differs as --set or --model.depth"
        )

    def _fits(self, state: State, config: Any) -> bool:
        """Whether a model has tensors of these names and shapes, but for its ends."""
        stem = state.get(f"{config.stem}.weight")
        if stem is None or len(stem) != getattr(config, "embed_dim", len(stem)):
            return False  # known without building it
        with contextlib.suppress(UserError):
            check_keys(state, meta_state_dict(self._like(state, config)), self.title)
            return True
        return False

    def unspecified(self, config: Any) -> dict[str, Any]:
        """The settings that weights with these keys do not specify."""
        return {}

    def dropped(self, config: Any) -> dict[str, tuple[int, ...]]:
        """The shape of each of their tensors that has no effect, and that ours therefore lack."""
        return {}

    def accepted(self, config: Any) -> dict[str, tuple[Any, ...]]:
        """Settings of which their code has these values alone."""
        return {}

    def require(self, config: Any) -> None:
        """Refuse what their code cannot compute, or computes otherwise.

        Raises:
            UserError: saying what it is.
        """
        for name, values in self.accepted(config).items():
            for part in (config, *getattr(config, "stages", ())):
                given, setting = getattr(part, name, values[0]), name.removeprefix("has_")
                if given not in values:
                    raise UserError(
                        f"{self.title} code has {setting}={' or '.join(map(repr, values))} alone, "
                        f"and this model has {setting}={given!r}; keep it in our own format, or "
                        f"set {setting}={values[0]} to write its weights for what that code "
                        f"computes"
                    )

    def rename(self, name: str) -> str:
        """Our name of a tensor → theirs."""
        for pattern, by in self.renames:
            name = re.sub(pattern, by, name)
        return name

    def write(self, name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
        """Their tensors that one of ours becomes."""
        return {self.rename(name): tensor}

    def read(self, name: str, state: State, config: Any) -> Tensor:
        """One of our tensors, from theirs."""
        return state[self.rename(name)]

    def to_native(self, state: State, config: Any) -> dict[str, Tensor]:
        """Weights with these keys → ours.

        Raises:
            UserError: if a name is missing or unknown, or a shape differs from `config`'s.
        """
        blank = meta_state_dict(config)
        expected, dropped = self._foreign_state(blank, config), self.dropped(config)
        check_keys(state, expected, self.title, dropped)
        return {name: self.read(name, state, config) for name in blank}

    def from_native(self, state: State, config: Any) -> dict[str, Tensor]:
        """Our weights → these keys. Tensors without an effect are written as zeros.

        Raises:
            UserError: if it cannot hold such a model, or `state` does not fit `config`.
        """
        if self.holds and not isinstance(config, self.holds):
            raise UserError(
                f"the format '{self.name}' holds {self.holds.title}, and this model is "
                f"{config.title}"
            )
        self.require(config)
        check_keys(state, meta_state_dict(config), NATIVE.title)
        return self._foreign_state(state, config)

    def _foreign_state(self, state: State, config: Any) -> dict[str, Tensor]:
        theirs: dict[str, Tensor] = {}
        for name, tensor in state.items():
            theirs |= self.write(name, tensor, config)
        zeros = next(iter(state.values())).new_zeros
        return theirs | {name: zeros(shape) for name, shape in self.dropped(config).items()}

    def matches(self, state: State) -> bool:
        """Whether the tensors' names are this key map's."""

        def has(mark: str) -> bool:
            # Dots at both ends, so that a mark can ask for the beginning or the end of a name.
            return any(mark in f".{name}." for name in state)

        return all(map(has, self.marks)) and not any(map(has, self.absent))

    def configuration(
        self, state: State, like: Any = None, settings: Mapping[str, Any] = {}
    ) -> Any:
        """The architecture of weights with these keys, taken from `like` where one is given.

        Args:
            state: the weights.
            like: the configuration of the model they are for.
            settings: fields of the configuration, under our names, that stand above both.

        Raises:
            UserError: if it cannot be inferred, or `like` is of the other family.
        """
        # Our own names say by themselves which family they are of.
        cvt = any(name.startswith("stages.") for name in state)
        check_config_class(self.holds or (CvTConfig if cvt else ViTConfig), like)
        found = self.infer(state, settings) if like is None else self._like(state, like)
        return override_config(found, settings)

    def _like(self, state: State, like: Any) -> Any:
        """`like`, with the ends that the weights have."""
        ends: dict[str, Any] = {"num_classes": self.classes(state)}
        stem = self.rename(f"{like.stem}.weight")
        if stem in state:
            ends["in_chans"] = state[stem].shape[1]
        if isinstance(like, ViTConfig) and "pos_embed" in state:
            # The model's own size if it has as many patches, whatever their shape; else a square's.
            held = math.prod(token_grid(like.img_size, like.patch_size)) + like.embed_class_token
            if state["pos_embed"].shape[1] != held:
                classes = like.embed_class_token
                ends["img_size"] = infer_img_size(state, like.patch_size, classes, None)[0]
        return dataclasses.replace(like, **ends)

    def classes(self, state: State) -> int:
        """How many classes the weights have; 0 without a classifier."""
        return len(state.get(self.rename("head.weight"), ()))

    def require_tensor(self, state: State, name: str) -> Tensor:
        """The tensor that we call `name`, from whose shape the architecture is inferred.

        Raises:
            UserError: if it is missing.
        """
        if self.rename(name) not in state:
            raise UserError(
                f"these weights have no {self.rename(name)}, from which the architecture is "
                f"inferred"
            )
        return state[self.rename(name)]


NATIVE = KeyMap(
    "locality",
    "locality's",
    marks=(".norm1.", ".attn."),
    absent=(".patch_embed.proj.", ".stage0.", ".cvt."),
)


def infer_img_size(
    state: State, patch_size: int, may_hold_class: bool, img_size: Any
) -> tuple[int | tuple[int, int], bool]:
    """The image size, and whether the class token has an entry in the position embedding."""
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
        f"the position embedding has {entries} entries, which make no square of patches; set "
        f"img_size to the height and width of the images, such as img_size=[224,448]"
    )


def format_settings(settings: Mapping[str, Any]) -> str:
    """Settings and their values, as `--set` takes them."""
    shown = {name: json.dumps(value, separators=(",", ":")) for name, value in settings.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items()).replace('"', "")


def override_config(config: Any, settings: Mapping[str, Any]) -> Any:
    """`config` with some of its fields set, each of its type.

    Raises:
        UserError: for an unknown field, with the nearest, or a value that it cannot have.
    """
    # What comes from a command line is of any type.
    return from_dict(type(config), to_dict(config.with_overrides(**settings)), "architecture")


def check_config_class(expected: Any, like: Any) -> None:
    """Refuse a configuration of another family than the weights'; None is of any.

    Raises:
        UserError: saying what both are.
    """
    if like is not None and not isinstance(like, expected):
        raise UserError(
            f"these weights do not fit the model: they are of {expected.title}, and it is "
            f"{like.title}"
        )
