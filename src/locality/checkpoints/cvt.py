"""CvT as Microsoft's code and as transformers name it: the same tensors, under other names.

Both have one setting per stage where ours may have one per block, and some of their code has one
meaning only. Microsoft's without weights of convolutions has average pooling in their place: with
linear projections alone it cannot run, and transformers' can with neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from locality.checkpoints.reading import State, blank_state, check_keys, require_blocks
from locality.errors import UserError
from locality.layers.block import mlp_ratio_of
from locality.models.cvt_config import CvTConfig, StageConfig

# Every published CvT has heads of this width; the weights themselves do not tell.
_HEAD_DIM = 64

# Our settings that weights do not tell → Microsoft's; transformers' are these in small letters.
THEIR_SETTINGS = {
    "num_heads": "NUM_HEADS",
    "embed_stride": "PATCH_STRIDE",
    "embed_padding": "PATCH_PADDING",
    "kv_stride": "STRIDE_KV",
    "kv_padding": "PADDING_KV",
    "projection_kernel": "KERNEL_QKV",
}

_OURS = re.compile(r"stages\.(\d+)\.(?:blocks\.(\d+)\.)?(.+?)(\.[^.]+)?$")


@dataclass(frozen=True)
class Names:
    """How a layout names its tensors.

    Attributes:
        title: whose names these are.
        stage, block: what stands before the names in a stage, and in a block of it.
        modules: our module name → theirs, inside a stage or block, and for the final layers.
        fixed: our settings of which their code has only these values.
    """

    title: str
    stage: str
    block: str
    modules: dict[str, str]
    fixed: dict[str, tuple[Any, ...]]

    def rename(self, name: str) -> str:
        """Our name of a tensor → theirs."""
        inside = _OURS.fullmatch(name)
        if inside is None:
            module, _, leaf = name.rpartition(".")
            return f"{self.modules[module]}.{leaf}"
        stage, block, module, leaf = inside.groups(default="")
        place = self.stage.format(stage) + (self.block.format(block) if block else "")
        return place + self.modules[module] + leaf


MICROSOFT = Names(
    "Microsoft's",
    stage="stage{}.",
    block="blocks.{}.",
    modules={
        "embed.conv": "patch_embed.proj",
        "embed.norm": "patch_embed.norm",
        "cls_token": "cls_token",
        "norm1": "norm1",
        "norm2": "norm2",
        **{f"attn.{part}.conv": f"attn.conv_proj_{part}.conv" for part in "qkv"},
        **{f"attn.{part}.norm": f"attn.conv_proj_{part}.bn" for part in "qkv"},
        **{f"attn.{part}.linear": f"attn.proj_{part}" for part in "qkv"},
        "attn.proj": "attn.proj",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
        "norm": "norm",
        "head": "head",
    },
    fixed={
        "activation": ("quick_gelu",),
        "attention_scale": ("width",),
        "projection": ("conv", "microsoft_avg"),
        "use_pos_embed": (False,),
    },
)

_LONG = {"q": "query", "k": "key", "v": "value"}
_PROJECTION = "attention.attention.convolution_projection_{}.convolution_projection."

TRANSFORMERS = Names(
    "transformers'",
    stage="cvt.encoder.stages.{}.",
    block="layers.{}.",
    modules={
        "embed.conv": "embedding.convolution_embeddings.projection",
        "embed.norm": "embedding.convolution_embeddings.normalization",
        "cls_token": "cls_token",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        **{f"attn.{p}.conv": _PROJECTION.format(_LONG[p]) + "convolution" for p in "qkv"},
        **{f"attn.{p}.norm": _PROJECTION.format(_LONG[p]) + "normalization" for p in "qkv"},
        **{f"attn.{p}.linear": f"attention.attention.projection_{_LONG[p]}" for p in "qkv"},
        "attn.proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
        "norm": "layernorm",
        "head": "classifier",
    },
    fixed={
        "activation": ("gelu",),
        "attention_scale": ("width",),
        "projection": ("conv",),
        "use_pos_embed": (False,),
    },
)


def from_microsoft(state: State, config: CvTConfig) -> dict[str, Tensor]:
    """Microsoft's CvT → ours.

    Raises:
        UserError: if a name is missing or unknown, or a shape differs from `config`'s.
    """
    return _from(MICROSOFT, state, config)


def to_microsoft(state: State, config: CvTConfig) -> dict[str, Tensor]:
    """Ours → Microsoft's CvT.

    Raises:
        UserError: if `state` does not fit `config`, or their code cannot compute such a model.
    """
    return _to(MICROSOFT, state, config)


def from_transformers(state: State, config: CvTConfig) -> dict[str, Tensor]:
    """The state dict of transformers' `CvtForImageClassification` → ours.

    Raises:
        UserError: if a name is missing or unknown, or a shape differs from `config`'s.
    """
    return _from(TRANSFORMERS, state, config)


def to_transformers(state: State, config: CvTConfig) -> dict[str, Tensor]:
    """Ours → the state dict of transformers' `CvtForImageClassification`.

    Raises:
        UserError: if `state` does not fit `config`, or their code cannot compute such a model: it
            has the exact GELU, always.
    """
    if not config.has_class_token:
        raise UserError(
            f"transformers' CvT has a class token, always; this model has global_pool="
            f"'{config.global_pool}' without one"
        )
    for index, stage in enumerate(config.stages):
        if stage.depth <= index:  # it looks up one of the stage's blocks by the stage's number
            raise UserError(
                f"transformers' CvT has {index + 1} blocks or more in stage {index + 1}, and this "
                f"model {stage.depth}"
            )
    return _to(TRANSFORMERS, state, config)


def infer_microsoft(state: State, settings: Mapping[str, Any]) -> CvTConfig:
    """The architecture of weights under Microsoft's names; see `infer`."""
    return infer(MICROSOFT, state, settings)


def infer_transformers(state: State, settings: Mapping[str, Any]) -> CvTConfig:
    """The architecture of weights under transformers' names; see `infer`."""
    return infer(TRANSFORMERS, state, settings)


def infer(names: Names, state: State, settings: Mapping[str, Any]) -> CvTConfig:
    """The architecture, read from the shapes.

    Weights do not tell strides, padding and numbers of heads: they are taken to be the paper's,
    with heads 64 wide, keys and values of stride 2, and embeddings that overlap by half.

    Args:
        names: whose names the tensors have.
        state: the weights.
        settings: fields of the configuration that the reader has set.

    Raises:
        UserError: if the tensors that tell are not there, or a width is no multiple of 64.
    """
    stages = require_blocks(state, names.stage.removesuffix("{}."))
    embeddings = [
        _tensor(state, f"{names.stage.format(index)}{names.modules['embed.conv']}.weight")
        for index in range(stages)
    ]
    head = state.get(f"{names.modules['head']}.weight")
    return CvTConfig(
        stages=tuple(
            _infer_stage(names, state, index, embedding, "num_heads" in settings)
            for index, embedding in enumerate(embeddings)
        ),
        num_classes=0 if head is None else len(head),
        in_chans=embeddings[0].shape[1],
        global_pool="token" if any(key.endswith("cls_token") for key in state) else "avg",
    )


def untold_by_microsoft(config: CvTConfig) -> dict[str, Any]:
    """The settings that Microsoft's weights do not tell, one value per stage where they differ."""
    stages = config.stages
    untold = {
        "num_heads": tuple(stage.num_heads for stage in stages),
        "embed_stride": tuple(stage.embed_stride for stage in stages),
        "embed_padding": tuple(stage.embed_padding for stage in stages),
        "kv_stride": tuple(stage.kv_strides[0] for stage in stages),
        "kv_padding": tuple(stage.padding_of_keys for stage in stages),
    }
    if any(stage.projection != "conv" for stage in stages):
        untold["projection_kernel"] = tuple(stage.projection_kernel for stage in stages)
    return {name: values if len(set(values)) > 1 else values[0] for name, values in untold.items()}


def untold_by_transformers(config: CvTConfig) -> dict[str, Any]:
    """The settings that transformers' weights do not tell, one value per stage."""
    # The published weights were trained with the authors' activation, those trained by
    # transformers with its own.
    return untold_by_microsoft(config) | {"activation": config.activation}


def _infer_stage(
    names: Names, state: State, index: int, embedding: Tensor, heads_set: bool
) -> StageConfig:
    stage = names.stage.format(index)
    depth = require_blocks(state, stage + names.block.removesuffix("{}."))
    width, kernel = embedding.shape[0], embedding.shape[-1]
    heads, rest = (1, 0) if heads_set else divmod(width, _HEAD_DIM)
    if rest:
        raise UserError(
            f"the number of heads cannot be told from a CvT of width {width}; set num_heads, or "
            f"give the model's name"
        )
    hidden = [
        len(_tensor(state, f"{stage}{names.block.format(i)}{names.modules['mlp.fc1']}.weight"))
        for i in range(depth)
    ]
    ratios = tuple(mlp_ratio_of(width, each) for each in hidden)
    first = stage + names.block.format(0)
    window = state.get(f"{first}{names.modules['attn.q.conv']}.weight")
    if window is None and "microsoft_avg" not in names.fixed["projection"]:
        raise UserError(
            f"these weights have no convolutions in their projections, and {names.title} code "
            f"cannot run without"
        )
    overlapping = kernel % 2 == 1
    stride = (kernel + 1) // 2 if overlapping else kernel
    return StageConfig(
        embed_dim=width,
        num_heads=heads,
        depth=depth,
        embed_kernel=kernel,
        embed_stride=stride,
        embed_padding=stride // 2 if overlapping else 0,
        mlp_ratio=ratios[0] if len(set(ratios)) == 1 else ratios,
        projection="microsoft_avg" if window is None else "conv",
        projection_kernel=3 if window is None else window.shape[-1],
        qkv_bias=f"{first}{names.modules['attn.q.linear']}.bias" in state,
    )


def _from(names: Names, state: State, config: CvTConfig) -> dict[str, Tensor]:
    blank = blank_state(config)
    if any(stage.use_pos_embed for stage in config.stages):
        raise UserError(f"{names.title} layout has no name for a position embedding")
    ours = {names.rename(name): name for name in blank}
    check_keys(state, {theirs: blank[name] for theirs, name in ours.items()}, names.title)
    return {ours[name]: tensor for name, tensor in state.items()}


def _to(names: Names, state: State, config: CvTConfig) -> dict[str, Tensor]:
    for field in ("kv_strides", "mlp_ratios"):
        if any(len(set(getattr(stage, field))) > 1 for stage in config.stages):
            raise UserError(
                f"{names.title} CvT has the same {field[:-1]} in all blocks of a stage, and this "
                f"model has not"
            )
    for field, values in names.fixed.items():
        for part in (config, *config.stages):
            given = getattr(part, field, values[0])
            if given not in values:
                only = " or ".join(map(repr, values))
                raise UserError(
                    f"{names.title} CvT has {field}={only} alone, and this model {given!r}; to "
                    f"write its weights for what that code computes, set {field}={values[0]}"
                )
    if config.global_pool != ("token" if config.has_class_token else "avg"):
        raise UserError(
            f"{names.title} CvT reads its class token if it has one, else the mean over patches; "
            f"this model has global_pool='{config.global_pool}' and class_token="
            f"{config.has_class_token}"
        )
    check_keys(state, blank_state(config), "locality's")
    return {names.rename(name): tensor for name, tensor in state.items()}


def _tensor(state: State, name: str) -> Tensor:
    if name not in state:
        raise UserError(f"these weights have no {name}, which tells the architecture")
    return state[name]
