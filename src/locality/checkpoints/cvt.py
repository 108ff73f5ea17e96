"""CvT as microsoft's code and as transformers name it: the same tensors, under other names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor

from locality.checkpoints.keys import State, blank_state, check_keys
from locality.checkpoints.vit import require_blocks
from locality.errors import UserError
from locality.layers.block import mlp_ratio_of
from locality.models.cvt_config import CvTConfig, StageConfig

# Every published CvT has heads of this width; the weights themselves do not tell.
_HEAD_DIM = 64

DROPPED: frozenset[str] = frozenset()
"""Nothing: every tensor of theirs has its place in ours."""

_OURS = re.compile(r"stages\.(\d+)\.(?:blocks\.(\d+)\.)?(.+?)(\.[^.]+)?$")


@dataclass(frozen=True)
class Names:
    """How a layout names its tensors.

    Attributes:
        title: whose names these are.
        stage, block: what stands before the names in a stage, and in a block of it.
        modules: our module name → theirs, inside a stage or block, and for the final layers.
    """

    title: str
    stage: str
    block: str
    modules: dict[str, str]

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
    "microsoft's",
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
)


def from_microsoft(state: State, config: CvTConfig) -> dict[str, Tensor]:
    """microsoft's CvT → ours.

    Raises:
        UserError: if a name is missing or unknown, or a shape differs from `config`'s.
    """
    return _from(MICROSOFT, state, config)


def to_microsoft(state: State, config: CvTConfig) -> dict[str, Tensor]:
    """Ours → microsoft's CvT.

    Raises:
        UserError: if `state` does not fit `config`, or has a position embedding, which their code
            has no name for.
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

    Their port computes the exact GELU, whatever `config.activation` says.

    Raises:
        UserError: if `state` does not fit `config`, or has a position embedding, which their code
            has no name for.
    """
    return _to(TRANSFORMERS, state, config)


def infer_microsoft(state: State, like: CvTConfig | None = None) -> CvTConfig:
    """The architecture of weights under microsoft's names; see `infer`."""
    return infer(MICROSOFT, state, like)


def infer_transformers(state: State, like: CvTConfig | None = None) -> CvTConfig:
    """The architecture of weights under transformers' names; see `infer`."""
    return infer(TRANSFORMERS, state, like)


def infer(names: Names, state: State, like: CvTConfig | None = None) -> CvTConfig:
    """The architecture, read from the shapes.

    Weights do not tell strides and numbers of heads: they are taken to be the paper's, with heads
    64 wide, keys and values of stride 2, and embeddings that overlap by half.

    Args:
        names: whose names the tensors have.
        state: the weights.
        like: take everything from this configuration but the channels and the classes.

    Raises:
        UserError: if the tensors that tell are not there, or a width is no multiple of 64.
    """
    stages = require_blocks(state, names.stage.removesuffix("{}."))
    modules = names.modules
    embeddings = [
        _tensor(state, f"{names.stage.format(index)}{modules['embed.conv']}.weight")
        for index in range(stages)
    ]
    head = state.get(f"{modules['head']}.weight")
    num_classes, in_chans = 0 if head is None else len(head), embeddings[0].shape[1]
    if like is not None:
        return replace(like, num_classes=num_classes, in_chans=in_chans)
    return CvTConfig(
        stages=tuple(
            _infer_stage(names, state, index, embedding)
            for index, embedding in enumerate(embeddings)
        ),
        num_classes=num_classes,
        in_chans=in_chans,
        global_pool="token" if any(key.endswith("cls_token") for key in state) else "avg",
    )


def _infer_stage(names: Names, state: State, index: int, embedding: Tensor) -> StageConfig:
    stage = names.stage.format(index)
    depth = require_blocks(state, stage + names.block.removesuffix("{}."))
    width, kernel = embedding.shape[0], embedding.shape[-1]
    if width % _HEAD_DIM:
        raise UserError(
            f"the number of heads cannot be told from a CvT of width {width}; give the model's name"
        )
    hidden = [
        len(_tensor(state, f"{stage}{names.block.format(i)}{names.modules['mlp.fc1']}.weight"))
        for i in range(depth)
    ]
    ratios = tuple(mlp_ratio_of(width, each) for each in hidden)
    first = stage + names.block.format(0)
    window = state.get(f"{first}{names.modules['attn.q.conv']}.weight")
    overlapping = kernel % 2 == 1
    stride = (kernel + 1) // 2 if overlapping else kernel
    return StageConfig(
        embed_dim=width,
        num_heads=width // _HEAD_DIM,
        depth=depth,
        embed_kernel=kernel,
        embed_stride=stride,
        embed_padding=stride // 2 if overlapping else 0,
        mlp_ratio=ratios[0] if len(set(ratios)) == 1 else ratios,
        projection="linear" if window is None else "conv",
        projection_kernel=3 if window is None else window.shape[-1],
        qkv_bias=f"{first}{names.modules['attn.q.linear']}.bias" in state,
    )


def _from(names: Names, state: State, config: CvTConfig) -> dict[str, Tensor]:
    blank = blank_state(config)
    ours = {names.rename(name): name for name in _nameable(blank, names)}
    expected = {theirs: blank[name] for theirs, name in ours.items()}
    check_keys(state, expected, names.title, DROPPED)
    return {ours[name]: tensor for name, tensor in state.items()}


def _to(names: Names, state: State, config: CvTConfig) -> dict[str, Tensor]:
    check_keys(state, blank_state(config), "locality's")
    return {names.rename(name): tensor for name, tensor in _nameable(state, names).items()}


def _nameable(state: State, names: Names) -> State:
    if any(name.endswith("pos_embed") for name in state):
        raise UserError(
            f"this CvT has a position embedding, and {names.title} layout has no name for one"
        )
    return state


def _tensor(state: State, name: str) -> Tensor:
    if name not in state:
        raise UserError(f"these weights have no {name}, which tells the architecture")
    return state[name]
