"""Image files listed in a table: rows of a path and a class."""

from __future__ import annotations

import csv
import io
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from locality.data.config import DataConfig
from locality.data.folder import IMAGE_SUFFIXES, FileSource, is_inside
from locality.errors import UserError, some, unknown, wrap_errors
from locality.files import in_threads, read_text

TABLE = "labels.csv"

_MAX_TABLE_BYTES = 1 << 30


def open_table(config: DataConfig) -> tuple[list[str], FileSource, None]:
    """Classes, sorted, and images of a table: a text file whose rows name an image and its class.

    Columns are divided by commas, semicolons, tabs or spaces. They are chosen by number, from 1,
    or by their names in the first row, which is a heading if its image is none by name.

    Args:
        config: its root is the file, or a folder with a `labels.csv`; images lie relative to it.
            Its columns are the first and the second unless given.

    Raises:
        UserError: there is no such table, column or image, or a row names none or one again.
    """
    if config.root is None:
        raise UserError("a table of images needs a file or its folder; give it as data.root")
    path = Path(config.root).expanduser()
    path = path / TABLE if path.is_dir() else path
    if not path.exists():
        raise UserError(f"there is no table of images '{path}'; give it, or its folder, as root")
    rows = _rows(path)
    columns = [
        _column(path, rows[0], given)
        for given in (config.image_column or "1", config.label_column or "2")
    ]
    if Path(rows[0][columns[0]]).suffix.lower() not in IMAGE_SUFFIXES:
        rows = rows[1:]
    short = next((number for number, row in enumerate(rows) if len(row) <= max(columns)), None)
    if short is not None:
        raise UserError(f"'{path}' has a row of too few columns: {' '.join(rows[short])!r}")
    images, labels = ([row[column].strip() for row in rows] for column in columns)
    _check_paths(path, images, config.allow_outside)
    if again := [image for image, times in Counter(images).items() if times > 1]:
        raise UserError(f"'{path}' names {some(again)} more than once")
    if not images or not (path.parent / images[0]).exists():
        named = f"names '{images[0]}', which is not" if images else "names no image"
        raise UserError(f"'{path}' {named} in '{path.parent}'")
    classes = _sort_labels(set(labels))
    numbers = {label: number for number, label in enumerate(classes)}
    chosen = [numbers[label] for label in labels]
    return classes, FileSource(path.parent, images, chosen, config.decoding), None


def _check_paths(table: Path, images: list[str], allow_outside: bool) -> None:
    """The images of a table have to lie beside it or below, and to be files.

    Those that are missing are damaged images, and dealt with as such.

    Raises:
        UserError: naming those that do not.
    """
    if not allow_outside and (
        out := [name for name in images if not is_inside(table.parent, name)]
    ):
        raise UserError(
            f"'{table}' names {some(out)}, outside of '{table.parent}'; set data.allow_outside to "
            f"true if images there are to be read"
        )
    strange = in_threads(_is_special_file, (table.parent / name for name in images))
    if found := [name for name, is_none in zip(images, strange, strict=True) if is_none]:
        raise UserError(f"'{table}' names {some(found)}, no file but a folder, device or pipe")


def _is_special_file(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _rows(path: Path) -> list[list[str]]:
    # Names may hold line breaks, within quotation marks.
    lines = io.StringIO(read_text(path, _MAX_TABLE_BYTES), newline="")
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise UserError(f"'{path}' has no rows")
    lines.seek(0)
    mark = next((mark for mark in ",;\t" if mark in first), None)
    if mark is None:
        return [line.split() for line in lines if line.strip()]
    with wrap_errors(f"{path} is not CSV", csv.Error):
        rows = csv.reader(lines, delimiter=mark)
        return [row for row in rows if any(cell.strip() for cell in row)]


def _column(path: Path, first: list[str], given: str) -> int:
    """The number, from 0, of a column given by its number from 1 or its name."""
    numbers = [str(number + 1) for number in range(len(first))]
    for known in (numbers, first):
        if given in known:
            return known.index(given)
    raise unknown(f"column of '{path}'", given, [*first, *numbers])


def _sort_labels(labels: Iterable[str]) -> list[str]:
    """Numbers by their value, other labels by the alphabet."""
    try:
        return sorted(labels, key=float)
    except ValueError:
        return sorted(labels)
