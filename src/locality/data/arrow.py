"""Folders of Parquet or Arrow files: random access to millions of images in a few files.

Read through Hugging Face's `datasets`, memory-mapped: the index takes no memory, and position-keyed
loading can read any image directly.

Arrow files are read in place. Parquet files are converted to Arrow once, into a cache (`locality`
in the cache of `datasets`, see HF_HOME); this takes as much disk space again and is logged. A small
Parquet file can expand to terabytes, so the copy's size is limited relative to the file's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from locality.data.classes import class_difference, sort_classes
from locality.data.config import DEFAULT_DECODING, DataConfig, Decoding
from locality.data.decoding import BadImage, decode, read_bytes
from locality.data.folder import is_inside, outside_error, part_of, require_folder, train_and_val
from locality.data.sources import ImageSource
from locality.errors import UserError, require, some, wrap_errors
from locality.files import atomic_file, read_shaped

if TYPE_CHECKING:
    import datasets

_log = logging.getLogger("locality")

# Limits of a Parquet file's uncompressed size, in bytes and as a multiple of the file's: images
# hardly compress, and labels are small.
_MIN_UNCOMPRESSED_LIMIT, _MAX_COMPRESSION = 1 << 24, 100
_BATCH_ROWS = 100
# ImageNet-22k has 21,841.
_MAX_CLASSES = 1_000_000


class ArrowSource(ImageSource):
    """A Hugging Face dataset with an image and a class per row.

    A row may name a file instead, which must be in the folder `inside` if that is given.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        image_column: str,
        labels: npt.ArrayLike,
        name: str,
        decoding: Decoding = DEFAULT_DECODING,
        files: Sequence[tuple[str, str]] = (),
        inside: Path | None = None,
    ) -> None:
        # Arrow cells leave images undecoded and are the fastest access to single rows.
        self.rows = rows.select_columns([image_column]).with_format("arrow")
        self.labels = np.asarray(labels, dtype=np.int64)
        self.name = name
        self.decoding = decoding
        self._files = files
        self._inside = inside

    def read(self, index: int) -> Image.Image:
        return decode(self.read_bytes(index), self.decoding)

    def read_bytes(self, index: int) -> bytes:
        """The encoded image of a row."""
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
        """The "bytes" or "path" of a row's image."""
        cell = self.rows[index].column(0)[0].as_py()
        if isinstance(cell, (bytes, str)):
            return {"bytes" if isinstance(cell, bytes) else "path": cell}
        return cell or {}

    def describe(self, index: int) -> str:
        path = self._cell(index).get("path")
        return f"{self.name}[{index}]" + (f" ({path})" if path else "")


def open_arrow(config: DataConfig) -> tuple[list[str], ImageSource, ImageSource | None]:
    """Classes, training and validation images of a folder of Parquet or Arrow files.

    Files belong to the split that their folder or file name begins with: train, and val,
    validation, valid, dev or test. Without these names all images are training images and the
    third value is None.

    Args:
        config: its root is the folder; its columns are needed if several qualify.
    """
    folder = require_folder(config.root)
    parts = _parts(folder)
    opened = {part: _read(files, part, folder) for part, files in parts.items()}
    hf, train = huggingface_datasets(), opened["train"]
    image = _column("image", config, train, hf.Image, ("image", "img"))
    label = _column("label", config, train, hf.ClassLabel, ("label", "labels", "cls"))
    classes: list[str] = []
    sources: dict[str, ImageSource] = {}
    for part, rows in opened.items():
        if missing := [name for name in (image, label) if name not in rows.features]:
            raise UserError(f"{part} in '{folder}' has no column {some(missing)}, which train has")
        names, labels = _labels(rows, label, classes, f"{part} in '{folder}'")
        if part == "train":
            numbered = not names and "int" in rows.features[label].dtype
            classes = names or [str(number) for number in range(labels.max(initial=-1) + 1)]
        elif difference := class_difference({"train": classes, part: names}):
            raise UserError(f"train and {part} in '{folder}' have different classes: {difference}")
        numbers = {name: number for number, name in enumerate(classes)}
        labels = np.array([numbers[name] for name in names or classes], np.int64)[labels]
        files = [(str(path.relative_to(folder)), str(path)) for path in parts[part]]
        name = f"{folder}/{part}"
        inside = None if config.allow_outside else folder
        source = ArrowSource(rows, image, labels, name, config.decoding, files, inside)
        source.numbered = numbered
        sources[part] = source
    return classes, sources["train"], sources.get("val")


def huggingface_datasets() -> Any:
    """The optional package `datasets`; the error says how to install it."""
    require("a folder of Parquet or Arrow files", "locality[arrow]", "datasets")
    import datasets

    return datasets


def _parts(folder: Path) -> dict[str, list[Path]]:
    """Files by split; all are training data unless their names say otherwise."""
    files = sorted(
        path
        for suffix in ("arrow", "parquet")
        for path in folder.rglob(f"*.{suffix}")
        if not path.name.startswith("cache-")
        and _is_listed(path)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise UserError(f"no .arrow or .parquet files in '{folder}'")
    named: dict[str, list[Path]] = {}
    for path in files:
        words = (re.split("[-_.]", name)[0] for name in path.relative_to(folder).parts)
        if part := next(filter(None, map(part_of, words)), None):
            named.setdefault(part, []).append(path)
    if not named:
        return {"train": files}
    if "train" not in named:
        raise UserError(f"'{folder}' has no files whose name or folder begins with 'train'")
    return {part: named[name] for part, name in train_and_val(named).items()}


def _is_listed(path: Path) -> bool:
    """Whether the state beside a file lists it; a folder saved again keeps files of before."""
    if path.suffix != ".arrow":
        return True
    shape = {"_data_files?": [{"filename": str}]}
    files = read_shaped(path.with_name("state.json"), shape, {}).get("_data_files")
    return files is None or any(file["filename"] == path.name for file in files)


def _read(files: list[Path], part: str, folder: Path) -> datasets.Dataset:
    hf = huggingface_datasets()
    arrow = [path for path in files if path.suffix == ".arrow"]
    parquet = [path for path in files if path.suffix == ".parquet"]
    if arrow and parquet:
        raise UserError(f"'{folder}' has .arrow and .parquet files for {part}; keep one of the two")
    names = some(str(path.relative_to(folder)) for path in files)
    sentence = f"'{folder}': {names} cannot be read"
    files = arrow or [_convert_parquet(path, sentence) for path in parquet]
    with wrap_errors(sentence, OSError, ValueError):
        return hf.concatenate_datasets([hf.Dataset.from_file(str(path)) for path in files])


def _convert_parquet(path: Path, unreadable: str) -> Path:
    """Convert a Parquet file to a cached Arrow file, once; `unreadable` begins reading's errors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    status = path.stat()
    key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    cache = Path(huggingface_datasets().config.HF_DATASETS_CACHE) / "locality"
    target = cache / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()}.arrow"
    if target.exists():
        return target
    most = max(_MIN_UNCOMPRESSED_LIMIT, _MAX_COMPRESSION * status.st_size)
    # Errors of writing the copy are not the Parquet file's.
    reading = partial(wrap_errors, unreadable, OSError, ValueError)
    with reading():
        file = pq.ParquetFile(path)
        about, schema = file.metadata, file.schema_arrow

    def read_batches(rows: int) -> Iterator[pa.RecordBatch]:
        with reading():
            yield from file.iter_batches(rows)

    with file:
        groups = [about.row_group(n).total_byte_size for n in range(about.num_row_groups)]
        _check_uncompressed(path, sum(groups), most)
        _log.warning("converting '%s' to Arrow, once; the copy is '%s'", path, target)
        cache.mkdir(parents=True, exist_ok=True)
        # A value stored once may be used by many rows, each of which is written in full.
        rows = min(_BATCH_ROWS, max(1, _MIN_UNCOMPRESSED_LIMIT // max([1, *groups])))
        with atomic_file(target) as out, pa.ipc.new_stream(out, schema) as stream:
            for batch in read_batches(rows):
                _check_uncompressed(path, out.tell() + batch.nbytes, most)
                stream.write_batch(batch)
    return target


def _check_uncompressed(path: Path, size: int, most: int) -> None:
    if size > most:
        raise UserError(
            f"'{path}' expands to more than {most:,} bytes; image files do not compress that much"
        )


def _column(
    what: str, config: DataConfig, rows: datasets.Dataset, feature: type, usual: tuple[str, ...]
) -> str:
    """The given column, else the only one of that feature, else the one with a usual name."""
    given = getattr(config, f"{what}_column")
    found = [name for name, has in rows.features.items() if isinstance(has, feature)]
    candidates = [given] if given is not None else found or usual
    candidates = [name for name in candidates if name in rows.features]
    if len(candidates) == 1:
        return candidates[0]
    several = f"several candidates ({some(candidates)})" if candidates else "no candidate"
    raise UserError(
        f"'{config.root}' has {several} for the {what} column among {some(rows.features)}; give "
        f"{what}_column"
    )


def _labels(
    rows: datasets.Dataset, column: str, classes: list[str], where: str
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Class names and each row's index into them; numbers without names are of `classes`."""
    cells = rows.data.column(column)
    if cells.null_count:
        raise UserError(f"{cells.null_count} rows of {where} have no {column}")
    names = list(getattr(rows.features[column], "names", None) or [])
    values = cells.to_numpy()
    if not names and values.dtype == object and all(isinstance(value, str) for value in values):
        names = sort_classes([*classes, *values])
        numbers = {name: number for number, name in enumerate(names)}
        return names, np.array([numbers[value] for value in values], np.int64)
    if values.dtype.kind not in "biu":
        raise UserError(f"the column {column} of {where} holds neither names nor integers")
    names, count = names or classes, len(names or classes) or _MAX_CLASSES
    if len(values) and not 0 <= values.min() <= values.max() < count:
        raise UserError(
            f"{column} of {where} ranges from {values.min()} to {values.max()}; give 0 to "
            f"{count - 1:,}"
        )
    return names, values.astype(np.int64)
