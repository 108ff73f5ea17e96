"""Tables of images: a CSV file, or a folder of Parquet or Arrow files.

A row of a CSV file names an image file and its class:

    image,label,split
    photos/1.jpg,cat,train
    photos/2.jpg,dog,val

`split` is optional; other columns are ignored. The text is UTF-8; commas, semicolons, tabs or
spaces separate the columns. Nothing is guessed: a table in another form is refused.

Parquet and Arrow give random access to millions of images in a few files. Hugging Face's `datasets`
finds the splits, converts Parquet to Arrow once, into its cache (see HF_HOME; this takes as much
disk space again), and maps the files into memory.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from locality.checks import shaped
from locality.data.config import DataConfig, Decoding
from locality.data.decoding import BadImage, read_bytes
from locality.data.folder import (
    check_one_class,
    class_name,
    is_inside,
    list_entries,
    log_once,
    outside_error,
    part_of,
    require_folder,
    train_and_val,
)
from locality.data.sources import FileSource, ImageSource, class_difference
from locality.errors import UserError, one_line, require, some, wrap_errors
from locality.files import open_file, parse_json, without_mark

if TYPE_CHECKING:
    import datasets

TABLE = "labels.csv"
_METADATA = ("metadata.csv", "metadata.jsonl")  # of Hugging Face's ImageFolder

_MAX_TABLE_BYTES = 1 << 28
# The first that the first line has separates the columns.
_SEPARATORS = "\t;, "
_EXAMPLE = "expected a first line such as image,label and rows such as photos/1.jpg,cat"


def open_table(config: DataConfig) -> tuple[list[str], FileSource, FileSource | None]:
    """Classes, sorted, training and validation images of a table; None without splits.

    Args:
        config: its root is the file, or a folder with a `labels.csv`, or with Hugging Face's
            `metadata.csv` or `metadata.jsonl` in it or in its splits; image paths are relative to
            the file's folder. `image_column` and `label_column` name other columns than "image"
            (or "file_name") and "label", or, without a heading, number them from 1.
    """
    path = Path(config.root or "").expanduser()
    root = path if path.is_dir() else path.parent
    tables = [path] if path != root else _tables(root)
    if not tables:
        raise UserError(f"no table of images '{root / TABLE}'; give it or its folder as root")
    rows = [row for table in tables for row in _entries(root, table, config)]
    images, labels, groups, parts = zip(*rows, strict=True)
    classes = sorted(set(labels))
    check_one_class(classes, f"'{path}'")
    numbers = {label: number for number, label in enumerate(classes)}

    def source(part: str | None) -> FileSource:
        chosen = [index for index, own in enumerate(parts) if own == part]
        files, own = [images[n] for n in chosen], [numbers[labels[n]] for n in chosen]
        found = FileSource(root, files, np.array(own, np.int64), config.decoding)
        found.group_names = [groups[n] for n in chosen] if config.group_column else None
        return found

    counts = Counter(parts)
    if [*counts] == [None]:
        return classes, source(None), None
    if None in counts:
        raise UserError(
            f"{counts[None]:,} images of '{path}' are in no split, others in "
            f"{some(filter(None, counts))}; give all a split, in a column of that name"
        )
    picked = train_and_val(filter(None, counts))
    if len(picked) < 2:
        raise UserError(f"the column split of '{path}' needs train and val; it has {[*counts]}")
    if unused := [f"{counts[part]:,} of {part}" for part in counts if part not in picked.values()]:
        log_once(f"'{path}': images that are not used: {', '.join(unused)}")
    return classes, source("train"), source(picked["val"])


def _tables(folder: Path) -> list[Path]:
    """The tables in a folder, or in its splits."""
    for place in ([folder], [folder / name for name in list_entries(folder)[0] if part_of(name)]):
        for name in (TABLE, *_METADATA):
            if found := [inside / name for inside in place if (inside / name).is_file()]:
                return found
    return []


def _entries(
    root: Path, path: Path, config: DataConfig
) -> Iterator[tuple[str, str, str, str | None]]:
    """The image, relative to `root`, class, group and split of each row of a table.

    The split is that of a column, else that of the folder of Hugging Face's table, or in it.
    """
    rows = list(_rows(path))
    if not rows:
        raise UserError(f"'{path}' is empty; {_EXAMPLE}")
    columns, heading = _columns(path, config, rows[0][1])
    if not rows[heading:]:
        raise UserError(f"'{path}' has no rows after its first line; {_EXAMPLE}")
    lines: dict[str, int] = {}
    for line, row in rows[heading:]:
        where = f"line {line} of '{path}'"
        if len(row) != len(rows[0][1]):
            raise UserError(
                f"{where} has {len(row)} columns, the first row {len(rows[0][1])}: "
                f"{' '.join(row)!r}"
            )
        image, label, part, group = (None if n is None else row[n] for n in columns)
        assert image is not None and label is not None
        if not image:
            raise UserError(f"{where} names no image")
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
        image = os.path.relpath(path.parent / image, root) if path.parent != root else image
        if part is None and path.name in _METADATA:
            part = image.split(os.sep)[0]
        yield image, class_name(label, f"the class in {where}"), group or "", part and part_of(part)


def has_table(folder: Path) -> bool:
    """Whether a table, rather than class folders, lists a folder's images."""
    if not (tables := _tables(folder)):
        return False
    if all(len(_class_folders(table.parent)) < 2 for table in tables):
        return True
    log_once(f"'{tables[0]}' is not used beside folders; to use it, give it in place of '{folder}'")
    return False


def _class_folders(folder: Path) -> list[str]:
    names = list_entries(folder)[0]
    if (folder / TABLE).is_file():
        return names
    return [name for name in names if not part_of(name) or len(list_entries(folder / name)[0]) > 1]


def _columns(
    path: Path, config: DataConfig, first: list[str]
) -> tuple[tuple[int, int, int | None, int | None], bool]:
    """The columns of images, classes, splits and groups; whether `first` is a heading."""
    usual = "file_name" if path.name in _METADATA else "image"
    names = [config.image_column or usual, config.label_column or "label"]
    names += [config.group_column] if config.group_column else []
    heading = not names[0].isdecimal()
    numbers = [str(number) for number, _ in enumerate(first, 1)]
    named = [cell.casefold() for cell in first] if heading else numbers
    for name in names:
        if named.count(name.casefold()) != 1:
            raise UserError(
                f"line 1 of '{path}' names no column '{name}' ({', '.join(first)}); {_EXAMPLE}, or "
                f"name the columns by --data.image_column and --data.label_column (1 and 2 without "
                f"a heading)"
            )
    image, label, *groups = (named.index(name.casefold()) for name in names)
    split = named.index("split") if "split" in named else None
    return (image, label, split, groups[0] if groups else None), heading


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows with the numbers of the lines in which they begin, without empty ones."""
    sentence = f"'{path}' is not text in UTF-8; save the table as CSV, in UTF-8"
    with open_file(path, _MAX_TABLE_BYTES) as file, wrap_errors(sentence, UnicodeError):
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        if path.suffix == ".jsonl":
            yield from _json_rows(path, text)
            return
        start = text.readline()
        mark = next((mark for mark in _SEPARATORS if mark in start.strip()), ",")
        lines = chain([start], text)
        reader = csv.reader(lines, delimiter=mark, skipinitialspace=True, strict=True)
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


def _json_rows(path: Path, text: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The same of a file with an object a line; the first names the columns."""
    names: list[str] = []
    for line, content in enumerate(text, 1):
        if content.strip():
            where = f"line {line} of '{path}'"
            row = parse_json(content, where)
            shaped(where, row, dict)
            if not names:
                names = [*row]
                yield line, names
            yield line, [_cell(row.get(name, "")) for name in names]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ";".join(map(str, value))
    return "" if value is None else str(value)


# -- Parquet and Arrow -----------------------------------------------------------------------------

# ImageNet-22k has 21,841.
_MAX_CLASSES = 1_000_000


@dataclass(eq=False)
class ArrowSource(ImageSource):
    """A Hugging Face dataset with an image and a class per row.

    Images are undecoded, their "bytes" or "path", in its only column. A path must be in the folder
    `_inside` if that is given.
    """

    images: datasets.Dataset
    labels: npt.NDArray[np.int64]
    name: str
    _files: Sequence[tuple[str, str]]
    _inside: Path | None
    decoding: Decoding

    def read_bytes(self, index: int) -> bytes:
        cell = self._cell(index)
        if cell.get("bytes") is not None:
            return cell["bytes"]
        if (path := cell.get("path")) is None:
            raise BadImage("the row has no image")
        if self._inside is not None and not is_inside(self._inside, os.path.abspath(path)):
            raise BadImage(str(outside_error(f"the row names '{path}'", self._inside)))
        return read_bytes(path)

    def files(self, indices: npt.NDArray[np.int64]) -> Sequence[tuple[str, str]]:
        """All files of the dataset: which of them hold these rows is not known."""
        return self._files

    def _cell(self, index: int) -> dict[str, Any]:
        (cell,) = self.images[index].values()
        return cell or {}

    def describe(self, index: int) -> str:
        path = self._cell(index).get("path")
        return f"{self.name}[{index}]" + (f" ({path})" if path else "")


def open_arrow(config: DataConfig) -> tuple[list[str], ImageSource, ImageSource | None]:
    """Classes, training and validation images of a folder of Parquet or Arrow files.

    The third value is None if `datasets` finds no validation or test split.

    Args:
        config: its root is the folder; its columns are needed if several qualify.
    """
    folder = require_folder(config.root)
    require("a folder of Parquet or Arrow files", "locality[arrow]", "datasets")
    import datasets as hf

    parts, files = _load(folder)
    image = _column("image", config, parts["train"], hf.Image)
    label = _column("label", config, parts["train"], hf.ClassLabel)
    opened: list[ArrowSource] = []
    classes: list[str] = []
    for part, rows in parts.items():
        where = f"{part} in '{folder}'"
        if missing := [name for name in (image, label) if name not in rows.features]:
            raise UserError(f"{where} has no column {some(missing)}, which train has")
        declared, names = _classes(rows, label, where)
        if part == "train":
            numbers = not declared and "int" in rows.features[label].dtype
            classes = declared or sorted(set(names))
            check_one_class(classes, where)
            if numbers:
                classes = [str(n) for n in range(1 + max(map(int, names), default=-1))]
        elif difference := class_difference(
            {"train": classes, part: declared or {*classes, *names}}
        ):
            raise UserError(f"train and {part} in '{folder}' have different classes: {difference}")
        index = {name: number for number, name in enumerate(classes)}
        inside = None if config.allow_outside else folder
        labels = np.array([index[name] for name in names], np.int64)
        images = rows.select_columns([image]).cast_column(image, hf.Image(decode=False))
        source = ArrowSource(images, labels, f"{folder}/{part}", files, inside, config.decoding)
        source.numbered, files = numbers, []
        if (group := config.group_column) is not None:
            if group not in rows.features:
                raise UserError(f"{where} has no column {group}; it has {some(rows.features)}")
            values = rows.data.column(group).to_pylist()
            source.group_names = ["" if value is None else str(value) for value in values]
        opened.append(source)
    return classes, opened[0], opened[1] if len(opened) > 1 else None


def _load(folder: Path) -> tuple[dict[str, datasets.Dataset], list[tuple[str, str]]]:
    """The rows by split, "train" and "val", and the files: names below the folder, and paths."""
    import datasets as hf

    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".arrow", ".parquet"))
    if not paths:
        raise UserError(f"no .arrow or .parquet files in '{folder}'")
    try:
        if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
            loaded = hf.load_from_disk(str(folder))
        else:
            # Each split on its own: together, all would be read with the class numbers of one.
            kind = paths[0].suffix[1:]
            splits = hf.load_dataset_builder(kind, data_dir=str(folder)).config.data_files
            loaded = {
                str(name): hf.load_dataset(kind, data_files=[*files], split="train")
                for name, files in splits.items()
            }
    except (OSError, ValueError, RuntimeError, hf.exceptions.DatasetsError) as error:
        reason = one_line(error.__cause__ or error)
        raise UserError(f"'{folder}' cannot be read by `datasets`: {reason}") from error
    rows = loaded if isinstance(loaded, dict) else {"train": loaded}
    if not (picked := train_and_val(rows)):
        raise UserError(f"'{folder}' has the splits {some(rows)} but no train")
    files = [(str(path.relative_to(folder)), str(path)) for path in paths]
    return {part: rows[name] for part, name in picked.items()}, files


def _column(what: str, config: DataConfig, rows: datasets.Dataset, feature: type) -> str:
    """The given column, else the only one of that feature, else the one of that name."""
    chosen = getattr(config, f"{what}_column")
    matching = [name for name, has in rows.features.items() if isinstance(has, feature)]
    candidates = [chosen] if chosen is not None else matching or [what]
    if len(candidates) == 1 and candidates[0] in rows.features:
        return candidates[0]
    raise UserError(
        f"'{config.root}' has no column {some(candidates)}, or several, among "
        f"{some(rows.features)}; give data.{what}_column"
    )


def _classes(rows: datasets.Dataset, column: str, where: str) -> tuple[list[str], list[str]]:
    """The declared classes, if any, and the class of every row."""
    declared = list(getattr(rows.features[column], "names", None) or [])
    values = rows.data.column(column).to_pylist()
    if missing := values.count(None):
        raise UserError(f"{missing} rows of {where} have no {column}")
    if not all(isinstance(value, str | int) for value in values):
        raise UserError(f"the column {column} of {where} holds neither names nor integers")
    numbers, count = [n for n in values if isinstance(n, int)], len(declared) or _MAX_CLASSES
    if numbers and not 0 <= min(numbers) <= max(numbers) < count:
        raise UserError(
            f"{column} of {where} ranges from {min(numbers)} to {max(numbers)}; give 0 to "
            f"{count - 1:,}"
        )
    return declared, [declared[value] if declared else str(value) for value in values]
