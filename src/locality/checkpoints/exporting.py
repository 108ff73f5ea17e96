"""Convert weights to other formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from locality.checkpoints.foreign import KEY_MAPS
from locality.checkpoints.format import contiguous_copies, write_file, write_folder
from locality.checkpoints.key_map import NATIVE, format_settings
from locality.checkpoints.registry import check_target
from locality.checkpoints.resolve import read
from locality.errors import prefix_errors
from locality.files import atomic_file, write_atomic


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
        model: the model name, if it cannot be inferred from the weights; must match them.
        entry: the state dict to read, if the checkpoint has several.
        overwrite: replace an existing `target`.
        settings: fields of the model's configuration that override those of the source.

    Returns:
        a summary, with the settings that the written weights do not specify.

    Raises:
        FileNotFoundError: if `source` does not exist.
        UserError: if it cannot be read, the format cannot hold the model, or `target` exists;
            nothing is written then.
    """
    target = Path(target)
    check_target(target, to, overwrite)
    wanted = KEY_MAPS[to]
    checkpoint = read(source, model, entry, settings)
    with prefix_errors(source):
        state = checkpoint.build().state_dict()
    notes = ""
    if wanted is not NATIVE:
        state = contiguous_copies(wanted.from_native(state, checkpoint.config))
        if target.suffix == ".safetensors":
            write_atomic(target, to_safetensors(state, {"format": "pt"}))
        else:
            with atomic_file(target) as file:
                torch.save(state, file)
        unspecified = wanted.unspecified(checkpoint.config)
        missing = [format_settings(unspecified)] if unspecified else []
        missing += ["preprocessing"] * (checkpoint.preprocessing is not None)
        if missing:
            lost = " and ".join(missing)
            notes = f"\nthe format does not keep {lost}; readers assume a published model's"
        notes += "\nthe format does not keep class names" * (checkpoint.classes is not None)
    elif target.suffix:
        write_file(checkpoint, target)
    else:
        write_folder(checkpoint, target)
    size = sum(tensor.numel() for tensor in state.values())
    return (
        f"{source} ({checkpoint.key_map}) → {target} ({to}): "
        f"{checkpoint.name or 'a model without a name'}, {size:,} numbers{notes}"
    )
