"""One picture that sums up a report: for a README, a slide, a message."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from locality.analysis.pictures import LayerPicture, Pictures
from locality.errors import UserError
from locality.figures.style import MAP_COLOURS, new_figure, save, settings
from locality.report import charts
from locality.report.maps import log_scaled
from locality.report.runs import read_runs
from locality.report.series import Series, compare, group, twins
from locality.report.wording import headline, percent, with_interval

_HEADS = 4


def draw_summary(run_folders: Iterable[Path | str], output: Path | str) -> list[Path]:
    """Draw accuracy, nonlocality and the first layer's attention of a ConViT and its DeiT twin.

    Args:
        run_folders: as for `build_report`.
        output: where to write; a PNG and an SVG are made of this name.

    Returns:
        the two paths.

    Raises:
        FileNotFoundError: if a folder does not exist.
        UserError: if there is no ConViT with its twin among the runs, or they were not measured.
    """
    series = group(read_runs(run_folders)[0])
    pairs = list(twins(series))
    if not pairs:
        raise UserError("the summary compares a ConViT with its DeiT twin; give runs of both")
    pair = pairs[0]
    comparisons = compare(*pair)
    if not comparisons:
        raise UserError("the ConViT and its DeiT twin share no fraction of the training images")
    seen = [pictures for one in pair if (pictures := _pictures(one)) is not None]
    fraction = comparisons[-1].fraction
    if len(seen) < 2 or charts.nonlocality(pair, fraction) is None:
        raise UserError("the instruments did not run on these runs, so there is nothing to draw")
    with settings():
        figure = new_figure(12, 3.9)
        figure.suptitle(headline(comparisons), fontsize=13, fontweight="bold", x=0.01, ha="left")
        parts: Any = figure.subfigures(1, 3, width_ratios=[1, 1, 1.15])
        left, middle, right = parts
        axes = left.subplots()
        charts.draw_accuracy(axes, pair)
        axes.set_title(f"Accuracy on {pair[0].dataset}")
        # As `draw_accuracy` places them: also the fractions that only one of the two has.
        fractions = sorted({part for one in pair for part in one.fractions})
        for each in comparisons:
            if each.difference is not None:
                axes.annotate(
                    f"{with_interval(each.difference, sign=True)} points",
                    (fractions.index(each.fraction), 0.02),
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    fontweight="bold",
                )
        axes.set_ylim(max(0, axes.get_ylim()[0] - 12), 104)
        axes.legend(loc="best")
        axes = middle.subplots()
        charts.draw_nonlocality(axes, pair, fraction)
        axes.set_title(f"How far layers look ({percent(fraction)} of the data)")
        _draw_heads(right, [one.label for one in pair], seen)
        return save(figure, output)


def _pictures(one: Series) -> Pictures | None:
    return one.at(one.fractions[-1])[0].pictures()


def _draw_heads(figure: Any, labels: list[str], seen: list[Pictures]) -> None:
    """One image, and what the first layer's heads of each model look at from its centre."""
    figure.suptitle(
        "Where heads of layer 1 look from the boxed patch", fontsize=10, fontweight="bold"
    )
    columns = 1 + min(_HEADS, *(pictures.layers[0].mixed.shape[1] for pictures in seen))
    grid = figure.subplots(len(seen), columns)
    for row, (label, pictures) in enumerate(zip(labels, seen, strict=True)):
        layer = pictures.layers[0]
        grid[row, 0].imshow(pictures.images[0])
        grid[row, 0].set_ylabel(label)
        _box(grid[row, 0], layer, pictures.images.shape[1:3])
        for head in range(columns - 1):
            axes = grid[row, head + 1]
            axes.imshow(log_scaled(layer.mixed[0, head]), cmap=MAP_COLOURS, vmin=0, vmax=1)
            _box(axes, layer, layer.key_grid)
            if layer.gates is not None:
                axes.set_xlabel(f"gate {layer.gates[head]:.2f}", fontsize=7.5)
    for axes in np.ravel(grid):
        axes.set_xticks([])
        axes.set_yticks([])


def _box(axes: Any, layer: LayerPicture, shape: tuple[int, ...]) -> None:
    """A red box around the query patch, on something of `shape` pixels that covers the image."""
    height, width = shape[0] / layer.grid[0], shape[1] / layer.grid[1]
    corner = (layer.query[1] * width - 0.5, layer.query[0] * height - 0.5)
    axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="#e60026", linewidth=1.5))
