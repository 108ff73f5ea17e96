"""Opening whatever a command was given: models, and images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from locality.analysis.pictures import one_of_each
from locality.checkpoints.open import Classifier, is_run_folder, open_model
from locality.commands.parsing import read_settings
from locality.data import BadImage, decode, open_data
from locality.data.decoding import read_bytes
from locality.data.folder import IMAGE_SUFFIXES
from locality.errors import UserError
from locality.training import RunFolder


def open_given(what: str, options: Any) -> Classifier:
    """What `what` names, opened with the options that `add_model_options` added.

    Raises:
        FileNotFoundError, UserError: if it cannot be opened, naming it and the cause.
    """
    return open_model(what, options.variant, options.entry, read_settings(options))


def image_files(given: Sequence[str]) -> Iterator[Path]:
    """The image files that paths of files and folders name, those of a folder in sorted order.

    A folder without images of its own stands for those in the folders below it.

    Raises:
        FileNotFoundError: if there is no such file or folder.
        UserError: if a folder has no images.
    """
    for name in given:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
            inside = inside or sorted(
                p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES
            )
            if not inside:
                raise UserError(f"there are no images in the folder {path}")
            yield from inside
        elif path.exists():
            yield path
        else:
            raise FileNotFoundError(f"there is no file or folder {path}")


def read_image(file: Path) -> Image.Image:
    """The image in a file, as RGB.

    Raises:
        UserError: if it cannot be decoded, naming the file.
    """
    try:
        return decode(read_bytes(file))
    except BadImage as error:
        raise UserError(f"{file}: {error}") from error


def run_images(run: str, count: int) -> list[tuple[str, Image.Image]]:
    """The first validation images of a run, one of each class in turn, with their class's name.

    Raises:
        UserError: if `run` is no run folder.
    """
    if not is_run_folder(run):
        raise UserError(f"{run} is no run folder with images of its own; give --images")
    config = RunFolder(run).config()
    splits = open_data(config.data, config.seed)
    chosen = one_of_each(splits.val.labels, count).tolist()
    labels = splits.val.labels
    return [(splits.classes[labels[index]], splits.val.read_or_name(index)) for index in chosen]
