"""Configurations of the models: DeiT and ConViT, CvT, and timm's."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from msgspec import Meta

from locality import checks
from locality.errors import UnknownSetting, UserError, check_known, unknown
from locality.layers.grid import AttentionScale, Grid, ProjectionName, check_heads, projected_grid
from locality.settings import check, setting, settings_of, with_role

PositionalAttention = Literal["gpsa", "psa"]
PREFIX = "timm/"
"""The name prefix of timm models."""
Activation = Literal["quick_gelu", "gelu"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Base of the configurations of all families.

    Attributes:
        name: one of `locality models`, or "timm/" and the name of a timm model: what the values
            were taken from.
        img_size: image size, a number or (height, width); sets the grid of the position embeddings.
        in_chans, num_classes: channels of the images, classes of the classifier.
        global_pool: input of the classifier: "token", the class token; "avg", the mean over
            patches; "" all tokens, for models without a classifier.
        class_token: whether the model has a class token; None is the family's default. Without one,
            "token" reads the first patch.
        drop_rate: dropout before the classifier.
        proj_drop_rate: dropout after every attention and inside every MLP.
        attn_drop_rate: dropout of every attention matrix, which it makes slower to train.
        family, title: the name of the family in files and in messages.
        stem, classifiers: names of the first module and of the classifiers, which are averaged.
        pos_embed: name of the position embedding on each of `grids`.

    Raises:
        UserError: with the field, the value given and what is accepted.
    """

    family: ClassVar[str]
    title: ClassVar[str]
    stem: ClassVar[str]
    pos_embed: ClassVar[str]
    classifiers: ClassVar[tuple[str, ...]] = ("head",)

    name: str = dataclasses.field(default="", compare=False)
    img_size: checks.ImageSize = setting(224, "interface")
    in_chans: checks.UpTo1024 = setting(3, "data")
    num_classes: Annotated[int, Meta(ge=0, le=1_000_000)] = setting(1000, "data")
    global_pool: Literal["token", "avg", ""] = "token"
    class_token: bool | None = None
    drop_rate: checks.ShareBelowOne = setting(0.0, "training")
    proj_drop_rate: checks.ShareBelowOne = setting(0.0, "training")
    attn_drop_rate: checks.ShareBelowOne = setting(0.0, "training")

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
        return {self.pos_embed.format(i): grid for i, grid in enumerate(self.native_grids)}

    def weight_signature(self) -> dict[str, Any]:
        """The settings that the weights depend on, with no value left open."""
        others = {"name", *with_role(type(self), "interface", "training")}
        own = {name: getattr(self, name) for name in settings_of(self) if name not in others}
        return own | {"class_token": self.has_class_token}

    def with_overrides(self, **fields: Any) -> Self:
        """This configuration with some fields changed, those that are not None.

        Raises:
            UserError: for an unknown field (suggesting the nearest) or an invalid value.
        """
        changed = {n: x for n, x in fields.items() if x not in (None, getattr(self, n, None))}
        own = [field.name for field in dataclasses.fields(self)]
        check_known(f"setting of {self.name or self.title}", changed, own, UnknownSetting)
        return dataclasses.replace(self, **changed) if changed else self


def signature_diff(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Settings that make weights of one configuration invalid for another of the same family.

    Returns:
        name → its two values.
    """
    first, second = one.weight_signature(), other.weight_signature()
    return {name: (x, second[name]) for name, x in first.items() if x != second[name]}


def to_2tuple(img_size: int | Sequence[int]) -> Grid:
    """An image size, a number or (height, width), as (height, width)."""
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    return height, width


@dataclass(frozen=True, kw_only=True)
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
        embed_class_token: the class token joins before the position embedding is added, which has
            an entry for it (DeiT).
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
    pos_embed = "pos_embed"

    def __post_init__(self) -> None:
        check(self)
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
        _ = self.native_grids  # refuses an image size

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
        height, width = size
        patch = self.patch_size
        if min(size) < patch or height % patch or width % patch:
            raise UserError(
                f"an image of {height}×{width} pixels cannot be cut into patches of {patch}×{patch}"
                f"; both sides must be multiples of {patch}"
            )
        return [(height // patch, width // patch)]


class StageConfig(NamedTuple):
    """One stage of a CvT, with nothing left open; see `CvTConfig`."""

    embed_dim: int
    num_heads: int
    depth: int
    embed_kernel: int
    embed_stride: int
    embed_padding: int
    embed_pool: bool
    mlp_ratio: tuple[float, ...]
    kv_stride: tuple[int, ...]
    projection: ProjectionName
    projection_kernel: int
    kv_padding: int
    qkv_bias: bool
    use_pos_embed: bool
    drop_path_rate: float


_PER_BLOCK = ("mlp_ratio", "kv_stride")


@dataclass(frozen=True, kw_only=True)
class CvTConfig(Architecture):
    """The complete architecture of a CvT (Table 2); see `Architecture` for the other fields.

    A field of the stages is one value for all (`drop_path_rate`: for the last), or one per stage,
    as a column of Table 2 each. By default, the last stage has a class token unless `global_pool`
    is "avg". The model accepts images of at least `minimum_size`.

    Attributes:
        embed_dim: token width C of each stage.
        num_heads: heads per layer; divides C.
        depth: number of blocks. First stages of none are a convolutional stem (Xiao et al. 2021):
            their embeddings are followed by GELU.
        embed_kernel, embed_stride, embed_padding: the token embedding's convolution (Eq. 1).
            Kernel = stride without padding is a patch embedding (Table 6).
        embed_pool: max pooling by this window, before a convolution at stride 1.
        mlp_ratio: hidden width of the MLPs over C; also one value per block.
        kv_stride: stride of the key and value projections; also one value per block (Table 7).
            Ignored by linear projections.
        projection: "conv", "linear" (Table 8) or "avg"; see `Projection`.
        projection_kernel: side of the projections' window.
        kv_padding: padding of the key and value projections; half the window if None.
        qkv_bias: bias of the projections' linear parts.
        use_pos_embed: add a learned position embedding to the patches (Table 5).
        drop_path_rate: stochastic depth, rising linearly from 0 to this over the stage's blocks; a
            single value is the last stage's, as in the authors' configurations.
        activation: activation of the MLPs: the authors' "quick_gelu", x·σ(1.702x), or the exact
            "gelu".
        attention_scale: scale of the attention scores: "width", C^−½, as in the authors' weights,
            or "head", the usual d^−½.
    """

    embed_dim: tuple[checks.Width, ...]
    num_heads: checks.UpTo1024 | tuple[checks.UpTo1024, ...]
    depth: checks.StageDepth | tuple[checks.StageDepth, ...]
    embed_kernel: checks.UpTo1024 | tuple[checks.UpTo1024, ...] = 3
    embed_stride: checks.UpTo1024 | tuple[checks.UpTo1024, ...] = 2
    embed_padding: int | tuple[int, ...] = 1
    embed_pool: bool | tuple[bool, ...] = False
    mlp_ratio: checks.Ratio | tuple[checks.Ratio | tuple[checks.Ratio, ...], ...] = 4.0
    kv_stride: checks.UpTo1024 | tuple[checks.UpTo1024 | tuple[checks.UpTo1024, ...], ...] = 2
    projection: ProjectionName | tuple[ProjectionName, ...] = "conv"
    projection_kernel: int | tuple[int, ...] = 3
    kv_padding: int | tuple[int | None, ...] | None = None
    qkv_bias: bool | tuple[bool, ...] = True
    use_pos_embed: bool | tuple[bool, ...] = False
    drop_path_rate: checks.ShareBelowOne | tuple[checks.ShareBelowOne, ...] = setting(
        0.0, "training"
    )
    activation: Activation = "quick_gelu"
    attention_scale: AttentionScale = "width"

    family = "cvt"
    title = "a CvT"
    stem = "stages.0.embed.conv"
    pos_embed = "stages.{}.pos_embed"

    def __post_init__(self) -> None:
        check(self)
        if not self.embed_dim:
            raise UserError("embed_dim is empty; give the width of each stage")
        if not self.per_stage("depth")[-1] and self.has_class_token:
            raise UserError(
                "depth is 0 in the last stage: its class token would attend to nothing; give it "
                "blocks, or use class_token=False"
            )
        for name in StageConfig._fields:  # each model is written in one way
            values = self.per_stage(name)
            if name == "drop_path_rate":
                values = values if any(values[:-1]) else values[-1]
            elif name not in ("embed_dim", "num_heads", "depth"):
                values = tuple(map(_one, values))
                values = values if isinstance(values[0], tuple) else _one(values)
            object.__setattr__(self, name, values)
        for stage in self.stages:
            check_heads(stage.embed_dim, stage.num_heads)
            # With more padding, some tokens would see only padding; PyTorch pools with less.
            most = stage.embed_kernel // 2 if stage.embed_pool else stage.embed_kernel - 1
            checks.integer("embed_padding", stage.embed_padding, 0, most)
            if stage.embed_pool and stage.embed_kernel % 2 == 0:
                raise UserError(f"embed_pool needs an odd embed_kernel, not {stage.embed_kernel}")
            checks.integer("projection_kernel", stage.projection_kernel, 1, 1023)
            if stage.projection_kernel % 2 == 0:
                raise UserError(f"projection_kernel must be odd, not {stage.projection_kernel}")
            checks.integer("kv_padding", stage.kv_padding, 0, stage.projection_kernel // 2)
        _ = self.native_grids  # refuses an image size

    def per_stage(self, name: str) -> tuple[Any, ...]:
        """The values of a field of the stages, one per stage.

        Raises:
            UserError: for a wrong number of values.
        """
        value, count = getattr(self, name), len(self.embed_dim)
        depths: Any = self.depth
        if not isinstance(value, tuple):
            others = 0.0 if name == "drop_path_rate" else value
            return (others,) * (count - 1) + (value,)
        if name in _PER_BLOCK and len(value) == sum(depths) != count:
            blocks = iter(value)
            value = tuple(tuple(itertools.islice(blocks, depth)) for depth in depths)
        if len(value) != count:
            raise UserError(
                f"{name}={value} has {len(value)} values for {count} stages; give one value, one "
                f"per stage{', or one per block' if name in _PER_BLOCK else ''}"
            )
        for blocks, depth in zip(value, depths, strict=True) if name in _PER_BLOCK else ():
            if isinstance(blocks, tuple) and len(blocks) != depth:
                raise UserError(f"{name}={blocks} has {len(blocks)} values for depth={depth}")
        return value

    @cached_property
    def stages(self) -> tuple[StageConfig, ...]:
        """The stages, first to last."""
        columns = map(self.per_stage, StageConfig._fields)
        rows = [StageConfig(*row) for row in zip(*columns, strict=True)]
        return tuple(
            row._replace(
                mlp_ratio=_each(row.mlp_ratio, row.depth),
                kv_stride=_each(row.kv_stride, row.depth),
                kv_padding=row.projection_kernel // 2 if row.kv_padding is None else row.kv_padding,
            )
            for row in rows
        )

    @property
    def has_class_token(self) -> bool:
        """Whether the last stage has a class token."""
        return self.global_pool != "avg" if self.class_token is None else self.class_token

    @property
    def minimum_size(self) -> int:
        """The shortest image side, in pixels, that leaves at least one token in every stage."""
        return self.shortest(1)

    def shortest(self, tokens: int) -> int:
        """The shortest image side, in pixels, with at least `tokens` queries and keys along it."""
        side = tokens
        for stage in reversed(self.stages):
            if stage.projection != "linear":
                steps = (tokens - 1) * max(stage.kv_stride, default=1)
                side = max(side, steps + stage.projection_kernel - 2 * stage.kv_padding)
            side = (side - 1) * stage.embed_stride + stage.embed_kernel - 2 * stage.embed_padding
            side = max(tokens, side)
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
        grids = [(size[0], size[1])]
        for stage in self.stages:
            window = (stage.embed_kernel, stage.embed_stride, stage.embed_padding)
            grids.append(projected_grid(grids[-1], "conv", *window))
        return grids[1:]

    def weight_signature(self) -> dict[str, Any]:
        """As `Architecture.weight_signature`, with the values of each stage and block."""
        columns = dict(zip(StageConfig._fields, zip(*self.stages, strict=True), strict=True))
        return {name: columns.get(name, x) for name, x in super().weight_signature().items()}


def _one(values: Any) -> Any:
    """Equal values as one."""
    return values[0] if isinstance(values, tuple) and len({*values}) == 1 else values


def _each(value: Any, count: int) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,) * count


Scalar = str | bool | int | float


@dataclass(frozen=True, kw_only=True)
class TimmConfig:
    """A timm model.

    Attributes:
        name: "timm/" and timm's name of the model.
        img_size: image size, a number or (height, width); used by models with a fixed input size.
        num_classes, in_chans: classes of the classifier, channels of the images.
        settings: other arguments of timm's model function.
    """

    name: str
    img_size: checks.ImageSize = setting(224, "interface")
    num_classes: checks.Natural = setting(1000, "data")
    in_chans: checks.Natural = setting(3, "data")
    settings: dict[str, Scalar] = dataclasses.field(default_factory=dict, hash=False)

    has_class_token = False  # in the features of the wrapped model
    family = "timm"
    title = "a timm model"

    def __post_init__(self) -> None:
        import timm  # takes seconds

        check(self)
        if not timm.is_model(self.timm_name):
            raise unknown("model", self.name, [PREFIX + name for name in timm.list_models()])
        settings = {name: _number(value) for name, value in sorted(self.settings.items())}
        object.__setattr__(self, "settings", settings)
        for name, value in settings.items():
            # A checkpoint could otherwise ask for any number of blocks.
            if isinstance(value, int) and not isinstance(value, bool):
                checks.integer(name, value, 0, 512 if name == "depth" else 32_768)

    @property
    def timm_name(self) -> str:
        """timm's name of the model."""
        return self.name.removeprefix(PREFIX)

    @property
    def arguments(self) -> dict[str, Any]:
        """timm's arguments; models that take any image size are not given one."""
        fixed = _pretrained_cfg(self.timm_name).fixed_input_size
        size = {"img_size": self.img_size} if fixed else {}
        return {"num_classes": self.num_classes, "in_chans": self.in_chans} | self.settings | size

    @property
    def classifiers(self) -> tuple[str, ...]:
        """Names of the classifiers: distilled models have two."""
        names = _pretrained_cfg(self.timm_name).classifier or ()
        return tuple(f"model.{name}" for name in ([names] if isinstance(names, str) else names))

    @property
    def stem(self) -> str:
        """Name of the first convolution, of several the first; "model." if timm names none."""
        names = _pretrained_cfg(self.timm_name).first_conv or ("",)
        return f"model.{names if isinstance(names, str) else names[0]}"

    def embeddings(self) -> dict[str, Grid]:
        """Empty: position embeddings of timm models are not resampled."""
        return {}

    def weight_signature(self) -> dict[str, Any]:
        """As `Architecture.weight_signature`."""
        own = {name: x for name, x in self.settings.items() if not name.endswith("_rate")}
        return {"name": self.name, "settings": own}

    def data_config(self) -> dict[str, Any]:
        """timm's data configuration of the model: input size, mean, std, interpolation, crop."""
        from timm.data import resolve_data_config

        return resolve_data_config(pretrained_cfg=_pretrained_cfg(self.timm_name).to_dict())

    @classmethod
    def named(cls, name: str) -> "TimmConfig":
        """timm's default configuration of the model "timm/NAME".

        Raises:
            UserError: if timm has no model of this name.
        """
        cfg = _pretrained_cfg(name.removeprefix(PREFIX))
        return cls(name=name, num_classes=cfg.num_classes, img_size=cfg.input_size[1:])

    def with_overrides(self, **fields: Any) -> "TimmConfig":
        """This configuration with some settings changed; unknown ones are passed to timm.

        None keeps a field, and leaves an argument to timm. An argument is also known by its dotted
        name, `settings.NAME`.

        Raises:
            UserError: for an invalid value, or one passed to timm that is not a `Scalar`.
        """
        own = {field.name: fields.pop(field.name, None) for field in dataclasses.fields(self)}
        named = {name.removeprefix("settings."): value for name, value in fields.items()}
        given = self.settings | dict(own.pop("settings") or {}) | named
        own["settings"] = {name: value for name, value in given.items() if value is not None}
        kept = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(self, **kept)


def _number(value: Any) -> Any:
    """A number in one way of writing it, so that 0, 0.0 and "0e0" are one setting; else `value`."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        return value
    return int(number) if number.is_integer() else number if math.isfinite(number) else value


def _pretrained_cfg(name: str) -> Any:
    from timm.models import PretrainedCfg, get_pretrained_cfg

    return get_pretrained_cfg(name) or PretrainedCfg()
