"""Our own format: a folder of `model.safetensors`, `config.json` and a model card.

The safetensors file carries the description as well, so that it means something by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from locality.checkpoints.card import model_card
from locality.checkpoints.checkpoint import FORMAT, Checkpoint
from locality.checkpoints.keys import State
from locality.checkpoints.reading import read_safetensors
from locality.data.config import Preprocessing
from locality.errors import UserError
from locality.files import parse_json, read_json, write_atomic
from locality.models.base import ImageClassifier

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CARD = "README.md"


def save(
    model: nn.Module,
    folder: Path | str,
    *,
    card: Mapping[str, Any] | None = None,
    preprocessing: Preprocessing | None = None,
    classes: Sequence[str] | None = None,
) -> Path:
    """Save a model: weights, architecture, and a card. What was in the folder is replaced.

    Args:
        model: any model of this library.
        folder: where to; made if it is not there.
        card: figures for the model card, such as the content of a run's `result.json`.
        preprocessing: what images have to go through.
        classes: names of the classes, in the order of the logits.

    Returns:
        the folder.

    Raises:
        UserError: if the model is not ours, its weights are not finite, or there are not as many
            names as classes.
    """
    return write_folder(Checkpoint.of(model, preprocessing, classes), folder, card)


def load(folder: Path | str) -> ImageClassifier:
    """The model that `save` saved, in evaluation mode.

    Args:
        folder: the folder, or a `.safetensors` file from one.

    Raises:
        FileNotFoundError: if there is no such folder, or a file is missing in it.
        UserError: if a file is damaged, or the two do not belong together; naming it.
    """
    path = Path(folder)
    checkpoint = read_folder(path) if path.is_dir() else read_file(path)
    return build_from(checkpoint, path)


def build_from(checkpoint: Checkpoint, path: Path | str) -> ImageClassifier:
    """The checkpoint's model.

    Raises:
        UserError: if it cannot be built, naming the file at `path`.
    """
    try:
        return checkpoint.build()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def write_folder(
    checkpoint: Checkpoint, folder: Path | str, card: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint as a folder, see `save`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Without its description a folder cannot be loaded: it goes first and comes last, so that an
    # interruption in between leaves an error and not one model's weights under another's name.
    (folder / CONFIG).unlink(missing_ok=True)
    write_file(checkpoint, folder / WEIGHTS)
    write_atomic(folder / CARD, model_card(checkpoint, card))
    write_atomic(folder / CONFIG, json.dumps(checkpoint.describe(), indent=2) + "\n")
    return folder


def write_file(checkpoint: Checkpoint, path: Path | str) -> None:
    """Write a checkpoint as one safetensors file that carries its description."""
    # A single entry: the order of several is random, and equal models shall make equal files.
    metadata = {FORMAT: json.dumps(checkpoint.describe())}
    write_atomic(path, to_safetensors(owned(checkpoint.state), metadata))


def owned(state: State) -> dict[str, Tensor]:
    """The same tensors, each the only one in its memory, as safetensors demands."""
    return {
        name: tensor.contiguous()
        if tensor.untyped_storage().nbytes() == tensor.nbytes
        else tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }


def read_folder(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; its weights are compared with its description by `build`.

    Raises:
        FileNotFoundError: if one of the two files is missing.
        UserError: if one of them is damaged, naming it.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} has no {name}, so it holds no saved model")
    description = read_json(folder / CONFIG)
    state, _ = read_safetensors(folder / WEIGHTS)
    return _described(description, state, folder / CONFIG)


def read_file(path: Path) -> Checkpoint:
    """The checkpoint in one of our safetensors files.

    Raises:
        FileNotFoundError: if there is no such file.
        UserError: if it is damaged or carries no description.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no saved model {path}")
    state, metadata = read_safetensors(path)
    if FORMAT not in metadata:
        raise UserError(
            f"{path} does not say which model it is of; load it with its {CONFIG} beside it, or "
            f"give the model's name"
        )
    return _described(parse_json(metadata[FORMAT], f"the description in {path}"), state, path)


def _described(description: dict[str, Any], state: dict[str, Any], path: Path) -> Checkpoint:
    try:
        return Checkpoint.from_description(description, state)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
