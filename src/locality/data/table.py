"""A table of images: a text file whose rows name an image file and its class."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from locality.data.config import Decoding
from locality.data.folder import IMAGE_SUFFIXES, FileSource, some
from locality.errors import UserError, unknown
from locality.files import read_text

TABLE = "labels.csv"
_LARGEST = 1 << 30


def open_table(
    root: Path | str | None, decoding: Decoding, image_column: str | None, label_column: str | None
) -> tuple[list[str], FileSource]:
    """Classes, sorted, and images of a table.

    Columns are divided by commas, semicolons, tabs or spaces. They are chosen by number, from 1,
    or by their names in the first row, which is a heading if its image is none by name.

    Args:
        root: the file, or a folder with a `labels.csv`; images lie relative to it.
        decoding: how to decode.
        image_column, label_column: unless given, the first and the second.

    Raises:
        UserError: there is no such table, column or image, or a row names none or one again.
    """
    if root is None:
        raise UserError("a table of images needs a file or its folder; give it as data.root")
    path = Path(root).expanduser()
    path = path / TABLE if path.is_dir() else path
    if not path.exists():
        raise UserError(f"there is no table of images '{path}'; give it, or its folder, as root")
    rows = _rows(path)
    columns = [
        _column(path, rows[0], given) for given in (image_column or "1", label_column or "2")
    ]
    if Path(rows[0][columns[0]]).suffix.lower() not in IMAGE_SUFFIXES:
        rows = rows[1:]
    short = next((number for number, row in enumerate(rows) if len(row) <= max(columns)), None)
    if short is not None:
        raise UserError(f"'{path}' has a row of too few columns: {' '.join(rows[short])!r}")
    images, labels = ([row[column].strip() for row in rows] for column in columns)
    if again := [image for image, times in Counter(images).items() if times > 1]:
        raise UserError(f"'{path}' names {some(again)} more than once")
    if not images or not (path.parent / images[0]).exists():
        named = f"names '{images[0]}', which is not" if images else "names no image"
        raise UserError(f"'{path}' {named} in '{path.parent}'")
    classes = _in_order(set(labels))
    numbers = {label: number for number, label in enumerate(classes)}
    return classes, FileSource(path.parent, images, [numbers[label] for label in labels], decoding)


def _rows(path: Path) -> list[list[str]]:
    lines = [line for line in read_text(path, _LARGEST).splitlines() if line.strip()]
    if not lines:
        raise UserError(f"'{path}' has no rows")
    mark = next((mark for mark in ",;\t" if mark in lines[0]), None)
    if mark is None:
        return [line.split() for line in lines]
    try:
        return list(csv.reader(lines, delimiter=mark))
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: {error}") from error


def _column(path: Path, first: list[str], given: str) -> int:
    """The number, from 0, of a column given by its number from 1 or its name."""
    numbers = [str(number + 1) for number in range(len(first))]
    for known in (numbers, first):
        if given in known:
            return known.index(given)
    raise unknown(f"column of '{path}'", given, [*first, *numbers])


def _in_order(labels: Iterable[str]) -> list[str]:
    """Numbers by their value, other labels by the alphabet."""
    try:
        return sorted(labels, key=float)
    except ValueError:
        return sorted(labels)
