"""Reading weight files that may come from anywhere, without running what is in them.

A PyTorch file is a pickle, and a pickle is a program. Files are therefore read with
`weights_only=True`, always: torch's own unpickler, which knows tensors and containers and calls
nothing else. Two classes are allowed beside them, since the ConViT authors' files carry their
command line: `argparse.Namespace`, which only holds values, and paths, which are read as pure ones
and touch no file.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from locality.checkpoints.keys import shorten
from locality.errors import UserError

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Endings that weight files have; what is in the file decides how it is read."""

ALLOWED_CLASSES: tuple[Any, ...] = (
    argparse.Namespace,
    *(
        (kind, f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")  # Python 3.13 writes the second
        for kind in (PurePosixPath, PureWindowsPath)
        for name in (kind.__name__, kind.__name__.removeprefix("Pure"))
    ),
)
"""The classes that a pickle may name beside torch's own tensors and containers, with the name it
may give them where that is not their own."""

# Training wrappers add these in front of every name.
_WRAPPERS = ("module.", "_orig_mod.", "model.")
_NAMED_GLOBAL = re.compile(r"GLOBAL (\S+)")


def read_state(path: Path | str, entry: str | None = None) -> dict[str, Tensor]:
    """Read a state dict from a `.safetensors` or PyTorch file, on the CPU.

    Args:
        path: the file. Its content decides what it is, not its name.
        entry: which state dict to take, where a training checkpoint holds several ("model",
            "model_ema"); the only one unless given.

    Raises:
        FileNotFoundError: if there is no such file.
        UserError: if it is no weight file, is damaged, wants to run code, or holds no or several
            state dicts; naming the file and the cause.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == "safetensors":
        return read_safetensors(path)[0]
    state = _pick(_unpickle(path), entry, path)
    if not state:
        raise UserError(f"{path} holds no tensors")
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in state):
            state = {name.removeprefix(wrapper): tensor for name, tensor in state.items()}
    return state


def read_safetensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and the text fields in its header.

    Raises:
        UserError: if the file is damaged or truncated.
    """
    metadata = safetensors_metadata(path)
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def safetensors_metadata(path: Path | str) -> dict[str, str]:
    """The text fields in the header of a safetensors file.

    Raises:
        UserError: if the file is damaged or truncated.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or truncated: {_sentence(error)}") from error


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors files do: eight bytes of length, then JSON."""
    return _kind(path) == "safetensors"


def _kind(path: Path) -> str:
    """ "safetensors" or "torch", by the first bytes.

    Raises:
        UserError: for anything else, saying what it looks like.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a weight file")
    if not path.exists():
        raise FileNotFoundError(f"there is no weight file {path}")
    with path.open("rb") as file:
        start = file.read(512)
    if not start:
        raise UserError(f"{path} is empty")
    if start.startswith(b"version https://git-lfs"):
        raise UserError(
            f"{path} is a git-lfs pointer, not the weights it points to; fetch them with "
            f"`git lfs pull`"
        )
    if start[8:9] == b"{":
        return "safetensors"
    if start.startswith(b"PK\x03\x04") or start[:1] == b"\x80":
        return "torch"
    if _is_text(start):
        what = (
            "a web page" if b"<html" in start.lower() or b"<!doctype" in start.lower() else "text"
        )
        raise UserError(f"{path} holds {what}, not weights")
    raise UserError(f"{path} is neither a safetensors nor a PyTorch file")


def _unpickle(path: Path) -> Any:
    try:
        # A file object, since torch looks at the ending of a path.
        with torch.serialization.safe_globals([*ALLOWED_CLASSES]), path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = _NAMED_GLOBAL.search(str(error))
        if wanted:
            raise UserError(
                f"{path} was refused, and nothing in it was run: it wants to call {wanted[1]}, and "
                f"weights are read only from files that hold nothing but tensors"
            ) from error
        raise UserError(
            f"{path} was refused: it is a pickle, but not one of PyTorch weights"
        ) from error
    except RuntimeError as error:
        if "TorchScript" in str(error):
            raise UserError(
                f"{path} is a TorchScript program, not weights; save the model's state_dict instead"
            ) from error
        if _is_exported(path):
            raise UserError(
                f"{path} is a program of torch.export, not weights; run it with torch.export.load"
            ) from error
        raise UserError(f"{path} is damaged or truncated: {_sentence(error)}") from error
    # The reader meets arbitrary bytes here; whatever it stumbles over, they are no weights.
    except (EOFError, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or truncated: {type(error).__name__}") from error


def _is_exported(path: Path) -> bool:
    """Whether a file is what `torch.export.save` writes: a graph beside its weights."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
    except zipfile.BadZipFile:
        return False
    return "models/model.json" in names or "serialized_exported_program.json" in names


def _pick(content: Any, entry: str | None, path: Path) -> dict[str, Tensor]:
    """The one state dict in what a file holds."""
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not a state dict")
    found = {str(name): value for name, value in content.items() if _is_state(value)}
    if entry is not None:
        if entry not in found:
            held = ", ".join(found) or "none"
            raise UserError(f"{path} has no state dict '{entry}'; it has: {held}")
        return dict(found[entry])
    if _is_state(content):
        return {str(name): tensor for name, tensor in content.items()}
    if not found:
        raise UserError(
            f"{path} holds no state dict; its entries are: {shorten(map(str, content))}"
        )
    if len(found) > 1:
        raise UserError(
            f"{path} holds several state dicts ({', '.join(found)}); name one as the entry to read"
        )
    return dict(next(iter(found.values())))


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(tensor, Tensor) for tensor in value.values())
    )


def _is_text(start: bytes) -> bool:
    try:
        start.decode()
    except UnicodeDecodeError as error:
        # The cut may have gone through the last character.
        return error.start >= len(start) - 3 and error.reason == "unexpected end of data"
    return b"\0" not in start


def _sentence(error: Exception) -> str:
    """The first sentence of a library's message."""
    return re.split(r"\. |\n", str(error))[0].rstrip(".")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileNotFoundError: if there is no such file.
        UserError: if it is not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content
