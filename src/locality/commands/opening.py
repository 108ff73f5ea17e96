"""Opening whatever a command was given: run folders, weights, public names, graphs, images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from locality.analysis.pictures import one_of_each
from locality.checkpoints import Classifier, open_model
from locality.data import BadImage, decode, open_data
from locality.data.decoding import read_bytes
from locality.errors import UserError
from locality.training import RunFolder, load_run
from locality.training.runs import is_run_folder


def open_anything(what: str, model: str | None = None) -> Classifier:
    """A classifier from a run folder, weights in any layout, a public name or an ONNX graph.

    Args:
        what: path or name.
        model: the architecture's name, for weights that do not tell it.

    Raises:
        FileNotFoundError, UserError: if it cannot be opened, naming it and the cause.
    """
    return open_model(what, open_run=_open_run, model=model)


def _open_run(folder: Path) -> Classifier:
    model, config = load_run(folder)
    preprocessing = config.input.at(model.img_size)
    return Classifier.of(model, folder.name, preprocessing, RunFolder(folder).classes())


def image_files(given: Sequence[str]) -> Iterator[Path]:
    """The image files that paths of files and folders name, those of a folder in sorted order.

    A folder without images of its own stands for those in the folders below it.

    Raises:
        FileNotFoundError: if there is no such file or folder.
        UserError: if a folder has no images.
    """
    known = set(Image.registered_extensions())
    for name in given:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in known)
            inside = inside or sorted(p for p in path.rglob("*") if p.suffix.lower() in known)
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
