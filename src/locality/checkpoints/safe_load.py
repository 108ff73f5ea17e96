"""Weight files from anywhere, read without running what is in them.

A PyTorch file is a pickle, and a pickle is a program. Files are therefore read with
`weights_only=True`, always: torch's own unpickler, which knows tensors and containers and calls
nothing else. Two classes are allowed beside them, since the ConViT authors' files carry their
command line: `argparse.Namespace`, which only holds values, and paths, which are read as pure ones
and touch no file.

That unpickler can still be made to take hours or all memory. So the program is looked through
first: its length, and the names in it. Nor may an archive hold more than its own size, or a tensor
more numbers than the file has for it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from locality.errors import UserError, one_line, some, wrap_errors
from locality.files import open_file

ALLOWED_CLASSES: tuple[Any, ...] = (
    argparse.Namespace,
    *(
        (path_class, f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")  # Python 3.13 writes the second
        for path_class in (PurePosixPath, PureWindowsPath)
        for name in (path_class.__name__, path_class.__name__.removeprefix("Pure"))
    ),
)
"""The classes that a pickle may name beside torch's own tensors and containers, with the name it
may give them where that is not their own."""

_NAMED_GLOBAL = re.compile(r"GLOBAL (\S+)")
# What torch would call on the file's word, and what takes as much memory as the file says.
_UNSAFE_GLOBALS = ("bytearray", "Tensor")
# A tensor takes some 25 operations and 200 bytes; safetensors describes one in 100 bytes.
_MAX_OPCODES = 500_000
_MAX_TENSORS = 20_000
# A tensor has four tuples; some 200,000, each in the next, end the process where one is a key.
_MAX_TUPLES = 100_000
_MAX_PICKLE_BYTES = 16 << 20
_MAX_HEADER_BYTES = 16 << 20
# A legacy file begins with five pickles: magic number, version, system, content, storages.
_LEGACY_PICKLES = 5


def read_state(
    path: Path | str, entry: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a state dict from a `.safetensors` or PyTorch file, on the CPU.

    Args:
        path: the file. Its content decides what it is, not its name.
        entry: which state dict to take, where a training checkpoint holds several ("model",
            "model_ema"), or the first part of the names to take ("student"); the only one
            unless given.

    Returns:
        the state dict, and the text fields in the header of a safetensors file.

    Raises:
        OSError: if there is no such file.
        UserError: if it is no weight file, is damaged, wants to run code, or holds no or several
            state dicts; naming the file and the cause.
    """
    path = Path(path)
    if is_safetensors(path):
        state, metadata = read_safetensors(path)
        return _select_state_dict(state, entry, path), metadata
    with open_file(path) as file:
        state = _select_state_dict(unpickle(file, path), entry, path)
    for name, tensor in state.items():
        if not _has_all_data(tensor):
            raise UserError(f"{path}: the file does not hold all numbers of the tensor {name}")
    return state, {}


def read_safetensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and the text fields in its header.

    Raises:
        UserError: if the file is damaged or truncated, or holds too many tensors.
    """
    with open_file(path) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise UserError(f"{path} is damaged: its header would be {length:,} bytes long")
        header = opened.read(length)
    # Each tensor is described in braces, and so is what is said of all.
    if header.count(b"{") > _MAX_TENSORS:
        raise UserError(
            f"{path} was refused: it describes more than {_MAX_TENSORS:,} tensors, which no model "
            f"here has"
        )
    damaged = f"{path} is damaged or truncated"
    with wrap_errors(damaged, SafetensorError), safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}


def is_safetensors(path: Path) -> bool:
    """Whether a file is one of safetensors, and not of PyTorch, by its first bytes.

    Raises:
        OSError: if there is no such file.
        UserError: for anything else, saying what it looks like.
    """
    with open_file(path) as file:
        start = file.read(512)
    if not start:
        raise UserError(f"{path} is empty")
    if start.startswith(b"version https://git-lfs"):
        raise UserError(
            f"{path} is a git-lfs pointer, not the weights it points to; fetch them with "
            f"`git lfs pull`"
        )
    if start[8:9] == b"{":
        return True
    if start.startswith(b"PK\x03\x04") or start[:1] == b"\x80":
        return False
    text = start.decode(errors="replace").lower()
    # The cut may have gone through the last character.
    if "\0" not in text and "\N{REPLACEMENT CHARACTER}" not in text[:-1]:
        what = "a web page" if "<html" in text or "<!doctype" in text else "text"
        raise UserError(f"{path} holds {what}, not weights")
    raise UserError(f"{path} is neither a safetensors nor a PyTorch file")


def unpickle(file: IO[bytes], path: Path | str) -> Any:
    """What a PyTorch file holds, on the CPU.

    Args:
        file: open where it begins, which may be behind a header. (torch looks at a path's ending.)
        path: what to call it.

    Raises:
        UserError: if it is none, is damaged, wants to run code, or would take more memory than
            it has a size.
    """
    start = file.tell()
    names = _scan_pickle(file, path)
    file.seek(start)
    try:
        with torch.serialization.safe_globals([*ALLOWED_CLASSES]):
            return torch.load(file, map_location="cpu", weights_only=True)
    # The reader meets arbitrary bytes here; whatever it stumbles over, they are no weights.
    except Exception as error:
        if wanted := _NAMED_GLOBAL.search(str(error)):
            raise _unsafe_global(path, wanted[1]) from error
        if isinstance(error, pickle.UnpicklingError):
            what = "was refused: it is a pickle, but not one of PyTorch weights"
        elif "TorchScript" in str(error):
            what = "is a TorchScript program, not weights; save the model's state_dict instead"
        elif names & {"models/model.json", "serialized_exported_program.json"}:
            what = "is a program of torch.export, not weights; run it with torch.export.load"
        else:
            what = f"is damaged or truncated: {one_line(error)}"
        raise UserError(f"{path} {what}") from error


def _unsafe_global(path: Path | str, name: str) -> UserError:
    return UserError(
        f"{path} was refused, and nothing in it was run: it wants to call {name}, and weights are "
        f"read only from files that hold nothing but tensors"
    )


def _scan_pickle(file: IO[bytes], path: Path | str) -> set[str]:
    """Refuse a pickle that would take long or much memory; the names of an archive's entries."""
    program, names = file.read(_MAX_PICKLE_BYTES), set[str]()
    if program.startswith(b"PK\x03\x04"):
        size, held = file.seek(0, io.SEEK_END), 0
        try:
            with zipfile.ZipFile(file) as archive:
                entries = [(e.filename.partition("/")[2], e) for e in archive.infolist()]
                # TorchScript's code is compressed, and refused below with a word on what it is.
                held = sum(e.file_size for name, e in entries if not name.startswith("code/"))
                names = {name for name, _ in entries}
                pickles = [e for name, e in entries if name == "data.pkl" and held <= size]
                program = b"".join(map(archive.read, pickles))
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError):
            return names  # torch reads archives in its own way, and says what is wrong
        if held > size:
            raise UserError(
                f"{path} was refused: its entries are larger than the file itself, and weights "
                f"are not compressed"
            )
    tuples, stream = 0, io.BytesIO(program)
    for count, (code, argument, _) in enumerate(_opcodes(stream)):
        tuples += code.name.startswith("TUPLE")
        if count >= _MAX_OPCODES or tuples > _MAX_TUPLES:
            raise UserError(
                f"{path} was refused: it is a pickle of more than {_MAX_OPCODES:,} "
                f"operations, which no model's weights need"
            )
        if code.name == "GLOBAL" and str(argument).rpartition(" ")[2].endswith(_UNSAFE_GLOBALS):
            raise _unsafe_global(path, str(argument).replace(" ", "."))
    if stream.tell() == _MAX_PICKLE_BYTES:
        raise UserError(
            f"{path} was refused: it is a pickle of more than {_MAX_PICKLE_BYTES:,} bytes "
            f"beside its tensors"
        )
    return names


def _opcodes(stream: IO[bytes]) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    """What pickles would do, until numbers begin or what torch will say is wrong."""
    with contextlib.suppress(Exception):
        for _ in range(_LEGACY_PICKLES):
            yield from pickletools.genops(stream)


def _has_all_data(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    dense = plain and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return dense and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _select_state_dict(content: Any, entry: str | None, path: Path) -> dict[str, Tensor]:
    """The one state dict in what a file holds."""
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not a state dict")
    if not content:
        raise UserError(f"{path} holds no tensors")
    found = {str(name): value for name, value in content.items() if _is_state_dict(value)}
    if _is_state_dict(content):
        found = {"": content}
    elif not found:
        raise UserError(
            f"{path} holds no state dict; its entries are: {some(map(str, content), quote='')}"
        )
    if entry is None and len(found) > 1:
        raise several_entries(path, found)
    chosen = found[entry] if entry in found else next(iter(found.values()))
    state = {str(name): tensor for name, tensor in chosen.items()}
    if entry is None or entry in found:
        return state
    inside = {
        name.removeprefix(f"{entry}."): tensor
        for name, tensor in state.items()
        if name.startswith(f"{entry}.")
    }
    if len(found) > 1 or not inside:
        held = ", ".join(filter(None, found)) or "one, without a name; leave the entry out"
        raise UserError(f"{path} has no state dict '{entry}'; it has: {held}")
    return inside


def several_entries(path: Path, entries: Iterable[str]) -> UserError:
    """The error for a file with several state dicts, of which none was chosen."""
    return UserError(
        f"{path} holds several state dicts ({', '.join(entries)}); choose one with --entry NAME "
        f"(entry= in Python)"
    )


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(tensor, Tensor) for tensor in value.values())
    )
