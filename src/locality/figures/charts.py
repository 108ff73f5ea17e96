"""The charts of a report: groups of runs compared by accuracy, gates and nonlocality."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from locality.analysis.baselines import unsized
from locality.analysis.measures import nonlocality_unit
from locality.analysis.runs import RunGroup, baselines_at, percent
from locality.analysis.statistics import Estimate, estimate, mean_curve
from locality.figures.style import CONVIT, FAINT, INK, family_colour, family_style, settings
from locality.runs import Run

PANEL = (4.4, 3.1)  # inches; readable on a phone


def subset_label(fraction: float) -> str:
    """A fraction of the training images in words."""
    return "all training images" if fraction == 1 else f"{percent(fraction)} of the training images"


def chart(draw: Callable[..., bool | None], *content: Any) -> Figure | None:
    """A new figure drawn by one of the functions below; None if there is nothing to draw."""
    with settings():
        figure = Figure(figsize=PANEL)
        drawn = draw(figure.subplots(), *content)
    return None if drawn is False else figure


def draw_accuracy(axes: Axes, groups: Sequence[RunGroup]) -> None:
    """Final accuracy (mean, interval, seeds) by fraction of the training images.

    By model if all runs have the same fraction.
    """
    fractions = sorted({fraction for one in groups for fraction in one.fractions})
    looks = _group_styles(groups)
    _draw_baselines(axes, groups, fractions)
    if len(fractions) == 1:
        axes.figure.set_size_inches(PANEL[0], max(PANEL[1], 0.9 + 0.4 * len(groups)))  # type: ignore[union-attr]
        for number, (one, look) in enumerate(zip(groups, looks, strict=True)):
            mean = one.over_runs(fractions[0])
            _draw_seeds(axes, one, fractions[0], mean, number, 0.2, look, across=True)
        axes.set_yticks(range(len(groups)), [fill(one.label, 30) for one in groups], fontsize=8)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.margins(x=0.1)
        axes.set_xlim(*np.clip(axes.get_xlim(), *_LIMITS))
        label_axes(axes, f"top-1 accuracy (%), {subset_label(*fractions)}", "", grid="x")
        return
    step = 0.7 / len(groups)
    for number, (one, look) in enumerate(zip(groups, looks, strict=True)):
        shift = (number - (len(groups) - 1) / 2) * step
        for fraction in one.fractions:
            label = one.label if fraction == one.fractions[0] else None
            position = fractions.index(fraction) + shift
            mean = one.over_runs(fraction)
            _draw_seeds(axes, one, fraction, mean, position, step * 0.22, look, label)
    axes.set_xticks(range(len(fractions)), [percent(fraction) for fraction in fractions])
    axes.set_xlim(-0.6, len(fractions) - 0.4)
    axes.set_ylim(*np.clip(axes.get_ylim(), *_LIMITS))
    label_axes(axes, "fraction of the training images", "top-1 accuracy (%)", covered=True)


_LIMITS = 0, 101  # percent, which intervals of few seeds may exceed
_CLOSE = 0.06  # rotate labels closer than this, as a share of the distance between fractions
_BASELINE_STYLES = {"nearest neighbour": ":", "logistic regression": "--"}


def _draw_baselines(axes: Axes, groups: Sequence[RunGroup], fractions: Sequence[float]) -> None:
    """Grey lines at the baselines' accuracy on each fraction, without chance."""
    for position, fraction in enumerate(fractions):
        for name, accuracy in baselines_at(groups, fraction).items():
            if (dashes := _BASELINE_STYLES.get(unsized(name))) is None:
                continue
            style: dict[str, Any] = {"color": "0.55", "linestyle": dashes}
            style |= {"linewidth": 1.2, "label": None if position else name, "zorder": 1}
            if len(fractions) == 1:
                axes.axvline(accuracy.mean, **style)
            else:
                axes.plot([position - 0.4, position + 0.4], [accuracy.mean] * 2, **style)


def _draw_seeds(
    axes: Axes,
    one: RunGroup,
    fraction: float,
    accuracy: Estimate,
    position: float,
    aside: float,
    look: Mapping[str, Any],
    label: str | None = None,
    across: bool = False,
) -> None:
    """Mean and interval of a group's accuracy at `place` on the other axis; seeds at an offset."""

    def point(at: float, value: float) -> tuple[float, float]:
        return (value, at) if across else (at, value)

    look = {**look, "linestyle": "none"}
    values = list(one.top1(fraction).values())
    for value in values if len(values) > 1 else []:
        axes.plot(*point(position + aside, value), **look, markersize=3, alpha=0.45)
    low, high = max(0.0, accuracy.low or 0.0), min(100.0, accuracy.high or 0.0)
    width = None if accuracy.half_width is None else [[accuracy.mean - low], [high - accuracy.mean]]
    whiskers: dict[str, Any] = {"xerr" if across else "yerr": width, "label": label}
    whiskers |= {"markersize": 7, "capsize": 4, "elinewidth": 1.6}
    x, y = point(position, accuracy.mean)
    axes.errorbar(x, y, **whiskers, **look)
    axes.annotate(
        f"{accuracy.mean:.1f}",
        point(position, accuracy.mean if across or width is None else high),
        annotation_clip=False,
        xytext=(0, 5),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=7,
        rotation=0 if across or aside > _CLOSE else 90,
    )


def _group_styles(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """The family's colour for each group; further groups of a family get other markers."""
    looks, seen = [], dict[str, int]()
    for one in groups:
        look, number = family_style(one.family), seen.get(one.family, 0)
        looks.append(look | ({"marker": "DvPX*"[(number - 1) % 5]} if number else {}))
        seen[one.family] = number + 1
    return looks


def draw_learning(axes: Axes, groups: Sequence[RunGroup], fraction: float) -> None:
    """Validation accuracy over training: single seeds thin, their mean thick."""
    for one, look in zip(groups, _group_styles(groups), strict=True):
        curves = [curve for run in one.at(fraction) if len(curve := curve_of(run, "top1"))]
        for curve in curves:
            axes.plot(*curve.T, color=look["color"], linewidth=0.8, alpha=0.35)
        if curves:
            # Runs of a given time end at different steps, and all of them at their end.
            end = float(np.mean([curve[-1, 0] for curve in curves]))
            mean = mean_curve([{"x": [*c[:-1, 0], end], "y": c[:, 1].tolist()} for c in curves])
            every = 0.15 if len(mean["x"]) > 9 else 1  # 0.15 may omit a marker at the end
            look |= {"linewidth": 2.2, "markevery": every}
            axes.plot(mean["x"], mean["mean"], label=one.label, **look)
    _title_subset(axes, groups, fraction)
    label_axes(axes, "step", "top-1 accuracy (%)")


def _title_subset(axes: Axes, groups: Sequence[RunGroup], fraction: float) -> None:
    """Name the subset that a panel is about, unless all runs have the same."""
    if len({part for one in groups for part in one.fractions}) > 1:
        axes.set_title(subset_label(fraction))


def curve_of(run: Run, column: str) -> np.ndarray:
    """Steps and recorded values of `column`, (n, 2)."""
    points = [(row["step"], row[column]) for row in run.curve if "step" in row and column in row]
    return np.array(points).reshape(-1, 2)


def draw_curves(
    axes: Axes, run: Run, columns: Mapping[str, str], best: Mapping[str, float] | None, y_label: str
) -> None:
    """Columns of a run's `metrics.csv` over training, with the best evaluation marked.

    Args:
        axes: axes to draw on.
        run: the run.
        columns: column → label; the last column is validation's.
        best: row of the best evaluation, or None.
        y_label: label of the y axis.
    """
    own = {"color": family_colour(run.family), "linewidth": 2.2}
    looks: tuple[dict[str, Any], ...] = ({"color": FAINT}, own)
    for (column, label), look in zip(columns.items(), looks, strict=True):
        axes.plot(*curve_of(run, column).T, label=label, **look)
        if best is not None and column == list(columns)[-1] and column in best:
            axes.plot(best["step"], best[column], "o", color=INK, label="best top-1")
            axes.axvline(best["step"], color=FAINT, linestyle=":", linewidth=1.2)
    label_axes(axes, "step", y_label)


def draw_confusion(axes: Axes, matrix: npt.NDArray[np.int64], names: Sequence[str]) -> None:
    """The confusion matrix with labels in rows; a cell's opacity shows its share of the row."""
    count = len(names)
    share = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    axes.figure.set_size_inches(PANEL[0], PANEL[0])  # type: ignore[union-attr]
    axes.set(xlim=(0, count), ylim=(0, count))
    for row, column in np.argwhere(matrix):
        # Transparent, so that numbers are readable in light and dark themes.
        look: dict[str, Any] = {"facecolor": CONVIT, "alpha": 0.6 * share[row, column]}
        axes.add_patch(Rectangle((column, row), 1, 1, linewidth=0, **look))
        axes.text(column + 0.5, row + 0.5, f"{matrix[row, column]:,}", ha="center", va="center",
                  fontsize=min(9, 90 / count), color=INK)  # fmt: skip
    labels = [_wrapped(n if len(n) <= 40 else n[:39] + "…", 20) for n in names]
    centres = np.arange(count) + 0.5
    axes.set_xticks(centres, labels, rotation=90 if max(map(len, labels)) > 2 else 0, fontsize=7)
    axes.set_yticks(centres, labels, fontsize=7)
    axes.set(aspect="equal", xlabel="predicted", ylabel="labelled")
    axes.invert_yaxis()


def _wrapped(name: str, width: int) -> str:
    """Wrap a name at spaces and underscores to lines of at most `width`."""
    lines = fill(name.replace("_", "_ "), width, break_on_hyphens=False).split("\n")
    return "\n".join(line.replace("_ ", "_") for line in lines)


def draw_calibration(axes: Axes, table: npt.NDArray[np.float64]) -> None:
    """Accuracy by confidence. `table` (m, 3): confidence, accuracy, share of images (dot area)."""
    axes.plot([0, 100], [0, 100], color=FAINT, linestyle="--", label="perfectly calibrated")
    confidence, accuracy, share = table.T
    axes.plot(100 * confidence, 100 * accuracy, color=INK, linewidth=1)
    axes.scatter(100 * confidence, 100 * accuracy, s=10 + 400 * share, color=CONVIT, zorder=3)
    axes.set(xlim=(0, 104), ylim=(-4, 104))
    label_axes(axes, "confidence (%)", "top-1 accuracy (%)")


def draw_gates(axes: Axes, one: RunGroup, fraction: float) -> bool:
    """σ(λ) of each head by layer, with means before and after training; False without gates."""
    after = _by_layer(one.at(fraction), "after", "gates")
    before = _by_layer(one.at(fraction), "before", "gates")
    for layer, values in after.items():
        jitter = np.linspace(-0.18, 0.18, values.size) if values.size > 1 else np.zeros(1)
        look = family_style(one.family) | {"linestyle": "none", "markersize": 3.5, "alpha": 0.5}
        axes.plot(layer + jitter, values.ravel(), **look)
    for values_by_layer, label, look in (
        (before, "before training", {"color": FAINT, "linestyle": "--"}),
        (after, "mean after training", {"color": INK, "linewidth": 2, "marker": "_"}),
    ):
        if values_by_layer:
            means = [values.mean() for values in values_by_layer.values()]
            axes.plot(list(values_by_layer), means, label=label, **look)
    _title_subset(axes, [one], fraction)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xticks(list(after))
    label_axes(axes, "layer", "gate σ(λ):  0 content … 1 position")
    return bool(after)


def draw_nonlocality(axes: Axes, groups: Sequence[RunGroup], fraction: float) -> bool:
    """Nonlocality of each layer before and after training; False if not measured."""
    measured = [one for one in groups if _by_layer(one.at(fraction), "after", "nonlocality")]
    # Of the first measured seed: others may not have been recorded.
    layers = [
        next(after["layers"] for run in one.at(fraction) if (after := run.measures.get("after")))
        for one in measured
    ]
    unit, scale, everywhere = nonlocality_unit([layer for each in layers for layer in each])
    looks: dict[str, dict[str, Any]] = {
        "before": {"linestyle": "--", "linewidth": 1.2, "markerfacecolor": "none"},
        "after": {"linestyle": "-", "linewidth": 2},
    }
    for one, own, each in zip(measured, _group_styles(measured), layers, strict=True):
        for stage, look in looks.items():
            values = _by_layer(one.at(fraction), stage, "nonlocality")
            if not values:
                continue
            # Average over heads first; the interval is over seeds.
            estimates = [
                estimate(list(of_layer.mean(axis=1) / scale(layer)))
                for of_layer, layer in zip(values.values(), each, strict=True)
            ]
            widths = [each.half_width for each in estimates if each.half_width is not None]
            axes.errorbar(
                list(values),
                [each.mean for each in estimates],
                yerr=widths or None,
                label=f"{one.label}, {stage} training",
                **own | {"markersize": 5, "capsize": 2, "elinewidth": 1} | look,
            )
    if measured:
        label = "uniform attention"
        axes.axhline(everywhere, color=FAINT, linestyle=":", linewidth=1.2, label=label)
        label_axes(axes, "layer", f"nonlocality ({unit})")
    _title_subset(axes, groups, fraction)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.locator_params(axis="x", integer=True)
    return bool(measured)


def label_axes(
    axes: Axes, x_label: str, y_label: str, grid: Literal["x", "y"] = "y", covered: bool = False
) -> None:
    """Label the axes and add a legend, below the axes where it would cover the plot."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis=grid)
    lines, labels = axes.get_legend_handles_labels()
    if any(len(label) > 30 for label in labels):  # too wide for a legend inside
        wrapped = [fill(label, 60) for label in labels]
        axes.figure.legend(lines, wrapped, loc="outside lower left", fontsize=7)
    elif covered or len(labels) > 3:
        axes.figure.legend(lines, labels, loc="outside lower center", ncols=2, fontsize=8)
        width, height = axes.figure.get_size_inches()  # type: ignore[union-attr]
        rows = (len(labels) + 1) // 2  # grow the figure, so that the axes keep their size
        axes.figure.set_size_inches(width, height + 0.16 * rows)  # type: ignore[union-attr]
    elif labels:
        axes.legend(loc="best", fontsize=8)


def _by_layer(runs: Sequence[Run], stage: str, name: str) -> dict[int, np.ndarray]:
    """A measure (seeds, heads) by layer, counted from 1, for layers that have it."""
    collected: dict[int, list[Any]] = {}
    for run in runs:
        record = run.measures.get(stage)
        for index, layer in enumerate(record["layers"] if record else [], start=1):
            value = layer.get(name)
            if isinstance(value, dict):
                value = value["mean"]
            if value is not None:
                collected.setdefault(index, []).append(np.array(value, dtype=float))
    return {index: np.stack(values) for index, values in sorted(collected.items())}
