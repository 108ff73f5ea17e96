"""Run folders → one HTML page that needs nothing else: no network, no second file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from locality._version import __version__
from locality.analysis.pictures import Pictures
from locality.analysis.recording import recorded_trajectory
from locality.errors import UserError
from locality.figures.over_training import Course, gates_over_training, nonlocality_over_training
from locality.figures.style import inline_svg
from locality.files import render, write_atomic
from locality.report import charts, maps, wording
from locality.report.runs import Run, Unfinished, read_runs
from locality.report.series import Comparison, Series, compare, group, twins
from locality.training.settings import flatten

SHOWN_IMAGES, SHOWN_LAYERS, SHOWN_HEADS = 3, 4, 4


@dataclass(frozen=True)
class Panel:
    """A chart and its caption-sized title."""

    svg: Markup
    title: str


@dataclass(frozen=True)
class Gallery:
    """One image seen by several models."""

    image: str
    label: str
    box: str
    models: list[tuple[str, str, list[maps.Row]]]


def build_report(run_folders: Iterable[Path | str], output: Path | str) -> Path:
    """Write a self-contained HTML report of finished runs. Recomputes nothing.

    Args:
        run_folders: folders of runs, or folders that hold such folders.
        output: the file to write; its folder is created.

    Returns:
        the path of the report.

    Raises:
        FileNotFoundError: if a folder does not exist.
        UserError: if no run has finished, or what a folder holds cannot be read.
    """
    runs, unfinished = read_runs(run_folders)
    if not runs:
        waiting = f" ({len(unfinished)} have started)" if unfinished else ""
        raise UserError(f"none of these runs has finished{waiting}; there is nothing to report")
    series = group(runs)
    html = render("locality.report", "report.html", _FILTERS, **_context(series, unfinished))
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, html)
    return output


def _context(series: Sequence[Series], unfinished: Sequence[Unfinished]) -> dict[str, Any]:
    comparisons = [each for pair in twins(series) for each in compare(*pair)]
    fractions = sorted({fraction for one in series for fraction in one.fractions})
    runs = [run for one in series for run in one.runs]
    return {
        "title": wording.headline(comparisons),
        "datasets": sorted({one.dataset for one in series}),
        "sentences": [wording.sentence(each) for each in comparisons],
        "besides": sorted({name for each in comparisons for name in each.other_differences()}),
        "comparisons": comparisons,
        "cards": [_card(each) for each in comparisons],
        "series": series,
        "families": {one.family for one in series},
        "fractions": fractions,
        "accuracy": _panel(charts.accuracy(series), "accuracy", "Final accuracy of every model"),
        "curves": _panels("curve", fractions, lambda part: charts.learning_curves(series, part)),
        "gates": [
            panel
            for number, one in enumerate(series)
            for panel in _panels(
                f"gates{number}", one.fractions, lambda part, one=one: charts.gates(one, part)
            )
        ],
        "nonlocality": _panels(
            "nonlocality", fractions, lambda part: charts.nonlocality(series, part)
        ),
        "courses": _courses(series),
        "measured_images": _measured_images(runs),
        "first_gate": _first_gate(runs),
        "galleries": _galleries(series),
        "decades": maps.DECADES,
        "common": _common_settings(runs),
        "differing": _differing_settings(series),
        "rows": [
            _row(one, fraction) for fraction in fractions for one in series if one.at(fraction)
        ],
        "environments": _environments(runs),
        "runs": runs,
        "unfinished": unfinished,
        "version": __version__,
    }


def _card(comparison: Comparison) -> dict[str, Any]:
    """The big numbers of one comparison."""
    return {
        "heading": "All training images"
        if comparison.fraction == 1
        else f"{wording.percent(comparison.fraction)} of the training images",
        "images": comparison.images,
        "sides": [
            (one.label, one.family, found)
            for one, found in (
                (comparison.first_series, comparison.first),
                (comparison.second_series, comparison.second),
            )
        ],
        "difference": comparison.difference,
    }


def _panel(figure: Figure, identifier: str, title: str) -> Panel:
    return Panel(Markup(inline_svg(figure, identifier, title)), title)


def _panels(identifier: str, fractions: Sequence[float], draw: Any) -> list[Panel]:
    """One chart per fraction, without those that had nothing to draw."""
    drawn = [(number, part, draw(part)) for number, part in enumerate(fractions)]
    return [
        _panel(figure, f"{identifier}{number}", f"{wording.percent(part)} of the training images")
        for number, part, figure in drawn
        if figure is not None
    ]


def _courses(series: Sequence[Series]) -> list[Panel]:
    """Nonlocality and gates while training, of the runs on most data that were measured then."""
    courses = []
    for one in series:
        found = [recorded_trajectory(run.folder) for run in one.at(one.fractions[-1])]
        recorded = [each for each in found if each is not None]
        if recorded:
            share = wording.percent(one.fractions[-1])
            courses.append(Course(f"{one.label}, {share} of the images", recorded))
    if not courses:
        return []
    panels = [_panel(nonlocality_over_training(courses), "course", "How far layers look")]
    for number, course in enumerate(courses):
        if course.gated_layers():
            drawn = gates_over_training(course)
            panels.append(_panel(drawn, f"course-gates{number}", f"Gates of {course.label}"))
    return panels


def _measured_images(runs: Sequence[Run]) -> int | None:
    counts = {record["images"] for run in runs if (record := (run.measures or {}).get("after"))}
    return max(counts) if counts else None


def _first_gate(runs: Sequence[Run]) -> float | None:
    """Where the gates start, if all of them start at the same value."""
    values = {
        round(gate, 4)
        for run in runs
        if run.measures and run.measures.get("before")
        for layer in run.measures["before"]["layers"]
        for gate in layer["gates"] or []
    }
    return values.pop() if len(values) == 1 else None


def _galleries(series: Sequence[Series]) -> list[Gallery]:
    """The same images seen by one run of every series: the most data, the lowest seed."""
    seen: list[tuple[str, Pictures]] = []
    for one in series:
        run = one.at(one.fractions[-1])[0]
        pictures = run.pictures()
        if pictures is not None and pictures.layers:
            label = f"{one.label}, {wording.percent(run.fraction)} of the images, seed {run.seed}"
            seen.append((label, pictures))
    if not seen:
        return []
    first = seen[0][1]
    galleries = []
    for image in range(min(SHOWN_IMAGES, len(first.images))):
        # Another model may have been shown other images; those are no comparison.
        alike = [
            (label, pictures)
            for label, pictures in seen
            if len(pictures.images) > image
            and pictures.images[image].shape == first.images[image].shape
            and (pictures.images[image] == first.images[image]).all()
        ]
        models = [
            (
                label,
                pictures.predictions[image],
                maps.picture_rows(
                    pictures,
                    image,
                    maps.chosen_layers(len(pictures.layers), SHOWN_LAYERS),
                    SHOWN_HEADS,
                ),
            )
            for label, pictures in alike
        ]
        galleries.append(
            Gallery(
                maps.data_address(first.images[image]),
                first.labels[image],
                maps.query_box(first.layers[0]),
                models,
            )
        )
    return galleries


def _row(one: Series, fraction: float) -> dict[str, Any]:
    """One line of the results table."""
    runs = one.at(fraction)
    result = runs[0].result
    return {
        "fraction": fraction,
        "images": result["train_images"],
        "label": one.label,
        "family": one.family,
        "model": one.model,
        "top1": wording.estimate_of(runs, "top1"),
        "top5": wording.estimate_of(runs, "top5"),
        "seeds": [run.seed for run in runs],
        "parameters": result["parameters"],
        "macs": result["macs"],
        "steps": result["steps"],
        "val_images": result["val_images"],
        "seconds": sum(float(run.result["seconds"]) for run in runs) / len(runs),
    }


# Told elsewhere on the page.
_SHOWN_APART = ("seed", "model.name", "data.fraction", "data.dataset")


def _common_settings(runs: Sequence[Run]) -> list[tuple[str, Any]]:
    """Settings that all runs share, by dotted name."""
    flat = [flatten(run.config) for run in runs]
    return [
        (name, value)
        for name, value in flat[0].items()
        if name not in _SHOWN_APART
        and all(name in other and other[name] == value for other in flat)
    ]


def _differing_settings(series: Sequence[Series]) -> list[tuple[str, list[Any]]]:
    """Settings in which series differ: name and one value per series."""
    flat = [flatten(one.runs[0].config) for one in series]
    names = dict.fromkeys(name for settings in flat for name in settings)
    return [
        (name, [settings.get(name) for settings in flat])
        for name in names
        if name not in _SHOWN_APART and len({repr(settings.get(name)) for settings in flat}) > 1
    ]


def _environments(runs: Sequence[Run]) -> list[tuple[dict[str, Any], int]]:
    """The distinct machines and versions that runs were made with, and how many runs each."""
    counted: dict[str, tuple[dict[str, Any], int]] = {}
    for run in runs:
        environment = {
            key: value for key, value in run.environment.items() if key not in ("seed", "starts")
        }
        start = (run.environment.get("starts") or [{}])[-1]
        environment |= {key: start[key] for key in ("device", "precision") if key in start}
        key = repr(sorted(environment.items()))
        counted[key] = (environment, counted.get(key, (environment, 0))[1] + 1)
    return list(counted.values())


def _shown(value: Any) -> str:
    """A setting's value for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "–"
    return str(value)


_FILTERS: dict[str, Any] = {
    "percent": wording.percent,
    "interval": wording.with_interval,
    "thousands": lambda number: f"{number:,.0f}",
    "millions": lambda number: f"{number / 1e6:.2f} M",
    "shown": _shown,
}
