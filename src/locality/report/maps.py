"""Attention pictures as small images inside a page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.colors import to_hex
from PIL import Image

from locality.analysis.pictures import DECADES, LayerPicture, Pictures
from locality.figures.style import GATE_COLOURS, MAP_COLOURS


@dataclass(frozen=True)
class Cell:
    """One head's map: the image, the head's number, and its gate if it has one."""

    head: int
    image: str
    gate: float | None
    gate_colour: str | None
    gate_ink: str | None


@dataclass(frozen=True)
class Row:
    """One layer's maps from one query patch, with the query's box in per cent of the image."""

    layer: int
    cells: list[Cell]
    box: str


def picture_rows(pictures: Pictures, image: int, layers: list[int], heads: int) -> list[Row]:
    """The maps of one image: chosen layers, the first `heads` heads of each."""
    return [
        Row(
            index + 1,
            [_cell(pictures.layers[index], image, head) for head in _heads(pictures, index, heads)],
            query_box(pictures.layers[index]),
        )
        for index in layers
    ]


def chosen_layers(depth: int, count: int) -> list[int]:
    """At most `count` layers spread evenly from the first to the last."""
    return sorted({round(float(place)) for place in np.linspace(0, depth - 1, min(count, depth))})


def _heads(pictures: Pictures, index: int, heads: int) -> range:
    return range(min(heads, pictures.layers[index].mixed.shape[1]))


def _cell(layer: LayerPicture, image: int, head: int) -> Cell:
    gate = None if layer.gates is None else float(layer.gates[head])
    return Cell(
        head + 1,
        map_image(layer.mixed[image, head]),
        gate,
        None if gate is None else to_hex(GATE_COLOURS(gate)),
        None if gate is None else ("#ffffff" if gate > 0.6 else "#1a1a1a"),
    )


def query_box(layer: LayerPicture) -> str:
    """CSS that puts a box over the query patch."""
    (row, column), (rows, columns) = layer.query, layer.grid
    return (
        f"top:{100 * row / rows:.3f}%;left:{100 * column / columns:.3f}%;"
        f"height:{100 / rows:.3f}%;width:{100 / columns:.3f}%"
    )


def map_image(attention: npt.NDArray[Any]) -> str:
    """An attention map (H, W) as a PNG data address, on a log scale, a pixel per patch."""
    colours = matplotlib.colormaps[MAP_COLOURS](log_scaled(attention))
    return data_address((colours[..., :3] * 255).round().astype(np.uint8))


def log_scaled(attention: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A map's values between 0 and 1: 1 at its largest, 0 at `DECADES` powers of ten below."""
    top = max(float(attention.max()), 1e-12)
    return 1 + np.log10(np.maximum(attention / top, 10.0**-DECADES)) / DECADES


def data_address(pixels: npt.NDArray[np.uint8]) -> str:
    """(H, W, 3) uint8 as a PNG data address."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
