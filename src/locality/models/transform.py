"""From a convolutional network to a transformer that computes the same function.

"Transformed CNNs" (d'Ascoli et al. 2021, arXiv 2106.05795) continue from a trained ConvNet with
gated positional attention in the place of its last convolutions. In separable form, with zero
padding inside the softmax, such a layer is the convolution exactly in the limit of a large α
(`GatedPositionalSelfAttention.from_conv2d`); everything else of the network stays as it is.
"""

from __future__ import annotations

import copy
import re
from typing import Literal, TypeVar

from torch import nn

from locality import checks
from locality.errors import UserError, saying, unknown
from locality.layers import GatedPositionalSelfAttention, ImageAttention
from locality.models.base import ImageClassifier

STRENGTH, GATING = 7.0, 1.0
"""α and λ of the layers unless given; docs/transform.md has the measurements behind them."""
EXACT = 40.0
"""e⁻⁴⁰ vanishes beside 1 in double precision too."""

Network = TypeVar("Network", bound=nn.Module)


def transform(
    model: Network,
    layers: str | int = "stage4",
    alpha: float | Literal["exact"] = STRENGTH,
    gating: float = GATING,
) -> Network:
    """The same network with gated attention in the place of chosen k×k convolutions.

    Args:
        model: a network of timm's or torchvision's, as itself or as `locality.load` gives it
            ("timm/NAME"); the latter can be saved and trained here. It stays as it is.
        layers: which convolutions: those in a module ("layer3.0"), in a stage ("stage4": layer4 in
            a ResNet, s4 in a RegNet), several of these with commas, the last n, or "all".
        alpha: α of Eq. 5. The function differs from the network's by about e^−α, and the gradient
            of v_pos falls as fast; "exact" leaves no difference in any precision.
        gating: initial λ of the layers' gates, above 0; it does not change the function.

    Raises:
        UserError: if there is no such layer, or one that attention cannot be.
    """
    checks.number("gating", gating, 0, above=True)
    if alpha != "exact":
        checks.number("alpha", alpha, 0, above=True)
    strength = EXACT if alpha == "exact" else alpha
    changed = copy.deepcopy(model)
    if isinstance(changed, ImageClassifier):
        if getattr(changed.config, "gpsa", None) != "":
            raise UserError(
                "only a convolutional network of timm's or torchvision's can be transformed, once"
            )
        fields = {"gpsa": layers, "locality_strength": strength, "gating_init": gating}
        changed.config = changed.config.with_overrides(**fields)
    put_attention(changed, layers, strength, gating)
    return changed


def put_attention(model: nn.Module, layers: str | int, strength: float, gating: float) -> None:
    """Replace convolutions of a network by the attention that computes them; see `transform`.

    Raises:
        UserError: as `transform`.
    """
    for name in chosen_convolutions(model, layers):
        conv = model.get_submodule(name)
        if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros":
            raise UserError(f"{name} is a {type(conv).__name__}, not a plain zero-padded Conv2d")
        with saying(f"{name} cannot be attention", ValueError):
            attn = GatedPositionalSelfAttention.from_conv2d(conv, strength, gating)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, ImageAttention(attn).train(model.training))


def chosen_convolutions(model: nn.Module, layers: str | int) -> list[str]:
    """The names of the k×k convolutions, k > 1, that `layers` means; see `transform`.

    Raises:
        UserError: if there are none.
    """
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1
    ]
    if not names:
        raise UserError(f"{type(model).__name__} has no k×k convolution to transform")
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
    """Whether the module `name` is `word` or inside it; stage 4 is layer4, s4 or stages.3."""
    stage = re.fullmatch(r"stage(\d)", word)
    number = int(stage[1]) if stage else 0
    words = [f"layer{number}", f"s{number}", f"stages.{number - 1}"] if stage else [word]
    return any(f"{name.removeprefix('model.')}.".startswith(f"{part}.") for part in words)
