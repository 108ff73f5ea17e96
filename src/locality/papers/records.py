"""An experiment's outcome as plain values: what is written down and what pages are made of."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locality._version import __version__
from locality.analysis.statistics import Estimate, estimate
from locality.papers.claims import judged
from locality.papers.quantities import Empty, Quantity, Values
from locality.papers.scales import Scale
from locality.papers.specs import Cell, Experiment, Figure, Panel, Series, Spec, Table
from locality.runner.runs import Run

Record = dict[str, Any]


def make_record(item: Experiment, spec: Spec, scale: Scale, failures: Mapping[Path, str]) -> Record:
    """Evaluate a spec on the runs that are finished.

    Args:
        item: the experiment.
        spec: what it asks for at `scale`.
        scale: where.
        failures: why runs failed, by folder.

    Returns:
        plain values: `columns` and `rows` of a table or `panels` of a figure, `claims` with their
        verdicts, and `provenance`.
    """
    record: Record = {
        "name": item.name,
        "title": item.title,
        "kind": "table" if isinstance(spec, Table) else "figure",
        "scale": scale.name,
        "scale_about": scale.about,
        "comparable": scale.comparable,
        "about": spec.about,
    }
    if isinstance(spec, Table):
        record["columns"] = [vars(column) for column in spec.columns]
        record["rows"] = [
            {"label": row.label, "cells": [_cell(cell, failures) for cell in row.cells]}
            for row in spec.rows
        ]
    else:
        record["panels"] = [_panel(panel, failures) for panel in spec.panels]
        record["empty"] = _why_not_drawn(spec, failures)
    record["claims"] = [judged(claim, failures) for claim in spec.claims]
    record["provenance"] = provenance(spec.runs)
    return record


def _cell(cell: Cell | None, failures: Mapping[Path, str]) -> Record | None:
    if cell is None:
        return None
    printed = cell.published
    content: Record = {
        "paper": None
        if printed is None
        else {"value": printed.value, "protocol": printed.protocol, "note": printed.note}
    }
    return content | _number(cell.quantity, failures)


def _number(quantity: Quantity, failures: Mapping[Path, str]) -> Record:
    try:
        values = quantity.evaluate(failures)
    except Empty as error:
        return {"empty": str(error)}
    return described(values.estimate(), values) | {"empty": None}


def described(found: Estimate, values: Values) -> Record:
    """An estimate and the values it comes from."""
    return {
        "mean": found.mean,
        "half_width": found.half_width,
        "n": found.n,
        "by_seed": {str(seed): value for seed, value in values.by_seed.items()},
        "problems": list(values.problems),
    }


def _panel(panel: Panel, failures: Mapping[Path, str]) -> Record:
    return {
        "title": panel.title,
        "x_label": panel.x_label,
        "y_label": panel.y_label,
        "log_x": panel.log_x,
        "scatter": panel.scatter,
        "series": [_series(series, failures) for series in panel.series],
    }


def _series(series: Series, failures: Mapping[Path, str]) -> Record:
    line: Record = {
        "label": series.label,
        "colour": series.colour,
        "dashed": series.dashed,
        "band": series.band,
    }
    try:
        values = series.quantity.evaluate(failures)
    except Empty as error:
        return line | {"empty": str(error)}
    curves = list(values.by_seed.values())
    at = [estimate(list(column)) for column in zip(*(c["y"] for c in curves), strict=True)]
    return line | {
        "empty": None,
        "x": curves[0]["x"],
        "mean": [each.mean for each in at],
        "half_width": [each.half_width for each in at],
        "n": len(curves),
        "problems": list(values.problems),
    }


def _why_not_drawn(spec: Figure, failures: Mapping[Path, str]) -> str | None:
    """For a drawing: what is missing for it."""
    if spec.drawing is None:
        return None
    for run in spec.drawing.runs:
        if run.folder in failures:
            return f"{run.name}: {failures[run.folder]}"
        if not run.is_finished():
            return f"{run.name}: not run yet"
    return None


def provenance(runs: list[Run]) -> Record:
    """With what, where and when some runs were computed, from what they left in their folders."""
    finished = [run for run in runs if run.is_finished()]
    environments = [_environment(run) for run in finished]
    results = [run.result() or {} for run in finished]
    times = [start["time"] for each in environments for start in each.get("starts", [])]

    def distinct(*keys: str) -> list[Any]:
        found: dict[str, Any] = {}
        for environment in environments:
            value: Any = environment
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                found[json.dumps(value)] = value
        return list(found.values())

    return {
        "locality": __version__,
        "runs": len(runs),
        "finished": len(finished),
        "seeds": sorted({run.config.seed for run in finished}),
        "training_seconds": round(sum(result.get("seconds") or 0.0 for result in results), 1),
        "commits": distinct("commit"),
        "packages": distinct("packages"),
        "python": distinct("python"),
        "processors": distinct("processor"),
        "gpus": [gpus for gpus in distinct("gpus") if gpus],
        "threads": distinct("threads"),
        "first": min(times, default=None),
        "last": max(times, default=None),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _environment(run: Run) -> dict[str, Any]:
    path = run.folder / "environment.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
