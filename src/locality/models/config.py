"""Configurations of the architectures: a common base, DeiT and ConViT, and CvT."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from locality import checks
from locality.errors import UnknownSetting, UserError, check_known
from locality.layers.grid import (
    AttentionScale,
    Grid,
    ProjectionName,
    check_heads,
    check_kernel,
    hidden_width,
    projected_grid,
)
from locality.settings import Setting, check, from_dict, setting, settings_of, with_role

# The largest published model has 0.3 billion parameters; far more is a mistake or hostile.
_MOST_PARAMETERS = 4_000_000_000

Initialisation = Literal["default", "mimetic", "impulse"]
PositionalAttention = Literal["gpsa", "psa"]
Activation = Literal["quick_gelu", "gelu"]


def weight_signature(config: Any) -> dict[str, Any]:
    """The fields of a configuration that its weights depend on."""
    left_out = with_role(type(config), "interface", "training")
    names = (field.name for field in dataclasses.fields(config))
    return {name: getattr(config, name) for name in names if name not in left_out}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Base of the configurations of all families.

    Attributes:
        img_size: image size, a number or (height, width); sets the grid of the position embeddings.
        in_chans, num_classes: channels of the images, classes of the classifier.
        global_pool: input of the classifier: "token", the class token; "avg", the mean over
            patches; "" all tokens, for models without a classifier.
        class_token: whether the model has a class token; None is the family's default. Without one,
            "token" reads the first patch.
        drop_rate: dropout before the classifier.
        proj_drop_rate: dropout after every attention and inside every MLP.
        init: initialisation of attention, one of `locality.models.initialisations`; "default" is
            the family's.
        family, title: the name of the family in files and in messages.
        stem, classifiers: names of the first module and of the classifiers, which are averaged.

    Raises:
        UserError: with the field, the value given and what is accepted.
    """

    family: ClassVar[str]
    title: ClassVar[str]
    stem: ClassVar[str]
    classifiers: ClassVar[tuple[str, ...]] = ("head",)

    img_size: checks.ImageSize = setting(224, "interface")
    in_chans: checks.UpTo1024 = setting(3, "interface")
    num_classes: Annotated[int, Meta(ge=0, le=1_000_000)] = setting(1000, "interface")
    global_pool: Literal["token", "avg", ""] = "token"
    class_token: bool | None = None
    drop_rate: checks.ShareBelowOne = setting(0.0, "training")
    proj_drop_rate: checks.ShareBelowOne = setting(0.0, "training")
    init: Initialisation = setting("default", "training")

    def __post_init__(self) -> None:
        check(self)
        checks.one_of("init", self.init, self.initialisations)

    @property
    def initialisations(self) -> tuple[Initialisation, ...]:
        """Values of `init` for this model."""
        return "default", "mimetic"

    @property
    def has_class_token(self) -> bool:
        """Whether the final tokens include a class token."""
        raise NotImplementedError

    def grids(self, size: Sequence[int]) -> list[Grid]:
        """The token grids, first to last, for an image of `size` (height, width).

        Raises:
            UserError: if the model does not accept this size.
        """
        raise NotImplementedError

    @property
    def native_grids(self) -> list[Grid]:
        """The token grids at `img_size`, those of the position embeddings."""
        return self.grids(to_2tuple(self.img_size))

    def embeddings(self) -> dict[str, Grid]:
        """Grids of the position embeddings, by name."""
        raise NotImplementedError

    def weight_signature(self) -> dict[str, Any]:
        """The fields that the weights depend on, normalised, by dotted name."""
        return weight_signature(self) | {"class_token": self.has_class_token}

    def with_overrides(self, **fields: Any) -> Self:
        """This configuration with some fields changed.

        Raises:
            UserError: for an unknown field (suggesting the nearest) or an invalid value.
        """
        check_known(f"setting of {type(self).__name__}", fields, self.settings(), UnknownSetting)
        return dataclasses.replace(self, **fields) if fields else self

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """The settings that `with_overrides` accepts, by name."""
        return settings_of(cls)


def signature_diff(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Fields that make weights of one configuration invalid for another of the same family.

    Input and output sizes and training settings are ignored. MLPs are compared by width, keys and
    values by their stride per block.

    Returns:
        dotted field name → its two values.
    """
    first, second = one.weight_signature(), other.weight_signature()
    both = {name: (first.get(name), second.get(name)) for name in (*first, *second)}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def to_2tuple(img_size: int | Sequence[int]) -> Grid:
    """An image size, a number or (height, width), as (height, width)."""
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    return height, width


@dataclass(frozen=True)
class ViTConfig(Architecture):
    """The complete architecture of a DeiT or ConViT; see `Architecture` for the other fields.

    The class token joins after the positional blocks. The model accepts images of any multiple of
    the patch size.

    Attributes:
        patch_size: side of a patch in pixels.
        embed_dim: token width.
        depth: number of blocks.
        num_heads: heads per layer; divides `embed_dim`.
        mlp_ratio: hidden width of the MLPs over `embed_dim`.
        qkv_bias: bias on queries, keys and values (DeiT: True, ConViT: False).
        gpsa_layers: number of first blocks with positional attention (10 of 12 in the paper).
        positional_attention: "gpsa" (gated, Eq. 7) or "psa" (one softmax, Eq. 4; Fig. 9).
        locality_strength: α of the convolutional initialisation (Eq. 5).
        conv_init: initialise the positional layers as random convolutions (Table 3 c, d: False).
        gating_init: initial λ of every gate.
        freeze_gating: do not train the gates (Table 3 b, d: with `gating_init=0`).
        freeze_gpsa: do not train the attention of the positional layers (Table 3 f, g).
        use_pos_embed: add a learned absolute position embedding to the patches.
        embed_class_token: include the class token in the position embedding (DeiT).
        drop_path_rate: stochastic depth, rising linearly from 0 to this over the blocks.
    """

    embed_dim: checks.Width
    num_heads: checks.UpTo1024
    depth: checks.Depth = 12
    patch_size: checks.UpTo1024 = 16
    mlp_ratio: checks.Ratio = 4.0
    qkv_bias: bool = False
    gpsa_layers: int = 0
    positional_attention: PositionalAttention = "gpsa"
    locality_strength: checks.Positive = setting(1.0, "training")
    conv_init: bool = setting(True, "training")
    gating_init: checks.Finite = setting(1.0, "training")
    freeze_gating: bool = setting(False, "training")
    freeze_gpsa: bool = setting(False, "training")
    use_pos_embed: bool = True
    embed_class_token: bool = False
    drop_path_rate: checks.ShareBelowOne = setting(0.0, "training")

    family = "vit"
    title = "a DeiT or ConViT"
    stem = "patch_embed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.embed_dim, self.num_heads)
        checks.integer("gpsa_layers", self.gpsa_layers, 0, self.depth)
        reads_token = self.global_pool == "token" and self.class_token is None
        if self.gpsa_layers == self.depth and (self.class_token or reads_token):
            raise UserError(
                f"gpsa_layers={self.gpsa_layers} of depth={self.depth} leaves no block for the "
                f"class token to attend to patches; lower gpsa_layers, or use global_pool='avg' "
                f"without class_token"
            )
        if self.embed_class_token and (self.gpsa_layers or not self.has_class_token):
            raise UserError(
                "embed_class_token=True needs a class token and gpsa_layers=0: with positional "
                "layers the class token joins after the position embedding is added"
            )
        ((rows, columns),) = self.native_grids
        entries = rows * columns * self.use_pos_embed + self.num_classes
        entries += self.in_chans * self.patch_size**2
        _check_parameters(self.embed_dim, self.depth, self.mlp_ratio, self.embed_dim * entries)

    @property
    def initialisations(self) -> tuple[Initialisation, ...]:
        """Values of `init`: impulses need position embeddings."""
        impulse = self.use_pos_embed and self.embed_dim >= 4 * self.num_heads
        return ("default", "mimetic", "impulse") if impulse else ("default", "mimetic")

    @property
    def has_class_token(self) -> bool:
        """Whether a class token joins before the first block without positional attention."""
        return self.gpsa_layers < self.depth if self.class_token is None else self.class_token

    def with_overrides(self, **fields: Any) -> Self:
        """This configuration with some fields changed; see `Architecture.with_overrides`.

        A `depth` of at most `gpsa_layers` lowers `gpsa_layers`, keeping the number of other blocks.
        """
        depth = fields.get("depth")
        if "gpsa_layers" not in fields and isinstance(depth, int) and depth <= self.gpsa_layers:
            fields["gpsa_layers"] = max(0, depth - (self.depth - self.gpsa_layers))
        return super().with_overrides(**fields)

    def grids(self, size: Sequence[int]) -> list[Grid]:
        """The patch grid of an image of `size` (height, width), as a list of one.

        Raises:
            UserError: if a side is not a multiple of the patch size.
        """
        return [token_grid(size, self.patch_size)]

    def embeddings(self) -> dict[str, Grid]:
        """The patch grid of `pos_embed`."""
        return {"pos_embed": self.native_grids[0]}

    def weight_signature(self) -> dict[str, Any]:
        """As `Architecture.weight_signature`; `positional_attention` only with `gpsa_layers`."""
        fields = super().weight_signature() | {
            "mlp_ratio": hidden_width(self.embed_dim, self.mlp_ratio)
        }
        if not self.gpsa_layers:
            del fields["positional_attention"]
        return fields


def _check_parameters(width: int, depth: int, mlp_ratio: float, others: int) -> None:
    """Check the size of a transformer of `depth` blocks and `others` further parameters.

    Raises:
        UserError: if it has more than `_MOST_PARAMETERS`.
    """
    count = depth * width * width * (4 + 2 * mlp_ratio) + others
    if count > _MOST_PARAMETERS:
        raise UserError(
            f"embed_dim={width} and depth={depth} give about {count:.2g} parameters; "
            f"at most {_MOST_PARAMETERS:.2g} are allowed"
        )


def token_grid(img_size: int | Sequence[int], patch_size: int) -> Grid:
    """The patch grid of an image of `img_size` pixels, a number or (height, width).

    Raises:
        UserError: if a side is not a multiple of the patch size.
    """
    height, width = to_2tuple(img_size)
    if min(height, width) < patch_size or height % patch_size or width % patch_size:
        raise UserError(
            f"an image of {height}×{width} pixels cannot be cut into patches of {patch_size}×"
            f"{patch_size}; both sides must be multiples of {patch_size}"
        )
    return height // patch_size, width // patch_size


_PER_BLOCK = ("mlp_ratio", "kv_stride")
_SHORTHANDS = {
    "position": Setting(
        Literal["every", "first", "last", "none"],
        "which of the stages have a position embedding (Table 5)",
    ),
    "embedding": Setting(
        Literal["conv", "patch"], "token embedding, for all stages or one per stage (Table 6)"
    ),
}


@dataclass(frozen=True)
class StageConfig:
    """One stage of a CvT (a column of Table 2).

    Attributes:
        embed_dim: token width C.
        num_heads: heads per layer; divides C.
        depth: number of blocks.
        embed_kernel, embed_stride, embed_padding: the token embedding's convolution (Eq. 1).
            Kernel = stride without padding is a patch embedding (Table 6).
        mlp_ratio: hidden width of the MLPs over C; one number, or one per block.
        kv_stride: stride of the key and value projections; one number, or one per block (Table 7).
            Ignored by linear projections.
        projection: "conv", "linear" (Table 8) or "avg"; see `Projection`.
        projection_kernel: side of the projections' window.
        kv_padding: padding of the key and value projections; half the window if None.
        qkv_bias: bias of the projections' linear parts.
        use_pos_embed: add a learned position embedding to the stage's patches (Table 5).
        drop_path_rate: stochastic depth, rising linearly from 0 to this over the stage's blocks.

    Raises:
        UserError: with the field, the value given and what is accepted.
    """

    embed_dim: checks.Width
    num_heads: checks.UpTo1024
    depth: checks.Depth
    embed_kernel: checks.UpTo1024 = 3
    embed_stride: checks.UpTo1024 = 2
    embed_padding: int = 1
    mlp_ratio: checks.Ratio | tuple[checks.Ratio, ...] = 4.0
    kv_stride: checks.UpTo1024 | tuple[checks.UpTo1024, ...] = 2
    projection: ProjectionName = "conv"
    projection_kernel: int = 3
    kv_padding: int | None = None
    qkv_bias: bool = True
    use_pos_embed: bool = False
    drop_path_rate: checks.ShareBelowOne = setting(0.0, "training")

    def __post_init__(self) -> None:
        check(self)
        for name in _PER_BLOCK:
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != self.depth:
                raise UserError(
                    f"{name}={given} has {len(given)} values for depth={self.depth}; "
                    f"give one number, or one per block"
                )
        check_heads(self.embed_dim, self.num_heads)
        # With more padding, some tokens would see only padding.
        checks.integer("embed_padding", self.embed_padding, 0, self.embed_kernel - 1)
        check_kernel(self.projection_kernel)
        if self.kv_padding is not None:
            checks.integer("kv_padding", self.kv_padding, 0, self.projection_kernel // 2)

    @property
    def mlp_ratios(self) -> tuple[float, ...]:
        """The MLP ratio of each block."""
        given = self.mlp_ratio
        return given if isinstance(given, tuple) else (given,) * self.depth

    @property
    def kv_strides(self) -> tuple[int, ...]:
        """The stride of keys and values in each block."""
        given = self.kv_stride
        return given if isinstance(given, tuple) else (given,) * self.depth

    def kv_grid(self, grid: Grid, kv_stride: int) -> Grid:
        """The grid of the keys and values of tokens on `grid`."""
        return projected_grid(
            grid, self.projection, self.projection_kernel, kv_stride, self.resolved_kv_padding
        )

    @property
    def resolved_kv_padding(self) -> int:
        """The padding of keys and values, as a number."""
        return self.projection_kernel // 2 if self.kv_padding is None else self.kv_padding

    @property
    def drop_path_rates(self) -> tuple[float, ...]:
        """The stochastic depth of each block."""
        step = self.drop_path_rate / max(1, self.depth - 1)
        return tuple(step * index for index in range(self.depth))

    def grid(self, size: Grid) -> Grid:
        """The token grid of the stage for an image or token map of `size` (Eq. 1)."""
        return projected_grid(
            size, "conv", self.embed_kernel, self.embed_stride, self.embed_padding
        )

    def weight_signature(self) -> dict[str, Any]:
        """As `Architecture.weight_signature`."""
        linear = self.projection == "linear"
        return weight_signature(self) | {
            "mlp_ratio": tuple(hidden_width(self.embed_dim, ratio) for ratio in self.mlp_ratios),
            "kv_stride": None if linear else self.kv_strides,
            "projection_kernel": None if linear else self.projection_kernel,
            "kv_padding": None if linear else self.resolved_kv_padding,
        }


@dataclass(frozen=True)
class CvTConfig(Architecture):
    """The complete architecture of a CvT (Table 2); see `Architecture` for the other fields.

    By default, the last stage has a class token unless `global_pool` is "avg". The model accepts
    images of at least `minimum_size`.

    Attributes:
        stages: one `StageConfig` per stage.
        activation: activation of the MLPs: the authors' "quick_gelu", x·σ(1.702x), or the exact
            "gelu".
        attention_scale: scale of the attention scores: "width", C^−½, as in the authors' weights,
            or "head", the usual d^−½.
    """

    stages: tuple[StageConfig, ...]
    activation: Activation = "quick_gelu"
    attention_scale: AttentionScale = "width"

    family = "cvt"
    title = "a CvT"
    stem = "stages.0.embed.conv"

    def __post_init__(self) -> None:
        stages = tuple(
            from_dict(StageConfig, stage, "stage") if isinstance(stage, dict) else stage
            for stage in self.stages
        )
        object.__setattr__(self, "stages", stages)
        super().__post_init__()
        if not stages:
            raise UserError("stages is empty; give at least one StageConfig")
        channels = self.in_chans
        for stage, (rows, columns) in zip(stages, self.native_grids, strict=True):
            entries = rows * columns * stage.use_pos_embed + channels * stage.embed_kernel**2
            entries += 3 * stage.depth * stage.projection_kernel**2 + self.num_classes
            ratio = max(stage.mlp_ratios)
            _check_parameters(stage.embed_dim, stage.depth, ratio, stage.embed_dim * entries)
            channels = stage.embed_dim

    @property
    def has_class_token(self) -> bool:
        """Whether the last stage has a class token."""
        return self.global_pool != "avg" if self.class_token is None else self.class_token

    @property
    def minimum_size(self) -> int:
        """The shortest image side, in pixels, that leaves at least one token in every stage."""
        side = 1
        for stage in reversed(self.stages):
            if stage.projection != "linear":
                side = max(side, stage.projection_kernel - 2 * stage.resolved_kv_padding)
            side = (side - 1) * stage.embed_stride + stage.embed_kernel - 2 * stage.embed_padding
            side = max(1, side)
        return side

    def grids(self, size: Sequence[int]) -> list[Grid]:
        """The token grid of each stage for an image of `size` (height, width).

        Raises:
            UserError: if a side is below `minimum_size`.
        """
        least = self.minimum_size
        if min(size) < least:
            raise UserError(
                f"an image of {size[0]}×{size[1]} pixels is too small for the strides of these "
                f"stages; the smallest is {least}×{least}"
            )
        grid, grids = (size[0], size[1]), []
        for stage in self.stages:
            grid = stage.grid(grid)
            grids.append(grid)
        return grids

    def embeddings(self) -> dict[str, Grid]:
        """The token grid of each stage's position embedding."""
        return {f"stages.{i}.pos_embed": grid for i, grid in enumerate(self.native_grids)}

    def weight_signature(self) -> dict[str, Any]:
        """As `Architecture.weight_signature`, with the fields of each stage."""
        fields = super().weight_signature()
        for index, stage in enumerate(fields.pop("stages")):
            fields |= {f"stages.{index}.{name}": x for name, x in stage.weight_signature().items()}
        return fields

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        per_stage = {
            name: of if name in _PER_BLOCK else of._replace(hint=of.hint | tuple[of.hint, ...])  # type: ignore[name-defined]
            for name, of in settings_of(StageConfig).items()
        }
        return settings_of(cls) | per_stage | _SHORTHANDS

    def with_overrides(self, **fields: Any) -> Self:
        """This configuration with some fields changed; `position` and `embedding` are shorthands.

        Args:
            fields: any field of `CvTConfig`; any field of `StageConfig`, as one value for all
                stages or one per stage (`mlp_ratio` and `kv_stride` also one per block of the
                whole model; a single `drop_path_rate` applies to the last stage, the others get
                0); `position`: "every", "first", "last" or "none" of the stages have a position
                embedding (Table 5); `embedding`: "conv" or "patch", for all stages or one per
                stage (Table 6).

        Raises:
            UserError: for an unknown field (suggesting the nearest), a wrong number of values, or
                an invalid value.
        """
        own, per_stage = settings_of(CvTConfig), settings_of(StageConfig)
        if "patch_size" in fields:
            raise UserError(
                "a CvT has no patch_size; set embed_stride per stage, and embedding='patch' for "
                "embeddings that do not overlap"
            )
        check_known("setting of CvTConfig", fields, self.settings(), UnknownSetting)
        if "embedding" in fields and fields.keys() & {"embed_kernel", "embed_padding"}:
            raise UserError(
                "embedding sets embed_kernel and embed_padding; give either embedding or those two"
            )
        changed = dataclasses.replace(self, **{k: v for k, v in fields.items() if k in own})
        count = len(changed.stages)
        depths = _spread("depth", fields.get("depth", [s.depth for s in changed.stages]), count)
        values = {
            name: _spread(name, value, count, depths if name in _PER_BLOCK else None)
            for name, value in fields.items()
            if name in per_stage
        }
        if "position" in fields:
            which = checks.typed("position", fields["position"], _SHORTHANDS["position"].hint)
            only = {"first": 0, "last": count - 1}.get(which)
            values["use_pos_embed"] = [which == "every" or i == only for i in range(count)]
        stages = [
            dataclasses.replace(stage, **{name: given[index] for name, given in values.items()})
            for index, stage in enumerate(changed.stages)
        ]
        if "embedding" in fields:
            embeddings = _spread("embedding", fields["embedding"], count)
            stages = [_with_embedding(*pair) for pair in zip(stages, embeddings, strict=True)]
        return dataclasses.replace(changed, stages=tuple(stages))


def _spread(name: str, value: Any, count: int, depths: list[int] | None = None) -> list[Any]:
    """Expand one value for all stages, or one per stage, to a list of one per stage.

    Args:
        name, value: the setting.
        count: number of stages.
        depths: blocks per stage, if one value per block of the whole model is also accepted.
    """
    if not isinstance(value, (list, tuple)):
        if name == "drop_path_rate":
            return [0.0] * (count - 1) + [value]
        return [value] * count
    if len(value) == count:
        return list(value)
    if depths is not None and len(value) == sum(depths):
        remaining = iter(value)
        return [tuple(next(remaining) for _ in range(depth)) for depth in depths]
    blocks = "" if depths is None else f", or one for each of the {sum(depths)} blocks"
    raise UserError(
        f"{name}={tuple(value)} has {len(value)} values for {count} stages; give one value, one "
        f"per stage{blocks}"
    )


def _with_embedding(stage: StageConfig, embedding: str) -> StageConfig:
    """The stage with a convolutional or a patch embedding of the same stride (Table 6)."""
    checks.typed("embedding", embedding, _SHORTHANDS["embedding"].hint)
    stride = stage.embed_stride
    # The paper's are 7 and 2 for stride 4, 3 and 1 for 2. Stride 1, which is not in the paper, gets
    # 3 and 1, so that tokens overlap.
    kernel, padding = max(3, 2 * stride - 1), max(1, stride // 2)
    if embedding == "patch":
        kernel, padding = stride, 0
    return dataclasses.replace(stage, embed_kernel=kernel, embed_padding=padding)
