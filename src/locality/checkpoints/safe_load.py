"""Read untrusted weight files without running code in them.

A PyTorch file is a pickle, which is a program. Files are always read with `weights_only=True`:
torch's unpickler, restricted to tensors and containers. Two more classes are allowed, because the
ConViT authors' files include their command line: `argparse.Namespace`, which only holds values, and
paths, which are read as pure paths that access no file.

The restricted unpickler can still be made to run for hours or exhaust memory. The program is
therefore scanned first: its length, the names in it, and the number of keys it hashes other than
text, since these can be chosen to collide. An archive must not hold more than its own size, nor a
tensor more numbers than the file has for it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

import torch
from safetensors import safe_open
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
"""Classes that a pickle may name besides torch's tensors and containers, with their name in the
pickle if it differs."""

_NAMED_GLOBAL = re.compile(r"GLOBAL (\S+)")
# torch would allocate as much memory as the file says, or call what the file names.
_UNSAFE_GLOBALS = ("bytearray", "Tensor")
# A tensor takes about 25 operations and 200 bytes; in safetensors, 100 bytes.
_MAX_OPCODES = 500_000
_MAX_TENSORS = 20_000
# A tensor takes four tuples. About 200,000 nested ones crash the process if used as a key.
_MAX_TUPLES = 100_000
_MAX_DIMS = 8
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Tied weights are one tensor with several names, which is copied for each.
_MOST_SHARED = 4
# Hashes of text are randomised per process. Other keys can collide: n of them take n² steps.
_MAX_HASHED = 10_000
_HASHING = ("set", "Counter", "OrderedDict")
_MAX_PICKLE_BYTES = 16 << 20
_MAX_HEADER_BYTES = 16 << 20
# A legacy file starts with five pickles: magic number, version, system, content, storages.
_LEGACY_PICKLES = 5


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
    path = Path(path)
    if is_safetensors(path):
        state, metadata = read_safetensors(path)
        return _select_state_dict(state, entry, path), metadata
    with open_file(path) as file:
        state = _select_state_dict(unpickle(file, path), entry, path)
    _check_tensors(state, path)
    return state, {}


def read_safetensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and the text fields in its header.

    Raises:
        UserError: if the file is damaged or truncated, or has too many tensors.
    """
    with open_file(path) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise UserError(f"{path} is damaged: its header claims {length:,} bytes")
        header = opened.read(length)
    # The header is JSON with one object per tensor.
    if header.count(b"{") > _MAX_TENSORS:
        raise _too_many(path, f"{_MAX_TENSORS:,} tensors")
    damaged = f"{path} is damaged or truncated"
    with wrap_errors(damaged, Exception), safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check_tensors(tensors, path)
        return tensors, file.metadata() or {}


def is_safetensors(path: Path) -> bool:
    """Whether a file is a safetensors rather than a PyTorch file, by its first bytes.

    Raises:
        OSError: if the file does not exist.
        UserError: if it is neither, saying what it looks like.
    """
    with open_file(path) as file:
        start = file.read(512).lower()
    if start[8:9] == b"{":
        return True
    if start.startswith((b"pk\x03\x04", b"\x80")):
        return False
    what = "neither a safetensors nor a PyTorch file"
    if not start:
        what = "empty"
    elif start.startswith(b"version https://git-lfs"):
        what = "a git-lfs pointer, not the weights it points to; fetch them with `git lfs pull`"
    elif b"<html" in start or b"<!doctype" in start:
        what = "a web page, not weights"
    elif b"\0" not in start:
        what = "text, not weights"
    raise UserError(f"{path} is {what}")


def unpickle(file: IO[bytes], path: Path | str) -> Any:
    """The content of a PyTorch file, on the CPU.

    Args:
        file: the open file, positioned after any header. (torch looks at a path's suffix.)
        path: its path, for messages.

    Raises:
        UserError: if it is not a PyTorch file, is damaged, would run code, or would take more
            memory than its size.
    """
    start = file.tell()
    _scan_pickle(file, path)
    file.seek(start)
    try:
        with torch.serialization.safe_globals([*ALLOWED_CLASSES]):
            return torch.load(file, map_location="cpu", weights_only=True)
    # Arbitrary input may raise anything.
    except Exception as error:
        if wanted := _NAMED_GLOBAL.search(str(error)):
            raise _unsafe_global(path, wanted[1]) from error
        if isinstance(error, pickle.UnpicklingError):
            what = "was refused: it is a pickle, but not of PyTorch weights"
        elif "TorchScript" in str(error):
            what = "is a TorchScript program, not weights; save the model's state_dict instead"
        elif Path(path).suffix == ".pt2" or "data.pkl" in str(error):
            what = "is a torch.export program, not weights; run it with torch.export.load"
        else:
            what = f"is damaged or truncated: {one_line(error)}"
        raise UserError(f"{path} {what}") from error


def _unsafe_global(path: Path | str, name: str) -> UserError:
    return UserError(
        f"{path} was refused, and nothing in it was run: it would call {name}. Only files of "
        f"tensors are read; save model.state_dict()"
    )


def _too_many(path: Path | str, most: str) -> UserError:
    return UserError(f"{path} was refused: it has more than {most}, which no model's weights need")


def _scan_pickle(file: IO[bytes], path: Path | str) -> None:
    """Check that a pickle takes little time and memory."""
    program = file.read(_MAX_PICKLE_BYTES)
    if program.startswith(b"PK\x03\x04"):
        size, held = file.seek(0, io.SEEK_END), 0
        try:
            with zipfile.ZipFile(file) as archive:
                entries = [(e.filename.partition("/")[2], e) for e in archive.infolist()]
                # TorchScript's code is compressed; it gets a better message below.
                held = sum(e.file_size for name, e in entries if not name.startswith("code/"))
                pickles = [e for name, e in entries if name == "data.pkl" and held <= size]
                program = b"".join(map(archive.read, pickles))
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError):
            return  # torch reads archives differently, and reports the error
        if held > size:
            raise UserError(
                f"{path} was refused: its entries are larger than the file itself, but weights "
                f"are never compressed"
            )
    tuples, stream, machine = 0, io.BytesIO(program), _Machine()
    with wrap_errors(f"{path} is damaged", IndexError, KeyError):
        for count, (code, argument, _) in enumerate(_opcodes(stream)):
            tuples += code.name.startswith("TUPLE")
            if code.name == "GLOBAL" and str(argument).rpartition(" ")[2].endswith(_UNSAFE_GLOBALS):
                raise _unsafe_global(path, str(argument).replace(" ", "."))
            machine.step(code, argument)
            if count >= _MAX_OPCODES or tuples > _MAX_TUPLES or machine.hashed > _MAX_HASHED:
                most = f"{_MAX_OPCODES:,} operations or {_MAX_HASHED:,} keys that are not text"
                raise _too_many(path, most)
    if stream.tell() == _MAX_PICKLE_BYTES:
        raise _too_many(path, f"{_MAX_PICKLE_BYTES:,} bytes besides its tensors")


class _Machine:
    """Simulates torch's unpickler, counting the values that it would hash.

    A value on the stack is represented by the number of non-text values it contains; for a class or
    function, followed by its name.

    Attributes:
        hashed: number of non-text values hashed so far.
    """

    def __init__(self) -> None:
        self.hashed = 0
        self._stack: list[list[Any]] = []
        self._frames: list[list[list[Any]]] = []
        self._memo: dict[Any, list[Any]] = {}

    def step(self, code: pickletools.OpcodeInfo, argument: Any) -> None:
        """Simulate one operation."""
        name, before = code.name, code.stack_before
        if name == "MARK":
            self._frames.append(self._stack)
            self._stack = []
            return
        if name.endswith("PUT"):
            self._memo[argument] = self._stack[-1]
            return
        if pickletools.markobject in before:
            items, self._stack = self._stack, self._frames.pop()
        else:
            fills = name in ("APPEND", "SETITEM")  # the container stays on the stack
            items = [self._stack.pop() for _ in before[fills:]][::-1]
        inside = sum(item[0] for item in items)
        if name.startswith("SETITEM"):
            self.hashed += sum(key[0] for key in items[::2])
        elif name.startswith("APPEND"):
            self._stack[-1][0] += inside
        elif name.startswith("TUPLE"):
            self._stack.append([1 + inside])
        elif name.endswith("GET"):
            self._stack.append(self._memo[argument])
        elif name == "GLOBAL":
            self._stack.append([1, argument.rpartition(" ")[2]])
        else:
            if name in ("REDUCE", "NEWOBJ") and items[0][-1] in _HASHING:
                self.hashed += items[1][0]
            elif name == "BINPERSID":  # a tuple with a storage's class and size, and its key
                self.hashed += max(0, inside - 4)
            text = name.startswith("EMPTY") or "STRING" in name or "UNICODE" in name
            self._stack += [[int(not text)] for _ in code.stack_after]


def _opcodes(stream: IO[bytes]) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    """The operations of the leading pickles, up to the tensors' data or an error."""
    with contextlib.suppress(Exception):
        for _ in range(_LEGACY_PICKLES):
            yield from pickletools.genops(stream)


def _check_tensors(state: Mapping[str, Tensor], path: Path | str) -> None:
    """Check that tensors are plain, of a supported dtype, and fully stored in the file."""
    for name, tensor in state.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        in_file = plain and tensor.device.type == "cpu"
        if not in_file or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: the file does not hold all numbers of the tensor {name}")
        if tensor.dim() > _MAX_DIMS or (tensor.dtype not in _DTYPES and tensor.is_floating_point()):
            raise UserError(
                f"{path}: the tensor {name} has {tensor.dim()} axes of {tensor.dtype}, which is "
                f"not supported"
            )
    size, held = sum(tensor.nbytes for tensor in state.values()), os.path.getsize(path)
    if size > _MOST_SHARED * held:
        raise UserError(
            f"{path} was refused: its tensors share memory, and copied would take "
            f"{size / 1e6:,.0f} MB, the file {held / 1e6:,.1f}"
        )


def _select_state_dict(content: Any, entry: str | None, path: Path) -> dict[str, Tensor]:
    """The selected, or only, state dict in a file's content."""
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not a state dict")
    if _is_state_dict(content):
        found = {"": content}
    else:
        found = {str(name): value for name, value in content.items() if _is_state_dict(value)}
    if not found:
        entries = some(map(str, content), quote="") or "none"
        raise UserError(f"{path} holds no state dict; its entries are: {entries}")
    if entry is None and len(found) > 1:
        raise several_entries(path, found)
    chosen = found.get(entry or "", next(iter(found.values())))
    state = {str(name): tensor for name, tensor in chosen.items()}
    if entry is None or entry in found:
        return state
    inside = {
        name.removeprefix(f"{entry}."): tensor
        for name, tensor in state.items()
        if name.startswith(f"{entry}.")
    }
    if len(found) > 1 or not inside:
        held = ", ".join(filter(None, found)) or "one without a name; omit the entry"
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
