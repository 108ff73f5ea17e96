"""Curves over training, from measurements of snapshots."""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from locality.analysis.measures import nonlocality_unit
from locality.analysis.statistics import mean_curve
from locality.figures.charts import label_axes
from locality.figures.style import FAINT, INK, MAP_COLOURS, OTHER, family_colour, family_style

Record = dict[str, Any]


def draw_panel(axes: Axes, panel: Record) -> None:
    """Draw lines over training.

    Args:
        axes: axes to draw on.
        panel: `title`, `x_label`, `y_label`, optionally `y_range`, and `series`, each with `label`,
            `colour` (see `resolve_colour`), `dashed`, `band`, `x`, `mean` and `half_width`.
    """
    draw_series(axes, panel, draw_line)
    label_axes(axes, panel["x_label"], panel["y_label"])


def draw_series(axes: Axes, panel: Record, draw: Callable[[Axes, Record], None]) -> None:
    """A panel's title, labels and y range, and its series by `draw`."""
    axes.set(title=panel["title"], xlabel=panel["x_label"], ylabel=panel["y_label"])
    for series in panel["series"]:
        draw(axes, series)
    if "y_range" in panel:
        axes.set_ylim(*panel["y_range"])


def draw_line(axes: Axes, series: Record) -> None:
    colour = resolve_colour(series["colour"])
    few = len(series["x"]) <= 6
    axes.plot(
        series["x"],
        series["mean"],
        color=colour,
        label=series["label"],
        linestyle="--" if series["dashed"] else "-",
        linewidth=2.2 if series["colour"] == "ink" else 1.4,
        marker=family_style(series["colour"])["marker"] if few else None,
        markersize=4,
    )
    if series["band"]:  # one seed has no interval
        mean, half = (np.array(series[name], dtype=float) for name in ("mean", "half_width"))
        axes.fill_between(
            series["x"], mean - half, mean + half, color=colour, alpha=0.12, linewidth=0
        )


def resolve_colour(name: str) -> str:
    """A colour from a family's name, "ink", "other", or "depth:FRACTION" (0 … 1)."""
    if name.startswith("depth:"):
        # The lightest colours are invisible on white.
        return to_hex(matplotlib.colormaps[MAP_COLOURS](0.9 * float(name[6:])))
    named = {"ink": INK, "other": OTHER, "": FAINT}
    return named[name] if name in named else family_colour(name)


def nonlocality_panels(measured: Sequence[tuple[str, Sequence[Record]]]) -> list[Record]:
    """One panel per group of runs (Figs. 5, 10, 13): a line per layer, dark to bright, and uniform
    attention, in `nonlocality_unit`. Panels of the same unit share a y axis.

    Args:
        measured: label and one `analysis.recording.measure_trajectory` per seed of each group.
    """
    panels = []
    for label, seeds in measured:
        layers = seeds[0]["layers"]
        unit, divisor, everywhere = nonlocality_unit(layers)
        panel = _over_epochs(label, f"nonlocality ({unit})")
        for n, layer in enumerate(layers):
            of = [np.array(seed["layers"][n]["nonlocality"]) / divisor(layer) for seed in seeds]
            panel["series"].append(_line(f"layer {n + 1}", f"depth:{n / len(layers)}", seeds, of))
        even = [np.full(len(seed["epochs"]), everywhere) for seed in seeds]
        line = _line("uniform attention", "", seeds, even, dashed=True, band=False)
        panel["series"].append(line)
        panels.append(panel)
    tops: dict[str, float] = {}
    for panel in panels:
        means = [value for series in panel["series"] for value in series["mean"]]
        tops[panel["y_label"]] = max([tops.get(panel["y_label"], 0.0), *means])
    return [panel | {"y_range": (0, 1.05 * tops[panel["y_label"]])} for panel in panels]


def gate_panels(seeds: Sequence[Record]) -> list[Record]:
    """One panel per gated layer (Figs. 6, 14): σ(λ) of each head, and their mean in black."""
    panels = []
    for n, layer in enumerate(seeds[0]["layers"]):
        if layer.get("gates"):
            panel = _over_epochs(f"layer {n + 1}", "gate σ(λ)") | {"y_range": (0, 1)}
            gates = [np.array(seed["layers"][n]["gates"]) for seed in seeds]
            heads = gates[0].shape[1]
            panel["series"] = [
                _line(f"head {h + 1}", f"depth:{h / heads}", seeds, [of[:, h] for of in gates],
                      band=False)
                for h in range(heads)
            ]  # fmt: skip
            mean = _line("mean", "ink", seeds, [of.mean(axis=1) for of in gates])
            panel["series"].append(mean)
            panels.append(panel)
    return panels


def _over_epochs(title: str, y_label: str) -> Record:
    return {"title": title, "x_label": "epochs", "y_label": y_label, "series": []}


def _line(
    label: str, colour: str, seeds: Sequence[Record], values: Sequence[Any],
    dashed: bool = False, band: bool = True,
) -> Record:  # fmt: skip
    """A series of one array of values by epoch per seed; see `draw`."""
    curves = [{"x": of["epochs"], "y": y} for of, y in zip(seeds, values, strict=True)]
    look = {"label": label, "colour": colour, "dashed": dashed, "band": band}
    return look | mean_curve(curves)
