"""Attention maps of all heads for one query patch.

As in ConViT's Figs. 3, 7, 15, 16 and 17, the query is boxed and colours are logarithmic. A frame
from white (content) to red (position) shows a head's gate.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle

from locality.analysis.pictures import DECADES, LayerPicture, Pictures, Sample, capture_pictures
from locality.errors import UserError
from locality.figures.style import FAINT, GATE_COLOURS, MAP_COLOURS, settings
from locality.layers.grid import Grid
from locality.models import Architecture, build

Array = npt.NDArray[np.floating]

_QUERY = "#ff3b30"
_INCH = 0.85


def maps(
    pictures: Sequence[tuple[str, Pictures]],
    layers: Sequence[int] | None = None,
    heads: int | Sequence[int] = 4,
    image: int | Sequence[int] | None = 0,
    per_map_scale: bool = False,
) -> Figure:
    """Attention maps of several models side by side, lettered from (a).

    Args:
        pictures: title and attention pictures of each model.
        layers: layers to draw, from 0; by default the second and the last but two, as in the
            paper's figures of twelve layers.
        heads: number of heads per layer, or their indices.
        image: index of the image, drawn too with its query boxed; several indices are drawn below
            each other; None averages over all images.
        per_map_scale: start each map's colours at its minimum, which shows structure in nearly
            uniform maps, instead of `DECADES` below its maximum, which makes maps comparable.
    """
    if not pictures:
        raise UserError("give at least one model to draw the attention of")
    blocks = [
        [(f"layer {index + 1}", captured.layers[index]) for index in _layers(captured, layers)]
        for _, captured in pictures
    ]
    images = [image] if image is None or isinstance(image, int) else list(image)
    widths = [] if image is None else [1.6]
    widths += [len(_heads(rows, heads)) + 0.5 for rows in blocks]
    with settings():
        height = _INCH * max(map(len, blocks)) + 0.45
        figure = Figure(figsize=(_INCH * sum(widths), height * len(images)))
        bands = figure.subfigures(len(images), 1, squeeze=False)[:, 0]
        for band, shown in zip(bands, images, strict=True):
            parts = list(band.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0])
            letters = iter(string.ascii_lowercase)
            if shown is not None:
                _draw_image(parts.pop(0), pictures[0][1], shown, f"({next(letters)}) input")
            for part, (title, _), rows in zip(parts, pictures, blocks, strict=True):
                _draw_rows(part, f"({next(letters)}) {title}", rows, heads, shown, per_map_scale)
    return figure


def _heads(rows: Sequence[tuple[str, LayerPicture]], heads: int | Sequence[int]) -> Sequence[int]:
    """Indices of the heads to draw."""
    if not isinstance(heads, int):
        return heads
    return range(min(heads, max(layer.mixed.shape[1] for _, layer in rows)))


def initial_maps(
    chosen: Sample,
    model: str | Architecture,
    seed: int = 0,
    heads: int | Sequence[int] = 4,
) -> Figure:
    """The first layer of untrained models on one image (Fig. 3).

    Self-attention, and positional self-attention at two locality strengths.

    Args:
        chosen: one image, preprocessed for the model.
        model: name or configuration of a ConViT.
        seed: seed of the initialisation.
        heads: see `maps`.
    """
    variants: dict[str, dict[str, Any]] = {"self-attention": {"gpsa_layers": 0}} | {
        f"PSA, α = {strength:g}": {"positional_attention": "psa", "locality_strength": strength}
        for strength in (0.5, 2.0)
    }
    captured = []
    for title, changes in variants.items():
        torch.manual_seed(seed)
        network = build(model, **changes)
        captured.append((title, capture_pictures(network, chosen)))
    return maps(captured, layers=[0], heads=heads, per_map_scale=True)


def _layers(pictures: Pictures, layers: Sequence[int] | None) -> Sequence[int]:
    depth = len(pictures.layers)
    if layers is None:
        return sorted({min(1, depth - 1), max(0, depth - 3)})
    for layer in layers:
        if not 0 <= layer < depth:
            raise UserError(f"layer {layer + 1} is out of range; the model has layers 1 to {depth}")
    return layers


def _draw_image(part: SubFigure, pictures: Pictures, index: int, title: str) -> None:
    """One image with a box around the query patch."""
    part.suptitle(title, fontsize=10, fontweight="bold")
    axes = part.subplots()
    image, layer = pictures.images[index], pictures.layers[0]
    axes.imshow(image, interpolation="nearest")
    axes.set_axis_off()
    assert layer.query is not None
    _box(axes, layer.query, layer.grid, image.shape[:2])


def _draw_rows(
    part: SubFigure,
    title: str,
    rows: Sequence[tuple[str, LayerPicture]],
    heads: int | Sequence[int],
    image: int | None,
    per_map_scale: bool = False,
) -> None:
    """One row of maps per layer, one map per head; see `maps`."""
    part.suptitle(title, fontsize=10, fontweight="bold")
    chosen = _heads(rows, heads)
    grid = part.subplots(len(rows), len(chosen), squeeze=False)
    for line, (label, layer) in zip(grid, rows, strict=True):
        attention = layer.mixed.mean(axis=0) if image is None else layer.mixed[image]
        for head, axes in zip(chosen, line, strict=True):
            axes.set_xticks([])
            axes.set_yticks([])
            if head >= len(attention):
                axes.set_axis_off()
                continue
            norm, values = _scaled(attention[head], per_map_scale)
            axes.imshow(values, cmap=MAP_COLOURS, norm=norm, interpolation="nearest")
            assert layer.query is not None
            # Convert the query from the grid of queries to that of keys.
            positions = zip(layer.query, layer.key_grid, layer.grid, strict=True)
            query = [position * keys // queries for position, keys, queries in positions]
            _box(axes, query, layer.key_grid, layer.key_grid)
            _frame(axes, None if layer.gates is None else float(layer.gates[head]))
        line[0].set_ylabel(label, fontsize=8)


def _scaled(attention: Array, per_map_scale: bool = False) -> tuple[LogNorm, Array]:
    """A map's colour scale, and its values clipped to that scale."""
    largest = max(float(attention.max()), 1e-12)
    lowest = largest * 10.0**-DECADES
    if per_map_scale:
        lowest = max(lowest, min(float(attention.min()), 0.999 * largest))
    return LogNorm(lowest, largest), np.maximum(attention, lowest)


def _box(axes: Axes, query: Sequence[int], grid: Grid, shape: Sequence[int]) -> None:
    """Draw a box around the query patch of `grid`, on an image of `shape` pixels."""
    height, width = shape[0] / grid[0], shape[1] / grid[1]
    corner = (query[1] * width - 0.5, query[0] * height - 0.5)
    axes.add_patch(
        Rectangle(corner, width, height, fill=False, edgecolor=_QUERY, linewidth=1.3, clip_on=False)
    )


def _frame(axes: Axes, gate: float | None) -> None:
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(FAINT if gate is None else GATE_COLOURS(gate))
        spine.set_linewidth(0.6 if gate is None else 2.5)
    if gate is not None:
        axes.set_title(f"gate {gate:.2f}", fontsize=6, loc="center", pad=2, fontweight="normal")
