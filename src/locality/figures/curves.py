"""Records of panels and their curves as matplotlib figures."""

from __future__ import annotations

import math
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

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


def draw(record: Record) -> Figure | None:
    """The panels of a figure's record; None if there is nothing to show in any of them."""
    panels = [panel for panel in record["panels"] if _filled(panel)]
    if not panels:
        return None
    columns = min(len(panels), _MOST_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    with settings():
        figure = new_figure(_PANEL[0] * columns, _PANEL[1] * rows)
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
    return figure


def _filled(panel: Record) -> list[Record]:
    return [series for series in panel["series"] if not series["empty"]]


def _draw_panel(axes: Axes, panel: Record) -> None:
    axes.set_title(panel["title"])
    axes.set_xlabel(panel["x_label"])
    axes.set_ylabel(panel["y_label"])
    axes.grid(True)
    if panel["log_x"]:
        axes.set_xscale("log")
    drawing = _draw_points if panel["scatter"] else _draw_line
    for series in _filled(panel):
        drawing(axes, series)
    _plain_ticks(axes, panel)
    if not panel["scatter"]:  # points have their names beside them
        columns = 2 if len(_filled(panel)) > 8 else 1
        legend = axes.legend(fontsize=6.5, handlelength=1.6, ncols=columns, frameon=True)
        # Where every place is taken, the curves behind it still show.
        legend.get_frame().set(alpha=0.7, linewidth=0)


def _plain_ticks(axes: Axes, panel: Record) -> None:
    """Ticks where something was measured, if that is in few places; else no powers of ten."""
    places = sorted({x for series in _filled(panel) for x in series["x"]})
    if len(places) <= 6 and not panel["scatter"]:
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
        low = [mean - half for mean, half in zip(series["mean"], halves, strict=True)]
        high = [mean + half for mean, half in zip(series["mean"], halves, strict=True)]
        axes.fill_between(series["x"], low, high, color=colour, alpha=0.12, linewidth=0)


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
        # Twins have the same size and often nearly the same accuracy.
        xytext=(7, -9 if series["colour"] == "deit" else 4),
        textcoords="offset points",
        fontsize=6.5,
    )


def colour_named(name: str) -> str:
    """A colour from a family's name, "ink", "other", "depth:SHARE" (0 … 1), or matplotlib's own."""
    if name.startswith("depth:"):
        # The lightest end would not show on white.
        return to_hex(matplotlib.colormaps[MAP_COLOURS](0.9 * float(name[6:])))
    named = {"ink": INK, "other": OTHER, "": FAINT}
    return named[name] if name in named else colour_of(name)
