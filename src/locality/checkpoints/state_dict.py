"""Read weight files of any origin, without running code in them.

PyTorch files are pickles, which are programs; they are read with `weights_only=True`, torch's
unpickler for tensors and containers.
"""

from __future__ import annotations

import argparse
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


def check_keys(state: State, expected: State, owner: str) -> None:
    """Check the names and shapes of a state dict.

    Args:
        state: the state dict to check.
        expected: the required names, with their shapes and whether they are floating-point.
        owner: whose names these are, for the message.

    Raises:
        UserError: naming missing and unknown tensors, and those of another shape or dtype.
    """

    def form(tensor: Tensor) -> str:
        kind = "numbers" if tensor.is_floating_point() else "integers"
        return f"{tuple(tensor.shape)} of {kind}"

    forms = {name: (form(state[name]), form(expected[name])) for name in state if name in expected}
    faults = {
        "missing": [name for name in expected if name not in state],
        "unknown": [name for name in state if name not in expected],
        "of another shape": [
            f"{name} is {own} instead of {wanted}"
            for name, (own, wanted) in sorted(forms.items())
            if own != wanted
        ],
    }
    if any(faults.values()):
        said = [f"{what}: {some(names, quote='')}" for what, names in faults.items() if names]
        raise UserError(f"these weights do not fit the model ({owner} names); {'; '.join(said)}")


def check_finite(state: State) -> None:
    """Check that all weights are finite.

    Raises:
        UserError: naming the tensors that contain NaN or infinity.
    """
    if broken := [name for name, tensor in state.items() if not tensor.isfinite().all()]:
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
        start = file.read(9)
        file.seek(0)
        if start[8:] != b"{":
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
    except Exception as error:  # arbitrary input may raise anything
        what = f"is damaged, truncated or not a file of tensors: {one_line(error)}"
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            what = f"was refused, and nothing in it was run: it would call {named[1]}"
        elif isinstance(error, pickle.UnpicklingError):
            what = "is neither a safetensors nor a PyTorch file; a failed download, or git-lfs?"
        raise UserError(f"{path} {what}") from error


def _select_state_dict(content: Any, entry: str | None, path: Path) -> dict[str, Tensor]:
    """The selected, or only, state dict in a file's content."""
    if _is_state_dict(content):
        states = {"": content}
    else:
        entries = content if isinstance(content, Mapping) else {}
        states = {str(name): value for name, value in entries.items() if _is_state_dict(value)}
        if not states:
            held = some(map(str, entries), quote="") or f"a {type(content).__name__}"
            raise UserError(f"{path} holds no state dict, but {held}")
    if entry in states:
        return {str(name): tensor for name, tensor in states[entry].items()}
    # Without an entry, or with the prefix of some tensors as one, there is only one.
    state, prefix = next(iter(states.values())), f"{entry}." if entry else ""
    inside = {str(n).removeprefix(prefix): state[n] for n in state if str(n).startswith(prefix)}
    if len(states) > 1 or not inside:
        raise several_entries(path, states)
    return inside


def several_entries(path: Path | str, entries: Iterable[str]) -> UserError:
    """The error for a file with several state dicts and no valid `entry`."""
    names = some(filter(None, entries), 10, quote="") or "one without a name; omit the entry"
    return UserError(
        f"choose a state dict of {path} with --entry NAME (entry= in Python); it has: {names}"
    )


def _is_state_dict(value: Any) -> bool:
    tensors = value.values() if isinstance(value, Mapping) else ()
    return bool(tensors) and all(isinstance(tensor, Tensor) for tensor in tensors)
