"""The architecture of a DeiT or ConViT as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from locality import checks
from locality.errors import UserError
from locality.layers.grid import Grid, hidden_width
from locality.models.architecture import Architecture, Initialisation

PositionalAttention = Literal["gpsa", "psa", "conv"]


@dataclass(frozen=True)
class ViTConfig(Architecture):
    """The architecture of a DeiT or ConViT, complete; see `Architecture` for the other fields.

    A class token is of use where a block attends to it: behind the positional ones. Images of any
    multiple of the patch size work at run time.

    Attributes:
        patch_size: side of a patch in pixels.
        embed_dim, depth, num_heads, mlp_ratio: as everywhere.
        qkv_bias: bias on queries, keys and values (DeiT has one, ConViT has none).
        gpsa_layers: how many of the first blocks have positional attention (10 of 12 in the paper).
        positional_attention: "gpsa" (gated, Eq. 7), "psa" (one softmax, Eq. 4; Fig. 9), or "conv",
            a convolution in its place with the kernel that the heads could represent.
        locality_strength: α of the convolutional initialisation (Eq. 5).
        conv_init: start the positional layers as random convolutions (Table 3 c, d: False).
        gating_init: initial λ of every gate.
        freeze_gating: do not train the gates (Table 3 b, d: with `gating_init=0`).
        freeze_gpsa: do not train the positional layers' attention at all (Table 3 f, g).
        use_pos_embed: add a learned absolute position embedding to the patches.
        embed_class_token: give the class token an entry in the position embedding (DeiT).
        drop_path_rate: stochastic depth, rising linearly from 0 to this over the blocks.
    """

    embed_dim: int = checks.bounded(MISSING, 1, 32_768)
    num_heads: int = checks.bounded(MISSING, 1, 1024)
    depth: int = checks.bounded(12, 1, 512)
    patch_size: int = checks.bounded(16, 1, 1024)
    mlp_ratio: float = checks.bounded(4.0, 0, 64, above=True)
    qkv_bias: bool = False
    gpsa_layers: int = 0
    positional_attention: PositionalAttention = "gpsa"
    locality_strength: float = checks.bounded(1.0, 0, above=True)
    conv_init: bool = True
    gating_init: float = checks.bounded(1.0)
    freeze_gating: bool = False
    freeze_gpsa: bool = False
    use_pos_embed: bool = True
    embed_class_token: bool = False
    drop_path_rate: float = checks.bounded(0.0, 0, 1, below=True)

    family = "vit"
    title = "a DeiT or ConViT"
    stem = "patch_embed"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.heads(self.embed_dim, self.num_heads)
        checks.integer("gpsa_layers", self.gpsa_layers, 0, self.depth)
        reads_token = self.global_pool == "token" and self.class_token is None
        if self.gpsa_layers == self.depth and (self.class_token or reads_token):
            raise UserError(
                f"gpsa_layers={self.gpsa_layers} of depth={self.depth} leaves no block in which a "
                f"class token could attend to the patches; lower gpsa_layers or give "
                f"global_pool='avg' without class_token"
            )
        if self.embed_class_token and (self.gpsa_layers or not self.has_class_token):
            raise UserError(
                "embed_class_token=True needs a class token and gpsa_layers=0: with positional "
                "layers the class token joins after the position embedding has been added"
            )
        ((rows, columns),) = self.home_grids
        entries = rows * columns * self.use_pos_embed + self.num_classes
        entries += self.in_chans * self.patch_size**2
        checks.parameters(self.embed_dim, self.depth, self.mlp_ratio, self.embed_dim * entries)

    @property
    def initialisations(self) -> tuple[Initialisation, ...]:
        """Two need positional layers; impulses need an embedding of positions to point at."""
        found = super().initialisations
        if self.use_pos_embed and self.embed_dim >= 4 * self.num_heads:
            found += ("impulse",)
        if self.gpsa_layers and self.positional_attention != "conv":
            found += ("conv", "trained_conv")
        return found

    @property
    def has_class_token(self) -> bool:
        """Whether a class token joins before the first block that is not positional."""
        return self.gpsa_layers < self.depth if self.class_token is None else self.class_token

    def grids(self, size: Sequence[int]) -> list[Grid]:
        """The one grid of patches on an image of `size` (height, width).

        Raises:
            UserError: if the image cannot be cut into whole patches.
        """
        return [token_grid(size, self.patch_size)]

    def embeddings(self) -> dict[str, Grid]:
        """The one of the patches."""
        return {"pos_embed": self.home_grids[0]}

    def meaning(self) -> dict[str, Any]:
        """As `Architecture.meaning`; which positional attention is told where a block has it."""
        fields = super().meaning() | {"mlp_ratio": hidden_width(self.embed_dim, self.mlp_ratio)}
        if not self.gpsa_layers:
            del fields["positional_attention"]
        return fields


def token_grid(img_size: int | Sequence[int], patch_size: int) -> Grid:
    """The grid of patches on an image of `img_size` pixels, a number or (height, width).

    Raises:
        UserError: if the image cannot be cut into whole patches.
    """
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    if min(height, width) < patch_size or height % patch_size or width % patch_size:
        raise UserError(
            f"an image of {height}×{width} pixels cannot be cut into patches of {patch_size}×"
            f"{patch_size}; both sides have to be multiples of {patch_size}"
        )
    return height // patch_size, width // patch_size
