"""Tables of images: a CSV file whose rows name an image file and its class.

    image,label,split
    photos/1.jpg,cat,train
    photos/2.jpg,dog,val

`split` is optional; other columns are ignored. The text is UTF-8; commas, semicolons, tabs or
spaces separate the columns. Nothing is guessed: a table in another form is refused.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from locality.data.classes import sort_classes
from locality.data.config import DataConfig
from locality.data.folder import (
    class_name,
    is_inside,
    list_entries,
    log_names,
    log_once,
    outside_error,
    part_of,
    train_and_val,
)
from locality.data.sources import FileSource
from locality.errors import UserError, wrap_errors
from locality.files import open_file, without_mark

TABLE = "labels.csv"

_MAX_TABLE_BYTES = 1 << 28
# The first that the first line has separates the columns.
_SEPARATORS = "\t;, "
_EXAMPLE = "expected a first line such as image,label and rows such as photos/1.jpg,cat"


def open_table(config: DataConfig) -> tuple[list[str], FileSource, FileSource | None]:
    """Classes, sorted, training and validation images of a table; None without a `split` column.

    Args:
        config: its root is the file, or a folder with a `labels.csv`; image paths are relative to
            that folder. `image_column` and `label_column` name other columns than "image" and
            "label", or number them from 1; if the image column is a number, there is no heading.
    """
    path = Path(config.root or "").expanduser()
    path = path / TABLE if path.is_dir() else path
    if not path.exists():
        raise UserError(f"no table of images '{path}'; give the table or its folder as root")
    rows = _rows(path)
    heading, first = _heading(path, config, rows)
    columns = _columns(path, config, heading)
    lines: dict[str, int] = {}
    images, labels, parts = list[str](), list[str](), list[str | None]()
    for line, row in chain(first, rows):
        where = f"line {line} of '{path}'"
        if len(row) != len(heading):
            raise UserError(
                f"{where} has {len(row)} columns, the first row {len(heading)}: {' '.join(row)!r}"
            )
        image, label, part = (None if column is None else row[column] for column in columns)
        assert image is not None and label is not None
        if not config.allow_outside and not is_inside(path.parent, image):
            raise outside_error(f"{where} names '{image}'", path.parent)
        if not os.path.isfile(path.parent / image):
            raise UserError(f"{where} names '{image}', which is not a file in '{path.parent}'")
        if not label or "\n" in label:
            raise UserError(f"{where} gives '{image}' the class {label!r}; expected a name")
        if (same := lines.setdefault(os.path.normpath(path.parent / image), line)) != line:
            raise UserError(f"{where} names '{image}', and so does line {same}")
        if part is not None and part_of(part) is None:
            raise UserError(f"{where} has the split {part!r}; expected train or val")
        images.append(image)
        labels.append(class_name(label, f"the class in {where}"))
        parts.append(part and part_of(part))
    if not images:
        raise UserError(f"'{path}' has no rows after its first line; {_EXAMPLE}")
    classes = sort_classes(labels)
    log_names(classes)
    numbers = {label: number for number, label in enumerate(classes)}

    def source(part: str | None) -> FileSource:
        chosen = [index for index, own in enumerate(parts) if own == part]
        files, own = [images[n] for n in chosen], [numbers[labels[n]] for n in chosen]
        return FileSource(path.parent, files, np.array(own, np.int64), config.decoding)

    counts = Counter(parts)
    if None in counts:
        return classes, source(None), None
    picked = train_and_val(filter(None, counts))
    if len(picked) < 2:
        raise UserError(f"the column split of '{path}' needs train and val; it has {[*counts]}")
    if unused := [f"{counts[part]:,} of {part}" for part in counts if part not in picked.values()]:
        log_once(f"'{path}': images that are not used: {', '.join(unused)}")
    return classes, source("train"), source(picked["val"])


def has_table(folder: Path) -> bool:
    """Whether `labels.csv`, rather than class folders, lists a folder's images."""
    path = folder / TABLE
    if not path.is_file():
        return False
    if len(list_entries(folder)[0]) < 2:
        return True
    log_once(f"'{path}' is not used beside folders; to use it, give it in place of '{folder}'")
    return False


def _heading(
    path: Path, config: DataConfig, rows: Iterator[tuple[int, list[str]]]
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of the columns, and the first row if it holds an image instead of them."""
    line, first = next(rows, (0, []))
    if not first:
        raise UserError(f"'{path}' is empty; {_EXAMPLE}")
    if (config.image_column or "").isdecimal():
        return ["" for _ in first], [(line, first)]
    return [name.casefold() for name in first], []


def _columns(path: Path, config: DataConfig, heading: list[str]) -> tuple[int, int, int | None]:
    """The indices of the columns of images, classes and splits."""
    indices = []
    for option, usual in (("image_column", "image"), ("label_column", "label")):
        name = getattr(config, option) or usual
        if heading.count(name.casefold()) == 1:
            indices.append(heading.index(name.casefold()))
        elif name.isdecimal() and 1 <= int(name) <= len(heading):
            indices.append(int(name) - 1)
        else:
            raise UserError(
                f"line 1 of '{path}' names no column '{name}' ({', '.join(heading)}); {_EXAMPLE}, "
                f"or name the columns by --data.image_column and --data.label_column (1 and 2 "
                f"without a heading)"
            )
    return indices[0], indices[1], heading.index("split") if "split" in heading else None


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows with the numbers of the lines in which they begin, without empty ones."""
    with (
        open_file(path, _MAX_TABLE_BYTES) as file,
        wrap_errors(
            f"'{path}' is not text in UTF-8; save the table as CSV, in UTF-8", UnicodeError
        ),
    ):
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        start = text.readline()
        mark = next((mark for mark in _SEPARATORS if mark in start.strip()), ",")
        reader = csv.reader(
            chain([start], text), delimiter=mark, skipinitialspace=True, strict=True
        )
        line = 1
        try:
            for row in reader:
                cells = [without_mark(cell.strip()) for cell in row]
                if any(cells):
                    yield line, cells
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(
                f"line {line} of '{path}' is not CSV ({error}); a quotation mark may be missing"
            ) from error
