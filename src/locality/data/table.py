"""Tables of images: text files whose rows name an image and its class.

Tables come from spreadsheets, pandas and scripts. The columns found are logged; ambiguous rows and
columns are errors, which name the line.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, islice
from pathlib import Path

from locality.data.classes import sort_classes
from locality.data.config import DataConfig
from locality.data.folder import (
    IMAGE_SUFFIXES,
    FileSource,
    class_name,
    find_splits,
    is_inside,
    list_entries,
    log_names,
    log_once,
    outside_error,
    part_of,
    train_and_val,
)
from locality.errors import UserError, some, unknown, wrap_errors
from locality.files import open_file, without_mark

TABLE = "labels.csv"

_MAX_TABLE_BYTES = 1 << 30
_MAX_LINE = 1 << 17
_MARKS = ",;\t| "
# Lines from which the format is inferred.
_SAMPLE = 100
_LABELS = ("label", "labels", "class", "classes", "target", "category", "cls")
_INDICES = ("", "index", "unnamed: 0")
_NO, _YES = ("0", "0.0"), ("1", "1.0")
_QUOTES = "a quotation mark may be missing, or one too many"


def open_table(config: DataConfig) -> tuple[list[str], FileSource, FileSource | None]:
    """Classes, sorted, training and validation images of a table; None without a split.

    Columns are separated by commas, semicolons, tabs, bars or spaces. The image column is the one
    whose cells are files; the class column is the one so named, or the only other one, or there is
    one column per class. Images are split by a column of "train" and "val", or by folders of these
    names.

    Args:
        config: its root is the file, or a folder with a `labels.csv`; image paths are relative to
            that folder. Columns, by name or by number from 1, are inferred unless given.
    """
    path = Path(config.root or "").expanduser()
    path = path / TABLE if path.is_dir() else path
    if not path.exists():
        raise UserError(f"no table of images '{path}'; give the table or its folder as root")
    table = _Table(path, config)
    found = table.read(config)
    images, rows = [*found], [row for _, row in found.values()]
    splits = table.split_column(rows)
    chosen = table.label_columns(config.label_column, rows, splits)
    labels = [table.label(line, row, chosen) for line, row in found.values()]
    said = some(map(table.called, chosen), quote="")
    parts = [None if splits is None else part_of(row[splits]) for row in rows]
    by = f"; they are split by {table.called(splits)}" if splits is not None else ""
    if splits is None and all(parts := [_folder_part(image) for image in images]):
        by = "; they are split by their folders"
    picked = train_and_val(filter(None, parts))
    if "val" not in picked:
        by, splits = "", None
    elif left := Counter(p for p in parts if p not in picked.values()):
        by += ", not used: " + ", ".join(f"{count:,} of {part}" for part, count in left.items())
    unused = [n for n in range(table.width) if n not in (table.images, splits, *chosen)]
    if others := some(map(table.called, unused), quote=""):
        by += f"; not used: {others}"
    log_once(f"'{path}': images are named by {table.called(table.images)}, classes by {said}{by}")
    classes = sort_classes(labels)
    log_names(classes)
    numbers = {label: number for number, label in enumerate(classes)}

    def source(part: str | None) -> FileSource:
        kept = [n for n, own in enumerate(parts) if part is None or own == part]
        named, own = [images[n] for n in kept], [numbers[labels[n]] for n in kept]
        return FileSource(path.parent, named, own, config.decoding)

    if "val" not in picked:
        return classes, source(None), None
    return classes, source("train"), source(picked["val"])


def has_table(folder: Path) -> bool:
    """Whether `labels.csv`, rather than class folders, lists a folder's images."""
    path = folder / TABLE
    if not path.is_file():
        return False
    if len(list_entries(folder).folders) < 2:
        return True
    if "val" in find_splits(folder):
        why = "there are training and validation folders"
    elif not _Table(path, DataConfig("table", str(path))).found:
        why = "none of its images exists, and there are class folders"
    else:
        return True
    log_once(f"'{path}' is not used: {why}; to use it, give it in place of '{folder}'")
    return False


class _Table:
    """The format of a table, inferred from its first rows.

    Attributes:
        path: the file.
        width: number of columns.
        heading: names of its columns; empty without a header.
        images: index of the image column.
        found: how many of the first rows name an existing file.
    """

    def __init__(self, path: Path, config: DataConfig) -> None:
        self.path, self.files = path, _Files(path.parent)
        self._rows: Iterator[tuple[int, list[str]]]
        lines = _lines(path)
        first = list(islice(lines, _SAMPLE))
        said = re.fullmatch(r'"?sep=(.)"?\s*', first[0], re.IGNORECASE) if first else None
        self._mark = said[1] if said else _separator(path, first)
        skipped = 1 if said else 0
        # Errors in the sample's rows rise only when the table is used, in `read`.
        sample = _readable_rows(path, first, self._mark)[skipped:]
        self._rows = islice(_rows(path, chain(first, lines), self._mark), skipped, None)
        if not sample:
            sample = [*islice(self._rows, 1)]
            self._rows = chain(sample, self._rows)
        if not sample:
            raise UserError(f"'{path}' has no rows")
        self.heading = sample[0][1]
        self.width = len(self.heading)
        if self.width == 1:
            raise UserError(
                f"'{path}' has a single column ({self.heading[0]!r}); expected an image and its "
                f"class"
            )
        given = [name for name in (config.image_column, config.label_column) if name is not None]
        named = [name for name in given if self.column(name) + 1 != _number(name)]
        cells = [row for _, row in sample if len(row) == self.width]
        self.images, find, self.found = self._image_column(config.image_column, cells)
        # Unless a column is given by name, the first row is data if its image exists or has an
        # image's suffix, or if a later row repeats one of its cells.
        columns = list(zip(*cells, strict=True))
        image, *others = columns[self.images]
        suffix = _suffix(image)
        repeated = {first for first, *later in columns if first and first in later}
        # Classes of a one-hot table may be called 0 and 1: another is 2, or only "file" lacks a
        # suffix.
        marks = {*_NO, *_YES}
        other = any(first not in marks and {*later} <= marks for first, *later in columns)
        if self.width > 2 and (other or (not suffix and all(map(_suffix, others)))):
            repeated -= marks
        if not named and (
            find(image) is not None
            or suffix in IMAGE_SUFFIXES
            or (suffix and all(suffix == _suffix(other) for other in others))
            or repeated
        ):
            self.heading = []

    def column(self, given: str) -> int:
        """The index of a column given by name or by number from 1."""
        names = [name.casefold() for name in self.heading]
        if names.count(given.strip().casefold()) == 1:
            return names.index(given.strip().casefold())
        if 1 <= _number(given) <= self.width:
            return _number(given) - 1
        numbers = map(str, range(1, self.width + 1))
        raise unknown(f"column of '{self.path}'", given, [*self.heading, *numbers])

    def called(self, number: int) -> str:
        """A column in words."""
        return f"column '{self.heading[number]}'" if self.heading else f"column {number + 1}"

    def read(self, config: DataConfig) -> dict[str, tuple[int, list[str]]]:
        """The line number and cells of every image, as its file is named.

        Raises:
            UserError: a row has the wrong width, its image is repeated, outside the folder or not
                a file, or too many images are missing.
        """
        missing: list[str] = []
        other: list[str] = []
        rows: dict[str, tuple[int, list[str]]] = {}
        places: dict[str, int] = {}
        for line, row in self._rows:
            if self.heading and not rows and row == self.heading:
                continue
            where = f"line {line} of '{self.path}'"
            if self._mark == " " and len(row) > 1:  # cells at the end of a line may be empty
                row += [""] * (self.width - len(row))
            if len(row) != self.width:
                raise UserError(
                    f"{where} has {len(row)} columns, the first row {self.width}: {' '.join(row)!r}"
                )
            if broken := [cell for n, cell in enumerate(row) if n != self.images and "\n" in cell]:
                raise UserError(f"{where}: {broken[0]!r} ends on another line; {_QUOTES}")
            name = row[self.images]
            found = self.files.find(name, config.allow_outside, where)
            if found is None:
                if "\udc80" <= max(name, default="") <= "\udcff":
                    raise UserError(f"{where} is not UTF-8; save the table as UTF-8")
                missing.append(f"'{name}', which is not in '{self.path.parent}' (line {line})")
                if len(missing) > config.max_bad_images:
                    break
            elif found != name:
                other.append(f"'{name}' is '{found}'")
            name = row[self.images] = name if found is None else found
            place = os.path.abspath(self.path.parent / name)  # "./1.png" is "1.png"
            if (first := places.setdefault(place, line)) != line:
                raise UserError(f"{where} names '{name}', and so does line {first}")
            rows[name] = line, [*map(sys.intern, row)]  # most cells repeat
        if not rows:
            raise UserError(f"'{self.path}' names no image")
        if len(missing) in (len(rows), config.max_bad_images + 1):
            more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            raise UserError(f"'{self.path}' names {missing[0]}{more}")
        if other:
            log_once(f"'{self.path}' spells file names differently: {some(other, 2, quote='')}")
        return rows

    def split_column(self, rows: list[list[str]]) -> int | None:
        """The column that assigns images to splits, or None."""
        for number in range(self.width):
            if number != self.images:
                parts = {part_of(cell) for cell in {row[number] for row in rows}}
                if None not in parts and (len(parts) > 1 or self._named(number) == "split"):
                    return number
        return None

    def label_columns(
        self, given: str | None, rows: list[list[str]], splits: int | None
    ) -> list[int]:
        """The class column, or one column per class."""
        if given is not None:
            return [self.column(given)]
        left = [
            n
            for n in range(self.width)
            if n not in (self.images, splits) and not (self.heading and self._named(n) in _INDICES)
        ]
        known = [n for n in left if self._named(n) in _LABELS]
        if len(known) == 1 or len(left) == 1:
            return known or left
        values = {row[n] for row in rows for n in left}
        one_hot = values <= {*_NO, *_YES} and bool(left)
        if one_hot and self.heading:
            return left
        if not one_hot and left and not self.heading:
            return left[:1]
        listed = some(map(self.called, left or [self.images]), quote="")
        if not left:
            raise UserError(f"'{self.path}' has no column of classes besides {listed}")
        raise UserError(
            f"{listed} of '{self.path}' could be the classes; give one, such as "
            f"--data.label_column {left[0] + 1}"
        )

    def label(self, line: int, row: list[str], columns: list[int]) -> str:
        """The class of a row."""
        where, label = f"line {line} of '{self.path}'", row[columns[0]]
        if len(columns) > 1:
            found = [self.heading[n] for n in columns if row[n] in _YES]
            if len(found) != 1:
                has = f"the classes {some(found)}" if found else "no class"
                raise UserError(f"{where} gives '{row[self.images]}' {has}; expected one class")
            label = found[0]
        if not label:
            raise UserError(f"{where} gives '{row[self.images]}' no class")
        if '"' in label:
            raise UserError(f"{where} has a quotation mark in its class {label!r}; remove it")
        return class_name(label, f"the class in {where}")

    def _named(self, number: int) -> str:
        return self.heading[number].casefold() if self.heading else ""

    def _image_column(
        self, given: str | None, rows: list[list[str]]
    ) -> tuple[int, Callable[[str], str | None], int]:
        """The image column, the function that finds its files, and how many cells are files."""
        searched = range(self.width) if given is None else [self.column(given)]
        for find in (self.files.exact, self.files.near):
            counts = {n: sum(find(row[n]) is not None for row in rows) for n in searched}
            most = max(counts.values())
            best = [n for n in searched if counts[n] == most]
            if most and len(best) > 1:
                several = some(map(self.called, best), quote="")
                column = f"--data.image_column {best[0] + 1}"
                raise UserError(
                    f"{several} of '{self.path}' name images; give one, such as {column}"
                )
            if most:
                return best[0], find, most
        like = [n for n in searched if _suffix(rows[-1][n]) in IMAGE_SUFFIXES]
        return (like or searched)[0], self.files.exact, 0


class _Files:
    """The files that a table in a folder can name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._by_key = cache(self._index)

    def find(self, name: str, allow_outside: bool, where: str) -> str | None:
        """The file that a name in a table refers to, or None."""
        for each in (name, name.replace("\\", "/")):
            if not allow_outside and not is_inside(self.root, each):
                raise outside_error(f"{where} names '{name}'", self.root)
            if (found := self.exact(each)) is not None:
                return found
            if name and os.path.exists(self.root / each):
                raise UserError(f"{where} names '{name}', a folder, device or pipe; give a file")
        return self.near(name)

    def exact(self, name: str) -> str | None:
        """The name itself, if it is a file."""
        return name if os.path.isfile(os.path.join(self.root, name)) else None

    def near(self, name: str) -> str | None:
        """The only file that differs just in case, accents' encoding or a missing suffix."""
        folder = ""
        *above, last = name.replace("\\", "/").removeprefix("./").split("/")
        for part in above:
            inside = self._by_key(folder, "folders").get(_key(part))
            if inside is None:
                return None
            folder = os.path.join(folder, inside)
        for kind in ("files", "stems"):
            if (found := self._by_key(folder, kind).get(_key(last))) is not None:
                return os.path.join(folder, found)
        return None

    def _index(self, folder: str, kind: str) -> dict[str, str | None]:
        """Names in a folder by their `_key`; None for ambiguous keys."""
        entries = list_entries(self.root / folder)
        keys: dict[str, str | None] = {}
        for name in entries.folders if kind == "folders" else entries.files:
            key = _key(os.path.splitext(name)[0] if kind == "stems" else name)
            keys[key] = None if key in keys else name
        return keys


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file, with line endings."""
    with open_file(path, _MAX_TABLE_BYTES) as file:
        utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        file.seek(0)
        encoding = "utf-16" if utf16 else "utf-8-sig"
        errors = "strict" if utf16 else "surrogateescape"
        text = io.TextIOWrapper(file, encoding, errors, newline="")
        with wrap_errors(f"'{path}' is not text", UnicodeError):
            while line := text.readline(_MAX_LINE):
                if "\0" in line or len(line) == _MAX_LINE:
                    raise UserError(f"'{path}' is not text; save the table as CSV, in UTF-8")
                # `csv` does not allow spaces after a closing quotation mark.
                yield re.sub(r" +([\r\n]*)$", r"\1", line)


def _rows(path: Path, lines: Iterable[str], mark: str) -> Iterator[tuple[int, list[str]]]:
    """Rows with the lines in which they begin."""
    reader = csv.reader(lines, delimiter=mark, skipinitialspace=True, strict=True)
    line = 1
    try:
        for row in reader:
            cells = [without_mark(cell.strip()) for cell in row]
            if any(cells):
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"line {line} of '{path}' is not CSV: {error}; {_QUOTES}") from error


def _readable_rows(path: Path, lines: list[str], mark: str) -> list[tuple[int, list[str]]]:
    """The rows before the first unreadable one; the last may be cut."""
    rows = list[tuple[int, list[str]]]()
    with contextlib.suppress(UserError):
        for row in _rows(path, lines, mark):
            rows.append(row)
    return rows


def _separator(path: Path, lines: list[str]) -> str:
    """The separator that isolates the most image names, and gives rows of equal width."""

    def merits(mark: str) -> tuple[int, bool, bool]:
        rows = [row for _, row in _readable_rows(path, lines, mark)]
        widths = Counter(map(len, rows))
        usual = widths.most_common(1)[0][0] if widths else 0
        named = [r for r in rows if len(r) == usual > 1 and {*map(_suffix, r)} & IMAGE_SUFFIXES]
        return len(named), len(widths) == 1 and usual > 1, any(mark in line for line in lines)

    return max(_MARKS, key=merits)


def _folder_part(image: str) -> str | None:
    return next(filter(None, map(part_of, os.path.dirname(image).split("/"))), None)


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
