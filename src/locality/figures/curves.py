"""Curves in panels: from plain records, and from what was measured over training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from locality.errors import UserError
from locality.figures.style import (
    FAINT,
    INK,
    MAP_COLOURS,
    OTHER,
    colour_of,
    marker_of,
    new_figure,
    settings,
)

Record = dict[str, Any]

_MOST_COLUMNS = 4
_PANEL = (3.4, 2.9)


def draw(panels: Sequence[Record], title: str | None = None) -> Figure:
    """Panels side by side, without those that have nothing to show.

    Args:
        panels: each with `title`, `x_label`, `y_label`, `log_x`, `scatter` (points with names
            instead of lines), perhaps `y_range`, and `series`:
            `label`, `colour` (see `colour_named`), `dashed`, `band`, `empty` (why there is
            nothing, or None), `x`, `mean` and `half_width`.
        title: above all of them.

    Raises:
        UserError: if there is nothing to show in any of them.
    """
    panels = [panel for panel in panels if filled(panel)]
    if not panels:
        raise UserError("there is nothing to draw in any of these panels")
    columns = min(len(panels), _MOST_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    with settings():
        figure = new_figure(_PANEL[0] * columns, _PANEL[1] * rows)
        if title is not None:
            figure.suptitle(title, fontsize=10, fontweight="bold")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        _draw_legends(figure, list(grid[: len(panels)]), panels)
    return figure


def filled(panel: Record) -> list[Record]:
    """The series of a panel that have something to show."""
    return [series for series in panel["series"] if not series["empty"]]


def _draw_panel(axes: Axes, panel: Record) -> None:
    axes.set_title(panel["title"])
    axes.set_xlabel(panel["x_label"])
    axes.set_ylabel(panel["y_label"])
    axes.grid(True)
    if panel["log_x"]:
        axes.set_xscale("log")
    drawing = _draw_points if panel["scatter"] else _draw_line
    for series in filled(panel):
        drawing(axes, series)
    if "y_range" in panel:
        axes.set_ylim(*panel["y_range"])
    _plain_ticks(axes, panel)


def _draw_legends(figure: Figure, grid: Sequence[Axes], panels: Sequence[Record]) -> None:
    """One legend beside panels that show the same; else one in each. Points are named anyway."""
    found = [axes.get_legend_handles_labels() for axes in grid]
    if len(found) > 1 and all(labels == found[0][1] for _, labels in found):
        figure.legend(*found[0], loc="outside right center", fontsize=7.5, handlelength=1.6)
        return
    for axes, panel, (_, labels) in zip(grid, panels, found, strict=True):
        if not panel["scatter"]:
            columns = 2 if len(labels) > 8 else 1
            legend = axes.legend(fontsize=6.5, handlelength=1.6, ncols=columns, frameon=True)
            # Where every place is taken, the curves behind it still show.
            legend.get_frame().set(alpha=0.7, linewidth=0)


def _plain_ticks(axes: Axes, panel: Record) -> None:
    """Ticks where something was measured, if that is in few places; else no powers of ten."""
    places = sorted({x for series in filled(panel) for x in series["x"]})
    if len(places) <= 6 and not panel["scatter"] and "y_range" not in panel:
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel["log_x"]:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.25)


def _draw_line(axes: Axes, series: Record) -> None:
    colour = colour_named(series["colour"])
    few = len(series["x"]) <= 6
    axes.plot(
        series["x"],
        series["mean"],
        color=colour,
        label=series["label"],
        linestyle="--" if series["dashed"] else "-",
        linewidth=2.2 if series["colour"] == "ink" else 1.4,
        marker=marker_of(series["colour"]) if few else None,
        markersize=4,
    )
    halves = series["half_width"]
    if series["band"] and all(half is not None for half in halves):
        mean, half = np.array(series["mean"]), np.array(halves)
        axes.fill_between(
            series["x"], mean - half, mean + half, color=colour, alpha=0.12, linewidth=0
        )


def _draw_points(axes: Axes, series: Record) -> None:
    halves = series["half_width"]
    axes.errorbar(
        series["x"],
        series["mean"],
        yerr=None if None in halves else halves,
        color=colour_named(series["colour"]),
        marker=marker_of(series["colour"]),
        linestyle="none",
        markersize=6,
        capsize=2,
        label=series["label"],
    )
    axes.annotate(
        series["label"],
        (series["x"][0], series["mean"][0]),
        # A baseline has the size of its ConViT and often nearly its accuracy.
        xytext=(7, -9 if series["colour"] == "deit" else 4),
        textcoords="offset points",
        fontsize=6.5,
    )


def colour_named(name: str) -> str:
    """A colour from a family's name, "ink", "other", or "depth:FRACTION" (0 … 1)."""
    if name.startswith("depth:"):
        # The lightest end would not show on white.
        return to_hex(matplotlib.colormaps[MAP_COLOURS](0.9 * float(name[6:])))
    named = {"ink": INK, "other": OTHER, "": FAINT}
    return named[name] if name in named else colour_of(name)


def mean_curve(curves: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of several curves (n, 2) at the places that all of them have."""
    if not curves:
        return np.empty((0, 2))
    common = sorted(set.intersection(*({*curve[:, 0]} for curve in curves)))
    values = [dict(zip(curve[:, 0], curve[:, 1], strict=True)) for curve in curves]
    return np.array([(place, np.mean([value[place] for value in values])) for place in common])


def nonlocality_panels(measured: Sequence[tuple[str, Sequence[Record]]]) -> list[Record]:
    """A panel for each group of runs, a line per layer, dark to bright (Figs. 5, 10, 13).

    Args:
        measured: a label and one record of `locality.analysis.recording.trajectory` per seed.
    """
    panels = []
    for label, seeds in measured:
        lines = [
            _line(
                f"layer {index + 1}",
                index / len(seeds[0]["layers"]),
                seeds,
                [layer["nonlocality"] for layer in layers],
            )
            for index, layers in enumerate(_layers(seeds))
        ]
        panels.append(_over_epochs(label, "nonlocality (patches)", lines))
    most = max((line["mean"].max() for panel in panels for line in panel["series"]), default=1)
    return [panel | {"y_range": (0, 1.05 * most)} for panel in panels]


def gate_panels(seeds: Sequence[Record]) -> list[Record]:
    """A panel per gated layer: σ(λ) of every head, and their mean in black (Figs. 6, 14)."""
    panels = []
    for index, layers in enumerate(_layers(seeds)):
        if layers[0]["gates"] is None:
            continue
        gates = [np.array(layer["gates"]) for layer in layers]  # (t, h) of each seed
        heads = gates[0].shape[1]
        lines = [
            _line(f"head {head + 1}", head / heads, seeds, [each[:, head] for each in gates])
            for head in range(heads)
        ]
        mean = _line("mean", 0, seeds, [each.mean(axis=1) for each in gates]) | {"colour": "ink"}
        panels.append(_over_epochs(f"layer {index + 1}", "gate σ(λ)", [*lines, mean]))
    return [panel | {"y_range": (0, 1)} for panel in panels]


def _layers(seeds: Sequence[Record]) -> list[tuple[Record, ...]]:
    """Every layer over training, as measured in each seed's run."""
    return list(zip(*(each["layers"] for each in seeds), strict=True))


def _line(label: str, depth: float, seeds: Sequence[Record], values: Sequence[Any]) -> Record:
    """The mean over seeds of one curve each, as a series of a panel."""
    curves = [
        np.array([each["epochs"], value], dtype=float).T
        for each, value in zip(seeds, values, strict=True)
    ]
    epochs, mean = mean_curve(curves).T
    plain: Record = {"dashed": False, "band": False, "empty": None, "half_width": []}
    return plain | {"label": label, "colour": f"depth:{depth}", "x": epochs, "mean": mean}


def _over_epochs(title: str, y_label: str, series: list[Record]) -> Record:
    plain: Record = {"x_label": "epochs", "log_x": False, "scatter": False}
    return plain | {"title": title, "y_label": y_label, "series": series}
