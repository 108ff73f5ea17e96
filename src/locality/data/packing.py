"""Packing an image folder into a few large files: the engine of `data pack`.

The images' bytes are copied unchanged and in the folder's order, so that a packed dataset trains
as the folder did, bit for bit, where millions of small files would be slow to list and to read.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from locality.data.arrow import huggingface_datasets
from locality.data.config import AS_PUBLISHED
from locality.data.folder import FileSource, find_layout, open_one, open_train_val
from locality.data.sources import BadImage
from locality.errors import UserError

# Large enough to keep the number of files small, small enough to copy and to repeat.
SHARD_BYTES = 500_000_000
# Rows that are written, and therefore found, together.
_BATCH_ROWS = 100


def pack(
    folder: Path | str, out: Path | str, *, shard_bytes: int = SHARD_BYTES, progress: bool = True
) -> dict[str, int]:
    """Write an image folder as Arrow files that `open_arrow`, or `datasets` itself, can read.

    Images are copied as they are, not decoded; `check` tells beforehand which are damaged. `out`
    appears when everything has been written, or not at all.

    Args:
        folder: with train/ and val/, or class folders only.
        out: a folder that does not exist yet.
        shard_bytes: size at which a new file is begun.
        progress: show a progress bar.

    Returns:
        The number of images per part.

    Raises:
        UserError: `out` exists, or an image cannot be read.
    """
    huggingface_datasets()
    target = Path(out).expanduser()
    if target.exists():
        raise UserError(f"'{target}' exists already; give a new folder to pack into")
    classes, parts = _folder_parts(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.partial")
    scratch.mkdir()
    try:
        total = sum(len(source) for source in parts.values())
        with tqdm(total=total, unit="image", disable=not progress, desc="packing") as bar:
            for part, source in parts.items():
                (scratch / part).mkdir()
                _write(source, classes, scratch / part, shard_bytes, bar)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch)
        raise
    return {part: len(source) for part, source in parts.items()}


def _folder_parts(folder: Path | str) -> tuple[list[str], dict[str, FileSource]]:
    layout = find_layout(folder)
    if layout.val is None:
        classes, source = open_one(layout.train, AS_PUBLISHED)
        return classes, {"train": source}
    classes, train, val = open_train_val(layout.train, layout.val, AS_PUBLISHED)
    return classes, {"train": train, "val": val}


def _write(
    source: FileSource, classes: list[str], folder: Path, shard_bytes: int, bar: tqdm
) -> None:
    hf = huggingface_datasets()
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=classes)})
    shards = _shards(source, shard_bytes)
    for number, rows in enumerate(shards):
        with open(folder / f"data-{number:05d}-of-{len(shards):05d}.arrow", "wb") as file:
            _write_shard(source, rows, features.arrow_schema, file, bar)
            file.flush()
            os.fsync(file.fileno())


def _write_shard(source: FileSource, rows: range, schema: Any, file: BinaryIO, bar: tqdm) -> None:
    import pyarrow as pa

    with pa.ipc.new_stream(file, schema) as stream:
        for start in rows[::_BATCH_ROWS]:
            batch = range(start, min(start + _BATCH_ROWS, rows.stop))
            cells = [_row(source, index) for index in batch]
            stream.write_batch(pa.RecordBatch.from_pylist(cells, schema=schema))
            bar.update(len(batch))


def _row(source: FileSource, index: int) -> dict[str, Any]:
    try:
        content = source.read_bytes(index)
    except BadImage as error:
        raise UserError(f"{source.describe(index)}: {error}") from error
    image = {"bytes": content, "path": source.paths[index]}
    return {"image": image, "label": int(source.labels[index])}


def _shards(source: FileSource, shard_bytes: int) -> list[range]:
    """The images, divided so that a shard ends once it holds `shard_bytes`."""
    shards, start, size = [], 0, 0
    for index in range(len(source)):
        path = source.describe(index)
        # A file that is gone is an error when its turn comes to be read.
        size += os.path.getsize(path) if os.path.exists(path) else 0
        if size >= shard_bytes:
            shards.append(range(start, index + 1))
            start, size = index + 1, 0
    if start < len(source) or not shards:
        shards.append(range(start, len(source)))
    return shards
