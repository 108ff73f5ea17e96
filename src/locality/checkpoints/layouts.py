"""The layouts that weights come in, and which one a file has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from locality.checkpoints.convit import from_convit, infer_convit, to_convit
from locality.checkpoints.cvt import (
    from_microsoft,
    from_transformers,
    infer_microsoft,
    infer_transformers,
    to_microsoft,
    to_transformers,
)
from locality.checkpoints.deit import from_deit, infer_deit, to_deit
from locality.checkpoints.description import encode_config
from locality.checkpoints.keys import Adapter, State, blank_state, check_keys, shorten
from locality.checkpoints.vit import infer_like, rename_to_timm
from locality.errors import UserError, unknown
from locality.models.variants import VARIANTS
from locality.models.vit import ViTConfig


@dataclass(frozen=True)
class Layout:
    """One way of naming a model's tensors.

    Attributes:
        name: as given to `convert`.
        title: whose it is, for people.
        family: of the models it holds, as in the table of variants; "" for all.
        marks: parts of tensor names that only this layout has; all of them are there.
        absent: parts that this layout's tensors never have.
        infer: (state, like) → configuration; see `infer_convit`.
        to_ours, from_ours: the two directions.
    """

    name: str
    title: str
    family: str
    marks: tuple[str, ...]
    absent: tuple[str, ...]
    infer: Callable[[State, Any], Any]
    to_ours: Adapter
    from_ours: Adapter

    def recognises(self, state: State) -> bool:
        """Whether the tensors' names are this layout's."""

        def has(mark: str) -> bool:
            # Dots at both ends, so that a mark can ask for the beginning or the end of a name.
            return any(mark in f".{name}." for name in state)

        return all(map(has, self.marks)) and not any(map(has, self.absent))


def _checked(state: State, config: Any) -> dict[str, Tensor]:
    check_keys(state, blank_state(config), "locality's")
    return dict(state)


def _infer_own(state: State, like: Any) -> Any:
    """`like`, with the ends that the weights have; our files say the rest themselves."""
    if like is None:
        raise UserError("these weights do not say which model they are of; give the model's name")
    if isinstance(like, ViTConfig):
        return infer_like({rename_to_timm(name): tensor for name, tensor in state.items()}, like)
    head, stem = state.get("head.weight"), state.get("stages.0.embed.conv.weight")
    return dataclasses.replace(
        like,
        num_classes=0 if head is None else len(head),
        in_chans=like.in_chans if stem is None else stem.shape[1],
    )


_ROWS = [
    Layout(
        "locality",
        "this library's own",
        "",
        marks=(".norm1.", ".attn."),
        absent=(".patch_embed.proj.", ".stage0.", ".cvt."),
        infer=_infer_own,
        to_ours=_checked,
        from_ours=_checked,
    ),
    Layout(
        "convit",
        "ConViT's authors' and timm's",
        "convit",
        marks=(".patch_embed.proj.", ".attn.gating_param."),
        absent=(".stage0.",),
        infer=infer_convit,
        to_ours=from_convit,
        from_ours=to_convit,
    ),
    Layout(
        "deit",
        "DeiT's authors' and timm's",
        "deit",
        marks=(".patch_embed.proj.", ".blocks.0.attn.qkv.", ".cls_token."),
        absent=(".attn.gating_param.", ".stage0."),
        infer=infer_deit,
        to_ours=from_deit,
        from_ours=to_deit,
    ),
    Layout(
        "cvt-microsoft",
        "microsoft's CvT",
        "cvt",
        marks=(".stage0.patch_embed.", ".attn.proj_q."),
        absent=(),
        infer=infer_microsoft,
        to_ours=from_microsoft,
        from_ours=to_microsoft,
    ),
    Layout(
        "cvt-transformers",
        "transformers' CvT",
        "cvt",
        marks=(".cvt.encoder.stages.0.embedding.",),
        absent=(),
        infer=infer_transformers,
        to_ours=from_transformers,
        from_ours=to_transformers,
    ),
]

LAYOUTS: dict[str, Layout] = {row.name: row for row in _ROWS}


def layout(name: str) -> Layout:
    """The layout called `name`.

    Raises:
        UserError: if there is none, with the nearest names.
    """
    if name not in LAYOUTS:
        raise unknown("layout", name, LAYOUTS)
    return LAYOUTS[name]


def recognise(state: State) -> Layout:
    """The one layout whose names these tensors have.

    Raises:
        UserError: if there is none, or more than one.
    """
    found = [row for row in _ROWS if row.recognises(state)]
    if len(found) == 1:
        return found[0]
    if found:
        titles = " and ".join(row.title for row in found)
        raise UserError(f"these weights have names of more than one layout: {titles}")
    known = ", ".join(row.title for row in _ROWS)
    raise UserError(
        f"these weights are of no model that is known here ({known}); their first tensors are "
        f"{shorten(state)}"
    )


def identify(config: Any) -> tuple[str | None, Any]:
    """The row of the table that has this architecture, if any.

    Returns:
        its name and its configuration with the image size, channels and classes of `config`, so
        that settings which only matter in training are the row's; or None and `config` itself.
    """
    wanted = _architecture(config)
    for name, row in VARIANTS.items():
        if type(row.config) is type(config) and _architecture(row.config) == wanted:
            fields = {field: getattr(config, field) for field in _INTERFACE}
            return name, dataclasses.replace(row.config, **fields)
    return None, config


# What may differ between two models that are the same architecture: the size of what goes in and
# out, and what matters in training alone.
_INTERFACE = ("img_size", "in_chans", "num_classes")
_TRAINING = (
    "locality_strength",
    "conv_init",
    "gating_init",
    "freeze_gating",
    "freeze_gpsa",
    "drop_rate",
    "proj_drop_rate",
    "drop_path_rate",
)


def _architecture(config: Any) -> Any:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            kept = value.keys() - {*_INTERFACE, *_TRAINING}
            return {key: strip(value[key]) for key in kept}
        if isinstance(value, (list, tuple)):
            return [strip(item) for item in value]
        return value

    return strip(encode_config(config))
