"""Attention of all heads from one query patch on a few images, saved as arrays.

Images are chosen deterministically. Drawing the maps later needs neither the model nor the image
files.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from locality.analysis.taps import LayerView, capture, reads_class_token
from locality.data.config import InputConfig
from locality.data.folder import short_name
from locality.data.preprocessing import eval_transform, normalise
from locality.data.sources import DataSplits, ImageSource
from locality.errors import UserError, wrap_errors
from locality.files import atomic_file, open_file, parse_json
from locality.layers.block import eval_mode
from locality.layers.grid import Grid
from locality.runs import Run
from locality.training.config import read_config
from locality.training.model import open_run_data

Array = npt.NDArray[Any]

_MAX_PICTURES_BYTES = 1 << 28

DECADES = 3
"""A map's colours span this many powers of ten below its maximum."""


@dataclass(frozen=True)
class Sample:
    """A few images of a source, preprocessed for a model and for display.

    Attributes:
        images: (n, 3, H, W) float32, normalised.
        shown: (n, H, W, 3) uint8, before normalisation.
        labels: class name of each image.
        classes: all class names, in the order of the logits; empty if unknown.
    """

    images: Tensor
    shown: npt.NDArray[np.uint8]
    labels: list[str]
    classes: Sequence[str] = ()


def round_robin_indices(labels: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Indices of `count` images, round robin over classes: the first of each, then the second, …

    (n,) class indices → at most `count` indices. Deterministic; a larger count extends the choice
    of a smaller one.
    """
    order = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    rank = np.arange(len(labels)) - np.repeat(starts, sizes)
    # Sort by rank within the class; the stable sort keeps the classes in order.
    return order[np.argsort(rank, kind="stable")][:count]


def sample(
    source: ImageSource, preprocessing: InputConfig, count: int, classes: Sequence[str] = ()
) -> Sample:
    """`count` images of a source, preprocessed for evaluation, evenly spread over its classes.

    Raises:
        UserError: the source is empty, or a chosen image cannot be decoded.
    """
    if len(source) == 0 or count < 1:
        raise UserError(f"cannot choose {count} images out of {len(source)}")
    return sample_at(source, preprocessing, round_robin_indices(source.labels, count), classes)


def sample_at(
    source: ImageSource,
    preprocessing: InputConfig,
    indices: npt.NDArray[np.int64],
    classes: Sequence[str] = (),
) -> Sample:
    """The images of a source at `indices`, preprocessed for evaluation.

    Raises:
        UserError: an image cannot be decoded.
    """
    transform: Any = eval_transform(preprocessing)
    pixels = torch.stack(
        [transform(source.read_or_raise(int(index), preprocessing.least)) for index in indices]
    )
    shown = pixels.permute(0, 2, 3, 1).contiguous().numpy()
    labels = [classes[label] if classes else str(label) for label in source.labels[indices]]
    return Sample(normalise(pixels, preprocessing), shown, labels, classes)


def run_images(run: str, count: int) -> list[tuple[str, str, Image.Image]]:
    """The first validation images of a run, round robin over classes: (file name, class, image)."""
    splits = open_run_data(run)
    splits = replace(splits, val=readable(Run(run), splits.val))
    return [
        (short_name(splits.val.describe(index)), label, image)
        for index, label, image in validation_images(splits, count)
    ]


def readable(run: Run, source: ImageSource) -> ImageSource:
    """The validation images of a run without those that it skipped, as they cannot be decoded."""
    skips = read_config(run.path).data.on_bad(training=False) == "skip"
    if not skips or not run.predictions_file.exists():
        return source
    return source.subset(np.intersect1d(run.predictions().indices, np.arange(len(source))))


def validation_images(splits: DataSplits, count: int) -> Iterator[tuple[int, str, Image.Image]]:
    """The first validation images, round robin over classes: (index, class, image)."""
    for index in round_robin_indices(splits.val.labels, count).tolist():
        yield index, splits.classes[splits.val.labels[index]], splits.val.read_or_raise(index)


@dataclass(frozen=True)
class LayerPicture:
    """One layer's attention from the query patch, for n images and h heads.

    Attributes:
        grid: of the queries.
        query: the query patch (row, column) on `grid`; None for what the classifier reads, the
            class token or the mean over all patches.
        mixed: (n, h, Hk, Wk) float32, the attention that the layer uses. The remainder to a sum of
            one is attention to the class token.
        gates: σ(λ), (h,); None for a layer without gates.
    """

    grid: Grid
    query: tuple[int, int] | None
    mixed: Array
    gates: Array | None = None

    @property
    def key_grid(self) -> Grid:
        return self.mixed.shape[2], self.mixed.shape[3]


@dataclass(frozen=True)
class Pictures:
    """Images with a model's predictions and attention maps.

    Attributes:
        images: (n, H, W, 3) uint8, the model's input before normalisation.
        labels, predictions: names of the true and predicted classes, n each.
        layers: in depth order.
    """

    images: Array
    labels: list[str]
    predictions: list[str]
    layers: list[LayerPicture]


def capture_pictures(
    model: nn.Module, chosen: Sample, place: tuple[float, float] | None = (0.5, 0.5)
) -> Pictures:
    """Capture attention in one forward pass of `model`, in evaluation mode.

    Args:
        model: a `locality` model, or a timm ViT.
        chosen: the images.
        place: the query position, as fractions of (height, width) in [0, 1); None for what
            the classifier reads, the class token or the mean over all patches.

    Raises:
        UserError: `place` is outside the image.
    """
    if place is not None and not all(0 <= fraction < 1 for fraction in place):
        raise UserError(f"query {place} is outside the image; give fractions in [0, 1)")
    layers: list[LayerPicture] = []
    token = reads_class_token(model)
    kept = capture(model, on_layer=lambda view: layers.append(_picture(view, place, token)))
    with eval_mode(model), kept:
        logits = model(chosen.images)
    classes = chosen.classes or [str(index) for index in range(logits.shape[-1])]
    predictions = [classes[index] for index in logits.argmax(dim=-1).tolist()]
    return Pictures(chosen.shown, chosen.labels, predictions, layers)


def _picture(view: LayerView, place: tuple[float, float] | None, token: bool) -> LayerPicture:
    maps, query = view.maps, None
    # In ConViT, the class token joins later.
    rows = slice(1) if token and maps.prefix_tokens else slice(maps.prefix_tokens, None)
    if place is not None:
        (height, width), (down, right) = maps.query_grid, place
        query = int(down * height), int(right * width)
        first = query[0] * width + query[1] + maps.prefix_tokens
        rows = slice(first, first + 1)
    attention = maps.mixed[..., rows, maps.prefix_tokens :].mean(dim=-2)
    return LayerPicture(
        grid=maps.query_grid,
        query=query,
        mixed=attention.unflatten(-1, maps.key_grid).float().cpu().numpy(),
        gates=None if maps.gate is None else maps.gate.float().cpu().numpy(),
    )


def save_pictures(pictures: Pictures, path: Path | str) -> None:
    """Write pictures to a NumPy archive (.npz), atomically."""
    arrays: dict[str, Array] = {"images": pictures.images}
    for index, layer in enumerate(pictures.layers):
        arrays[f"{index}.mixed"] = layer.mixed
        if layer.gates is not None:
            arrays[f"{index}.gates"] = layer.gates
    about = {
        "labels": pictures.labels,
        "predictions": pictures.predictions,
        "layers": [{"grid": layer.grid, "query": layer.query} for layer in pictures.layers],
    }
    arrays["about"] = np.array(json.dumps(about))
    with atomic_file(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_pictures(path: Path | str) -> Pictures:
    """Read a file written by `save_pictures`.

    Raises:
        UserError: the file is damaged or has another format.
    """
    with (
        open_file(path) as file,
        wrap_errors(f"{path} does not contain attention pictures", Exception),
        np.lib.npyio.NpzFile(file, allow_pickle=False) as archive,
    ):
        assert archive.zip is not None
        if sum(entry.file_size for entry in archive.zip.infolist()) > _MAX_PICTURES_BYTES:
            raise UserError(f"{path} unpacks to more than {_MAX_PICTURES_BYTES:,} bytes")
        about = parse_json(str(archive["about"]), str(path))
        layers = [
            LayerPicture(
                grid=tuple(layer["grid"]),
                query=None if layer["query"] is None else tuple(layer["query"]),
                mixed=archive[f"{index}.mixed"],
                gates=archive.get(f"{index}.gates"),
            )
            for index, layer in enumerate(about["layers"])
        ]
        return Pictures(archive["images"], about["labels"], about["predictions"], layers)
