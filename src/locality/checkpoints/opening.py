"""Opening weights of any layout from a file or folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from locality.checkpoints.checkpoint import Checkpoint
from locality.checkpoints.keys import check_finite
from locality.checkpoints.layouts import identify, recognise, with_settings
from locality.checkpoints.native import CONFIG, FORMAT, WEIGHTS, read_file, read_folder
from locality.checkpoints.reading import is_safetensors, read_state, safetensors_metadata
from locality.errors import UserError
from locality.files import read_json

_log = logging.getLogger("locality")

# What others call the weights in a folder.
_FOREIGN_WEIGHTS = (WEIGHTS, "pytorch_model.bin", "pytorch_model.pth")


def open_weights(
    path: Path | str,
    like: Any = None,
    entry: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Read weights of any known layout, recognised from the names of the tensors.

    What they do not tell is taken to be as in the published models, and the log says so.

    Args:
        path: one of our folders, a folder as model hubs keep them, a `.safetensors` file or a
            PyTorch file.
        like: the configuration of the model they are for, where the weights alone cannot tell it
            or a particular one is wanted; image size, channels and classes may differ.
        entry: which state dict to take from a training checkpoint that holds several.
        settings: fields of the model's configuration, above what file and `like` say.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        UserError: if it holds no weights of a known layout, or damaged ones; naming the file and
            the cause.
    """
    path = Path(path)
    if path.is_dir():
        if _is_ours(path):
            return _finite(read_folder(path), path / WEIGHTS, settings)
        path = _foreign_file(path)
    if path.exists() and path.stat().st_size and is_safetensors(path):
        if FORMAT in safetensors_metadata(path):
            return _finite(read_file(path), path, settings)
        if path.name == WEIGHTS and _is_ours(path.parent):
            return _finite(read_folder(path.parent), path, settings)
    state = read_state(path, entry)
    try:
        layout = recognise(state)
        config = layout.configuration(state, like, settings)
        name, config = identify(config) if like is None else (None, config)
        ours = layout.to_ours(state, config)
        check_finite(ours)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: its tensors are named as those of a model, but have other shapes"
        ) from error
    assumed = {
        setting: value
        for setting, value in layout.untold(config).items()
        if like is None and not {setting, layout.their_name(setting)} & (settings or {}).keys()
    }
    if assumed:
        _log.warning(
            f"{path}: these weights do not tell {layout.listed(assumed)}, which are assumed here; "
            f"set what is otherwise (--set NAME=VALUE, or settings={{...}} in Python)"
        )
    return Checkpoint(config, ours, name, layout=layout.name)


def _is_ours(folder: Path) -> bool:
    config = folder / CONFIG
    return config.exists() and read_json(config).get("format") == FORMAT


def _foreign_file(folder: Path) -> Path:
    for name in _FOREIGN_WEIGHTS:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(
        f"{folder} holds no weights: there is no {' and no '.join(_FOREIGN_WEIGHTS)} in it"
    )


def _finite(checkpoint: Checkpoint, path: Path, settings: Mapping[str, Any] | None) -> Checkpoint:
    try:
        check_finite(checkpoint.state)
        if settings:
            name, config = identify(with_settings(checkpoint.config, settings))
            checkpoint = replace(checkpoint, config=config, name=name)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return checkpoint
