"""Shards of images in a folder or in object storage, which litdata writes and reads.

Every epoch is a new random order of all images: a cache that drops old shards for new ones would
fetch nearly a whole shard per image. So the first shards, as many as `data.cache_gb` holds, are
fetched whole and stay on the disk. Of the others each image is fetched by its range of bytes and
nothing is kept, so there may be more images than a disk holds.

Labels are known without a look at the images, which lie class by class: `classes.json` beside the
shards says how many there are of each. Every image that is read is checked against it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from huggingface_hub.utils import WeakFileLock
from PIL import Image

from locality import checks
from locality.data.config import DEFAULT_DECODING, DataConfig, Decoding
from locality.data.decoding import decode
from locality.data.folder import require_folder
from locality.data.sources import ImageSource
from locality.errors import UserError, require, some, wrap_errors
from locality.files import parse_json, read_bytes, write_atomic

_CLASSES, _INDEX = "classes.json", "index.json"
# What is read of an index; it has more.
_SHARD = {"filename": str, "chunk_bytes": int, "chunk_size": int}
_FORMAT = {"data_format": [str], "data_spec": str, "compression?": str, "encryption?": dict}
_FIELDS = ["bytes", "int"]
_NAME = re.compile(r"[\w.-]+\.bin")
_BYTES_PER_IMAGE = 16  # at least: a place in the shard's table and the lengths of both fields


class StreamingSource(ImageSource):
    """Images in shards, in the order in which they were written.

    Args:
        place: the folder or address of the shards.
        folder: where their index is and where whole shards are kept; `place` itself if local.
        shards: their entries in the index.
        labels: (n,) whole numbers.
        kept: how many shards, from the first, are fetched whole; 0 where they are local.
        decoding: how to decode.
    """

    def __init__(
        self,
        place: str,
        folder: str,
        shards: list[dict[str, Any]],
        labels: npt.ArrayLike,
        kept: int = 0,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> None:
        self.labels = np.asarray(labels, dtype=np.int64)
        self.place, self.folder, self.decoding = place, folder, decoding
        self._names = [_INDEX] + [shard["filename"] for shard in shards if place == folder]
        self._ends = np.cumsum([shard["chunk_size"] for shard in shards])
        self._kept = [(shard["filename"], shard["chunk_bytes"]) for shard in shards[:kept]]
        if place != folder:
            self.remote_bytes = sum(shard["chunk_bytes"] for shard in shards)

    def read(self, index: int) -> Image.Image:
        return decode(self.read_bytes(index), self.decoding)

    def read_bytes(self, index: int) -> bytes:
        """The image file as it is in its shard.

        Raises:
            UserError: it cannot be had, which is not the image's fault, or is of another class.
        """
        from litdata.streaming.sampler import ChunkedIndex

        shard = int(np.searchsorted(self._ends, index, side="right"))
        with wrap_errors(f"{self.describe(index)} cannot be read", Exception):
            images, downloader = _open(self.place, self.folder, os.getpid(), threading.get_ident())
            if shard < len(self._kept):
                self._keep(shard, downloader)
            content, label = images[ChunkedIndex(index=index, chunk_index=shard)]
        if label != self.labels[index]:
            raise UserError(
                f"{self.describe(index)} is of class number {label}, and by {_CLASSES} of class "
                f"number {self.labels[index]}; write images class by class and in order "
                f"(keep_data_ordered=True)"
            )
        return bytes(content)

    def _keep(self, shard: int, downloader: Any) -> None:
        """Fetch a whole shard, unless it is there; other processes wait for it."""
        name, size = self._kept[shard]
        path = Path(self.folder, name)
        if path.exists():
            return
        with WeakFileLock(f"{path}.lock"):
            if not path.exists():
                # As one range: litdata fetches whole files by a runtime that forks do not survive.
                write_atomic(path, downloader.download_chunk_bytes_from_index(shard, 0, size))

    def files(self, indices: npt.NDArray[np.int64]) -> Iterator[tuple[str, str]]:
        """All local files: in object storage the index stands for the shards it lists."""
        return ((name, os.path.join(self.folder, name)) for name in self._names)

    def describe(self, index: int) -> str:
        return f"{self.place}[{index}]"


@functools.lru_cache(maxsize=64)
def _open(place: str, folder: str, process: int, thread: int) -> tuple[Any, Any]:
    """litdata's dataset and downloader, of this thread alone.

    Reading moves them, and connections do not outlive a fork.
    """
    from litdata import StreamingDataset
    from litdata.streaming.downloader import get_downloader
    from litdata.streaming.resolver import Dir

    url = None if place == folder else place
    # Otherwise an image's neighbours are read with it.
    images = StreamingDataset(Dir(path=folder, url=url), batch_decode=0)
    shards = parse_json(read_bytes(os.path.join(folder, _INDEX)).decode(), folder)["chunks"]
    return images, get_downloader(place, folder, shards)


def open_streaming(config: DataConfig) -> tuple[list[str], ImageSource, ImageSource | None]:
    """Classes, training and validation images of shards; None where a part is to be set aside.

    Args:
        config: its root is a folder or an address such as s3://bucket/photos, with `classes.json`
            and the shards of each part in train/ and, if there is one, val/.

    Raises:
        UserError: something is missing, is not what it should be or has another size, or the disk
            is too small for `cache_gb`; and with the command to install it, when `litdata` is
            missing.
    """
    require("a dataset of shards", "locality[streaming]", "litdata")
    root = str(config.root).rstrip("/")
    remote = "://" in root
    root = root if remote else str(require_folder(root))
    counts = _read_json(root, _CLASSES)[0]
    where = f"'{root}/{_CLASSES}'"
    checks.shaped(where, counts, {"train": {}, "val?": {}})
    parts = [part for part in ("train", "val") if counts.get(part) is not None]
    classes = list(counts["train"])
    if list(counts[parts[-1]]) != classes:
        raise UserError(f"{where} has different classes for train and val, or in another order")
    sources: dict[str, StreamingSource] = {}
    budget = config.cache_gb * 1e9 if remote else 0.0
    for part in reversed(parts):  # validation images are read most often
        for name, count in counts[part].items():
            checks.integer(f"{where}: {part}: {name}", count, 0)
        place = f"{root}/{part}"
        shards, content = _read_index(place, sum(counts[part].values()))
        folder = _cache_folder(place, content) if remote else place
        sizes = [shard["chunk_bytes"] for shard in shards]
        kept = int(np.searchsorted(np.cumsum(sizes), budget, side="right"))
        budget -= sum(sizes[:kept])
        labels = np.repeat(np.arange(len(classes)), list(counts[part].values()))
        sources[part] = StreamingSource(place, folder, shards, labels, kept, config.decoding)
        if remote:
            _check_disk(Path(folder), shards[:kept], config.cache_gb)
        else:
            _check_sizes(place, shards)
    return classes, sources["train"], sources.get("val")


def _read_json(place: str, name: str) -> tuple[Any, bytes]:
    """What a small file in a folder or in object storage holds, and its bytes."""
    with wrap_errors(f"{name} in '{place}' cannot be read", Exception):
        if "://" not in place:
            content = read_bytes(Path(place, name))
        else:
            from litdata.streaming.downloader import get_downloader

            file = io.BytesIO()
            get_downloader(place, "", []).download_fileobj(f"{place}/{name}", file)
            content = file.getvalue()
        return parse_json(content.decode(), f"{name} in '{place}'"), content


def _read_index(place: str, images: int) -> tuple[list[dict[str, Any]], bytes]:
    """The entries of shards in their index, checked, and the index itself.

    Only two plain fields are accepted: others are made by code that a file chooses, pickle's too.
    """
    index, content = _read_json(place, _INDEX)
    where = f"'{place}/{_INDEX}'"
    checks.shaped(where, index, {"chunks": [_SHARD], "config": _FORMAT})
    fields, shards = index["config"], index["chunks"]
    if fields["data_format"] != _FIELDS or "builtins.tuple" not in fields["data_spec"]:
        raise UserError(
            f"{where} has the fields {some(fields['data_format'])}; write each image as a tuple of "
            f"an image file's bytes and its class number"
        )
    if fields.get("compression") or fields.get("encryption"):
        raise UserError(
            f"the shards in '{place}' are compressed or encrypted; image files hardly get "
            f"smaller, so write them as they are"
        )
    if strange := [
        shard["filename"]
        for shard in shards
        if not _NAME.fullmatch(shard["filename"])
        or not 0 < shard["chunk_size"] * _BYTES_PER_IMAGE <= shard["chunk_bytes"] < 1 << 32
    ]:
        raise UserError(f"{where} has impossible names, numbers or sizes, of {some(strange)}")
    if (found := sum(shard["chunk_size"] for shard in shards)) != images or not images:
        raise UserError(f"{where} has {found:,} images, and {_CLASSES} {images:,}")
    return shards, content


def _check_sizes(folder: str, shards: list[dict[str, Any]]) -> None:
    """Local shards have to be there, and whole."""
    sizes = {shard["filename"]: shard["chunk_bytes"] for shard in shards}
    found = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    if wrong := [name for name in sizes if found.get(name) != sizes[name]]:
        raise UserError(f"{some(wrong)} in '{folder}': missing, or of another size than its index")


def _cache_folder(place: str, index: bytes) -> str:
    """A folder for an index and its shards; rewritten shards get another one."""
    from litdata.utilities.dataset_utilities import get_default_cache_dir

    key = hashlib.sha256(place.encode() + index).hexdigest()[:16]
    folder = Path(get_default_cache_dir(), "locality", key)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / _INDEX, index)
    return str(folder)


def _check_disk(folder: Path, shards: list[dict[str, Any]], cache_gb: float) -> None:
    sizes = (s["chunk_bytes"] for s in shards if not (folder / s["filename"]).exists())
    if (wanted := sum(sizes)) > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"data.cache_gb is {cache_gb:g} and shards of {wanted / 1e9:.1f} GB are still to be "
            f"fetched, but '{folder}' has {free / 1e9:.1f} GB left; give less, or a larger disk as "
            f"LITDATA_CACHE_DIR"
        )
