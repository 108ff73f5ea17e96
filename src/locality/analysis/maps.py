"""Attention maps as matplotlib figures: what every head looks at from one patch.

As in ConViT's Figs. 3, 7, 15, 16 and 17: the query is boxed, colours are logarithmic, and a frame
from white (content) to red (position) shows the gate of heads that have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle

from locality.analysis.pictures import LayerPicture, Pictures
from locality.analysis.style import FAINT, GATE_COLOURS, MAP_COLOURS, new_figure, settings
from locality.layers.position import Grid

Array = npt.NDArray[np.floating]

DECADES = 3
"""How many powers of ten below a map's largest value its colours reach."""
_QUERY = "#ff3b30"
_INCH = 0.85


@dataclass(frozen=True)
class MapRow:
    """A row of maps, one per head.

    Attributes:
        label: at its left.
        maps: (h, H, W), attention from the query.
        query: the query patch (row, column); None draws no box.
        gates: σ(λ) per head; None draws no frame.
    """

    label: str
    maps: Array
    query: tuple[int, int] | None
    gates: Array | None = None


@dataclass(frozen=True)
class MapBlock:
    """The maps of one model under a title."""

    title: str
    rows: Sequence[MapRow]


def layer_row(layer: LayerPicture, image: int | None, label: str, heads: int) -> MapRow:
    """The maps of one layer, of one image or (None) averaged over all images."""
    maps = layer.mixed.mean(axis=0) if image is None else layer.mixed[image]
    # The query lies on the grid of the queries; its box has to lie on that of the keys.
    query = tuple(
        place * keys // queries
        for place, keys, queries in zip(layer.query, layer.key_grid, layer.grid, strict=True)
    )
    gates = None if layer.gates is None else layer.gates[:heads]
    return MapRow(label, maps[:heads], (query[0], query[1]), gates)


def model_block(
    title: str, pictures: Pictures, layers: Sequence[int], heads: int, image: int | None = 0
) -> MapBlock:
    """Some layers of a model: the first `heads` heads of each, on one image or averaged."""
    return MapBlock(
        title,
        [layer_row(pictures.layers[index], image, f"layer {index + 1}", heads) for index in layers],
    )


def draw_maps(
    blocks: Sequence[MapBlock],
    image: npt.NDArray[np.uint8] | None = None,
    patch: tuple[tuple[int, int], Grid] | None = None,
    own_scale: bool = False,
) -> Figure:
    """Blocks of maps side by side, with the image they belong to at the left.

    Args:
        blocks: one per model.
        image: (H, W, 3); None draws none.
        patch: the query (row, column) and the grid it lies on, boxed on the image.
        own_scale: colour each map from its own least value, which brings out shapes in nearly
            even maps, instead of from `DECADES` below its largest, which compares maps.
    """
    columns = [max(len(row.maps) for row in block.rows) for block in blocks]
    height = max(len(block.rows) for block in blocks)
    widths = ([1.6] if image is not None else []) + [count + 0.5 for count in columns]
    with settings():
        figure = new_figure(_INCH * sum(widths), _INCH * height + 0.45)
        parts = figure.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0]
        if image is not None:
            _draw_image(parts[0], image, patch)
        for part, block in zip(parts[len(parts) - len(blocks) :], blocks, strict=True):
            _draw_block(part, block, own_scale)
    return figure


def _draw_image(
    part: SubFigure,
    image: npt.NDArray[np.uint8],
    patch: tuple[tuple[int, int], Grid] | None,
) -> None:
    part.suptitle("input", fontsize=10, fontweight="bold")
    axes = part.subplots()
    axes.imshow(image, interpolation="nearest")
    axes.set_axis_off()
    if patch is not None:
        (row, column), grid = patch
        height, width = image.shape[0] / grid[0], image.shape[1] / grid[1]
        corner = (column * width - 0.5, row * height - 0.5)
        axes.add_patch(
            Rectangle(corner, width, height, fill=False, edgecolor=_QUERY, linewidth=1.5)
        )


def _draw_block(part: SubFigure, block: MapBlock, own_scale: bool) -> None:
    part.suptitle(block.title, fontsize=10, fontweight="bold")
    heads = max(len(row.maps) for row in block.rows)
    grid = part.subplots(len(block.rows), heads, squeeze=False)
    for line, row in zip(grid, block.rows, strict=True):
        for head, axes in enumerate(line):
            axes.set_xticks([])
            axes.set_yticks([])
            if head >= len(row.maps):
                axes.set_axis_off()
                continue
            gate = None if row.gates is None else float(row.gates[head])
            _draw_map(axes, row.maps[head], row.query, gate, own_scale)
        line[0].set_ylabel(row.label, fontsize=8)


def _draw_map(
    axes: Axes,
    attention: Array,
    query: tuple[int, int] | None,
    gate: float | None,
    own_scale: bool,
) -> None:
    largest = max(float(attention.max()), 1e-12)
    lowest = largest * 10.0**-DECADES
    if own_scale:
        lowest = max(lowest, min(float(attention.min()), 0.999 * largest))
    axes.imshow(
        np.maximum(attention, lowest),
        cmap=MAP_COLOURS,
        norm=LogNorm(lowest, largest),
        interpolation="nearest",
    )
    if query is not None:
        axes.add_patch(
            Rectangle(
                (query[1] - 0.5, query[0] - 0.5),
                1,
                1,
                fill=False,
                edgecolor=_QUERY,
                linewidth=1.2,
                clip_on=False,
            )
        )
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(FAINT if gate is None else GATE_COLOURS(gate))
        spine.set_linewidth(0.6 if gate is None else 2.5)
    if gate is not None:
        axes.set_title(f"{gate:.2f}", fontsize=6, loc="center", pad=2, fontweight="normal")
