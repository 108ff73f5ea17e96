"""What every head of a model looks at from one patch of a few images, kept as arrays on disk.

Whoever draws these maps later needs neither the model nor the images' files.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from locality.analysis.samples import Sample
from locality.analysis.taps import LayerView, capture
from locality.errors import UserError
from locality.files import write_atomic
from locality.layers.position import Grid

Array = npt.NDArray[Any]

DECADES = 3
"""How many powers of ten below a map's largest value its colours reach, wherever it is drawn."""


@dataclass(frozen=True)
class LayerPicture:
    """One layer's attention from the query patch, for n images and h heads.

    Attributes:
        name: of the attention module.
        grid, key_grid: grids of queries and keys.
        query: the query patch (row, column) on `grid`.
        mixed: (n, h, Hk, Wk) float32, the attention the layer uses. What is missing to a sum of
            one is paid to the class token.
        gates: σ(λ), (h,); None for a layer without gates.
    """

    name: str
    grid: Grid
    key_grid: Grid
    query: tuple[int, int]
    mixed: Array
    gates: Array | None = None


@dataclass(frozen=True)
class Pictures:
    """Images, what the model made of them, and where its heads looked.

    Attributes:
        images: (n, H, W, 3) uint8, as the model saw them before normalisation.
        labels, predictions: names of the true and the predicted class, n each.
        place: the query's place in every image as fractions of (height, width).
        layers: in depth order.
    """

    images: Array
    labels: list[str]
    predictions: list[str]
    place: tuple[float, float]
    layers: list[LayerPicture]


@torch.no_grad()
def take_pictures(
    model: nn.Module, chosen: Sample, place: tuple[float, float] = (0.5, 0.5)
) -> Pictures:
    """Observe one forward pass of `model` in evaluation mode; the model is left as it was.

    Args:
        model: one of ours, or a timm ViT.
        chosen: the images.
        place: where to look from, as fractions of (height, width) in [0, 1).

    Raises:
        UserError: if `place` lies outside the image.
    """
    if not all(0 <= fraction < 1 for fraction in place):
        raise UserError(f"a query at {place} lies outside the image; give fractions in [0, 1)")
    layers: list[LayerPicture] = []
    was_training = model.training
    model.eval()
    try:
        with capture(model, on_layer=lambda view: layers.append(_picture(view, place))):
            logits = model(chosen.images)
    finally:
        model.train(was_training)
    predictions = [chosen.class_name(index) for index in logits.argmax(dim=-1).tolist()]
    return Pictures(chosen.shown, chosen.labels, predictions, place, layers)


def _picture(view: LayerView, place: tuple[float, float]) -> LayerPicture:
    maps = view.maps
    row, column = (
        int(fraction * length) for fraction, length in zip(place, maps.query_grid, strict=True)
    )
    query = row * maps.query_grid[1] + column + maps.prefix_tokens
    mixed = maps.mixed[..., query, maps.prefix_tokens :].unflatten(-1, maps.key_grid)
    return LayerPicture(
        name=view.name,
        grid=maps.query_grid,
        key_grid=maps.key_grid,
        query=(row, column),
        mixed=mixed.float().cpu().numpy(),
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
        "place": pictures.place,
        "layers": [
            {name: getattr(layer, name) for name in ("name", "grid", "key_grid", "query")}
            for layer in pictures.layers
        ],
    }
    arrays["about"] = np.array(json.dumps(about))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomic(path, buffer.getvalue())


def load_pictures(path: Path | str) -> Pictures:
    """Read what `save_pictures` wrote.

    Raises:
        UserError: if the file is something else.
    """
    with np.load(path, allow_pickle=False) as archive:
        if "about" not in archive:
            raise UserError(f"{path} holds no attention pictures")
        about = json.loads(str(archive["about"]))
        layers = [
            LayerPicture(
                name=layer["name"],
                **{name: tuple(layer[name]) for name in ("grid", "key_grid", "query")},
                mixed=archive[f"{index}.mixed"],
                gates=archive.get(f"{index}.gates"),
            )
            for index, layer in enumerate(about["layers"])
        ]
        return Pictures(
            archive["images"],
            about["labels"],
            about["predictions"],
            tuple(about["place"]),
            layers,
        )
