"""ImageNet's other yardsticks: ImageNet-V2 and the ReaL labels."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from locality.data.config import Decoding
from locality.data.folder import FileSource, existing_folder, list_folder, no_images, open_one, some
from locality.errors import UserError
from locality.files import parse_json, read_text

_CLASSES = 1000
_VALIDATION_NUMBER = re.compile(r"_val_(\d{8})\.")


def open_imagenet_v2(root: Path | str | None, decoding: Decoding) -> tuple[list[str], FileSource]:
    """ImageNet-V2 (Recht et al., 2019), whose folders are named by class number, 0 … 999.

    Sorted as text, as most readers do, they would be 0, 1, 10, 100, …, and most labels wrong.

    Args:
        root: the folder of class folders, or one that holds nothing else but that folder.

    Raises:
        UserError: not such a folder.
    """
    folder = existing_folder(root)
    listing = list_folder(folder)
    if len(listing.classes) == 1 and not listing.classes[0].isdigit():
        listing = list_folder(folder / listing.classes[0])
    wrong = [name for name in listing.classes if not _class_number(name)]
    if wrong:
        raise UserError(
            f"'{folder}' is not ImageNet-V2: its folders should be named 0 … {_CLASSES - 1}, "
            f"and it has {some(wrong)}"
        )
    if not any(listing.files):
        raise no_images(listing.root)
    order = np.argsort([int(name) for name in listing.classes])
    paths = [path for number in order for path in listing.files[number]]
    labels = [int(listing.classes[number]) for number in order for _ in listing.files[number]]
    source = FileSource(listing.root, paths, labels, decoding)
    return [str(number) for number in range(_CLASSES)], source


def open_imagenet_real(
    root: Path | str | None, labels_file: Path | str | None, decoding: Decoding
) -> tuple[list[str], FileSource]:
    """ImageNet's validation images with the reassessed labels (ReaL, Beyer et al., 2020).

    An image may have several right answers; those that have none are left out.

    Args:
        root: ImageNet's folder, with val/ in class folders, or val/ itself.
        labels_file: `real.json`, a list of class lists in the order of the files' numbers.

    Raises:
        UserError: files are missing or do not fit together.
    """
    folder = existing_folder(root)
    if (folder / "val").is_dir():
        folder = folder / "val"
    classes, source = open_one(folder, decoding)
    answers = _real_labels(labels_file)
    kept, sets = [], []
    for index, path in enumerate(source.paths):
        match = _VALIDATION_NUMBER.search(path)
        if match is None:
            raise UserError(
                f"'{path}' in '{folder}' is not named as ImageNet's validation images are "
                "(ILSVRC2012_val_00000001.JPEG), so its ReaL labels cannot be found"
            )
        number = int(match.group(1))
        if not 1 <= number <= len(answers):
            raise UserError(
                f"'{labels_file}' has labels for {len(answers)} images, but '{path}' is number "
                f"{number}"
            )
        if answers[number - 1]:
            kept.append(index)
            sets.append(answers[number - 1])
    highest = max((max(answer) for answer in sets), default=-1)
    if highest >= len(classes):
        raise UserError(
            f"'{labels_file}' speaks of class {highest}, but '{folder}' has {len(classes)} classes"
        )
    paths, firsts = [source.paths[index] for index in kept], [answers[0] for answers in sets]
    chosen = FileSource(folder, paths, firsts, decoding)
    chosen.label_sets = sets
    return classes, chosen


def _class_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and int(name) < _CLASSES


def _real_labels(path: Path | str | None) -> list[tuple[int, ...]]:
    if path is None:
        raise UserError("the ReaL labels are needed; give the path of real.json as real_labels")
    try:
        answers = parse_json(read_text(Path(path).expanduser()), f"the file of ReaL labels {path}")
    except FileNotFoundError as error:
        raise UserError(f"the ReaL labels '{path}' do not exist") from error
    if not isinstance(answers, list) or not all(
        isinstance(answer, list) and all(type(label) is int and label >= 0 for label in answer)
        for answer in answers
    ):
        raise UserError(f"the ReaL labels '{path}' should be a list of lists of class numbers")
    return [tuple(answer) for answer in answers]
