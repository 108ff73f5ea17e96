"""The checkpoints of runs, which are whole or refused.

A file is one line of text, with the SHA-256 and the size of what follows, and then what
`torch.save` writes. (Both `torch.load` and safetensors accept a flipped byte in a tensor without a
word.) A new checkpoint is written beside the old one and takes its place when it is on disk; the
old one is kept as `previous.ckpt`.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from locality.checkpoints.safe_load import unpickle
from locality.errors import CheckpointNotSaved, NonFiniteWeights, RunFailed, UserError
from locality.files import atomic_file, open_file

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"
BEST = "best.ckpt"

_KEYS = {"step", "progress", "model", "optimizer", "ema", "data"}
_MAGIC = "locality checkpoint 1"
_HEADER_BYTES = len(_MAGIC) + 1 + 64 + 1 + 20 + 1


class DamagedCheckpoint(RunFailed):
    """A checkpoint is not what was written; the message names the file."""

    exit_code = 2


_TENSOR = "\0tensor"

Packed = dict[str, Any]
"""A state on its way to disk: a copy in main memory that training no longer touches.

Hundreds of small tensors take `torch.save` ten times as long as one large one, and hold up the
training thread all the while; so they are laid end to end: `buffers` has one for each dtype, by its
name, and `tree` is the state with `[_TENSOR, dtype, offset, shape]` in the place of each tensor.
"""


def pack(state: Mapping[str, Any]) -> Packed:
    """Copy a nested structure of tensors and plain values into main memory."""
    pieces: dict[str, list[Tensor]] = {}
    ends: dict[str, int] = {}

    def packed(tensor: Tensor) -> list[Any]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        offset = ends.get(dtype, 0)
        ends[dtype] = offset + tensor.numel()
        pieces.setdefault(dtype, []).append(tensor.detach().reshape(-1).cpu())
        return [_TENSOR, dtype, offset, list(tensor.shape)]

    tree = tree_map_only(Tensor, packed, dict(state))
    return {"tree": tree, "buffers": {dtype: torch.cat(each) for dtype, each in pieces.items()}}


def unpack(packed: Packed) -> Any:
    """Undo `pack`; every tensor has memory of its own."""

    def is_tensor(node: Any) -> bool:
        return isinstance(node, list) and node[:1] == [_TENSOR]

    def unpacked(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        _, dtype, offset, shape = leaf
        count = math.prod(shape)
        return packed["buffers"][dtype][offset : offset + count].clone().reshape(shape)

    return tree_map(unpacked, packed["tree"], is_leaf=is_tensor)


def write_checkpoint(path: Path, packed: Packed) -> None:
    """Write a packed state to `path`, atomically.

    A checkpoint that is there already becomes `previous.ckpt` in the same folder, once the new
    one is on disk.
    """
    with atomic_file(path) as file:
        file.write(b" " * _HEADER_BYTES)
        torch.save(packed, file)
        header = _expected_header(file)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
        if path.exists():
            _link(path, PREVIOUS, os.replace)


def _link(path: Path, name: str, without_links: Callable[[Path, Path], Any]) -> None:
    """Give a checkpoint a second name; what has it now loses it."""
    second = path.parent / f".{name}.tmp"
    second.unlink(missing_ok=True)
    try:
        os.link(path, second)
    except OSError:  # a file system without links
        without_links(path, second)
    os.replace(second, path.parent / name)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state that `write_checkpoint` wrote, in main memory.

    Raises:
        DamagedCheckpoint: if a single bit of the file is not as it was written.
        FileNotFoundError: if there is no such file.
    """
    with open_file(path) as file:
        header = file.read(_HEADER_BYTES)
        if header != _expected_header(file):
            raise DamagedCheckpoint(_damage(path, header, file.tell() - _HEADER_BYTES))
        file.seek(_HEADER_BYTES)
        try:
            state = unpack(unpickle(file, path))
            if not state.keys() >= _KEYS:
                raise KeyError(*_KEYS - state.keys())
            return state
        except UserError as error:
            raise DamagedCheckpoint(str(error)) from error
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(
                f"checkpoint {path} holds something else than the state of a run"
            ) from error


def _expected_header(file: IO[bytes]) -> bytes:
    """The header that fits what follows it in a file, which is left at its end."""
    file.seek(_HEADER_BYTES)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    return f"{_MAGIC} {digest} {file.tell() - _HEADER_BYTES:020d}\n".encode()


def _damage(path: Path, header: bytes, size: int) -> str:
    words = header.split()
    if len(header) == _HEADER_BYTES and words[-1:] and words[-1].isdigit():
        written = int(words[-1])
        if size < written:
            return f"checkpoint {path} is cut short: {size} of {written} bytes"
    return f"checkpoint {path} is damaged: its content does not match its checksum"


def _newest_valid(
    folder: Path, names: Sequence[str]
) -> tuple[dict[str, Any] | None, str, dict[str, str]]:
    """The first of these checkpoints that is whole, its name, and what is wrong with others."""
    damaged: dict[str, str] = {}
    for name in names:
        try:
            return read_checkpoint(folder / name), name, damaged
        except FileNotFoundError:
            continue
        except DamagedCheckpoint as error:
            damaged[name] = str(error)
    return None, "", damaged


class CheckpointFolder:
    """The checkpoints of one run: the last one, and the one before it; one at a time is saved.

    Args:
        path: the folder, which exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved_step: int | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, packed: Packed) -> None:
        """Make a packed state the last checkpoint.

        Raises:
            CheckpointNotSaved: if it cannot be written; what was there is untouched.
            NonFiniteWeights: if a weight is infinite or not a number; what was there is untouched.
        """
        step = packed["tree"]["step"]
        for name, (_, dtype, offset, shape) in packed["tree"]["model"].items():
            if not packed["buffers"][dtype][offset : offset + math.prod(shape)].isfinite().all():
                raise NonFiniteWeights(
                    f"{name} is not finite after step {step}, so no checkpoint was written; "
                    f"{self._kept()}. Lower optim.lr or set optim.clip_grad, in a new run folder"
                )
        try:
            write_checkpoint(self.path / LAST, packed)
        except (OSError, RuntimeError) as error:
            # torch.save turns a write error into a RuntimeError of its own.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            full = cause.errno == errno.ENOSPC
            raise CheckpointNotSaved(
                f"the checkpoint of step {step} could not be written to {self.path} "
                f"({'the disk is full' if full else cause.strerror or cause}); {self._kept()}. "
                f"Make room and give the same command again"
            ) from error
        self.saved_step = step

    def _kept(self) -> str:
        if self.saved_step is None:
            return "there is no earlier one"
        return f"the one of step {self.saved_step} is kept"

    def keep_best(self) -> None:
        """Keep the checkpoint saved last as the best, whatever is saved later."""
        last = self.path / LAST
        # The last one is missing where a run went on from the one before it.
        _link(last if last.exists() else self.path / PREVIOUS, BEST, shutil.copyfile)

    def load(self) -> tuple[dict[str, Any] | None, str, list[str]]:
        """The newest checkpoint that is whole, or None when none was ever written.

        A damaged one is renamed to `….damaged`, so that it cannot replace a good one.

        Returns:
            the state, the name of its file ("" for none), and a sentence for each file that had
            to be passed over.

        Raises:
            DamagedCheckpoint: if there are checkpoints and none is whole.
        """
        # Temporary files, of a process that was killed while saving.
        leftovers = list(self.path.glob(".*.tmp"))
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
        state, name, damaged = _newest_valid(self.path, (LAST, PREVIOUS))
        for each in damaged:
            os.replace(self.path / each, (self.path / each).with_suffix(".ckpt.damaged"))
        passed_over = list(damaged.values())
        if state is not None:
            self.saved_step = state["step"]
            if name == PREVIOUS and not passed_over and not leftovers:
                passed_over = [f"checkpoint {self.path / LAST} is missing"]
        elif passed_over:
            raise DamagedCheckpoint(
                "; ".join(passed_over)
                + ". No whole checkpoint is left: start again in a new folder"
            )
        return state, name, passed_over

    def start(self, state: Mapping[str, Any]) -> None:
        """Copy `state` and begin to save the copy in a thread, once the one before is saved.

        Raises:
            CheckpointNotSaved: if the checkpoint before it could not be.
        """
        self.wait()
        self._thread = threading.Thread(target=self._save_in_thread, args=(pack(state),))
        self._thread.start()

    def _save_in_thread(self, packed: Packed) -> None:
        try:
            self.save(packed)
        except Exception as error:  # handed over to the thread that trains
            self._failure = error

    def wait(self) -> None:
        """Return when nothing is being saved.

        Raises:
            CheckpointNotSaved: if the checkpoint could not be.
        """
        if self._thread is not None:
            # A future has its result before its thread has ended, and a process that is forked in
            # between, as loading workers are, can wait for ever.
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what went wrong, if something has; costs nothing.

        Raises:
            CheckpointNotSaved: if the last checkpoint could not be saved.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


def load_best_state(folder: Path | str) -> dict[str, Any]:
    """The best checkpoint of the run in `folder` if it keeps that, else the last whole one.

    It is read without touching it.
    """
    state, _, damaged = _newest_valid(Path(folder) / "checkpoints", (BEST, LAST, PREVIOUS))
    if state is not None:
        return state
    reason = "; ".join(damaged.values()) or "it has no checkpoint yet"
    raise UserError(f"run folder {folder} has no weights to load: {reason}")
