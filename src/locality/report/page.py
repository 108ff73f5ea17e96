"""Reports: run folders → one self-contained HTML page."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from locality.analysis import recording
from locality.analysis.baselines import ADVICE
from locality.analysis.pictures import LayerPicture, Pictures, load_pictures
from locality.analysis.runs import (
    ALONE,
    BaselinePair,
    RunGroup,
    baseline_pairs,
    baselines_at,
    check_same_images,
    differing_settings,
    group,
    over,
    percent,
    read_runs,
)
from locality.analysis.statistics import Estimate, proportion_interval
from locality.data.folder import read_image, short_name
from locality.errors import UserError, printable
from locality.figures import charts, curves, style
from locality.figures.style import inline_svg
from locality.predictions import Predictions
from locality.runs import Run
from locality.settings import flatten
from locality.templates import data_url, render, write_page
from locality.training.config import read_config

_IMAGES, _LAYERS, _HEADS = 3, 4, 4
_MAX_NAMES = 4  # in the title
_THUMBNAIL = 160  # pixels

# In the confusion matrix and the table: readable on a phone.
_MAX_CLASSES = 20


def build_report(run_folders: Iterable[Path | str], output: Path | str) -> Path:
    """Write a self-contained HTML report of finished runs, from their recorded files.

    Args:
        run_folders: run folders, or folders of run folders.
        output: the file to write or replace; its folder is created.

    Returns:
        the path of the report.

    Raises:
        FileNotFoundError: a folder does not exist.
        UserError: no run has finished, or a run's file cannot be read.
    """
    runs = read_runs(run_folders)
    unfinished = [run for run in runs if not run.is_finished]
    check_same_images(runs)
    groups = group([run for run in runs if run.is_finished])
    if not groups:
        waiting = f" ({len(unfinished)} have started)" if unfinished else ""
        raise UserError(f"none of these runs has finished{waiting}: nothing to report")
    content = _content(groups) | {"unfinished": unfinished}
    return write_page(output, render("locality.report", "report.html", FILTERS, **content))


def _content(groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Template variables."""
    comparisons = list(baseline_pairs(groups))
    fractions = sorted({fraction for one in groups for fraction in one.fractions})
    runs = [run for one in groups for run in one.runs]
    measured = [run.measures for run in runs if run.measures]
    first_gates = {
        round(gate, 4)
        for measures in measured
        for layer in (measures.get("before") or {"layers": []})["layers"]
        for gate in layer.get("gates") or []
    }
    several = len(runs) > 1
    dataset = runs[0].dataset
    models = f"{len(groups)} models or settings"
    if len(groups) <= _MAX_NAMES:
        models = join_names([one.label for one in groups])
    baselines = {part: baselines_at(groups, part) for part in fractions}
    apart = differing_settings([_settings(run) for run in runs])
    learnt = [  # a curve needs two evaluations
        part
        for part in (fractions if several else [])
        if any(len(run.curve) > 1 for one in groups for run in one.at(part))
    ]
    repeated = [one.at(part) for one in groups for part in one.fractions]
    overs = sorted({over(group) for group in repeated if len(group) > 1})
    below = [
        said
        for one in groups
        for part in one.fractions
        if (said := one.below(part, baselines[part]))
    ]
    return {
        "title": f"{models} on {dataset}",
        "kind": "run" if not several else "experiment" if len(fractions) > 1 else "comparison",
        "one": None if several else single_run(runs[0]),
        "fractions": fractions,
        "dataset": dataset,
        "comparisons": [(each, pair_sentence(each)) for each in comparisons],
        "besides": sorted({name for each in comparisons for name in each.other_changed_settings()}),
        "groups": groups,
        "over": join_names(overs, "or"),
        "word": (overs[0] if overs else "seeds").split()[0],
        "families": {one.family for one in groups if any(run.measures for run in one.runs)},
        "pretrained": any(run.config.get("weights") for run in runs),
        # Top-5 accuracy is 100% with at most five classes.
        "top5": any(len(run.classes()) > 5 for run in runs),
        "baselines": baselines,
        "below": below and f"{'; '.join(below)}: {ADVICE}",
        "accuracy": charts.chart(charts.draw_accuracy, groups) if several else None,
        "learning": _panels("Learning curves", learnt, charts.draw_learning, groups),
        "gates": [
            panel
            for one in groups
            for panel in _panels(f"Gates of {one.label}", one.fractions, charts.draw_gates, one)
        ],
        "nonlocality": _panels("Nonlocality", fractions, charts.draw_nonlocality, groups),
        "over_training": _over_training(groups),
        "measured_images": max(
            (each["after"]["images"] for each in measured if each.get("after")), default=None
        ),
        # Initial gate, if the same for all heads.
        "first_gate": first_gates.pop() if len(first_gates) == 1 else None,
        "galleries": _attention_galleries(groups),
        "reach": style.REACH,
        "shared": {n: value for n, value in _settings(runs[0]).items() if n not in apart},
        "differing": differing_settings([_settings(one.runs[0]) for one in groups]),
        "environments": _environments(runs),
        "runs": runs,
    }


def format_estimate(value: Estimate) -> str:
    """69.0 ± 2.1, or 69.0 without an interval."""
    mean = f"{value.mean:.1f}"
    return f"{mean} ± {value.half_width:.1f}" if value.half_width else mean


def format_share(value: Estimate) -> str:
    """`format_estimate` for percentages: 95.0 (84.1 to 100) where ± would exceed 0 … 100."""
    if value.low is None or value.high is None or (value.low >= 0 and value.high <= 100):
        return format_estimate(value)
    return f"{value.mean:.1f} ({max(0.0, value.low):.3g} to {min(100.0, value.high):.3g})"


def format_range(value: Estimate) -> str:
    """−3.1 to +5.2: the interval of a difference in points, clipped to ±100."""
    low, high = max(-100.0, value.low or 0.0), min(100.0, value.high or 0.0)
    return minus(f"{low:+.1f} to {high:+.1f}")


def minus(number: str) -> str:
    """Replace hyphens in a formatted number by minus signs."""
    return number.replace("-", "−")


def join_names(names: Sequence[str], word: str = "and") -> str:
    """ "a, b and c"."""
    *first, last = names or [""]
    return f"{', '.join(first)} {word} {last}" if first else last


def breakable(name: str) -> Markup:
    """A name in any script, with optional line breaks after underscores and slashes."""
    broken = re.sub(r"(?<=[_/])(?=\w)", "<wbr>", str(escape(printable(name))))
    return Markup(f"<bdi>{broken}</bdi>")  # isolated: Arabic would reorder numbers beside it


def pair_sentence(comparison: BaselinePair) -> str:
    """The result of one comparison as a sentence."""
    (first, ours), (second, theirs) = comparison.sides
    opening = (
        f"With {charts.subset_label(comparison.fraction)} ({comparison.images:,}), {first.label} "
        f"reaches {ours.mean:.1f}% and {second.label} {theirs.mean:.1f}%"
    )
    difference = comparison.difference
    if difference is None:
        return f"{opening}; they share no seed and split, so there is no paired difference."
    if not difference.half_width:
        why = "one run each" if difference.n == 1 else f"the same in {difference.n} runs"
        return f"{opening}: {_points(difference.mean)} ({why}, no interval)."
    interval = f"95% interval {format_range(difference)} over {difference.n} {comparison.over}"
    if (difference.excludes_zero and comparison.over == ALONE) or comparison.p_value < 0.05:
        return f"{opening}: {_points(difference.mean)} ({interval})."
    alone = "; over seeds alone it includes 0" * difference.excludes_zero
    return f"{opening}; the difference is not significant ({interval}{alone})."


def _points(difference: float) -> str:
    if abs(difference) < 0.05:
        return "equal to a tenth of a point"
    word = "more" if difference > 0 else "fewer"
    return f"{abs(difference):.1f} percentage points {word}"


def _panels(
    what: str, fractions: Sequence[float], draw: Callable[..., Any], content: Any
) -> list[tuple[Markup, str]]:
    """One chart and title per fraction, without empty charts."""
    panels = []
    for part in fractions:
        figure, title = charts.chart(draw, content, part), charts.subset_label(part)
        if figure is not None:
            panels.append((inline_svg(figure, f"{what}, {title}"), title))
    return panels


def _over_training(groups: Sequence[RunGroup]) -> list[tuple[str, dict[str, Any]]]:
    """Nonlocality and gates during training, of runs on the largest fraction with recordings."""
    measured = []
    for one in groups:
        part = one.fractions[-1]
        trajectories = [recording.recorded_trajectory(run.path) for run in one.at(part)]
        if recorded := [trajectory for trajectory in trajectories if trajectory is not None]:
            measured.append((one.label_at(part), recorded))
    titled = {"Nonlocality": curves.nonlocality_panels(measured)}
    titled |= {f"Gates of {label}": curves.gate_panels(seeds) for label, seeds in measured}
    return [
        (title, {panel["title"]: charts.chart(curves.draw_panel, panel) for panel in panels})
        for title, panels in titled.items()
        if panels
    ]


def _attention_galleries(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Attention maps of one run per group (largest fraction, lowest seed) on the same images."""
    seen: list[tuple[str, Pictures]] = []
    for one in groups:
        run = one.at(one.fractions[-1])[0]
        path = run.path / recording.PICTURES
        if path.exists() and (pictures := load_pictures(path)).layers:
            seen.append((f"{one.label_at(run.fraction)}, seed {run.repeat[0]}", pictures))
    if not seen:
        return []
    first = seen[0][1]
    return [
        {
            "image": data_url(image),
            "label": first.labels[index],
            "box": _box(first.layers[0]),
            "models": [
                (label, pictures.predictions[index], _maps(pictures, index))
                for label, pictures in seen
                # Other runs may have recorded different images.
                if len(pictures.images) > index and np.array_equal(pictures.images[index], image)
            ],
        }
        for index, image in enumerate(first.images[:_IMAGES])
    ]


def _maps(pictures: Pictures, image: int) -> list[dict[str, Any]]:
    """Maps of the first few heads of evenly spaced layers."""
    depth = len(pictures.layers)
    chosen = {round(float(position)) for position in np.linspace(0, depth - 1, min(_LAYERS, depth))}
    return [
        {
            "layer": index + 1,
            "box": _box(layer),
            "heads": [
                (data_url(style.map_to_rgb(attention)), gate)
                for attention, gate in zip(
                    layer.mixed[image][:_HEADS],
                    [None] * _HEADS if layer.gates is None else map(float, layer.gates),
                    strict=False,
                )
            ],
        }
        for index, layer in enumerate(pictures.layers)
        if index in chosen
    ]


def _box(layer: LayerPicture) -> str:
    """CSS of the box over the query patch."""
    assert layer.query is not None
    (row, column), (rows, columns) = layer.query, layer.grid
    return (
        f"top:{100 * row / rows:.3f}%;left:{100 * column / columns:.3f}%;"
        f"height:{100 / rows:.3f}%;width:{100 / columns:.3f}%"
    )


def _settings(run: Run) -> dict[str, Any]:
    """A run's settings by dotted name, without those shown elsewhere on the page."""
    flat = flatten(run.config)
    shown = ("seed", "model.name", "data.fraction", "data.dataset")
    return {name: value for name, value in flat.items() if name not in shown}


def _environments(runs: Sequence[Run]) -> list[tuple[dict[str, Any], int]]:
    """Distinct environments (machine, versions) and the number of runs in each."""
    counted = Counter[str]()
    for run in runs:
        environment = run.environment()
        start = (environment.pop("starts", None) or [{}])[-1]
        environment.pop("seed", None)
        environment |= {key: start[key] for key in ("device", "precision") if key in start}
        counted[json.dumps(environment, sort_keys=True)] += 1
    return [(json.loads(environment), count) for environment, count in counted.items()]


def _shown(value: Any) -> str:
    """Format a setting's value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "–"
    return "–" if value is None else str(value)


_CURVES = {
    "Accuracy": ("top-1 accuracy (%)", {"train_top1": "training", "top1": "validation"}),
    "Loss": ("loss", {"train_loss": "training", "val_loss": "validation"}),
}


def single_run(run: Run) -> dict[str, Any]:
    """Template variables of a single run.

    Raises:
        UserError: a file in its folder is damaged.
    """
    evaluated = [row for row in run.curve if {"step", "top1"} <= row.keys()]
    kept = run.result.get("best_step", run.result.get("steps"))
    # Of equal accuracies the one whose weights are kept.
    best = max(evaluated, key=lambda row: (row["top1"], row["step"] == kept), default=None)
    content: dict[str, Any] = {
        "best": best,
        "chosen_of": len(evaluated) if run.config["schedule"].get("patience") else 1,
        "evaluated": int(run.result["val_images"]),
        "kept_step": kept,
        "curves": {
            name: charts.chart(charts.draw_curves, run, columns, best, y_label)
            for name, (y_label, columns) in _CURVES.items()
            # A curve needs two points.
            if any(len(charts.curve_of(run, column)) > 1 for column in columns)
        },
        "eval_seconds": sum(row.get("eval_seconds", 0) for row in run.timing),
        "skipped": run.skipped(),
        "augmented": _augmented(run),
        "predictions": None,
        "mistakes": [],
        "unread": 0,
    }
    if run.predictions_file.exists():
        content |= _from_predictions(run, run.predictions())
    content["interval"] = proportion_interval(run.result["top1"] / 100, content["evaluated"])
    return content


def _augmented(run: Run) -> list[tuple[str, str]]:
    """Training images as augmented, and their classes; none if not recorded."""
    path = run.path / recording.AUGMENTED
    if not path.exists():
        return []
    pictures = load_pictures(path)
    return [*zip(map(data_url, pictures.images), pictures.labels, strict=True)]


def _from_predictions(run: Run, predictions: Predictions) -> dict[str, Any]:
    rows = predictions.per_class()
    errors = [row["images"] + row["called"] - 2 * row["right"] for row in rows]
    shown = sorted(np.argsort(np.negative(errors), kind="stable")[:_MAX_CLASSES].tolist())
    table, error = predictions.calibration()
    names = [predictions.classes[number] for number in shown]
    return {
        "predictions": predictions,
        "macro": predictions.macro,
        "evaluated": len(predictions.labels),
        "unread": int(run.result["val_images"]) - len(predictions.labels),
        "rows": predictions.by_recall()[:_MAX_CLASSES],
        "train_images": run.class_counts(),
        "confusion": charts.chart(charts.draw_confusion, predictions.confusion(shown), names),
        "confused_classes": len(shown),
        "calibration": charts.chart(charts.draw_calibration, table),
        "calibration_error": 100 * error,
        "temperature": run.temperature,
        "mistakes": _mistakes(run, predictions),
    }


def _mistakes(run: Run, predictions: Predictions) -> list[dict[str, Any]]:
    """The most confident mistakes, with attention maps where recorded."""
    path = run.path / recording.MISTAKES
    captured = load_pictures(path) if path.exists() else None
    wrong = predictions.mistakes(recording.MAX_MISTAKES)
    files = [Path(predictions.paths[row]) for row in wrong]
    return [
        {
            "file": short_name(files[number]),
            "label": predictions.classes[predictions.labels[row]],
            "says": predictions.classes[predictions.predicted[row]],
            "confidence": predictions.confidence[row],
            "image": data_url(captured.images[number])
            if captured
            else _thumbnail(files[number], run),
            "map": captured and data_url(style.map_to_rgb(captured.layers[-1].mixed[number, 0])),
        }
        for number, row in enumerate(wrong)
        if captured is None or number < len(captured.images)
    ]


def _thumbnail(file: Path, run: Run) -> str | None:
    """A thumbnail of an image, if its file exists inside the run's data folder."""
    root = run.config["data"].get("root")
    if not isinstance(root, str) or not file.is_file():
        return None
    folder = Path(root) if Path(root).is_dir() else Path(root).parent
    if not file.resolve().is_relative_to(folder.resolve()):
        return None
    try:
        image = read_image(file, read_config(run.path).data.decoding)
    except UserError:
        return None
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return data_url(np.asarray(image))


FILTERS: dict[str, Any] = {
    "breakable": breakable,
    "names": join_names,
    "percent": percent,
    "difference": format_estimate,
    "interval": format_share,
    "minus": minus,
    "range": format_range,
    "thousands": lambda number: f"{number:,.0f}",
    "millions": lambda number: f"{number / 1e6:.2f} M",
    "svg": inline_svg,
    "subset_label": charts.subset_label,
    "gate_colour": style.gate_colour,
    "uniform_colour": style.uniform_colour,
    "shown": _shown,
}
