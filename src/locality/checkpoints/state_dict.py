"""Read weight files of any origin, without running code in them.

PyTorch files are pickles, which are programs; they are read with `weights_only=True`, torch's
unpickler for tensors and containers.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor

from locality.errors import UserError, one_line, some, wrap_errors
from locality.files import open_file

State = Mapping[str, Tensor]

_log = logging.getLogger("locality")

# The ConViT authors' files hold their command line and paths, which are read as pure ones.
ALLOWED_CLASSES: tuple[Any, ...] = (
    argparse.Namespace,
    *(
        (path_class, f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")  # Python 3.13 writes the second
        for path_class in (PurePosixPath, PureWindowsPath)
        for name in (path_class.__name__, path_class.__name__.removeprefix("Pure"))
    ),
)
"""Classes that a pickle may name besides torch's tensors and containers, with their name in the
pickle if it differs."""

_NAMED_GLOBAL = re.compile(r"GLOBAL (\S+)")
# First bytes of files that are not weights.
_OTHERS = {
    b"version https://git-lfs": "a git-lfs pointer; fetch the weights with `git lfs pull`",
    b"<!doctype": "a web page, not weights",
    b"<html": "a web page, not weights",
}


def check_keys(state: State, expected: State, owner: str) -> None:
    """Check the names and shapes of a state dict.

    Args:
        state: the state dict to check.
        expected: the required names, with their shapes and whether they are floating-point.
        owner: whose names these are, for the message.

    Raises:
        UserError: naming missing and unknown tensors, and those of another shape or dtype.
    """
    wrong = []
    for name in state.keys() & expected.keys():
        tensor, wanted = state[name], expected[name]
        if tensor.shape != wanted.shape:
            wrong.append(f"{name} is {tuple(tensor.shape)} instead of {tuple(wanted.shape)}")
        elif tensor.is_floating_point() != wanted.is_floating_point():
            wrong.append(f"{name} holds {tensor.dtype} instead of {wanted.dtype}")
    faults = {
        "missing": [name for name in expected if name not in state],
        "unknown": [name for name in state if name not in expected],
        "of another shape": sorted(wrong),
    }
    if any(faults.values()):
        said = "; ".join(
            f"{what}: {some(names, quote='')}" for what, names in faults.items() if names
        )
        raise UserError(f"these weights do not fit the model ({owner} names); {said}")


def check_finite(state: State) -> None:
    """Check that all weights are finite.

    Raises:
        UserError: naming the tensors that contain NaN or infinity.
    """
    broken = [
        name
        for name, tensor in state.items()
        if tensor.is_floating_point() and not torch.isfinite(tensor).all()
    ]
    if broken:
        raise UserError(f"these weights contain NaN or infinity, in {some(broken, quote='')}")


def read_state(
    path: Path | str, entry: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a state dict from a safetensors or PyTorch file, on the CPU.

    Args:
        path: the file; its format is detected from the content.
        entry: the state dict to read from a checkpoint with several ("model", "model_ema"), or the
            prefix of the tensors to read ("student"); not needed if there is only one.

    Returns:
        the state dict, and the text fields in the header of a safetensors file.

    Raises:
        OSError: if the file does not exist.
        UserError: if it is not a weight file, is damaged, would run code, or does not hold exactly
            one state dict and `entry` is not given; naming the file and the cause.
    """
    path, metadata = Path(path), dict[str, str]()
    with open_file(path) as file:
        start = file.read(512).lower()
        file.seek(0)
        text = start.lstrip()
        what = next((what for first, what in _OTHERS.items() if text.startswith(first)), "")
        if what or not start:
            raise UserError(f"{path} is {what or 'empty'}")
        if start[8:9] != b"{":
            content = unpickle(file, path)
        else:
            damaged = f"{path} is damaged or truncated"
            with wrap_errors(damaged, Exception), safe_open(str(path), framework="pt") as opened:
                content = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata() or {}
    state = _select_state_dict(content, entry, path)
    for name, tensor in state.items():
        # Views may claim any number of values.
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: the file does not hold all numbers of the tensor {name}")
    return state, metadata


def unpickle(file: IO[bytes], path: Path | str) -> Any:
    """The content of a PyTorch file, on the CPU.

    Args:
        file: the open file, positioned after any header. (torch looks at a path's suffix.)
        path: its path, for messages.

    Raises:
        UserError: if it is not a PyTorch file, is damaged, or would run code.
    """
    try:
        with torch.serialization.safe_globals([*ALLOWED_CLASSES]):
            return torch.load(file, map_location="cpu", weights_only=True)
    # Arbitrary input may raise anything.
    except Exception as error:
        if wanted := _NAMED_GLOBAL.search(str(error)):
            raise UserError(
                f"{path} was refused, and nothing in it was run: it would call {wanted[1]}. Only "
                f"files of tensors are read; save model.state_dict()"
            ) from error
        if isinstance(error, pickle.UnpicklingError):
            what = "is neither a safetensors nor a PyTorch file of tensors"
        elif "TorchScript" in str(error):
            what = "is a TorchScript program, not weights; save the model's state_dict instead"
        else:
            what = f"is damaged or truncated: {one_line(error)}"
        raise UserError(f"{path} {what}") from error


def _select_state_dict(content: Any, entry: str | None, path: Path) -> dict[str, Tensor]:
    """The selected, or only, state dict in a file's content."""
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not a state dict")
    if _is_state_dict(content):
        states = {"": content}
    else:
        states = {str(name): value for name, value in content.items() if _is_state_dict(value)}
    if not states:
        entries = some(map(str, content), quote="") or "none"
        raise UserError(f"{path} holds no state dict; its entries are: {entries}")
    if entry is None and len(states) > 1:
        raise several_entries(path, states)
    chosen = states.get(entry or "", next(iter(states.values())))
    state = {str(name): tensor for name, tensor in chosen.items()}
    if entry is None or entry in states:
        return state
    inside = {
        name.removeprefix(f"{entry}."): tensor
        for name, tensor in state.items()
        if name.startswith(f"{entry}.")
    }
    if len(states) > 1 or not inside:
        held = ", ".join(filter(None, states)) or "one without a name; omit the entry"
        raise UserError(f"{path} has no state dict '{entry}'; it has: {held}")
    return inside


def several_entries(path: Path, entries: Iterable[str]) -> UserError:
    """The error for a file with several state dicts and no `entry`."""
    return UserError(
        f"{path} holds several state dicts ({some(entries, 10, quote='')}); choose one with "
        f"--entry NAME (entry= in Python)"
    )


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(tensor, Tensor) for tensor in value.values())
    )


def unwrap(state: State, stems: Iterable[str], path: Path) -> dict[str, Tensor]:
    """The tensors of the only model in a state dict, without a wrapper's prefix.

    Prefixes are those of wrappers (`module.`, `_orig_mod.`, `model.`, any attribute of a Lightning
    module).

    Args:
        state: the state dict.
        stems: the names that the first tensor of a model may have.
        path: its file, for messages.

    Raises:
        UserError: if there are several models, for example a student and its teacher.
    """
    candidates = {
        name.removesuffix(stem)
        for name in state
        for stem in stems
        if f".{name}".endswith(f".{stem}")
    }
    # The names of one model may end like those of another: the shortest prefix is the model's.
    prefixes = [one for one in candidates if not any(one.startswith(o) for o in candidates - {one})]
    if len(prefixes) > 1:
        raise several_entries(path, sorted(prefix.rstrip(".") for prefix in prefixes))
    prefix = "".join(prefixes)
    if others := [name for name in state if not name.startswith(prefix)]:
        _log.warning(f"{path}: tensors outside {prefix[:-1]} are ignored: {some(others, quote='')}")
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
