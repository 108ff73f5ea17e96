"""Turning weights from one layout into another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from locality.checkpoints.format import owned, write_file, write_folder
from locality.checkpoints.layouts import OURS
from locality.checkpoints.open import LAYOUTS, read
from locality.errors import UserError, naming, unknown
from locality.files import atomic_file, write_atomic


@dataclass(frozen=True)
class Conversion:
    """What `convert` did.

    Attributes:
        source: what was read.
        target: the path that was written.
        layout, to: the layouts of both.
        model: the name of the architecture, or None if the table has no such row.
        parameters: how many numbers were converted.
        untold: what weights in the layout `to` do not tell their reader, in a sentence, or "".
    """

    source: str
    target: Path
    layout: str
    to: str
    model: str | None
    parameters: int
    untold: str = ""

    def __str__(self) -> str:
        model = self.model or "a model without a name"
        return (
            f"{self.source} ({self.layout}) → {self.target} ({self.to}): {model}, "
            f"{self.parameters:,} numbers" + f"\n{self.untold}" * bool(self.untold)
        )


def convert(
    source: Path | str,
    target: Path | str,
    to: str = "locality",
    model: str | None = None,
    entry: str | None = None,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Conversion:
    """Read a model from wherever it is and write it in a layout of one's choice.

    Args:
        source: whatever `locality.load` takes.
        target: a folder (only for our own format) if it has no ending, else a `.safetensors` file
            or a PyTorch file (`.pth`, `.pt`, `.bin`).
        to: the layout to write, one of `LAYOUTS`.
        model: the name of the architecture, where the weights alone cannot tell it; refused where
            they tell another.
        entry: which state dict to take from a training checkpoint that holds several.
        overwrite: replace `target` if it is there.
        settings: fields of the model's configuration that stand above what the source says.

    Raises:
        FileNotFoundError: if there is no `source`.
        UserError: if it cannot be read, the layout cannot hold the model, or `target` exists;
            nothing is written then.
    """
    target = Path(target)
    _check_target(target, to, overwrite)
    wanted = LAYOUTS[to]
    checkpoint = read(source, model, entry, settings)
    with naming(source):
        state = checkpoint.build().state_dict()
    untold = ""
    if wanted is not OURS:
        state = owned(wanted.from_ours(state, checkpoint.config))
        if target.suffix == ".safetensors":
            write_atomic(target, to_safetensors(state, {"format": "pt"}))
        else:
            with atomic_file(target) as file:
                torch.save(state, file)
        if settings_untold := wanted.untold(checkpoint.config):
            untold = (
                f"weights in this layout do not tell {wanted.listed(settings_untold)}; whoever "
                f"reads them has to set that"
            )
    elif target.suffix:
        write_file(checkpoint, target)
    else:
        write_folder(checkpoint, target)
    size = sum(tensor.numel() for tensor in state.values())
    return Conversion(str(source), target, checkpoint.layout, to, checkpoint.name, size, untold)


def _check_target(target: Path, to: str, overwrite: bool) -> None:
    if to not in LAYOUTS:
        raise unknown("layout", to, LAYOUTS)
    if target.suffix not in ("", ".safetensors", ".pth", ".pt", ".bin"):
        raise UserError(
            f"{target} ends in {target.suffix}; write to a folder, or a file ending in "
            f".safetensors, .pth, .pt or .bin"
        )
    if to == OURS.name and target.suffix not in ("", ".safetensors"):
        raise UserError(f"our own format is a folder or a .safetensors file, not {target}")
    if to != OURS.name and target.suffix == "":
        raise UserError(
            f"the layout '{to}' is written as one file; end {target} in .safetensors or .pth"
        )
    if target.exists() and not overwrite:
        raise UserError(f"{target} is there already; give another name, or overwrite it explicitly")
