"""Atomic writing, and reading with limits on size."""

import contextlib
import csv
import gzip
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO, Any, TypeVar

import yaml

from locality import checks
from locality.errors import UserError, near, prefix_errors, some, wrap_errors

# Hundreds of times the size of this library's own files; YAML is slower to read.
LARGEST_TEXT = 16 << 20
LARGEST_YAML = 256 << 10
_DEEPEST, _MOST_ALIASES = 50, 20
# Decoding and reading release the GIL; network file systems serve many requests at once.
_THREADS = 16
_AT_ONCE = 100

T = TypeVar("T")
R = TypeVar("R")

# libyaml's parser, if available, is ten times as fast, which matters for hundreds of run folders.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """Numbers as in YAML 1.2: PyYAML reads 1e-3 as text, and 1:30 as 90."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own name and form)
        first: [(tag, form) for tag, form in resolvers if not tag.endswith((":int", ":float"))]
        for first, resolvers in _SafeLoader.yaml_implicit_resolvers.items()
    }

    def flatten_mapping(self, node: Any) -> None:
        """Refuse repeated keys, before those of `<<` are added."""
        own = [] if hasattr(node, "checked") else [key for key, _ in node.value]
        node.checked = True
        keys = Counter(key.value for key in own if isinstance(key, yaml.ScalarNode))
        if repeated := [key for key, count in keys.items() if count > 1]:
            raise UserError(f"{some(repeated, quote='')} is given more than once")
        super().flatten_mapping(node)


for _tag, _form in {
    "int": r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$",
    "float": r"^[-+]?(([0-9][0-9_]*)?\.[0-9][0-9_]*|[0-9][0-9_]*\.)([eE][-+]?[0-9]+)?$"
    r"|^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$",
}.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_form), list("-+.0123456789")
    )


def missing(path: Path) -> FileNotFoundError:
    """The error for a path that does not exist, suggesting the nearest names."""
    scheme, mark, rest = str(path).partition(":/")
    if mark and len(scheme) > 1 and scheme.isalnum():  # Path has merged the slashes
        address = f"{scheme}://{rest.lstrip('/')}"
        return FileNotFoundError(f"{address} is a remote address; download it and give its path")
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = " or ".join(str(path.parent / other) for other in near(path.name, beside))
    suggestion = f"; did you mean {hint}?" if hint else ""
    return FileNotFoundError(f"file or folder {path} does not exist{suggestion}")


def open_file(path: Path | str | os.PathLike[str], most: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading; pipes, which may block, and devices are refused."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise UserError(f"{path} is a pipe or device, not a file")
    if most is not None and status.st_size > most:
        file.close()
        raise UserError(f"{path} is larger than the limit of {most / 1e6:.0f} MB")
    return file


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply `function` to every item in threads; results are in order."""
    with ThreadPool(_THREADS) as pool:
        yield from pool.imap(function, items, chunksize=_AT_ONCE)


def read_bytes(path: Path | str | os.PathLike[str], most: int = LARGEST_TEXT) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with open_file(path, most) as file:
        return file.read(most)


def read_text(path: Path | str, most: int = LARGEST_TEXT) -> str:
    """The content of a UTF-8 text file."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: Path | str) -> dict[str, Any]:
    """The JSON object in a file."""
    content = parse_json(read_text(path), str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def read_shaped(path: Path, wanted: Any, missing: Any = None) -> Any:
    """The JSON object in a file, checked by `checks.shaped`; `missing` if it does not exist."""
    if not path.exists():
        return missing
    content = read_json(path)
    checks.shaped(str(path), content, wanted)
    return content


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text; `where` names it in errors."""
    with wrap_errors(f"{where} is not JSON", ValueError, RecursionError):
        return json.loads(text)


def read_yaml(path: Path | str) -> Any:
    """The value in a YAML file."""
    return parse_yaml(read_text(path, LARGEST_YAML), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, read by a safe loader; `where` names it in errors."""
    with wrap_errors(f"{where} is not valid YAML", yaml.YAMLError, ValueError, TypeError):
        depth = aliases = 0
        for event in yaml.parse(text, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            aliases += isinstance(event, yaml.AliasEvent)
            if tag := getattr(event, "tag", None):
                raise UserError(f"{where} has the tag {tag}; give plain values, without tags")
            # libyaml would overflow the stack; aliases of aliases grow exponentially.
            if depth > _DEEPEST or aliases > _MOST_ALIASES:
                raise UserError(f"{where} has over {_DEEPEST} levels or {_MOST_ALIASES} aliases")
        with prefix_errors(where):
            value = yaml.load(text, _Loader)
        json.dumps(value, default=str)  # refuses values that contain themselves
        return value


def read_rows(
    path: Path | str,
    wanted: Mapping[str, Callable[[str], object]] = {},
    most: int = LARGEST_TEXT,
) -> list[dict[str, str]]:
    """The rows of a CSV file as dictionaries; an unfinished last line is ignored.

    Args:
        path: the file.
        wanted: required columns, each with a function that raises an error for an invalid cell.

    Raises:
        UserError: for a missing or invalid cell.
    """
    # Cells may be filenames, which need not be UTF-8.
    text = read_bytes(path, most).decode(errors="surrogateescape")
    with wrap_errors(f"{path} is not CSV", csv.Error):
        cells = csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))
        lines = [[*map(without_mark, line)] for line in cells]
        rows = [dict(zip(lines[0], line, strict=False)) for line in lines[1:] if line]
    for number, row in enumerate(rows, 1):
        for column, check in wanted.items():
            where = f"{path}, row {number}: {column}"
            if (cell := row.get(column)) is None:
                raise UserError(f"{where} is missing")
            with wrap_errors(f"{where} is {cell!r}", LookupError, ValueError, OverflowError):
                check(cell)
    return rows


def number(cell: str) -> float | None:
    """The finite number in a cell; None if it is empty.

    Raises:
        ValueError: if it is not a finite number.
    """
    value = float(cell) if cell else None
    if value is not None and not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def gunzip(path: Path | str, what: str, most: int) -> bytes:
    """The content of a gzip file that holds `what`, at most `most` bytes."""
    with wrap_errors(f"{path} is not a valid {what}", EOFError, gzip.BadGzipFile, zlib.error):
        content = gzip.GzipFile(fileobj=open_file(path, most)).read(most + 1)
    if len(content) > most:
        raise UserError(f"{path} inflates to more than the limit of {most / 1e6:.0f} MB")
    return content


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows of a table, including the header, as CSV; None is an empty cell.

    Cells that a spreadsheet would take for a formula, for example `=1+2.png`, are prefixed with
    `'`, which `read_rows` removes.
    """
    lines = []
    for row in rows:
        line = io.StringIO()
        # The csv module quotes cells that contain characters of the line terminator.
        csv.writer(line, lineterminator="\r\n").writerow(
            f"'{cell}" if _is_formula(str(cell)) else cell for cell in row
        )
        lines.append(line.getvalue()[:-2] + "\n")
    return "".join(lines)


def without_mark(cell: str) -> str:
    """The cell without the `'` that `csv_text` prefixes to formulas."""
    return cell[cell.startswith("'") and _is_formula(cell) :]


def _is_formula(cell: str) -> bool:
    """Whether a spreadsheet would take a cell, without any leading `'`, for a formula."""
    inner = cell.lstrip("'")
    if not inner.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return False
    with contextlib.suppress(ValueError):
        float(inner)
        return False
    return True


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Name the file in an `OSError` of the block that names none or a temporary one."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save raises a RuntimeError for a write error.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        if str(cause.filename or ".tmp").endswith(".tmp"):
            cause.filename = str(path)
        raise cause from None


@contextlib.contextmanager
def atomic_file(path: Path | str) -> Iterator[IO[bytes]]:
    """Open a temporary binary file that becomes `path` when the block ends without an error.

    The temporary file is in the same folder, since renaming is atomic only within a file system. It
    is synced before the rename and the folder after it, so that the new content survives a power
    cut. On an error it is removed and `path` is unchanged. For a symlink, its target is replaced;
    devices and pipes are written directly.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            with open(path, "wb") as target:
                shutil.copyfileobj(file, target)
        return
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise UserError(f"{path} is a symlink to itself")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with naming(path), open(temporary, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Write `data` to `path`, atomically and durably; text as UTF-8 with surrogate escapes."""
    with atomic_file(path) as file:
        file.write(data.encode(errors="surrogateescape") if isinstance(data, str) else data)


def check_output(path: Path | str | None, overwrite: bool = False) -> None:
    """Check that an output file may be written: an existing one only if empty, or `overwrite`.

    Raises:
        UserError: if `path` is a folder, or a file that is not to be replaced.
    """
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a filename")
    if path.is_file() and path.stat().st_size and not overwrite:
        raise _exists(path)


def check_output_folder(path: Path, overwrite: bool = False) -> None:
    """Check that a folder is new or empty, or `overwrite`.

    Raises:
        UserError: if it is not.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; give a folder")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise _exists(path)


def _exists(path: Path) -> UserError:
    return UserError(
        f"{path} already exists; give another name, or --overwrite (overwrite=True) to replace it"
    )


def check_parent(path: Path | str | None) -> None:
    """Check that the folder of an output file exists."""
    if path is not None and not Path(path).parent.is_dir():
        raise UserError(
            f"folder {Path(path).parent} does not exist; create it to write {Path(path).name}"
        )
