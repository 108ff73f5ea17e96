"""Writing files so that a reader sees the old content or the new, never a part of either; pages."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def atomic_file(path: Path | str) -> Iterator[IO[bytes]]:
    """Open a temporary binary file that becomes `path` when the block ends without an error.

    The temporary file lies in the same folder, since renaming is atomic only within one file
    system; it is flushed to disk before the rename and the folder after it, so that the new
    content survives a power cut as soon as the block has been left. On an error the temporary
    file is removed and `path` stays as it was.
    """
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp creates files that only their owner can read; results are meant to be shared.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Write `data` to `path`, atomically and durably (text as UTF-8)."""
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def render(
    package: str, template: str, filters: Mapping[str, Callable[..., Any]] = {}, **content: Any
) -> str:
    """A page from one of a package's `templates`; what the template asks for has to be given.

    Args:
        package: such as "locality.report".
        template: the file's name.
        filters: functions that the template may put values through.
        content: the values, escaped for HTML unless they are markup.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template).render(content)


@contextlib.contextmanager
def one_at_a_time(folder: Path | str) -> Iterator[None]:
    """Let one process of this machine at a time into the block; makes the folder if need be."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".locality.lock", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _umask() -> int:
    # The only portable way to read the mask is to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
