"""Nonlocality and gates over training, as figures (ConViT Figs. 5, 6, 10, 13, 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from locality.analysis.summary import Record
from locality.errors import UserError
from locality.figures.style import FAINT, INK, MAP_COLOURS, new_figure, settings

Array = npt.NDArray[np.floating]

_PANEL = (3.6, 2.9)
_GATE_PANEL = (2.3, 2.0)
_MOST_COLUMNS = 5
# The brightest end of the colour map does not show on white paper.
_DARKEST, _BRIGHTEST = 0.0, 0.88


@dataclass(frozen=True)
class Course:
    """Runs that differ in their seed alone, measured over training.

    Attributes:
        label: what they are.
        trajectories: one record of `locality.analysis.recording` per seed.
    """

    label: str
    trajectories: Sequence[Record]

    @property
    def epochs(self) -> Array:
        """Epochs at which all of them were measured, (t,)."""
        return np.array([self.trajectories[0]["epochs"][at] for at in self._rows(0)])

    @property
    def depth(self) -> int:
        """How many attention layers there are."""
        return len(self.trajectories[0]["layers"])

    def gated_layers(self) -> list[int]:
        """Layers with gates."""
        layers = self.trajectories[0]["layers"]
        return [index for index, layer in enumerate(layers) if layer["gates"] is not None]

    def nonlocality(self, layer: int) -> Array:
        """Of a layer over time, mean over heads, images and seeds, (t,)."""
        return self._values(layer, "nonlocality").mean(axis=0)

    def gates(self, layer: int) -> Array:
        """σ(λ) of every head of a layer over time, mean over seeds, (t, h)."""
        return self._values(layer, "gates").mean(axis=0)

    def _values(self, layer: int, name: str) -> Array:
        """(seeds, t, …)"""
        return np.array(
            [
                np.array(each["layers"][layer][name], dtype=float)[self._rows(seed)]
                for seed, each in enumerate(self.trajectories)
            ]
        )

    def _rows(self, seed: int) -> list[int]:
        """Where in a seed's record the steps are that all seeds have."""
        common = set.intersection(*(set(each["steps"]) for each in self.trajectories))
        steps = self.trajectories[seed]["steps"]
        return [at for at, step in enumerate(steps) if step in common]


def nonlocality_over_training(courses: Sequence[Course]) -> Figure:
    """One panel per course, one line per layer, from the first (dark) to the last (bright).

    Raises:
        UserError: if there is no course.
    """
    _need(courses)
    with settings():
        columns = min(len(courses), 4)
        rows = -(-len(courses) // columns)
        figure = new_figure(_PANEL[0] * columns + 0.6, _PANEL[1] * rows)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
        for axes, course in zip(grid, courses, strict=False):
            draw_nonlocality(axes, course)
        for axes in grid[len(courses) :]:
            axes.set_axis_off()
        depth = max(course.depth for course in courses)
        _depth_bar(figure, list(grid), depth)
    return figure


def draw_nonlocality(axes: Axes, course: Course) -> None:
    """The nonlocality of every layer over epochs, on given axes."""
    for layer in range(course.depth):
        axes.plot(
            course.epochs,
            course.nonlocality(layer),
            color=_depth_colour(layer, course.depth),
            linewidth=1.6,
            label=f"layer {layer + 1}",
        )
    axes.set_title(course.label)
    axes.set_xlabel("epochs")
    axes.set_ylabel("nonlocality (patches)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")


def gates_over_training(course: Course) -> Figure:
    """One panel per gated layer: every head's σ(λ), and their mean in black.

    Raises:
        UserError: if the model has no gates.
    """
    layers = course.gated_layers()
    if not layers:
        raise UserError(f"{course.label} has no gated layers, so there are no gates to draw")
    with settings():
        columns = min(len(layers), _MOST_COLUMNS)
        rows = -(-len(layers) // columns)
        figure = new_figure(_GATE_PANEL[0] * columns, _GATE_PANEL[1] * rows + 0.3)
        figure.suptitle(f"Gates of {course.label}", fontsize=10, fontweight="bold")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, layer in zip(grid, layers, strict=False):
            draw_gates(axes, course, layer)
        for axes in grid[len(layers) :]:
            axes.set_axis_off()
        grid[0].legend(loc="lower left", fontsize=7)
    return figure


def draw_gates(axes: Axes, course: Course, layer: int) -> None:
    """The gates of one layer over epochs, on given axes."""
    values = course.gates(layer)
    # Heads of neighbouring colour keep apart by the offset they start from, not by name.
    palette = matplotlib.colormaps["tab10"]
    for head in range(values.shape[1]):
        axes.plot(course.epochs, values[:, head], color=palette(head % 10), linewidth=1, alpha=0.8)
    axes.plot(course.epochs, values.mean(axis=1), color=INK, linewidth=2, label="mean")
    axes.set_title(f"layer {layer + 1}", fontsize=9)
    axes.set_ylim(0, 1)
    axes.set_xlabel("epochs")
    axes.set_ylabel("σ(λ)")
    axes.label_outer()
    axes.axhline(0.5, color=FAINT, linewidth=0.6, linestyle=":")
    axes.grid(axis="y")


def _depth_colour(layer: int, depth: int) -> tuple[float, float, float, float]:
    share = layer / max(1, depth - 1)
    return matplotlib.colormaps[MAP_COLOURS](_DARKEST + (_BRIGHTEST - _DARKEST) * share)


def _depth_bar(figure: Figure, axes: list[Axes], depth: int) -> None:
    """A legend that scales: which colour is which layer."""
    colours = matplotlib.colors.ListedColormap(
        [_depth_colour(layer, depth) for layer in range(depth)]
    )
    bar = figure.colorbar(
        ScalarMappable(Normalize(0.5, depth + 0.5), colours), ax=axes, label="layer", aspect=25
    )
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(depth, 12)))
    bar.ax.minorticks_off()


def _need(courses: Sequence[Course]) -> None:
    if not courses:
        raise UserError("there is no run to draw; give run folders that were measured")
