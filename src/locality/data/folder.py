"""Image files with random access, and folders with a subfolder per class.

torchvision's `ImageFolder` numbers each folder's classes separately, so that train and val can
silently disagree, and has no place for a class without images; timm's dataset replaces a broken
file by the next one, with its label. Here the training folder's sorted class names number the
classes once, and a broken file is an error.
"""

import logging
import os
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from glob import escape, glob
from importlib.util import find_spec
from itertools import chain, compress
from pathlib import Path

import numpy as np
from PIL import Image

from locality.data.config import DATASETS, DEFAULT_DECODING, DataConfig, Decoding
from locality.data.decoding import BadImage, decode, read_bytes
from locality.data.sources import FileSource, class_difference
from locality.errors import UserError, not_utf8, printable, some, wrap_errors
from locality.files import missing

_log = logging.getLogger("locality")

_HEIF = ("heic", "heif")
_READ = "jpg jpeg jpe jfif png bmp gif webp tif tiff ppm pgm pbm jp2 avif"
_ALL_READ = (*_READ.split(), *(_HEIF if find_spec("pillow_heif") else ()))
IMAGE_SUFFIXES = frozenset(f".{suffix}" for suffix in _ALL_READ)
# Photographs of cameras and browsers that Pillow does not read.
_UNREAD = (".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf")
# Left by operating systems, network drives and programs, like names that start with a dot.
_JUNK = {
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"),
    *("@eadir", "#recycle", "$recycle.bin", "__macosx", "system volume information", "lost+found"),
}
_DEEPEST = 50
# Names of splits: "train", "Validation", "test_images", "images-train", "training set".
_PART = re.compile(
    r"((images?|imgs?|data)[\W_]*)?((?P<train>train(ing)?)|(?P<val>val(id(ation)?)?)"
    r"|(?P<dev>dev(elopment)?)|(?P<test>test(ing)?))([\W_]*(images?|imgs?|data|set|split))*[\W_\d]*"
)


@dataclass
class Listing:
    """The contents of a folder of class folders.

    Attributes:
        root: the folder.
        files: by class, in sorted order, the image files' paths relative to `root`, sorted.
        ignored: files without an image suffix or outside class folders, and links back to a
            folder above them.
    """

    root: Path
    files: dict[str, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def source(self, classes: Collection[str], decoding: Decoding) -> FileSource:
        """The files of `classes`, whose order numbers them; a class may have no files."""
        paths = [self.files.get(name, []) for name in classes]
        labels = np.repeat(np.arange(len(classes)), [*map(len, paths)])
        return FileSource(self.root, chain.from_iterable(paths), labels, decoding)

    def log_ignored(self, images: int) -> None:
        """Log what was ignored beside so many images, once."""
        if count := len(self.ignored):
            left = f"{count:,} of {count + images:,} files are left out{left_out(self.ignored)}"
            log_once(f"'{self.root}': {left}, such as {some(self.ignored, 3)}")


def list_folder(root: Path | str, label: str = "top") -> Listing:
    """List the class folders of `root` and the images anywhere below each.

    Names that start with a dot are skipped. Links are followed, unless they lead back to a folder
    above. A broken link counts as an unreadable file.

    Args:
        root: the folder.
        label: as in `DataConfig`.
    """
    root = Path(root)
    folders, files = list_entries(root)
    listing = Listing(root, ignored=files)
    found: dict[str, list[str]] = {folder: [] for folder in folders if label == "top"}
    for folder in folders:
        for path in _images(root, folder, {root.resolve()}, listing):
            place = os.path.dirname(path)
            own = {"top": folder, "parent": os.path.basename(place), "path": place}[label]
            found.setdefault(own, []).append(path)
    named: dict[str, str] = {}
    for own in sorted(found):
        name = class_name(own, f"the name of the folder '{own}' in '{root}'")
        if name in named:
            raise UserError(
                f"'{root}' has two folders '{name}', which look alike (accents in two encodings: "
                f"{named[name]!a} and {own!a}); keep one"
            )
        named[name] = own
    listing.files = {name: sorted(found[named[name]]) for name in sorted(named)}
    return listing


def check_levels(listing: Listing, label: str) -> None:
    """Refuse splits and classes a level too low, and log a level that is not the class.

    Raises:
        UserError: a class has folders such as train and val, or there is one class, with folders.
    """
    root = listing.root
    places = {Path(path).parent.parts for paths in listing.files.values() for path in paths}
    tops, below = {place[0] for place in places}, sorted(x for x in places if len(x) > 1)
    shown = some(map("/".join, below))
    parts = {(place[0], part) for place in below for part in map(part_of, place[1:]) if part}
    if parts and (len({part for _, part in parts}) > 1 or tops == {top for top, _ in parts}):
        top, *deeper = below[0]
        above = f"make them the folders above, such as train/{top}"
        above = f"give '{root / top}'" if len(tops) == 1 and len(deeper) > 1 else above
        raise UserError(f"'{root}' has splits inside of classes, {shown}; {above}")
    if label != "top" or not below:
        return
    if len(tops) == 1:
        raise UserError(
            f"'{root}' has one folder with others in it, {shown}; give '{root / below[0][0]}', or "
            f"--data.label parent"
        )
    log_once(
        f"'{root}': the class is the first folder of {shown}; --data.label parent takes the last "
        f"one, --data.label path all"
    )


def check_alike(listings: Collection[Listing]) -> None:
    """Log classes whose names look alike, and folders that are reached twice, through links."""
    folders = [listing.root / name for listing in listings for name in ("", *listing.files)]
    names = sorted({name for listing in listings for name in listing.files})
    for what, keys in (
        ("classes look alike", {name: _as_seen(name) for name in names}),
        ("folders are the same, through a link", {f"{x}": f"{x.resolve()}" for x in folders}),
    ):
        same: dict[str, list[str]] = {}
        for name, key in keys.items():
            same.setdefault(key, []).append(name)
        for alike in same.values():
            if len(alike) > 1:
                log_once(f"these {what}: {some(map(ascii, alike), quote='')}")


def _as_seen(name: str) -> str:
    """A name without what one cannot see in it: case, spaces around it, formatting characters."""
    seen = (letter for letter in unicodedata.normalize("NFKC", name) if letter.isprintable())
    return " ".join("".join(seen).casefold().split())


def class_name(text: str, where: str) -> str:
    """Normalise a class name to NFC, as systems encode accents differently."""
    try:
        text.encode()
    except UnicodeError:
        raise not_utf8(where) from None
    return unicodedata.normalize("NFC", text)


def check_one_class(names: Iterable[str], where: str) -> None:
    """Refuse names that list several classes, "cat;dog", each part of which is in another one, too.

    "Milan, Italy" beside "Milan, Ohio" and "Rome, Italy" is no list: each part keeps its place.

    Raises:
        UserError: with two of them.
    """
    names = sorted({*names})
    for mark in ";|,":
        parts = [[part.strip() for part in name.split(mark)] for name in names]
        counts = Counter(chain.from_iterable(map(set, parts)))
        # Where a part stands in its names; alone is a place of its own.
        places = {(part, i if own[1:] else -1) for own in parts for i, part in enumerate(own)}
        moved = {part for part, count in Counter(part for part, _ in places).items() if count > 1}
        often = [
            len({*own}) > 1 and all(counts[part] > 1 for part in own) and not moved.isdisjoint(own)
            for own in parts
        ]
        if any(often):
            raise UserError(
                f"{where} gives images several classes, {some(compress(names, often), 2)}; models "
                f"are trained on one class an image: keep one, or write one class without '{mark}'"
            )


def left_out(paths: Iterable[str]) -> str:
    """Ignored files, counted by suffix in brackets, and what reads them."""
    suffixes = Counter(os.path.splitext(path)[1].lower() for path in paths)
    counts = ", ".join(f"{n:,} {suffix or 'without'}" for suffix, n in suffixes.most_common())
    if any(f".{suffix}" in suffixes for suffix in _HEIF):
        counts += "; pip install 'locality[heif]' reads .heic and .heif"
    if suffixes.keys() & {".arrow", ".parquet"}:
        counts += "; --data.dataset arrow reads them"
    if unread := [suffix for suffix in _UNREAD if suffix in suffixes]:
        counts += f"; convert {some(unread, quote='')} to .jpg or .png"
    return f" ({counts})" if counts else ""


def part_of(name: str) -> str | None:
    """The split that a name such as "Training" or "test_images" denotes, or None."""
    match = _PART.fullmatch(name.casefold())
    return next(part for part, found in match.groupdict().items() if found) if match else None


def train_and_val(names: Iterable[str]) -> dict[str, str]:
    """The names of the training and validation splits among `names`, by "train" and "val".

    "dev", then "test", is the validation split if there is no "val". Empty without "train".
    """
    parts = {part_of(name): name for name in names}
    if "train" not in parts:
        return {}
    val = [parts[part] for part in ("val", "dev", "test") if part in parts]
    return {"train": parts["train"]} | ({"val": val[0]} if val else {})


def find_splits(root: Path | str | None) -> dict[str, Path]:
    """The folders of the splits, "train" and "val"; "all" if `root` holds class folders itself.

    train/ and val/ may have similar names, see `part_of`.

    Raises:
        UserError: the folder does not exist or has no images, or has train/ but no validation
            split.
    """
    root = require_folder(root)
    folders, _ = list_entries(root)
    if not folders:
        raise no_images_error(root)
    parts = [name for name in folders if part_of(name)]
    picked = train_and_val(parts)
    if not picked:
        if len(parts) == len(folders):
            raise UserError(f"'{root}' has {some(parts)} but no folder train")
        return {"all": root}
    train = root / picked["train"]
    if "val" not in picked:
        if not list_entries(train)[0]:
            return {"all": root}  # a class may be called "train", too
        raise UserError(f"'{root}' has {train.name} but no val; give '{train}' to hold out a part")
    for part, name in picked.items():
        if len(same := [other for other in parts if part_of(other) == part_of(name)]) > 1:
            raise UserError(f"'{root}' has {some(same)}; keep one folder for {part}")
    if unused := [name for name in folders if name not in picked.values()]:
        log_once(f"'{root}': {some(picked.values())} are used, {some(unused)} not")
    return {part: root / name for part, name in picked.items()}


def open_folder(config: DataConfig) -> tuple[list[str], FileSource, FileSource | None]:
    """Classes, training and validation images of an image folder; None without a split.

    Both splits must have the same classes.
    """
    folders = find_splits(config.root)
    listings = {part: list_folder(root, config.label) for part, root in folders.items()}
    check_alike(listings.values())
    for listing in listings.values():
        check_levels(listing, config.label)
        if not any(listing.files.values()):
            raise no_images_error(listing.root)
        listing.log_ignored(sum(map(len, listing.files.values())))
    if difference := class_difference({part: listing.files for part, listing in listings.items()}):
        raise UserError(f"train and val have different classes: {difference}")
    classes = list(next(iter(listings.values())).files)
    train, *val = (listing.source(classes, config.decoding) for listing in listings.values())
    return classes, train, val[0] if val else None


@cache
def log_once(sentence: str) -> None:
    """Log a finding about a dataset once, even if a command opens it several times."""
    _log.warning("%s", printable(sentence))


def is_inside(folder: Path | str, path: str) -> bool:
    """Whether a path relative to `folder` stays below it; links are not resolved."""
    below = os.path.join(os.path.abspath(folder), "")
    return os.path.abspath(os.path.join(below, path)).startswith(below)


def outside_error(sentence: str, folder: Path) -> UserError:
    """The error for an image that a table names outside its folder."""
    return UserError(f"{sentence}, outside of '{folder}'; --data.allow_outside true reads it")


def place_name(root: Path | str) -> str:
    """The name of the folder of custom images, or of their table: "photos", "clothes/train"."""
    path = Path(root).resolve()
    path = path.parent if path.is_file() else path
    return "/".join(path.parts[-2:]) if part_of(path.name) else path.name


def short_name(path: Path | str) -> str:
    """A file with its folder: "coat/12.png"."""
    return "/".join(Path(path).parts[-2:])


def image_files(paths: Iterable[str]) -> Iterator[Path]:
    """The image files in paths of files and folders, sorted within a folder.

    A folder stands for all images in it and its subfolders.

    Raises:
        FileNotFoundError: a path does not exist.
        UserError: no folder has images, and no file is given.
    """
    empty, found = list[str](), 0
    for path in map(Path, paths):
        if path.is_dir():
            listing = Listing(path)
            inside = list(_images(path, "", set(), listing))
            found += len(inside)
            if not inside:
                empty.append(f"no images in the folder {path}{left_out(listing.ignored)}")
                continue
            listing.log_ignored(len(inside))
            yield from sorted(path / name for name in inside)
        elif path.exists():
            found += 1
            yield path
        else:
            raise missing(path)
    if not found:
        raise UserError("; ".join(empty) or "no images are given")
    for sentence in empty:
        _log.warning("%s", sentence)


def read_image(file: Path, decoding: Decoding = DEFAULT_DECODING) -> Image.Image:
    """Read an image file as RGB; errors name the file."""
    with wrap_errors(str(file), BadImage):
        return decode(read_bytes(file), decoding)


def check_root(config: DataConfig) -> None:
    """Check, without torch, that a dataset's root is given and usable."""
    name = config.dataset
    info = DATASETS[name]
    for setting in ("image_column", "label_column"):
        if getattr(config, setting) is not None and name not in ("table", "arrow"):
            raise UserError(
                f"data.{setting} is for tables, and {config.root or name} is none; leave it out "
                f"(--data.{setting} null), or give the table as data.root"
            )
    if config.root is None:
        if info.needs_root:
            called = info.title or f"the dataset '{name}'"
            what = "a file or folder" if name == "table" else "a folder"
            raise UserError(f"{called} needs {what}; give it as data.root")
    elif not info.needs_root and not info.content:
        raise UserError(
            f"{name} has no folder; to read '{config.root}', give data.dataset too, such as folder"
        )
    elif name == "folder":
        find_splits(config.root)
    else:
        require_folder(config.root, or_file=name == "table")


def require_folder(root: Path | str | None, or_file: bool = False) -> Path:
    """`root` as the path of an existing folder, or of a file that is no archive or image."""
    path = Path(root or "").expanduser()
    if not path.exists():
        raise UserError(str(missing(path)))
    if path.is_dir():
        return path
    archives = [suffix for _, suffixes, _ in shutil.get_unpack_formats() for suffix in suffixes]
    if path.name.lower().endswith(tuple(archives)):
        raise UserError(f"'{path}' is an archive; unpack it and give the folder")
    if _is_image(path.name):
        raise UserError(f"'{path}' is an image, not a folder; expected one folder per class")
    if not or_file:
        raise UserError(f"'{path}' is not a folder")
    return path


def no_images_error(root: Path) -> UserError:
    return UserError(
        f"no images in folders of '{root}'{left_out(list_folder(root).ignored)}; expected one "
        f"folder per class, of .jpg, .png … (if it is one, give the folder above it)"
    )


def _images(root: Path, relative: str, above: set[Path], listing: Listing) -> Iterator[str]:
    """All images below a folder; everything else in it is added to `listing.ignored`."""
    folder, inside = (root / relative).resolve(), partial(os.path.join, relative)
    if len(above) > _DEEPEST:
        raise UserError(
            f"'{root}' has folders more than {_DEEPEST} levels deep; give the one with the classes"
        )
    if folder in above:
        listing.ignored.append(relative)
        return
    folders, files = list_entries(folder)
    for name in files:
        if _is_image(name):
            yield inside(name)
        else:
            listing.ignored.append(inside(name))
    for name in folders:
        yield from _images(root, inside(name), above | {folder}, listing)


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def list_entries(folder: Path) -> tuple[list[str], list[str]]:
    """The names of a folder's subfolders and of all else in it, without hidden and system files,
    and without runs, which are here if one trains in the images' folder.
    """
    folders: list[str] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in _JUNK:
                continue
            # A link may lead nowhere or to itself; other entries need no further call.
            is_folder = os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
            if not is_folder:
                others.append(entry.name)
            elif not _holds_runs(entry.path):
                folders.append(entry.name)
    return sorted(folders), sorted(others)


def _holds_runs(folder: str) -> bool:
    """Whether a folder is a run's, or the one of default outputs: runs/RECIPE/NAME."""
    if os.path.basename(folder) == "runs":
        return any(map(_holds_runs, glob(os.path.join(escape(folder), "*", "*", ""))))
    return all(os.path.isfile(os.path.join(folder, f)) for f in ("config.yaml", "environment.json"))
