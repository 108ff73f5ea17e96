"""Attention maps of all heads for one query patch.

As in ConViT's Figs. 3, 7, 15, 16 and 17, the query is boxed and colours are logarithmic. A frame
from white (content) to red (position) shows a head's gate.
"""

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
from locality.figures.style import FAINT, GATE_COLOURS, MAP_COLOURS, settings
from locality.layers.grid import Grid
from locality.models import Architecture, build

Array = npt.NDArray[np.floating]

_QUERY = "#ff3b30"
_INCH = 0.85


def maps(
    pictures: Sequence[tuple[str, Pictures]],
    layers: Sequence[int],
    images: Sequence[int] | None = (0,),
    heads: Sequence[int] = range(4),
    per_map_scale: bool = False,
) -> Figure:
    """Attention maps of several models side by side, lettered from (a).

    Args:
        pictures: title and attention pictures of each model.
        layers: layers to draw, from 0.
        images: images, drawn too with their query boxed, below each other; None averages over all.
        heads: heads to draw.
        per_map_scale: start each map's colours at its minimum, which shows structure in nearly
            uniform maps, instead of `DECADES` below its maximum, which makes maps comparable.
    """
    widths = [len(heads) + 0.5] * len(pictures)
    widths = widths if images is None else [1.6, *widths]
    shown: Sequence[int | None] = [None] if images is None else images
    with settings():
        height = _INCH * len(layers) + 0.45
        figure = Figure(figsize=(_INCH * sum(widths), height * len(shown)))
        bands = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
        for band, image in zip(bands, shown, strict=True):
            parts = list(band.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0])
            letters = iter(string.ascii_lowercase)
            if image is not None:
                _draw_image(parts.pop(0), pictures[0][1], image, f"({next(letters)}) input")
            for part, (title, captured) in zip(parts, pictures, strict=True):
                rows = [(f"layer {n + 1}", captured.layers[n]) for n in layers]
                _draw_rows(part, f"({next(letters)}) {title}", rows, heads, image, per_map_scale)
    return figure


def initial_maps(chosen: Sample, model: Architecture, seed: int, heads: Sequence[int]) -> Figure:
    """The first layer of untrained models on one image (Fig. 3).

    Self-attention, and positional self-attention at two locality strengths.

    Args:
        chosen: one image, preprocessed for the model.
        model: configuration of a ConViT.
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
    return maps(captured, [0], heads=heads, per_map_scale=True)


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
    heads: Sequence[int],
    image: int | None,
    per_map_scale: bool,
) -> None:
    """One row of maps per layer, one map per head; see `maps`."""
    part.suptitle(title, fontsize=10, fontweight="bold")
    grid = part.subplots(len(rows), len(heads), squeeze=False)
    for line, (label, layer) in zip(grid, rows, strict=True):
        attention = layer.mixed.mean(axis=0) if image is None else layer.mixed[image]
        for head, axes in zip(heads, line, strict=True):
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


def _scaled(attention: Array, per_map_scale: bool) -> tuple[LogNorm, Array]:
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
