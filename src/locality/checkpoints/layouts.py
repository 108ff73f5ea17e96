"""The layouts that weights come in, and which one a file has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from locality.checkpoints.cvt import (
    THEIR_SETTINGS,
    from_microsoft,
    from_transformers,
    infer_microsoft,
    infer_transformers,
    to_microsoft,
    to_transformers,
    untold_by_microsoft,
    untold_by_transformers,
)
from locality.checkpoints.format import decode_config, encode_config
from locality.checkpoints.reading import Adapter, State, blank_state, check_keys, shorten
from locality.checkpoints.vit import (
    from_convit,
    from_deit,
    infer_vit,
    size_like,
    to_convit,
    to_deit,
    untold_by_convit,
    untold_by_deit,
)
from locality.errors import UserError, unknown
from locality.layers.block import hidden_width
from locality.models.cvt_config import CvTConfig, StageConfig
from locality.models.from_timm import TimmConfig
from locality.models.variants import VARIANTS
from locality.models.vit_config import ViTConfig


@dataclass(frozen=True)
class Layout:
    """One way of naming a model's tensors.

    Attributes:
        name: as given to `convert`.
        title: whose it is, for people.
        family: of the models it holds, as in the table of variants; "" for all.
        marks: parts of tensor names that only this layout has; all of them are there.
        absent: parts that this layout's tensors never have.
        infer: (state, settings) → configuration; see `infer_vit`.
        untold: configuration → the settings that weights in this layout do not tell.
        to_ours, adapt: the two directions.
    """

    name: str
    title: str
    family: str
    marks: tuple[str, ...]
    absent: tuple[str, ...]
    infer: Callable[[State, Mapping[str, Any]], Any]
    untold: Callable[[Any], dict[str, Any]]
    to_ours: Adapter
    adapt: Adapter

    def recognises(self, state: State) -> bool:
        """Whether the tensors' names are this layout's."""

        def has(mark: str) -> bool:
            # Dots at both ends, so that a mark can ask for the beginning or the end of a name.
            return any(mark in f".{name}." for name in state)

        return all(map(has, self.marks)) and not any(map(has, self.absent))

    def configuration(
        self, state: State, like: Any = None, settings: Mapping[str, Any] | None = None
    ) -> Any:
        """The architecture of weights in this layout, taken from `like` where one is given.

        Args:
            state: the weights.
            like: the configuration of the model they are for.
            settings: fields of the configuration that stand above both.

        Raises:
            UserError: if the weights do not tell it, or `like` is of the other family.
        """
        # Our own names say by themselves which family they are of.
        cvt = self.family == "cvt" or any(name.startswith("stages.") for name in state)
        check_family(CvTConfig if cvt else ViTConfig, like)
        settings = _our_names(settings or {})
        found = self.infer(state, settings) if like is None else _like(state, like)
        return with_settings(found, settings)

    def from_ours(self, state: State, config: Any) -> dict[str, Tensor]:
        """Our weights in this layout.

        Raises:
            UserError: if it cannot hold such a model, or `state` does not fit `config`.
        """
        held = CvTConfig if self.family == "cvt" else ViTConfig
        if self.family and not isinstance(config, held):
            raise UserError(
                f"the layout '{self.name}' holds {_TITLES[held]}, and this model is "
                f"{_TITLES[type(config)]}"
            )
        return self.adapt(state, config)

    def listed(self, settings: Mapping[str, Any]) -> str:
        """Settings and their values, each with the name it has in the layout's own code."""
        words = []
        for name, value in settings.items():
            shown = json.dumps(value, separators=(",", ":")).replace('"', "")
            theirs = self.their_name(name)
            words.append(f"{name}={shown}" + f" ({theirs})" * (theirs != name))
        return ", ".join(words)

    def their_name(self, setting: str) -> str:
        """What the code of whose layout this is calls one of our settings."""
        theirs = THEIR_SETTINGS.get(setting, setting) if self.family == "cvt" else setting
        return theirs if self.name == "cvt-microsoft" else theirs.lower()


def with_settings(config: Any, settings: Mapping[str, Any]) -> Any:
    """`config` with some of its fields set, under our names or Microsoft's, each of its type.

    Raises:
        UserError: for an unknown field, with the nearest, or a value that it cannot have.
    """
    if not settings:
        return config
    changed = config.with_overrides(**_our_names(settings))
    # What comes from a command line is of any type; the description's reader knows the right one.
    return decode_config(json.loads(json.dumps(encode_config(changed))))


def _our_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in THEIR_SETTINGS.items()}
    return {ours.get(name, name): value for name, value in settings.items()}


def _like(state: State, like: Any) -> Any:
    """`like`, with the ends that the weights have."""
    ends: dict[str, Any] = {"num_classes": 0}
    for name, tensor in state.items():
        if name in ("head.weight", "classifier.weight"):
            ends["num_classes"] = len(tensor)
        elif name in _STEMS:
            ends["in_chans"] = tensor.shape[1]
    if isinstance(like, ViTConfig):
        ends["img_size"] = size_like(state, like)
    return dataclasses.replace(like, **ends)


# The first convolution, as the layouts call it.
_STEMS = (
    "patch_embed.weight",
    "patch_embed.proj.weight",
    "stages.0.embed.conv.weight",
    "stage0.patch_embed.proj.weight",
    "cvt.encoder.stages.0.embedding.convolution_embeddings.projection.weight",
)


def _checked(state: State, config: Any) -> dict[str, Tensor]:
    check_keys(state, blank_state(config), "locality's")
    return dict(state)


def _infer_own(state: State, settings: Mapping[str, Any]) -> Any:
    raise UserError("these weights do not say which model they are of; give the model's name")


def _nothing_untold(config: Any) -> dict[str, Any]:
    return {}


_ROWS = [
    Layout(
        "locality",
        "this library's own",
        "",
        marks=(".norm1.", ".attn."),
        absent=(".patch_embed.proj.", ".stage0.", ".cvt."),
        infer=_infer_own,
        untold=_nothing_untold,
        to_ours=_checked,
        adapt=_checked,
    ),
    Layout(
        "convit",
        "ConViT's authors' and timm's",
        "convit",
        marks=(".patch_embed.proj.", ".attn.gating_param."),
        absent=(".stage0.",),
        infer=infer_vit,
        untold=untold_by_convit,
        to_ours=from_convit,
        adapt=to_convit,
    ),
    Layout(
        "deit",
        "DeiT's authors' and timm's",
        "deit",
        marks=(".patch_embed.proj.", ".blocks.0.attn.qkv.", ".cls_token."),
        absent=(".attn.gating_param.", ".stage0."),
        infer=infer_vit,
        untold=untold_by_deit,
        to_ours=from_deit,
        adapt=to_deit,
    ),
    Layout(
        "cvt-microsoft",
        "Microsoft's CvT",
        "cvt",
        marks=(".stage0.patch_embed.", ".attn.proj_q."),
        absent=(),
        infer=infer_microsoft,
        untold=untold_by_microsoft,
        to_ours=from_microsoft,
        adapt=to_microsoft,
    ),
    Layout(
        "cvt-transformers",
        "transformers' CvT",
        "cvt",
        marks=(".cvt.encoder.stages.0.embedding.",),
        absent=(),
        infer=infer_transformers,
        untold=untold_by_transformers,
        to_ours=from_transformers,
        adapt=to_transformers,
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


_TITLES: dict[type, str] = {
    ViTConfig: "a DeiT or ConViT",
    CvTConfig: "a CvT",
    TimmConfig: "a model of timm's",
}


def check_family(expected: type, like: Any) -> None:
    """Refuse a configuration of another family than the weights'; None is of any.

    Raises:
        UserError: saying what both are.
    """
    if like is not None and not isinstance(like, expected):
        raise UserError(
            f"these weights do not fit the model: they are of {_TITLES[expected]}, and it is "
            f"{_TITLES[type(like)]}"
        )


def identify(config: Any) -> tuple[str | None, Any]:
    """The row of the table that has this architecture, if any.

    Returns:
        its name and its configuration with the image size, channels and classes of `config`, so
        that settings which only matter in training are the row's; or None and `config` itself.
    """
    for name, row in VARIANTS.items():
        if type(row.config) is type(config) and not unlike(row.config, config):
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


def unlike(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configurations of one family say that weights mean something else.

    Their ends may differ, and what matters in training alone. MLPs are compared by their width,
    and keys and values by the stride they have: a ratio and a stride can be written in many ways.

    Returns:
        dotted name of the field → its two values.
    """
    first, second = _architecture(one), _architecture(other)
    names = dict.fromkeys((*first, *second))
    return {
        name: (first.get(name), second.get(name))
        for name in names
        if first.get(name) != second.get(name)
    }


def _architecture(config: Any) -> dict[str, Any]:
    """The fields that say what weights mean, by dotted name, in one spelling."""
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in (*_INTERFACE, *_TRAINING, "stages")
    }
    if not isinstance(config, StageConfig):
        fields["class_token"] = config.has_class_token
    if isinstance(config, CvTConfig):
        for index, stage in enumerate(config.stages):
            fields |= {f"stages.{index}.{name}": x for name, x in _architecture(stage).items()}
    elif isinstance(config, StageConfig):
        fields["mlp_ratio"] = tuple(hidden_width(config.embed_dim, x) for x in config.mlp_ratios)
        linear = config.projection == "linear"
        fields["kv_stride"] = None if linear else config.kv_strides
        fields["projection_kernel"] = None if linear else config.projection_kernel
        fields["kv_padding"] = None if linear else config.padding_of_keys
    elif isinstance(config, ViTConfig):
        fields["mlp_ratio"] = hidden_width(config.embed_dim, config.mlp_ratio)
        if not config.gpsa_layers:
            del fields["positional_attention"]
    return fields
