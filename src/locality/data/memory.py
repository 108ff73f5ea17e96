"""Images in memory: single pictures, and datasets written to files, which runs read and resume."""

import hashlib
import io
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch.utils.data import Subset
from torchvision.transforms.functional import to_pil_image

from locality.data.decoding import BadImage, orientation, to_rgb
from locality.data.folder import check_one_class, class_name, train_and_val
from locality.errors import UserError, some, wrap_errors

_FORMS = (
    "give a folder, (images, labels), a torch or Hugging Face dataset of images and classes, or "
    "{'train': …, 'val': …} of these"
)


def as_picture(image: Any) -> Image.Image:
    """Convert an array (H, W[, C]) of 0 … 255 or a tensor (C, H, W) of 0 … 1 to a PIL image.

    Raises:
        UserError: for other types, shapes or values.
    """
    if 0 in getattr(image, "shape", getattr(image, "size", ())):
        raise UserError("the image has no pixels")
    if isinstance(image, Image.Image):
        return image
    is_float = isinstance(image, torch.Tensor) and image.is_floating_point()
    if is_float and not 0 <= image.min() <= image.max() <= 1:
        raise UserError("the tensor has values outside 0 to 1; give images without normalisation")
    wanted = "an image must be a file, PIL image, uint8 array (H, W, C) or tensor (C, H, W)"
    if not is_float and str(getattr(image, "dtype", "uint8")).removeprefix("torch.") != "uint8":
        raise UserError(f"{wanted}, not {image.dtype}")
    with wrap_errors(wanted, TypeError, ValueError):
        return to_pil_image(image)


def write_images(images: Any, root: Path) -> Path:
    """Write a dataset to PNG files by class, once: the same images give the same folder.

    Args:
        images: (images, labels), a dataset of pairs (image, label), such as torchvision's, or of
            rows with an image and a label, such as Hugging Face's; or splits of these by name,
            "train" and "val", "dev" or "test".
        root: the folder in which to write one, named after its content.

    Raises:
        UserError: these are not images and classes.
    """
    if isinstance(images, Mapping):
        if len(picked := train_and_val(images)) < 2:
            raise UserError(f"the splits are {some(map(str, images))}; {_FORMS}")
        parts = {f"{part}/": images[name] for part, name in picked.items()}
    else:
        parts = {"": images}
    root.mkdir(parents=True, exist_ok=True)
    digest, names = hashlib.sha256(), set[str]()
    with tempfile.TemporaryDirectory(dir=root, prefix=".") as temporary:
        written = Path(temporary, "images")
        written.mkdir()
        for part, dataset in parts.items():
            for number, (image, label) in enumerate(_pairs(dataset)):
                name = class_name(label, f"the class {label!r}")
                if not name or name.startswith(".") or {"/", "\0"} & {*name}:
                    raise UserError(f"the class {label!r} cannot be a folder's name; rename it")
                names.add(name)
                with wrap_errors(f"image {number}", BadImage):
                    content = _png(as_picture(image))
                path = Path(written, part + name, f"{number:07d}.png")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                digest.update(f"{part}{name}".encode() + content)
        check_one_class(names, "the dataset")
        folder = root / digest.hexdigest()[:12]
        if not folder.exists():
            written.rename(folder)
    return folder


def _png(picture: Image.Image) -> bytes:
    """A picture as PNG, with its EXIF orientation; PNG has no CMYK, YCbCr, …"""
    content, exif = io.BytesIO(), Image.Exif()
    picture.load()  # turns those of TIFF files
    if (turn := orientation(picture)) not in (None, 1):
        exif[ExifTags.Base.Orientation] = turn
    if picture.mode.startswith("I;16"):  # PNG takes one byte order
        picture = Image.fromarray(np.asarray(picture).astype("<u2"))
    if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        picture = to_rgb(picture)
    picture.save(content, "PNG", exif=exif or None)
    return content.getvalue()


def _pairs(dataset: Any) -> Iterator[tuple[Any, str]]:
    """Images and class names."""
    inner = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    names = getattr(inner, "classes", None)
    if features := getattr(dataset, "features", None):
        kinds = {type(kind).__name__: name for name, kind in reversed([*features.items()])}
        image, label = kinds.get("Image", "image"), kinds.get("ClassLabel", "label")
        if missing := [column for column in (image, label) if column not in features]:
            raise UserError(f"the dataset has no column {some(missing)}; it has {some(features)}")
        names = getattr(features[label], "names", None)
        rows: Any = ((row[image], row[label]) for row in dataset)
    elif isinstance(dataset, tuple) and len(dataset) == 2 and len(dataset[0]) == len(dataset[1]):
        rows = zip(*dataset, strict=True)
    else:
        with wrap_errors(f"a {type(dataset).__name__} is not images; {_FORMS}", TypeError):
            rows = (dataset[index] for index in range(len(dataset)))
    for row in rows:
        with wrap_errors(f"a row of the dataset is not an image and a class; {_FORMS}", Exception):
            picture, own = row
            own = own.item() if hasattr(own, "item") else own
            if isinstance(own, (list, tuple, set, dict)):
                raise UserError(f"its class is {own!r}; one class an image is accepted")
            if own is None or (names is not None and not isinstance(own, str) and own < 0):
                raise UserError(f"its class is {own!r}, which names none; leave such rows out")
            yield picture, str(own) if names is None or isinstance(own, str) else names[own]
