"""Initialisations of attention layers, in place on a built model, and `transform`.

Shapes:  C width · h heads · d = C/h head width · N = H·W tokens · Δ an offset in tokens

W_Q, W_K, W_V, W_O are written as in the papers, x W; a linear layer holds the transpose.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from locality import checks
from locality.errors import UserError, prefix_errors, unknown
from locality.layers import (
    BasePositionalAttention,
    ConvolutionalAttention,
    GatedPositionalSelfAttention,
    Grid,
    ImageAttention,
    LocalConvolution,
    SelfAttention,
)
from locality.layers.conv_init import init_random_convolution_, kernel_offsets
from locality.models.base import ImageClassifier

_SLOWEST = 10_000.0
_GAP = 3.0
"""Difference between the score of an impulse and those of neighbouring patches, in nats."""

STRENGTH, GATING = 7.0, 1.0
"""Default α and λ of `transform`; measurements in docs/transform.md."""
EXACT = 40.0
"""α of "exact": 1 + e⁻⁴⁰ = 1 even in double precision."""

Network = TypeVar("Network", bound=nn.Module)


@torch.no_grad()
def conv(model: nn.Module) -> None:
    """Initialise every positional layer as a random convolution (ConViT Eq. 5)."""
    for layer in model.modules():
        if isinstance(layer, BasePositionalAttention) and not layer.conv_init:
            init_random_convolution_(layer.v_pos, layer.value_weight, layer.locality_strength)


@torch.no_grad()
def mimetic(model: nn.Module) -> None:
    """Attention that mimics a trained transformer's (Trockman & Kolter 2023, arXiv 2305.09828).

        W_Q W_Kᵀ ≈ 0.7 Z + 0.7 I per head,    W_V W_O ≈ 0.4 Z − 0.4 I,    Z_ij ~ N(0, 1/C),

    factorised by SVD, the first truncated to rank d. Position embeddings are sinusoidal.
    """
    set_sinusoidal_positions(model)
    for layer in model.modules():
        if not isinstance(layer, (SelfAttention, BasePositionalAttention, ConvolutionalAttention)):
            continue
        queries, keys, values = _projections(layer)
        rank = layer.dim // layer.num_heads
        for q, k in zip(queries.split(rank), keys.split(rank), strict=True):
            left, right = _factors(0.7, 0.7, q)
            q.copy_(left[:, :rank].T)
            k.copy_(right[:rank])
        left, right = _factors(0.4, -0.4, values)
        values.copy_(left.T)
        layer.proj.weight.copy_(right.T)


@torch.no_grad()
def impulse(model: nn.Module) -> None:
    """Content attention to a single neighbour (Zheng et al., NeurIPS 2025, arXiv 2505.19985).

        softmax(P W_Q W_Kᵀ Pᵀ/√d) ≈ the shift by Δ,    Δ random in a 3×3 window for each head,

    for sinusoidal positions P. The authors fit W_Q and W_K; here they have a closed form. Shifting
    P by Δ rotates each pair (sin ωi, cos ωi) by ωΔ. With W_Q = s·I on d/2 pairs and W_K = s·(I
    rotated), the score of offset δ is s²/√d Σ_ω cos ω(δ − Δ), largest at δ = Δ. The pairs of the
    highest frequencies on each axis are used, which distinguish neighbours best.
    """
    set_sinusoidal_positions(model)
    for layer in model.modules():
        if not isinstance(layer, (SelfAttention, BasePositionalAttention)):
            continue
        queries, keys, _ = _projections(layer)
        quarter, rank = layer.dim // 4, layer.dim // layer.num_heads
        pairs = rank // 4  # of each axis
        speeds, pair = _speeds(quarter)[:pairs], torch.arange(pairs)
        # After LayerNorm tokens have variance 1, so each pair has squared length 2.
        beside = 2 * float((1 - speeds.cos()).sum())
        scale = math.sqrt(_GAP * math.sqrt(rank) / beside)
        offsets = kernel_offsets(3)[torch.randint(9, (layer.num_heads,))]
        for q, k, offset in zip(queries.split(rank), keys.split(rank), offsets, strict=True):
            q.zero_()
            k.zero_()
            for axis, turn in enumerate(speeds * offset[:, None]):
                row, sine = 2 * (axis * pairs + pair), 2 * axis * quarter + pair
                cosine = sine + quarter
                q[row, sine] = q[row + 1, cosine] = scale
                # sin ω(j−Δ) and cos ω(j−Δ) for a key at j
                k[row, sine] = k[row + 1, cosine] = scale * turn.cos()
                k[row, cosine], k[row + 1, sine] = -scale * turn.sin(), scale * turn.sin()
            for weight in (q, k):
                # Rows that sum to zero ignore the mean that LayerNorm removes; the slowest sine,
                # which balances them, is about 0.
                weight[:, quarter - 1] -= weight.sum(dim=1)


@torch.no_grad()
def trained_conv(model: nn.Module, net: nn.Module) -> None:
    """Initialise the gated layers of `model` from the trained convolutions of `net`.

    The question with which the ConViT paper closes. All other weights, α and λ are unchanged.

    Args:
        model: a ConViT.
        net: the same model with `positional_attention="conv"`.

    Raises:
        UserError: if `net` does not have one convolution per gated layer.
    """
    layers = [m for m in model.modules() if isinstance(m, GatedPositionalSelfAttention)]
    convolutions = [m for m in net.modules() if isinstance(m, LocalConvolution)]
    if len(layers) != len(convolutions):
        raise UserError(
            f"{len(layers)} gated layers need as many trained convolutions, but the weights have "
            f"{len(convolutions)}; use weights of the same model trained with "
            f"positional_attention='conv'"
        )
    for layer, convolution in zip(layers, convolutions, strict=True):
        layer.init_from_conv2d_(convolution.conv)


INITIALISATIONS: dict[str, Callable[[nn.Module], None]] = {
    "conv": conv,
    "mimetic": mimetic,
    "impulse": impulse,
}
"""Functions by the value of `init`; "trained_conv" is applied when weights are loaded."""


def sinusoidal_positions(grid: Grid, width: int) -> Tensor:
    """Position embeddings (H·W, C): sin ωi, cos ωi, sin ωj, cos ωj for C/4 frequencies ω."""
    height, breadth = grid
    speeds = _speeds(width // 4)
    rows = torch.arange(height).repeat_interleave(breadth)[:, None] * speeds
    columns = torch.arange(breadth).repeat(height)[:, None] * speeds
    waves = (rows.sin(), rows.cos(), columns.sin(), columns.cos())
    return nn.functional.pad(torch.cat(waves, dim=1), (0, width % 4))


def set_sinusoidal_positions(model: Any) -> None:
    """Initialise a model's learned position embedding, if any, with sinusoids."""
    if getattr(model, "pos_embed", None) is not None:
        (grid,) = model.config.native_grids
        model.pos_embed[:, -grid[0] * grid[1] :] = sinusoidal_positions(grid, model.embed_dim)


def _speeds(count: int) -> Tensor:
    return _SLOWEST ** -(torch.arange(count) / max(1, count - 1))


def _projections(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of queries, keys and values, each (C, C)."""
    if isinstance(layer, ConvolutionalAttention):
        return layer.q.linear.weight, layer.k.linear.weight, layer.v.linear.weight
    queries, keys, values = layer.qkv.weight.chunk(3)
    return queries, keys, values


def _factors(alpha: float, beta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors of αZ + βI with equal singular values."""
    width = like.shape[1]
    noise = torch.randn(width, width, device=like.device) / math.sqrt(width)
    left, scales, right = torch.linalg.svd(alpha * noise + beta * torch.eye(width).to(noise))
    return left * scales.sqrt(), scales.sqrt()[:, None] * right


def transform(
    model: Network,
    layers: str | int = "stage4",
    alpha: float | Literal["exact"] = STRENGTH,
    gating: float = GATING,
) -> Network:
    """Copy a network, replacing chosen k×k convolutions by gated attention.

    "Transformed CNNs" (d'Ascoli et al. 2021, arXiv 2106.05795) replace the last convolutions of a
    trained ConvNet in this way and train further. The layers equal the convolutions in the limit of
    a large α (`GatedPositionalSelfAttention.from_conv2d`).

    Args:
        model: a network from timm or torchvision, or from `locality.load("timm/NAME")`; the latter
            can be saved and trained with this library. It is not modified.
        layers: convolutions to replace: those in a module ("layer3.0"), in a stage ("stage4":
            layer4 in a ResNet, s4 in a RegNet), several of these separated by commas, the last n,
            or "all".
        alpha: α of Eq. 5. The output changes by about e^−α, and the gradient of v_pos falls as
            fast; with "exact" the output is equal in any precision.
        gating: initial λ of the layers' gates, above 0; does not change the output.

    Raises:
        UserError: for an unknown layer, or a convolution that attention cannot compute.
    """
    checks.typed("gating", gating, checks.Positive)
    if alpha != "exact":
        checks.typed("alpha", alpha, checks.Positive)
    strength = EXACT if alpha == "exact" else alpha
    changed = copy.deepcopy(model)
    if isinstance(changed, ImageClassifier):
        if getattr(changed.config, "gpsa", None) != "":
            raise UserError(
                "only convolutional networks from timm or torchvision can be transformed, and only "
                "once"
            )
        fields = {"gpsa": layers, "locality_strength": strength, "gating_init": gating}
        changed.config = changed.config.with_overrides(**fields)
    replace_convolutions(changed, layers, strength, gating)
    return changed


def replace_convolutions(
    model: nn.Module, layers: str | int, strength: float, gating: float
) -> None:
    """Replace convolutions of a network by gated attention, in place; see `transform`.

    Raises:
        UserError: as in `transform`.
    """
    for name in select_convolutions(model, layers):
        conv = model.get_submodule(name)
        if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros":
            raise UserError(f"{name} is a {type(conv).__name__}, not a plain zero-padded Conv2d")
        with prefix_errors(f"{name} cannot be replaced by attention"):
            attn = GatedPositionalSelfAttention.from_conv2d(conv, strength, gating)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, ImageAttention(attn).train(model.training))


def select_convolutions(model: nn.Module, layers: str | int) -> list[str]:
    """Names of the k×k convolutions, k > 1, that `layers` selects; see `transform`.

    Raises:
        UserError: if the model has none, or for an unknown layer.
    """
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1
    ]
    if not names:
        raise UserError(f"{type(model).__name__} has no k×k convolution to replace")
    if str(layers).isdecimal():
        count = int(layers)
        checks.integer("layers", count, 1, len(names))
        return names[-count:]
    chosen: set[str] = set()
    for word in str(layers).split(","):
        found = {name for name in names if word == "all" or _within(name, word.strip())}
        if not found:
            raise unknown("layer", word, ["all", *(name.removeprefix("model.") for name in names)])
        chosen |= found
    return [name for name in names if name in chosen]


def _within(name: str, word: str) -> bool:
    """Whether the module `name` is or is inside `word`; stage4 is layer4, s4 or stages.3."""
    stage = re.fullmatch(r"stage(\d)", word)
    number = int(stage[1]) if stage else 0
    words = [f"layer{number}", f"s{number}", f"stages.{number - 1}"] if stage else [word]
    return any(f"{name.removeprefix('model.')}.".startswith(f"{part}.") for part in words)
