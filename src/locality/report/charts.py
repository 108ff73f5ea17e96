"""The charts of a report, drawn from series of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from locality.analysis.measures import token_distances
from locality.analysis.statistics import Estimate, estimate
from locality.figures.style import FAINT, INK, new_figure, settings
from locality.report.runs import Run
from locality.report.series import Series
from locality.report.wording import percent

PANEL = (4.4, 3.1)  # inches: readable on a phone's width, two or three beside each other elsewhere


def accuracy(series: Sequence[Series]) -> Figure:
    """Final accuracy against the share of training images: means, intervals, and every seed."""
    with settings():
        figure = new_figure(*PANEL)
        draw_accuracy(figure.subplots(), series)
    return figure


def draw_accuracy(axes: Axes, series: Sequence[Series]) -> None:
    """As `accuracy`, on given axes."""
    fractions = sorted({fraction for one in series for fraction in one.fractions})
    step = 0.7 / max(1, len(series))
    for number, one in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * step
        for fraction in one.fractions:
            x = fractions.index(fraction) + shift
            values = list(one.top1(fraction).values())
            found = estimate(values)
            axes.plot(
                np.full(len(values), x + step * 0.22),
                values,
                linestyle="none",
                marker=one.marker,
                markersize=3,
                alpha=0.45,
                color=one.colour,
            )
            axes.errorbar(
                [x],
                [found.mean],
                yerr=found.half_width,
                marker=one.marker,
                markersize=7,
                capsize=4,
                elinewidth=1.6,
                color=one.colour,
                linestyle="none",
                label=one.label if fraction == one.fractions[0] else None,
            )
            axes.annotate(
                f"{found.mean:.1f}",
                (x, found.mean),
                xytext=(-7, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8,
            )
    axes.set_xticks(range(len(fractions)), [percent(fraction) for fraction in fractions])
    axes.set_xlim(-0.6, len(fractions) - 0.4)
    # With two seeds an interval may reach beyond what an accuracy can be.
    low, high = axes.get_ylim()
    axes.set_ylim(max(0, low), min(101, high))
    axes.set_xlabel("share of the training images")
    axes.set_ylabel("top-1 accuracy (%)")
    axes.grid(axis="y")
    axes.legend(loc="lower right")


def learning_curves(series: Sequence[Series], fraction: float) -> Figure:
    """Validation accuracy over training: each seed thin, their mean thick."""
    with settings():
        figure = new_figure(*PANEL)
        axes = figure.subplots()
        for one in series:
            curves = [curve_of(run, "top1") for run in one.at(fraction)]
            curves = [curve for curve in curves if len(curve)]
            for curve in curves:
                axes.plot(*curve.T, color=one.colour, linewidth=0.8, alpha=0.35)
            mean = mean_curve(curves)
            if len(mean):
                axes.plot(*mean.T, color=one.colour, linewidth=2.2, label=one.label)
        axes.set_title(f"{percent(fraction)} of the training images")
        axes.set_xlabel("step")
        axes.set_ylabel("top-1 accuracy (%)")
        axes.grid(axis="y")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right")
    return figure


def curve_of(run: Run, column: str) -> np.ndarray:
    """(n, 2): the steps at which `column` was recorded, and its values."""
    points = [(row["step"], row[column]) for row in run.curve if "step" in row and column in row]
    return np.array(points).reshape(-1, 2)


def mean_curve(curves: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of several curves at the steps that all of them have."""
    if not curves:
        return np.empty((0, 2))
    common = sorted(set.intersection(*({*curve[:, 0]} for curve in curves)))
    values = [dict(zip(curve[:, 0], curve[:, 1], strict=True)) for curve in curves]
    return np.array([(step, np.mean([value[step] for value in values])) for step in common])


def gates(one: Series, fraction: float) -> Figure | None:
    """σ(λ) of every head by layer, with the mean and where it started; None without gates."""
    rows = _layer_values(one.at(fraction), "after", "gates")
    if not rows:
        return None
    with settings():
        figure = new_figure(*PANEL)
        axes = figure.subplots()
        draw_gates(axes, one, fraction)
        axes.set_title(f"{percent(fraction)} of the training images")
    return figure


def draw_gates(axes: Axes, one: Series, fraction: float) -> None:
    """As `gates`, on given axes."""
    after = _layer_values(one.at(fraction), "after", "gates")
    before = _layer_values(one.at(fraction), "before", "gates")
    for layer, values in after.items():
        flat = values.ravel()
        jitter = np.linspace(-0.18, 0.18, len(flat)) if len(flat) > 1 else np.zeros(1)
        axes.plot(
            layer + 1 + jitter,
            flat,
            linestyle="none",
            marker=one.marker,
            markersize=3.5,
            alpha=0.5,
            color=one.colour,
        )
    layers = np.array(sorted(after))
    if before:
        axes.plot(
            layers + 1,
            [before[layer].mean() for layer in layers],
            color=FAINT,
            linestyle="--",
            label="before training",
        )
    means = [after[layer].mean() for layer in layers]
    axes.plot(layers + 1, means, color=INK, linewidth=2, marker="_", label="mean after training")
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("layer")
    axes.set_ylabel("gate σ(λ):  0 content … 1 position")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xticks(layers + 1)
    axes.grid(axis="y")
    axes.legend(loc="best", fontsize=8)


def nonlocality(series: Sequence[Series], fraction: float) -> Figure | None:
    """Nonlocality of every layer before and after training; None where nothing was measured."""
    measured = [one for one in series if _layer_values(one.at(fraction), "after", "nonlocality")]
    if not measured:
        return None
    with settings():
        figure = new_figure(*PANEL)
        axes = figure.subplots()
        draw_nonlocality(axes, measured, fraction)
        axes.set_title(f"{percent(fraction)} of the training images")
    return figure


def draw_nonlocality(axes: Axes, series: Sequence[Series], fraction: float) -> None:
    """As `nonlocality`, on given axes."""
    for one in series:
        runs = one.at(fraction)
        for stage, style in (("before", "--"), ("after", "-")):
            values = _layer_values(runs, stage, "nonlocality")
            layers = np.array(sorted(values))
            if not len(layers):
                continue
            # The mean over heads is the layer's; its spread over seeds is the interval.
            found = [estimate(list(values[layer].mean(axis=1))) for layer in layers]
            axes.errorbar(
                layers + 1,
                [each.mean for each in found],
                yerr=_half_widths(found),
                color=one.colour,
                linestyle=style,
                linewidth=2 if stage == "after" else 1.2,
                marker=one.marker,
                markersize=5,
                markerfacecolor=one.colour if stage == "after" else "none",
                capsize=2,
                elinewidth=1,
                label=f"{one.label}, {stage} training",
            )
    everywhere = _uniform_nonlocality(series[0].at(fraction)[0])
    if everywhere is not None:
        axes.axhline(everywhere, color=FAINT, linestyle=":", linewidth=1.2)
        axes.annotate(
            "looking everywhere alike",
            (0.02, everywhere),
            xycoords=("axes fraction", "data"),
            xytext=(0, 6),
            textcoords="offset points",
            fontsize=7.5,
            color=FAINT,
        )
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.set_xlabel("layer")
    axes.set_ylabel("nonlocality (patches)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.legend(loc="best", fontsize=7.5)


def _half_widths(estimates: Sequence[Estimate]) -> list[float] | None:
    widths = [each.half_width for each in estimates]
    return None if None in widths else [width for width in widths if width is not None]


def _layer_values(runs: Sequence[Run], stage: str, name: str) -> dict[int, np.ndarray]:
    """A measure by layer, (seeds, heads), for the layers that have it."""
    collected: dict[int, list[Any]] = {}
    for run in runs:
        record = (run.measures or {}).get(stage)
        for index, layer in enumerate(record["layers"] if record else []):
            value = layer.get(name)
            if isinstance(value, dict):
                value = value["mean"]
            if value is not None:
                collected.setdefault(index, []).append(np.array(value, dtype=float))
    return {index: np.stack(values) for index, values in collected.items()}


def _uniform_nonlocality(run: Run) -> float | None:
    """The nonlocality of attention that is the same everywhere, where all layers share a grid."""
    record = (run.measures or {}).get("after")
    grids = {tuple(layer["grid"]) for layer in record["layers"]} if record else set()
    if len(grids) != 1:
        return None
    rows, columns = grids.pop()
    return token_distances((rows, columns)).mean().item()
