"""What somebody named as a model, told from the name alone: nothing is opened, nobody is asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from locality.checkpoints.sources import SOURCES
from locality.errors import UserError, near, unknown
from locality.models.variants import PREFIX, VARIANTS

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Endings that weight files have; what is in the file decides how it is read."""

Kind = Literal["graph", "run", "path", "public", "timm", "hub"]


def is_run_folder(path: Path | str) -> bool:
    """Whether a path is a folder with a config.yaml."""
    return (Path(path) / "config.yaml").is_file()


def kind_of(what: Path | str) -> Kind:
    """What kind of thing is named: an ONNX graph, a run folder, another file or folder, public
    weights, a model of timm's, or a repository on the hub.

    Whatever looks like a path is one, and has to be there: the hub is asked for nothing else than
    "user/name".

    Raises:
        FileNotFoundError: if it is a path that is not there, with the nearest name beside it.
        UserError: for an address, an architecture without weights, or a name that nothing has.
    """
    path, name = Path(what), str(what)
    if is_run_folder(path):
        return "run"
    if path.exists():
        return "graph" if path.suffix == ".onnx" else "path"
    if re.match(r"\w+://", name):
        raise UserError(f"{name} is an address; download the file, and give its path")
    if name in SOURCES:
        return "public"
    if name.startswith(PREFIX):
        return "timm"
    if name in VARIANTS:
        raise UserError(
            f"'{name}' is an architecture without weights; give the name of public weights "
            f"(`locality models --pretrained` lists them), a run folder or a file"
        )
    is_file = path.suffix in (*SUFFIXES, ".onnx")
    if "/" not in name and not is_file:
        raise unknown("file, folder or model", name, (*SOURCES, *VARIANTS))
    parent = path.parent
    # A folder of that name, or the place where runs are written, is meant before a user of the hub.
    local = parent.name == "runs" or (parent != Path() and parent.is_dir())
    if is_file or local or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        beside = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
        hint = " or ".join(str(parent / other) for other in near(path.name, beside))
        raise FileNotFoundError(
            f"there is no file or folder {name}" + f"; did you mean {hint}?" * bool(hint)
        )
    return "hub"


def refuse_entry(what: Path | str, entry: str | None) -> None:
    """Refuse to choose between state dicts where there is one.

    Raises:
        UserError: if `entry` is given.
    """
    if entry is not None:
        raise UserError(
            f"{what} holds one set of weights and no entry '{entry}' to choose; entries are of "
            f"PyTorch checkpoints that hold several"
        )
