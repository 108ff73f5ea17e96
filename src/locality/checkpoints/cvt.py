"""CvT as Microsoft's code and as transformers name it: the same tensors, under other names.

Both have one setting per stage where ours may have one per block, and some of their code has one
meaning only. Microsoft's without weights of convolutions has average pooling in their place: with
linear projections alone it cannot run, and transformers' can with neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from locality.checkpoints.layouts import THEIR_SETTINGS, Layout
from locality.checkpoints.reading import State, require_blocks
from locality.errors import UserError
from locality.layers.grid import mlp_ratio_of
from locality.models.config import CvTConfig, StageConfig

# Every published CvT has heads of this width; the weights themselves do not tell.
_HEAD_DIM = 64


@dataclass(frozen=True)
class _CvT(Layout):
    """A layout of CvTs.

    Attributes:
        activations, projections: the only ones that their code has.
    """

    activations: tuple[str, ...] = ()
    projections: tuple[str, ...] = ()

    holds = CvTConfig

    def infer(self, state: State, settings: Mapping[str, Any]) -> CvTConfig:
        """Weights do not tell strides, padding and numbers of heads: they are taken to be the
        paper's, with heads 64 wide, keys and values of stride 2, and embeddings that overlap by
        half."""
        stages = tuple(
            self._infer_stage(state, f"stages.{index}.", "num_heads" in settings)
            for index in range(self._count(state, "stages."))
        )
        head = state.get(self.rename("head.weight"))
        return CvTConfig(
            stages,
            num_classes=0 if head is None else len(head),
            in_chans=self.told(state, "stages.0.embed.conv.weight").shape[1],
            global_pool="token" if any(key.endswith("cls_token") for key in state) else "avg",
        )

    def _count(self, state: State, blocks: str) -> int:
        return require_blocks(state, self.rename(blocks + "0.").removesuffix("0."))

    def _infer_stage(self, state: State, stage: str, heads_set: bool) -> StageConfig:
        width, _, kernel, _ = self.told(state, f"{stage}embed.conv.weight").shape
        heads, rest = (1, 0) if heads_set else divmod(width, _HEAD_DIM)
        if rest:
            raise UserError(
                f"the number of heads cannot be told from a CvT of width {width}; set num_heads, "
                f"or give the model's name"
            )
        depth = self._count(state, f"{stage}blocks.")
        ratios = tuple(
            mlp_ratio_of(width, len(self.told(state, f"{stage}blocks.{index}.mlp.fc1.weight")))
            for index in range(depth)
        )
        window = state.get(self.rename(f"{stage}blocks.0.attn.q.conv.weight"))
        if window is None and "microsoft_avg" not in self.projections:
            raise UserError(
                f"these weights have no convolutions in their projections, and {self.title} "
                f"code cannot run without"
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
            qkv_bias=self.rename(f"{stage}blocks.0.attn.q.linear.bias") in state,
        )

    def untold(self, config: CvTConfig) -> dict[str, Any]:
        """One value per stage where they differ."""
        stages = config.stages
        untold: dict[str, Any] = {
            "num_heads": [stage.num_heads for stage in stages],
            "embed_stride": [stage.embed_stride for stage in stages],
            "embed_padding": [stage.embed_padding for stage in stages],
            "kv_stride": [stage.kv_strides[0] for stage in stages],
            "kv_padding": [stage.padding_of_keys for stage in stages],
        }
        if any(stage.projection != "conv" for stage in stages):
            untold["projection_kernel"] = [stage.projection_kernel for stage in stages]
        return {name: x if len(set(x)) > 1 else x[0] for name, x in untold.items()}

    def their_name(self, setting: str) -> str:
        return THEIR_SETTINGS.get(setting, setting)

    def accepted(self, config: CvTConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "activation": self.activations,
            "attention_scale": ("width",),
            "projection": self.projections,
            "use_pos_embed": (False,),
            "global_pool": ("token" if config.has_class_token else "avg",),
        }

    def require(self, config: CvTConfig) -> None:
        super().require(config)
        for name in ("kv_strides", "mlp_ratios"):
            if any(len(set(getattr(stage, name))) > 1 for stage in config.stages):
                raise UserError(
                    f"{self.title} code has the same {name[:-1]} in all blocks of a stage, and "
                    f"this model has not"
                )


class _Transformers(_CvT):
    def untold(self, config: CvTConfig) -> dict[str, Any]:
        # The published weights were trained with the authors' activation, those trained by
        # transformers with its own.
        return super().untold(config) | {"activation": config.activation}

    def their_name(self, setting: str) -> str:
        return super().their_name(setting).lower()

    def accepted(self, config: CvTConfig) -> dict[str, tuple[Any, ...]]:
        token = {"global_pool": ("token",), "has_class_token": (True,)}
        return super().accepted(config) | token

    def require(self, config: CvTConfig) -> None:
        super().require(config)
        for index, stage in enumerate(config.stages):
            if stage.depth <= index:  # it looks up one of the stage's blocks by the stage's number
                raise UserError(
                    f"{self.title} code has {index + 1} blocks or more in stage {index + 1}, and "
                    f"this model {stage.depth}"
                )


MICROSOFT = _CvT(
    "cvt-microsoft",
    "Microsoft's CvT",
    "cvt",
    marks=(".stage0.patch_embed.", ".attn.proj_q."),
    renames=(
        (r"^stages\.", "stage"),
        (r"\bembed\.conv", "patch_embed.proj"),
        (r"\bembed\.norm", "patch_embed.norm"),
        (r"attn\.([qkv])\.conv", r"attn.conv_proj_\1.conv"),
        (r"attn\.([qkv])\.norm", r"attn.conv_proj_\1.bn"),
        (r"attn\.([qkv])\.linear", r"attn.proj_\1"),
    ),
    activations=("quick_gelu",),
    projections=("conv", "microsoft_avg"),
)
_CONVOLVED = r"attention.attention.convolution_projection_\1.convolution_projection."
TRANSFORMERS = _Transformers(
    "cvt-transformers",
    "transformers' CvT",
    "cvt",
    marks=(".cvt.encoder.stages.0.embedding.",),
    renames=(
        (r"^stages\.", "cvt.encoder.stages."),
        (r"^norm\.", "layernorm."),
        (r"^head\.", "classifier."),
        (r"\.blocks\.", ".layers."),
        (r"\bembed\.conv", "embedding.convolution_embeddings.projection"),
        (r"\bembed\.norm", "embedding.convolution_embeddings.normalization"),
        (r"norm1", "layernorm_before"),
        (r"norm2", "layernorm_after"),
        (r"attn\.proj", "attention.output.dense"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
        (r"attn\.q\.", "attn.query."),
        (r"attn\.k\.", "attn.key."),
        (r"attn\.v\.", "attn.value."),
        (r"attn\.(\w+)\.conv", _CONVOLVED + "convolution"),
        (r"attn\.(\w+)\.norm", _CONVOLVED + "normalization"),
        (r"attn\.(\w+)\.linear", r"attention.attention.projection_\1"),
    ),
    activations=("gelu",),
    projections=("conv",),
)
