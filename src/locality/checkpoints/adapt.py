"""Models by name with anyone's weights in them, fitted to other images, channels and classes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from timm.layers import resample_abs_pos_embed
from torch import Tensor

from locality.checkpoints.download import find_weights
from locality.checkpoints.format import Checkpoint
from locality.checkpoints.layouts import check_family, unlike
from locality.checkpoints.open import read
from locality.checkpoints.reading import check_finite, check_keys
from locality.checkpoints.sources import source
from locality.errors import UserError, naming
from locality.layers import Grid
from locality.models import factory
from locality.models.base import ImageClassifier
from locality.models.cvt_config import CvTConfig
from locality.models.from_timm import TimmConfig
from locality.models.vit_config import ViTConfig, token_grid

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
    **overrides: Any,
) -> ImageClassifier:
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
        overrides: any other field of its configuration.

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
    path = weights
    if pretrained:
        assert row is not None
        path = find_weights(row)
    if path is not None:
        load_weights(model, path)
    return model


def load_weights(model: ImageClassifier, path: Path | str, entry: str | None = None) -> list[str]:
    """Load weights of any layout into a model; see `load_into` for what may differ.

    Args:
        model: the model; nothing in it changes unless everything fits.
        path: a file or folder.
        entry: which state dict to take from a training checkpoint that holds several.

    Returns:
        what was changed to make them fit, in sentences.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        UserError: if the weights are damaged or do not fit, naming the file and the cause.
    """
    checkpoint = read(path, entry=entry, like=model.config)
    with naming(path):
        return load_into(model, checkpoint)


def load_into(model: ImageClassifier, checkpoint: Checkpoint) -> list[str]:
    """Load a checkpoint's weights into a model that may differ at its ends.

    Position embeddings are resampled bicubically to the model's image size (relative encodings need
    nothing). The first convolution is adapted to another number of channels as timm does: summed
    over the channels for one, repeated and rescaled for more. A classifier for another number of
    classes keeps the fresh weights it has. Each is said in the log. Everything between has to fit
    exactly, and nothing is assigned before everything has been checked. Files in our own
    format say what shapes do not tell (heads, strides, the scale of attention), and the model has
    to agree.

    Returns:
        what was changed, in sentences.

    Raises:
        UserError: if the weights do not fit the model, or are not finite.
    """
    target = model.config
    check_family(type(checkpoint.config), target)
    fresh = model.state_dict()
    state = dict(checkpoint.state)
    changes = []
    for adapt in (_classifier, _channels, resample_positions):
        changes += adapt(state, checkpoint.config, target, fresh)
    check_keys(state, fresh, "locality's")
    if checkpoint.layout == "locality":
        _check_meaning(checkpoint.config, target)
    check_finite(state)
    model.load_state_dict(state, strict=True)
    for change in changes:
        _log.info(change)
    return changes


def _check_meaning(source: Any, target: Any) -> None:
    """Refuse a model in which the weights, whose shapes fit, would mean something else."""
    for name, (theirs, ours) in unlike(source, target).items():
        raise UserError(
            f"these weights were made with {name}={theirs!r} and mean something else with "
            f"{name}={ours!r}, which the model has"
        )


def _classifier(state: State, source: Any, target: Any, fresh: State) -> list[str]:
    if source.num_classes == target.num_classes:
        return []
    head = target.classifier if isinstance(target, TimmConfig) else "head."
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
    name = "stages.0.embed.conv.weight" if isinstance(target, CvTConfig) else "patch_embed.weight"
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
    if type(source) is not type(target):
        return []
    changes = []
    before, after = _grids(source), _grids(target)
    for name in before.keys() & after.keys() & state.keys() & fresh.keys():
        if before[name] == after[name]:
            continue
        prefix = state[name].shape[1] - before[name][0] * before[name][1]
        state[name] = resample_abs_pos_embed(
            state[name],
            new_size=list(after[name]),
            old_size=list(before[name]),
            num_prefix_tokens=prefix,
        )
        changes.append(
            f"the position embedding {name} is resampled from {before[name][0]}×{before[name][1]} "
            f"to {after[name][0]}×{after[name][1]} patches"
        )
    return changes


def _grids(config: ViTConfig | CvTConfig | TimmConfig) -> dict[str, Grid]:
    """The grid of every position embedding that a model may have, as far as is known."""
    if isinstance(config, TimmConfig):
        return {}
    if isinstance(config, ViTConfig):
        return {"pos_embed": token_grid(config.img_size, config.patch_size)}
    size = config.img_size
    grids = config.grids((size, size) if isinstance(size, int) else size)
    return {f"stages.{index}.pos_embed": grid for index, grid in enumerate(grids)}
