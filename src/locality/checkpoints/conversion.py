"""Convert weights to other formats, and to models of another image size, channels or classes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from timm.models import adapt_input_conv
from torch import Tensor

from locality.checkpoints.foreign_config import PREPROCESSING_KEYS
from locality.checkpoints.key_maps import KEY_MAPS
from locality.checkpoints.loading import read
from locality.checkpoints.native import Checkpoint, contiguous_copies, write_file, write_folder
from locality.checkpoints.registry import FORMAT, check_target
from locality.checkpoints.state_dict import check_keys
from locality.data.classes import class_difference, joinable, numbered
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors
from locality.files import atomic_file, write_atomic
from locality.models.base import ImageClassifier, position_embedding

State = dict[str, Tensor]

_log = logging.getLogger("locality")


def convert(
    source: Path | str,
    target: Path | str,
    to: str = "locality",
    model: str | None = None,
    entry: str | None = None,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Read a model from any source and write it in the format `to`.

    Args:
        source: as in `locality.load`.
        target: a folder (only for the native format) if it has no suffix, else a `.safetensors` or
            PyTorch file (`.pth`, `.pt`, `.bin`).
        to: the format to write, one of `KEY_MAPS`.
        model: the model name, if the weights do not say it; must match them.
        entry: the state dict to read, if the checkpoint has several.
        overwrite: replace an existing `target`.
        settings: fields of the model's configuration that override those of the source.

    Returns:
        a summary.

    Raises:
        FileNotFoundError: if `source` does not exist.
        UserError: if it cannot be read, the format cannot hold the model, or `target` exists;
            nothing is written then.
    """
    target = Path(target)
    check_target(target, to, overwrite)
    checkpoint = read(source, model, entry, settings)
    notes = ""
    if to != FORMAT:
        state = contiguous_copies(KEY_MAPS[to].from_native(checkpoint.state, checkpoint.config))
        if target.suffix == ".safetensors":
            write_atomic(target, to_safetensors(state, {"format": "pt"}))
        else:
            with atomic_file(target) as file:
                torch.save(state, file)
        name = checkpoint.name or "the nearest, and --set for each setting that differs"
        notes = (
            f"\nthe format keeps tensors alone: no heads, strides, padding, pooling, activation, "
            f"preprocessing or class names; read it with --variant {name}"
        )
    elif target.suffix:
        write_file(checkpoint, target)
    else:
        write_folder(checkpoint, target)
    size = sum(tensor.numel() for tensor in checkpoint.state.values())
    return (
        f"{source} → {target} ({to}): "
        f"{checkpoint.name or 'a model without a name'}, {size:,} numbers{notes}"
    )


def load_weights(
    model: ImageClassifier,
    what: Path | str,
    entry: str | None = None,
    classes: Sequence[str] | None = None,
) -> list[str]:
    """Load weights into a model of another image size, with other channels or classes.

    Position embeddings are resampled bicubically to the model's image size. The first convolution
    is adapted to another number of channels as in timm: summed over the channels for one, repeated
    and rescaled for more. The classifier is kept if the classes are the same (reordered if need
    be), else it stays newly initialised. All other weights must fit exactly, and nothing is
    assigned before everything is checked. Settings that shapes do not determine (heads, strides,
    attention scale) must agree with those in the file. Each change is logged.

    Args:
        model: the model; unchanged if the weights do not fit.
        what, entry: as in `locality.load`.
        classes: names of the model's classes, if any.

    Returns:
        the changes made, as sentences.

    Raises:
        FileNotFoundError: if `what` does not exist.
        UserError: if the weights are damaged or do not fit, naming `what` and the cause.
    """
    target = model.config
    checkpoint = read(what, entry=entry, like=target)
    with prefix_errors(what):
        fresh = model.state_dict()
        state = dict(checkpoint.state)
        changes = _classifier(state, checkpoint, target, fresh, classes)
        for adapt in (_channels, resample_pos_embeds):
            changes += adapt(state, checkpoint.config, target, fresh)
        check_keys(state, fresh, "locality's")
    model.load_state_dict(state, strict=True)
    prepared = checkpoint.preprocessing
    if prepared is not None and len(prepared.mean) == target.in_chans:
        set_data_config(model, prepared.at(model.img_size))
    for change in changes:
        _log.info(change)
    return changes


def set_data_config(model: ImageClassifier, preprocessing: Preprocessing) -> None:
    """Set the part of `pretrained_cfg` that timm's `resolve_model_data_config` reads."""
    shared = {name: getattr(preprocessing, name) for name in PREPROCESSING_KEYS}
    size = {"input_size": (model.in_chans, *preprocessing.size)}
    model.pretrained_cfg = (getattr(model, "pretrained_cfg", None) or {}) | size | shared


def _classifier(
    state: State, source: Checkpoint, target: Any, fresh: State, classes: Sequence[str] | None
) -> list[str]:
    count, names = source.config.num_classes, joinable(source.classes)
    prefixes = tuple(f"{name}." for name in target.classifiers)
    own = [name for name in state if name.startswith(prefixes)]
    why = f"the weights have {count} classes, the model {target.num_classes}"
    if count == target.num_classes:
        if classes is None or tuple(classes) == names:
            return []
        if names is None:
            return [
                f"the weights have no class names: the classifier's outputs are assigned in order, "
                f"{numbered(classes)}"
            ]
        why = class_difference({"the weights": names, "the data": classes})
        if not why:
            order = list(map(names.index, classes))
            state |= {name: state[name][order] for name in own}
            return ["the classifier's outputs are reordered to match the data's classes"]
    for name in own:
        del state[name]
    state |= {name: tensor for name, tensor in fresh.items() if name.startswith(prefixes)}
    if target.num_classes == 0:
        return [f"the classifier of {count} classes is not loaded"]
    return [f"the classifier is new and untrained: {why}"]


def _channels(state: State, source: Any, target: Any, fresh: State) -> list[str]:
    channels, wanted = source.in_chans, target.in_chans
    if channels == wanted:
        return []
    name = f"{target.stem}.weight"
    if name in state:
        if channels != 3 or state[name].shape[1] != 3:
            raise UserError(
                f"these weights take {channels} channels, the model {wanted}; only weights for 3 "
                f"channels can be adapted"
            )
        state[name] = adapt_input_conv(wanted, state[name])
    return [f"the first convolution is adapted from {channels} to {wanted} channels"]


def resample_pos_embeds(state: State, source: Any, target: Any, fresh: State) -> list[str]:
    """Resample, in place, every position embedding of `state` whose grid differs.

    Args:
        state: weights in the native format.
        source, target: configurations of the weights and of the model.
        fresh: the model's state dict.

    Returns:
        the changes made, as sentences.
    """
    # Here instead of in each forward pass, so that training continues from the new embedding.
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
