"""Panels side by side, from plain records."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from locality.errors import UserError
from locality.figures.curves import Record, draw_line, draw_series, resolve_colour
from locality.figures.style import family_style, settings

_MAX_COLUMNS = 4
_PANEL = (3.4, 2.9)


def draw(panels: Sequence[Record]) -> Figure:
    """Draw panels side by side; empty ones are skipped.

    Args:
        panels: each with `title`, `x_label`, `y_label`, optionally `log_x`, `scatter` (named points
            instead of lines) and `y_range`, and `series`, each with `label`, `colour` (see
            `resolve_colour`), `dashed`, `band`, `x`, `mean` and `half_width`, and `empty`, why it
            is.
    """
    panels = [panel | {"series": series} for panel in panels if (series := filled(panel))]
    if not panels:
        raise UserError("nothing to draw: all panels are empty")
    columns = min(len(panels), _MAX_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    with settings():
        figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows))
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        _draw_legends(figure, list(grid[: len(panels)]), panels)
    return figure


def filled(panel: Record) -> list[Record]:
    """The series of a panel that are not empty."""
    return [series for series in panel["series"] if not series.get("empty")]


def _draw_panel(axes: Axes, panel: Record) -> None:
    axes.grid(True)
    if panel.get("log_x"):
        axes.set_xscale("log")
    draw_series(axes, panel, _draw_points if panel.get("scatter") else draw_line)
    _plain_ticks(axes, panel)


def _draw_legends(figure: Figure, grid: Sequence[Axes], panels: Sequence[Record]) -> None:
    """One legend beside panels with equal series, below a single panel with many, else in each.

    Scatter panels need none, as points are annotated.
    """
    legends = [axes.get_legend_handles_labels() for axes in grid]
    if len(legends) == 1 and len(legends[0][1]) > 5 and not panels[0].get("scatter"):
        figure.legend(
            *legends[0], loc="outside lower center", ncols=3, fontsize=6.5, handlelength=1.6
        )
        return
    if len(legends) > 1 and all(labels == legends[0][1] for _, labels in legends):
        figure.legend(*legends[0], loc="outside right center", fontsize=7.5, handlelength=1.6)
        return
    for axes, panel, (_, labels) in zip(grid, panels, legends, strict=True):
        if not panel.get("scatter"):
            columns = 2 if len(labels) > 8 else 1
            legend = axes.legend(fontsize=6.5, handlelength=1.6, ncols=columns, frameon=True)
            # Translucent, so that it never hides curves.
            legend.get_frame().set(alpha=0.7, linewidth=0)


def _plain_ticks(axes: Axes, panel: Record) -> None:
    """Ticks at the measured x if few; on log axes, plain numbers instead of powers of ten."""
    ticks = sorted({x for series in panel["series"] for x in series["x"]})
    if len(ticks) <= 6 and not panel.get("scatter") and "y_range" not in panel:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel.get("log_x"):
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.25)


def _draw_points(axes: Axes, series: Record) -> None:
    halves = series["half_width"]
    axes.errorbar(
        series["x"],
        series["mean"],
        yerr=None if None in halves else halves,
        color=resolve_colour(series["colour"]),
        marker=family_style(series["colour"])["marker"],
        linestyle="none",
        markersize=6,
        capsize=2,
        label=series["label"],
    )
    axes.annotate(
        series["label"],
        (series["x"][0], series["mean"][0]),
        # Below the point: a baseline has its ConViT's size and often nearly its accuracy.
        xytext=(7, -9 if series["colour"] == "deit" else 4),
        textcoords="offset points",
        fontsize=6.5,
    )
