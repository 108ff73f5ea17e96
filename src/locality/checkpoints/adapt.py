"""Models by name with anyone's weights in them, fitted to other images, channels and classes."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from timm.models._features import FeatureGetterNet
from torch import Tensor

from locality.checkpoints.format import Checkpoint
from locality.checkpoints.layouts import OURS, check_family
from locality.checkpoints.open import read
from locality.checkpoints.reading import check_finite, check_keys
from locality.checkpoints.where import source
from locality.errors import UserError, naming
from locality.models import factory
from locality.models.base import ImageClassifier, position_embedding
from locality.models.config import unlike
from locality.models.factory import TimmConfig
from locality.models.initialisations import trained_conv, transform

State = dict[str, Tensor]

_log = logging.getLogger("locality")


def create_model(
    name: str,
    pretrained: bool = False,
    weights: Path | str | None = None,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    features_only: bool = False,
    out_indices: int | tuple[int, ...] | None = None,
    **overrides: Any,
) -> Any:
    """Build a model by name, with fresh weights, public ones, or those of a file.

    The image size, the number of channels and of classes may differ from the weights': position
    embeddings are resampled, the first convolution is adapted, and a classifier for other classes
    is new. The log says so.

    Args:
        name: one of `list_models()`; with a tag ("convit_tiny.fb_in1k") the model as those public
            weights have it, image size included.
        pretrained: load the public weights of that name; without a tag, the model's first.
        weights: a file or folder to load from instead, of any layout.
        num_classes, in_chans, img_size, patch_size: the model's own unless given.
        features_only: give what timm's models give then: images → a list of feature maps
            (B, C, H, W), with `feature_info`, instead of a classifier.
        out_indices: which maps, as for `forward_intermediates`; the last three unless given.
        overrides: any other field of its configuration.

    Returns:
        an `ImageClassifier`, or timm's `FeatureGetterNet` around one.

    Raises:
        UserError: for an unknown name or field, for weights that do not fit, or if public weights
            can neither be found nor downloaded; then it says which file is wanted, and where.
        FileNotFoundError: if `weights` is not there.
    """
    if pretrained and weights is not None:
        raise UserError("give either pretrained=True or weights=PATH, not both")
    row = source(name) if pretrained or "." in name else None
    if row is not None and img_size is None:
        img_size = row.preprocessing.img_size
    model = factory.build(
        row.model if row else name,
        num_classes=num_classes,
        in_chans=in_chans,
        img_size=img_size,
        patch_size=patch_size,
        **overrides,
    )
    if pretrained:
        assert row is not None
        weights = row.name
    if weights is not None:
        load_weights(model, weights)
    if features_only:
        return FeatureGetterNet(model, out_indices=3 if out_indices is None else out_indices)
    if out_indices is not None:
        raise UserError("out_indices chooses feature maps; give features_only=True with it")
    return model


def load_weights(model: ImageClassifier, what: Path | str, entry: str | None = None) -> list[str]:
    """Load weights into a model that may differ at its ends.

    Position embeddings are resampled bicubically to the model's image size (relative encodings need
    nothing). The first convolution is adapted to another number of channels as timm does: summed
    over the channels for one, repeated and rescaled for more. A classifier for another number of
    classes keeps the fresh weights it has. Each is said in the log. Everything between has to fit
    exactly, and nothing is assigned before everything has been checked. Files in our own
    format say what shapes do not tell (heads, strides, the scale of attention), and the model has
    to agree. Weights of a convolutional network go into a model that has attention in the place of
    some convolutions as `transform` does it. The gated layers of a ConViT start from the weights of
    its convolutional net as nearly as their heads allow, at the model's own α and λ; with
    `init="trained_conv"` they alone start from weights.

    Args:
        model: the model; nothing in it changes unless everything fits.
        what: as `locality.load` takes it.
        entry: which state dict to take from a training checkpoint that holds several.

    Returns:
        what was changed to make them fit, in sentences.

    Raises:
        FileNotFoundError: if there is nothing at `what`.
        UserError: if the weights are damaged or do not fit, naming `what` and the cause.
    """
    target = model.config
    checkpoint = read(what, entry=entry, like=target)
    with naming(what):
        check_family(type(checkpoint.config), target)
        changes = []
        if isinstance(target, TimmConfig) and target.gpsa and not checkpoint.config.gpsa:
            start = (target.gpsa, target.locality_strength, target.gating_init)
            checkpoint = Checkpoint.of(transform(checkpoint.build(), *start))
            changes += [f"attention computes the convolutions of {target.gpsa}"]
        convolutions = getattr(checkpoint.config, "positional_attention", "") == "conv"
        if convolutions and target.gpsa_layers and target.positional_attention == "gpsa":
            checkpoint = _gated(model, checkpoint)
            changes += ["the gated layers start from the weights' convolutions"]
        fresh = model.state_dict()
        state = dict(checkpoint.state)
        for adapt in (_classifier, _channels, resample_positions):
            changes += adapt(state, checkpoint.config, target, fresh)
        check_keys(state, fresh, OURS.title)
        if checkpoint.layout == OURS.name:
            for name, (theirs, ours) in unlike(checkpoint.config, target).items():
                raise UserError(
                    f"these weights were made with {name}={theirs!r} and mean something else with "
                    f"{name}={ours!r}, which the model has"
                )
        check_finite(state)
    model.load_state_dict(state, strict=True)
    for change in changes:
        _log.info(change)
    return changes


def _gated(model: ImageClassifier, net: Checkpoint) -> Checkpoint:
    """`model` with the convolutions of `net` in its gated layers; all else from `net` too, unless
    the model's `init` is "trained_conv"."""
    started = copy.deepcopy(model)
    trained_conv(started, net.build())
    if model.config.init == "trained_conv":
        return Checkpoint.of(started)
    state = started.state_dict()
    state |= {name: tensor for name, tensor in net.state.items() if name in state}
    gated = net.config.with_overrides(positional_attention="gpsa")
    return replace(net, config=gated, state=state)


def _classifier(state: State, source: Any, target: Any, fresh: State) -> list[str]:
    if source.num_classes == target.num_classes:
        return []
    head = f"{target.classifier}."
    for name in [name for name in state if name.startswith(head)]:
        del state[name]
    state |= {name: tensor for name, tensor in fresh.items() if name.startswith(head)}
    if target.num_classes == 0:
        return [f"the classifier of {source.num_classes} classes is left out"]
    return [
        f"the classifier is new and untrained: the weights have {source.num_classes} classes, the "
        f"model {target.num_classes}"
    ]


def _channels(state: State, source: Any, target: Any, fresh: State) -> list[str]:
    if source.in_chans == target.in_chans:
        return []
    name = f"{target.stem}.weight"
    if name in state:
        state[name] = _with_channels(state[name], target.in_chans)
    return [
        f"the first convolution is adapted from {source.in_chans} to {target.in_chans} channels"
    ]


def _with_channels(weight: Tensor, wanted: int) -> Tensor:
    """A first convolution (out, in, k, k) for `wanted` channels, as timm adapts one from three."""
    if wanted == 1:
        return weight.float().sum(dim=1, keepdim=True).to(weight.dtype)
    given = weight.shape[1]
    repeated = weight.float().repeat(1, -(-wanted // given), 1, 1)[:, :wanted]
    return (repeated * (given / wanted)).to(weight.dtype)


def resample_positions(state: State, source: Any, target: Any, fresh: State) -> list[str]:
    """Resample, in place, every position embedding of `state` whose grid differs.

    Args:
        state: weights under our names.
        source, target: the configurations they were made for, and are to be used with.
        fresh: the target model's own state dict.

    Returns:
        what was changed, in sentences.
    """
    # Once here instead of in each forward pass, so that training continues from the new embedding.
    changes = []
    before, after = source.embeddings(), target.embeddings()
    for name in before.keys() & after.keys() & state.keys() & fresh.keys():
        if before[name] == after[name]:
            continue
        prefix = state[name].shape[1] - before[name][0] * before[name][1]
        state[name] = position_embedding(state[name], before[name], after[name], prefix)
        changes.append(
            f"the position embedding {name} is resampled from {before[name][0]}×{before[name][1]} "
            f"to {after[name][0]}×{after[name][1]} patches"
        )
    return changes
