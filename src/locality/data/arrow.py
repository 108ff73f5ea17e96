"""Folders of Parquet or Arrow files: random access to millions of images in a few files.

Hugging Face's `datasets` finds the splits, converts Parquet to Arrow once, into its cache (see
HF_HOME; this takes as much disk space again), and maps the files into memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from locality.data.classes import class_difference, sort_classes
from locality.data.config import DataConfig, Decoding
from locality.data.decoding import BadImage, decode, read_bytes
from locality.data.folder import is_inside, outside_error, require_folder, train_and_val
from locality.data.sources import ImageSource
from locality.errors import UserError, one_line, require, some

if TYPE_CHECKING:
    import datasets

# ImageNet-22k has 21,841.
_MAX_CLASSES = 1_000_000


class ArrowSource(ImageSource):
    """A Hugging Face dataset with an image and a class per row.

    Images are undecoded, their "bytes" or "path". A path must be in the folder `inside` if that is
    given.
    """

    def __init__(
        self,
        images: datasets.Dataset,
        labels: npt.ArrayLike,
        name: str,
        decoding: Decoding,
        files: Sequence[tuple[str, str]],
        inside: Path | None,
    ) -> None:
        self.images, (self._column,) = images, images.column_names
        self.labels = np.asarray(labels, dtype=np.int64)
        self.name = name
        self.decoding = decoding
        self._files = files
        self._inside = inside

    def read(self, index: int) -> Image.Image:
        return decode(self.read_bytes(index), self.decoding)

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
        return self.images[index][self._column] or {}

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
            classes = declared or sort_classes(names)
            if numbers:
                classes = [str(n) for n in range(1 + max(map(int, names), default=-1))]
        elif difference := class_difference(
            {"train": classes, part: declared or {*classes, *names}}
        ):
            raise UserError(f"train and {part} in '{folder}' have different classes: {difference}")
        index = {name: number for number, name in enumerate(classes)}
        inside = None if config.allow_outside else folder
        labels = [index[name] for name in names]
        images = rows.select_columns([image]).cast_column(image, hf.Image(decode=False))
        source = ArrowSource(images, labels, f"{folder}/{part}", config.decoding, files, inside)
        source.numbered, files = numbers, []
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
