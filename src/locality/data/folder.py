"""Image files: a folder per class, listed by our own rules, or a table; read in any order.

torchvision's `ImageFolder` numbers the classes of every folder for itself, so that train and val
can disagree without a word, and leaves no place for a class without images; timm's dataset
returns the next file, with the next file's label, when one is broken. Here the training folder's
sorted class names number the classes once, and a file is itself or an error.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from glob import glob
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from locality.data.classes import class_difference, sort_classes
from locality.data.config import DATASETS, DEFAULT_DECODING, DataConfig, Decoding
from locality.data.decoding import check_header, decode, read_bytes
from locality.data.sources import BadImage, ImageSource
from locality.errors import UserError, printable, some, wrap_errors

_log = logging.getLogger("locality")

_HEIF = ("heic", "heif")
IMAGE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "bmp", "gif", "webp"),
        *("tif", "tiff", "ppm", "pgm", "pbm", "jp2", "avif"),
        *(_HEIF if find_spec("pillow_heif") else ()),
    )
)
# What systems, network drives and programs leave beside files; so are names that start with a dot.
_JUNK = {
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"),
    *("@eadir", "#recycle", "$recycle.bin", "__macosx", "system volume information", "lost+found"),
}
# A name says one thing: "train", "Validation", "test_images", "images-train", "training set".
_PART = re.compile(
    r"(?:(?:images?|imgs?|data)[\W_]*)?"
    r"(train(?:ing)?|val(?:id(?:ation)?)?|dev(?:elopment)?|test(?:ing)?)"
    r"(?:[\W_]*(?:images?|imgs?|data|set|split))*[\W_\d]*"
)
_PARTS = {"tr": "train", "va": "val", "de": "dev", "te": "test"}
_STDIN = Path("/dev/stdin")
_EXAMPLES = 3  # of class folders that are looked into


class FileSource(ImageSource):
    """Image files below one folder.

    Args:
        root: the folder.
        paths: of the files, relative to it.
        labels: (n,) whole numbers.
        decoding: how to decode.
    """

    def __init__(
        self,
        root: Path | str,
        paths: Iterable[str],
        labels: npt.ArrayLike,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> None:
        self.root = str(root)
        # One array: millions of Python strings would cost 200 bytes each, and a copy in every
        # worker, since looking at a Python object writes to its memory.
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.decoding = decoding

    def read(self, index: int) -> Image.Image:
        return decode(self.read_bytes(index), self.decoding)

    def path(self, index: int) -> str:
        """Where image `index` lies below the folder."""
        return os.fsdecode(self._paths[index])

    def read_bytes(self, index: int) -> bytes:
        """The file as it is, not decoded."""
        return read_bytes(self.describe(index))

    def check_header(self, index: int) -> None:
        check_header(self.describe(index), self.decoding)

    def files(self, indices: npt.NDArray[np.int64]) -> Iterator[tuple[str, str]]:
        for index in indices.tolist():
            path = self.path(index)
            yield path, os.path.join(self.root, path)

    def describe(self, index: int) -> str:
        return os.path.join(self.root, self.path(index))


@dataclass
class Listing:
    """What lies below a folder of class folders.

    Attributes:
        root: the folder.
        classes: names of its class folders, sorted.
        files: per class, the image files' paths relative to `root`, sorted.
        ignored: files that are not images by their name, or that lie outside class folders.
        loops: links that lead to themselves or back to a folder above them; not followed.
    """

    root: Path
    classes: list[str]
    files: list[list[str]]
    ignored: list[str] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)

    def source(self, classes: Sequence[str], decoding: Decoding) -> FileSource:
        """The files of `classes`, which number them; one may have none."""
        by_name = dict(zip(self.classes, self.files, strict=True))
        paths = [by_name.get(name, []) for name in classes]
        labels = np.repeat(np.arange(len(classes)), [*map(len, paths)])
        return FileSource(self.root, chain.from_iterable(paths), labels, decoding)


def list_folder(root: Path | str) -> Listing:
    """List the class folders of `root` and the images anywhere below each.

    Names that start with a dot are passed over. Links are followed, unless they lead to themselves
    or back to a folder above. A link to nothing counts as a file, one that cannot be read.
    """
    root = Path(root)
    folders, files, others = list_entries(root)
    named: dict[str, str] = {}
    for folder in folders:
        name = class_name(folder, f"the name of the folder '{root / folder}'")
        if name in named:
            raise UserError(
                f"'{root}' has two folders '{name}' (accents in two encodings); keep one"
            )
        named[name] = folder
    listing = Listing(root, sort_classes(named), [], files)
    _note(listing, others)
    for name in listing.classes:
        listing.files.append(sorted(_images(root, named[name], {_inode(root)}, listing)))
    return listing


def class_name(text: str, where: str) -> str:
    """A name as that of a class: with accents in one form (NFC), whatever the system's own."""
    try:
        text.encode()
    except UnicodeError:
        raise UserError(f"{where} is not UTF-8; write it in UTF-8") from None
    return unicodedata.normalize("NFC", text)


def left_out(paths: Iterable[str]) -> str:
    """Files that are not read, counted by suffix, and what would read them."""
    found = Counter(os.path.splitext(path)[1].lower() for path in paths)
    counts = ", ".join(f"{count:,} {suffix or 'without'}" for suffix, count in found.most_common())
    if any(f".{suffix}" in found for suffix in _HEIF):
        counts += "; pip install 'locality[heif]' reads .heic and .heif"
    return counts


def log_names(classes: Iterable[str]) -> None:
    """Log classes whose names differ in nothing but case, as those of mistakes do."""
    groups: dict[str, list[str]] = {}
    for name in classes:
        groups.setdefault(name.casefold(), []).append(name)
    if twins := [name for group in groups.values() if len(group) > 1 for name in group]:
        log_once(f"classes that differ in case alone are different classes: {some(twins)}")


def part_of(name: str) -> str | None:
    """The part of a dataset that a name such as "Training" or "test_images" speaks of, if any."""
    found = _PART.fullmatch(name.casefold())
    return _PARTS[found[1][:2]] if found else None


def train_and_val(names: Iterable[str]) -> dict[str, str]:
    """Which of some names is that of images to train on, and which of those to evaluate on.

    Images of "test" are evaluated on where there are no others. Without training images neither
    is there.
    """
    found = {part_of(name): name for name in names}
    if "train" not in found:
        return {}
    val = [found[part] for part in ("val", "dev", "test") if part in found]
    return {"train": found["train"]} | ({"val": val[0]} if val else {})


def find_splits(root: Path | str | None) -> dict[str, Path]:
    """The folders of training and validation images by name; of "all" where they are to be divided.

    Tells a folder with train/ and val/, by these names or others, from one that holds the class
    folders itself.

    Raises:
        UserError: it does not exist, or has train/ but nothing to evaluate on.
    """
    root = require_folder(root)
    folders = list_entries(root)[0]
    if not folders:
        raise no_images_error(root)
    parts = [name for name in folders if part_of(name)]
    picked = train_and_val(parts)
    if not picked:
        if len(parts) == len(folders):
            raise UserError(f"'{root}' has {some(parts)} but no folder train")
        for name in folders[:_EXAMPLES]:
            if len(inside := train_and_val(list_entries(root / name)[0])) > 1:
                each = " and ".join(f"{root / part / name}" for part in inside.values())
                raise UserError(
                    f"'{root / name}' has {some(inside.values())}; expected parts above the "
                    f"classes: {each}"
                )
        return {"all": root}
    train = root / picked["train"]
    # A class may be called "train", too; it holds images, not folders.
    has_classes = bool(list_entries(train)[0])
    if "val" not in picked and not has_classes:
        return {"all": root}
    if "val" not in picked:
        raise UserError(
            f"'{root}' has {train.name} but no val; give '{train}' to have a part of it set aside"
        )
    if not has_classes:
        raise no_images_error(train)
    for part, name in picked.items():
        if len(same := [other for other in parts if part_of(other) == part_of(name)]) > 1:
            raise UserError(f"'{root}' has {some(same)}; keep one folder for {part}")
    if unused := [name for name in folders if name not in picked.values()]:
        log_once(f"'{root}': {some(picked.values())} are used, {some(unused)} not")
    return {part: root / name for part, name in picked.items()}


def open_splits(
    parts: Mapping[str, Path], decoding: Decoding
) -> tuple[list[str], list[FileSource]]:
    """Classes and images of folders, by name, that have the same class folders."""
    listings = {part: list_folder(root) for part, root in parts.items()}
    for listing in listings.values():
        if not any(listing.files):
            raise no_images_error(listing.root)
        if loops := [str(listing.root / path) for path in listing.loops]:
            log_once(f"links that lead in circles are not followed: {some(loops)}")
        if ignored := listing.ignored:
            outside = [p for p in ignored if _is_image(p) and os.sep not in p]
            beside = f"; images outside of the class folders: {some(outside)}" if outside else ""
            total = len(ignored) + sum(map(len, listing.files))
            left = f"{len(ignored):,} of {total:,} files are left out ({left_out(ignored)})"
            log_once(f"'{listing.root}': {left}{beside}")
    if difference := class_difference({part: each.classes for part, each in listings.items()}):
        raise UserError(f"train and val have different classes: {difference}")
    classes = next(iter(listings.values())).classes
    log_names(classes)
    return classes, [listing.source(classes, decoding) for listing in listings.values()]


def open_folder(config: DataConfig) -> tuple[list[str], FileSource, FileSource | None]:
    """Classes, training and validation images of an image folder; None where it has no parts."""
    classes, sources = open_splits(find_splits(config.root), config.decoding)
    return classes, sources[0], sources[1] if len(sources) > 1 else None


@cache
def log_once(sentence: str) -> None:
    """Log what was found in a dataset, which a command may open several times."""
    _log.warning("%s", printable(sentence))


def is_inside(folder: Path | str, path: str) -> bool:
    """Whether a path, relative to a folder, leads to a place below it; links are not looked at."""
    below = os.path.join(os.path.abspath(folder), "")
    return os.path.abspath(os.path.join(below, path)).startswith(below)


def outside_error(sentence: str, folder: Path) -> UserError:
    """The error for an image that a table names, and that lies outside of its folder."""
    return UserError(f"{sentence}, outside of '{folder}'; set data.allow_outside to read it")


def place_name(root: Path | str) -> str:
    """The name of the folder that custom images are in, or that a table of them is in."""
    path = Path(root).resolve()
    return path.parent.name if path.is_file() else path.name


def short_name(path: Path | str) -> str:
    """A file with the folder that it is in, as people call it: "coat/12.png"."""
    return "/".join(Path(path).parts[-2:])


def image_files(given: Iterable[str]) -> Iterator[Path]:
    """The image files that paths of files and folders name, those of a folder in sorted order.

    A folder without images of its own stands for those in the folders below it. A pattern that is
    no name itself stands for what fits it ("loose/*.jpg"), and - for standard input.
    """
    for name in given:
        path = _STDIN if name == "-" else Path(name)
        if "://" in name and not path.exists():
            raise UserError(f"{name} is an address; fetch the image, then give the file")
        if found := [] if os.path.lexists(path) else sorted(glob(name, recursive=True)):
            yield from image_files(found)
        elif path.is_dir():
            listing = Listing(path, [], [])
            inside = [name for name in list_entries(path)[1] if _is_image(name)]
            inside = inside or list(_images(path, "", set(), listing))
            if not inside:
                others = f" ({left_out(listing.ignored)})" if listing.ignored else ""
                raise UserError(f"there are no images in the folder {path}{others}")
            yield from sorted(path / name for name in inside)
        elif path.exists():
            yield path
        else:
            raise FileNotFoundError(f"there is no file or folder {path}")


def read_image(file: Path, decoding: Decoding = DEFAULT_DECODING) -> Image.Image:
    """The image in a file, as RGB; an error names the file."""
    with wrap_errors(str(file), BadImage):
        return decode(sys.stdin.buffer.read() if file == _STDIN else read_bytes(file), decoding)


def check_root(config: DataConfig) -> None:
    """Check, without torch, that a dataset is given the folder it needs, and no other."""
    name = config.dataset
    row, kind = DATASETS[name], "file or " if name == "table" else ""
    needs_root = row.get("needs_root", True)
    if config.root is None:
        if needs_root:
            called = row.get("title", f"the dataset '{name}'")
            raise UserError(f"{called} needs a {kind}folder; give it as data.root")
    elif not needs_root and "reader" not in row:
        raise UserError(
            f"{name} has no folder; to read '{config.root}' give data.dataset too, such as folder"
        )
    elif name in ("folder", "table") and Path(config.root).is_file():
        _check_file(Path(config.root), name == "table")
    elif name == "folder":
        find_splits(config.root)
    elif not kind:
        require_folder(config.root)


def _check_file(path: Path, table: bool) -> None:
    """Refuse an archive or an image in place of a folder of images or a table of them."""
    archives = [suffix for _, suffixes, _ in shutil.get_unpack_formats() for suffix in suffixes]
    if path.name.lower().endswith(tuple(archives)):
        raise UserError(f"'{path}' is an archive; unpack it, and give the folder")
    if _is_image(path.name):
        raise UserError(f"'{path}' is not a folder but an image; expected one folder per class")
    if not table:
        require_folder(path)


def require_folder(root: Path | str | None) -> Path:
    """`root`, which `check_root` has seen is given, as a path, if it is a folder."""
    if "://" in str(root):
        raise UserError(f"'{root}' is an address; fetch the images, then give their folder")
    path = Path(root or "").expanduser()
    if not path.exists():
        raise UserError(f"the folder '{path}' does not exist")
    if not path.is_dir():
        raise UserError(f"'{path}' is not a folder")
    return path


def no_images_error(root: Path) -> UserError:
    files = list_entries(root)[1]
    if any(map(_is_image, files)):
        return UserError(
            f"'{root}' holds images itself; expected one folder per class (if it is one, give the "
            f"folder above it)"
        )
    if any(name.endswith((".arrow", ".parquet")) for name in files):
        return UserError(f"'{root}' holds tables of images; read them with --data.dataset arrow")
    ignored = list_folder(root).ignored
    others = f" ({left_out(ignored)})" if ignored else ""
    return UserError(
        f"no images in '{root}'{others}; expected one folder per class, of .jpg, .png …"
    )


def _images(
    root: Path, relative: str, above: set[tuple[int, int]], listing: Listing
) -> Iterator[str]:
    """The images anywhere below a folder; what else there is goes to `listing`."""
    folder = root / relative
    identity = _inode(folder)
    if identity in above:
        listing.loops.append(relative)
        return
    folders, files, others = list_entries(folder)
    for name in files:
        path = os.path.join(relative, name)
        if _is_image(name):
            yield path
        else:
            listing.ignored.append(path)
    _note(listing, [os.path.join(relative, name) for name in others])
    for name in folders:
        yield from _images(root, os.path.join(relative, name), above | {identity}, listing)


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _note(listing: Listing, others: Iterable[str]) -> None:
    for path in others:
        exists = os.path.exists(listing.root / path)
        (listing.ignored if exists else listing.loops).append(path)


def list_entries(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Names of folders, of files, and of what is neither, without those of systems' own.

    Neither are pipes, sockets and links that lead to themselves.
    """
    folders, files, others = list[str](), list[str](), list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in _JUNK:
                continue
            try:
                mode = entry.stat().st_mode
            except FileNotFoundError:  # a link to nothing
                mode = stat.S_IFREG
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                mode = stat.S_IFLNK
            kind = folders if stat.S_ISDIR(mode) else files if stat.S_ISREG(mode) else others
            kind.append(entry.name)
    return sorted(folders), sorted(files), sorted(others)


def _inode(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
