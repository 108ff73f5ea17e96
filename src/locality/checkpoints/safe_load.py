"""Weight files from anywhere, read without running what is in them.

A PyTorch file is a pickle, and a pickle is a program. Files are therefore read with
`weights_only=True`, always: torch's own unpickler, which knows tensors and containers and calls
nothing else. Two classes are allowed beside them, since the ConViT authors' files carry their
command line: `argparse.Namespace`, which only holds values, and paths, which are read as pure ones
and touch no file.

That unpickler can still be made to take hours or all memory. So the program is looked through
first: its length, the names in it, and what it hashes, since keys that are not text can be chosen
to have one hash. Nor may an archive hold more than its own size, or a tensor
more numbers than the file has for it.
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
_MAX_DIMS = 8
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Tied weights are one tensor by several names; the copies made of each take memory of their own.
_MOST_SHARED = 4
# Text has another hash in every process. Other keys may all have one: n of them take n² steps.
_MAX_HASHED = 10_000
_HASHING = ("set", "Counter", "OrderedDict")
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
    _check_tensors(state, path)
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
    with wrap_errors(damaged, Exception), safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check_tensors(tensors, path)
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
    """The content of a PyTorch file, on the CPU.

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
        f"read only from files that hold nothing but tensors: save model.state_dict()"
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
    tuples, stream, machine = 0, io.BytesIO(program), _Machine()
    with wrap_errors(f"{path} is damaged", IndexError, KeyError):
        for count, (code, argument, _) in enumerate(_opcodes(stream)):
            tuples += code.name.startswith("TUPLE")
            if count >= _MAX_OPCODES or tuples > _MAX_TUPLES:
                raise UserError(
                    f"{path} was refused: it is a pickle of more than {_MAX_OPCODES:,} "
                    f"operations, which no model's weights need"
                )
            if code.name == "GLOBAL" and str(argument).rpartition(" ")[2].endswith(_UNSAFE_GLOBALS):
                raise _unsafe_global(path, str(argument).replace(" ", "."))
            machine.step(code, argument)
            if machine.hashed > _MAX_HASHED:
                raise UserError(
                    f"{path} was refused: it is a pickle of more than {_MAX_HASHED:,} keys that "
                    f"are not text, which no model's weights have"
                )
    if stream.tell() == _MAX_PICKLE_BYTES:
        raise UserError(
            f"{path} was refused: it is a pickle of more than {_MAX_PICKLE_BYTES:,} bytes "
            f"beside its tensors"
        )
    return names


class _Machine:
    """Follows a pickle as torch's unpickler would, and makes nothing of it but a count.

    A value on the stack is how many numbers, and other things that are not text, it has in it; of
    a class or function, its name is with it.

    Attributes:
        hashed: how many have been hashed.
    """

    def __init__(self) -> None:
        self.hashed = 0
        self._stack: list[list[Any]] = []
        self._frames: list[list[list[Any]]] = []
        self._memo: dict[Any, list[Any]] = {}

    def step(self, code: pickletools.OpcodeInfo, argument: Any) -> None:
        """Follow one operation."""
        name, before = code.name, code.stack_before
        if name == "MARK":
            self._frames.append(self._stack)
            self._stack = []
        elif name.endswith("GET"):
            self._stack.append(self._memo[argument])
        elif name.endswith("PUT"):
            self._memo[argument] = self._stack[-1]
        elif name.startswith(("APPEND", "SETITEM")):
            several = pickletools.markobject in before
            items = self._stack if several else self._stack[1 - len(before) :]
            self._stack = self._frames.pop() if several else self._stack[: 1 - len(before)]
            if name.startswith("SETITEM"):
                self.hashed += sum(key[0] for key in items[::2])
            else:
                self._stack[-1][0] += sum(item[0] for item in items)
        elif name == "TUPLE":
            items, self._stack = self._stack, self._frames.pop()
            self._stack.append([1 + sum(item[0] for item in items)])
        else:
            taken = [self._stack.pop() for _ in before]
            inside = sum(item[0] for item in taken)
            if name in ("REDUCE", "NEWOBJ") and taken[1][-1] in _HASHING:
                self.hashed += taken[0][0]
            elif name == "BINPERSID":  # a tuple with a storage's class and size, and its key
                self.hashed += max(0, inside - 4)
            if name.startswith("TUPLE"):
                self._stack.append([1 + inside])
            elif name == "GLOBAL":
                self._stack.append([1, argument.rpartition(" ")[2]])
            else:
                text = name.startswith("EMPTY") or "STRING" in name or "UNICODE" in name
                self._stack += [[int(not text)] for _ in code.stack_after]


def _opcodes(stream: IO[bytes]) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    """What pickles would do, until numbers begin or what torch will say is wrong."""
    with contextlib.suppress(Exception):
        for _ in range(_LEGACY_PICKLES):
            yield from pickletools.genops(stream)


def _check_tensors(state: Mapping[str, Tensor], path: Path | str) -> None:
    """Refuse tensors that no model has, or that are not in the file number by number."""
    for name, tensor in state.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        in_file = plain and tensor.device.type == "cpu"
        if not in_file or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: the file does not hold all numbers of the tensor {name}")
        if tensor.dim() > _MAX_DIMS or (tensor.dtype not in _DTYPES and tensor.is_floating_point()):
            raise UserError(
                f"{path}: the tensor {name} has {tensor.dim()} axes of {tensor.dtype}, which no "
                f"model's has here"
            )
    size, held = sum(tensor.nbytes for tensor in state.values()), os.path.getsize(path)
    if size > _MOST_SHARED * held:
        raise UserError(
            f"{path} was refused: its tensors share memory, and would take {size / 1e6:,.0f} MB by "
            f"themselves, the file {held / 1e6:,.1f}"
        )


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
