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
from torch import Tensor, nn

from locality.analysis.measures import class_token_attention
from locality.analysis.taps import LayerView, capture
from locality.errors import UserError
from locality.files import write_atomic
from locality.layers.position import Grid

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LayerPicture:
    """One layer's attention from the query patch, for n images and h heads.

    Attributes:
        name: of the attention module.
        grid, key_grid: grids of queries and keys.
        query: the query patch (row, column) on `grid`.
        mixed: (n, h, Hk, Wk) float32, the attention the layer uses. What is missing to a sum of
            one is paid to the class token.
        content, position: its two parts, same shape; None for a layer without them. A purely
            content-based layer has only `mixed`.
        class_token: what the class token looks at, same shape; None where there is none.
        gates: σ(λ), (h,); None for a layer without gates.
    """

    name: str
    grid: Grid
    key_grid: Grid
    query: tuple[int, int]
    mixed: Array
    content: Array | None = None
    position: Array | None = None
    class_token: Array | None = None
    gates: Array | None = None


@dataclass(frozen=True)
class Pictures:
    """Images, what the model made of them, and where its heads looked.

    Attributes:
        images: (n, H, W, 3) uint8, as the model saw them before normalisation.
        labels, predictions: names of the true and the predicted class, n each.
        place: the query's place in every image as shares of (height, width).
        layers: in depth order.
    """

    images: Array
    labels: list[str]
    predictions: list[str]
    place: tuple[float, float]
    layers: list[LayerPicture]


_PARTS = ("mixed", "content", "position", "class_token", "gates")


@torch.no_grad()
def take_pictures(
    model: nn.Module,
    images: Tensor,
    shown: Array,
    labels: list[str],
    classes: list[str],
    place: tuple[float, float] = (0.5, 0.5),
) -> Pictures:
    """Observe one forward pass of `model` in evaluation mode; the model is left as it was.

    Args:
        model: one of ours, or a timm ViT.
        images: (n, C, H, W), normalised.
        shown: (n, H, W, 3) uint8, the same images for people to look at.
        labels: the true class of each image.
        classes: names of the classes, in the order of the logits.
        place: where to look from, as shares of (height, width) in [0, 1).

    Raises:
        UserError: if `place` lies outside the image.
    """
    if not all(0 <= share < 1 for share in place):
        raise UserError(f"a query at {place} lies outside the image; give shares in [0, 1)")
    layers: list[LayerPicture] = []
    was_training = model.training
    model.eval()
    try:
        with capture(model, on_layer=lambda view: layers.append(_picture(view, place))):
            logits = model(images)
    finally:
        model.train(was_training)
    predictions = [classes[index] for index in logits.argmax(dim=-1).tolist()]
    return Pictures(shown, labels, predictions, place, layers)


def _picture(view: LayerView, place: tuple[float, float]) -> LayerPicture:
    maps = view.maps
    row, column = (
        int(share * length) for share, length in zip(place, maps.query_grid, strict=True)
    )
    query = row * maps.query_grid[1] + column + maps.prefix_tokens

    def on_grid(patches: Tensor) -> Array:
        return patches.unflatten(-1, maps.key_grid).float().cpu().numpy()

    def from_query(attention: Tensor) -> Array:
        return on_grid(attention[..., query, maps.prefix_tokens :])

    class_token = None
    if maps.prefix_tokens:
        class_token = on_grid(class_token_attention(maps.mixed, maps.prefix_tokens))

    position = None
    if maps.position is not None:
        position = np.broadcast_to(
            from_query(maps.position), (len(maps.mixed), *maps.position.shape[:1], *maps.key_grid)
        )
    return LayerPicture(
        name=view.name,
        grid=maps.query_grid,
        key_grid=maps.key_grid,
        query=(row, column),
        mixed=from_query(maps.mixed),
        # Without a positional part, content is all there is: the same numbers again.
        content=None if position is None or maps.content is None else from_query(maps.content),
        position=position,
        class_token=class_token,
        gates=None if maps.gate is None else maps.gate.float().cpu().numpy(),
    )


def save_pictures(pictures: Pictures, path: Path | str) -> None:
    """Write pictures to a NumPy archive (.npz), atomically."""
    arrays: dict[str, Array] = {"images": pictures.images}
    described = []
    for index, layer in enumerate(pictures.layers):
        for part in _PARTS:
            values = getattr(layer, part)
            if values is not None:
                arrays[f"{index}.{part}"] = values
        described.append(
            {
                "name": layer.name,
                "grid": layer.grid,
                "key_grid": layer.key_grid,
                "query": layer.query,
            }
        )
    about = {
        "labels": pictures.labels,
        "predictions": pictures.predictions,
        "place": pictures.place,
        "layers": described,
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
        layers = [_read_layer(archive, *item) for item in enumerate(about["layers"])]
        return Pictures(
            archive["images"],
            about["labels"],
            about["predictions"],
            tuple(about["place"]),
            layers,
        )


def _read_layer(archive: Any, index: int, about: dict[str, Any]) -> LayerPicture:
    values = {part: archive.get(f"{index}.{part}") for part in _PARTS}
    (rows, columns), (key_rows, key_columns) = about["grid"], about["key_grid"]
    return LayerPicture(
        about["name"],
        grid=(rows, columns),
        key_grid=(key_rows, key_columns),
        query=(about["query"][0], about["query"][1]),
        **values,
    )
