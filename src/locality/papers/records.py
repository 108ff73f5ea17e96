"""An experiment's outcome as plain values: what is written down and what pages are made of."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locality import __version__
from locality.analysis.runs import RecordedRun
from locality.analysis.statistics import estimate
from locality.files import read_yaml
from locality.papers import published
from locality.papers.measures import Empty, Failures, Quantity, Untestable, Values
from locality.papers.published import Published
from locality.papers.scales import Scale
from locality.papers.specs import Claim, Experiment, Figure, Panel, Series, Spec, Table
from locality.papers.verdicts import NOT_RUN, UNTESTABLE, judge
from locality.runner.runs import Run

Record = dict[str, Any]

DEFINITION = 2
"""Raised when experiments come to mean something else; records keep the one they were made by."""

REDEFINED: dict[str, str] = read_yaml(Path(__file__).with_name("redefined.yaml"))
"""What records of the first definition mean otherwise, by experiment; all others mean the same."""


def make_record(item: Experiment, spec: Spec, scale: Scale, failures: Failures) -> Record:
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
        "definition": DEFINITION,
        "name": item.name,
        "title": item.title,
        "kind": "table" if isinstance(spec, Table) else "figure",
        "scale": scale.name,
        "scale_about": scale.about,
        "comparable": scale.comparable,
        "about": spec.about,
    }
    if isinstance(spec, Table):
        record["columns"] = [vars(column) for column in spec.columns.values()]
        record["rows"] = [
            {
                "label": row.label,
                "cells": [
                    _cell(
                        row.cells.get(metric),
                        published.find(item.name, row.printed_row, metric),
                        failures,
                    )
                    for metric in spec.columns
                ],
            }
            for row in spec.rows
        ]
    elif isinstance(spec, Figure):
        record["panels"] = [_panel(panel, failures) for panel in spec.panels]
        record["empty"] = _why_not_drawn(spec, failures)
    record["claims"] = [decided(claim, failures) for claim in spec.claims]
    record["provenance"] = provenance(spec.runs)
    return record


def _cell(
    quantity: Quantity | None, printed: Published | None, failures: Failures
) -> Record | None:
    if quantity is None:
        return None
    names = ("value", "protocol", "note")
    paper = None if printed is None else {name: getattr(printed, name) for name in names}
    try:
        values = quantity.evaluate(failures)
    except Empty as error:
        return {"paper": paper, "empty": str(error)}
    rest = {"problems": list(values.problems), "empty": None}
    return {"paper": paper} | _measured(values) | rest


def _panel(panel: Panel, failures: Failures) -> Record:
    axes = {name: value for name, value in vars(panel).items() if name != "series"}
    return axes | {"series": [_series(series, failures) for series in panel.series]}


def _series(series: Series, failures: Failures) -> Record:
    line = {name: value for name, value in vars(series).items() if name != "quantity"}
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


def _why_not_drawn(spec: Figure, failures: Failures) -> str | None:
    """For a drawing: what is missing for it."""
    for run in spec.drawn:
        reason = failures.get(run.folder) or (None if run.is_finished() else "not run yet")
        if reason is not None:
            return f"{run.name}: {reason}"
    return None


def decided(claim: Claim, failures: Failures) -> Record:
    """A claim with what it rests on, seed by seed, and its verdict taken alone."""
    content: Record = {
        "text": claim.text,
        "where": claim.where,
        "expects": "above" if claim.margin is None else "equal",
        "margin": claim.margin or 0.0,
        "unit": claim.quantity.unit,
    }
    try:
        values = claim.quantity.evaluate(failures)
    except Empty as error:
        verdict = UNTESTABLE if isinstance(error, Untestable) else NOT_RUN
        return content | {"verdict": verdict, "empty": str(error)}
    content |= _measured(values) | {"exact": not claim.quantity.runs, "empty": None}
    return content | {"verdict": judge(content)[0]}


def _measured(values: Values) -> Record:
    """Mean and interval, and the values they come from."""
    found = values.estimate()
    by_seed = {str(seed): value for seed, value in values.by_seed.items()}
    return {"mean": found.mean, "half_width": found.half_width, "n": found.n, "by_seed": by_seed}


def provenance(runs: Sequence[Run]) -> Record:
    """With what, where and when some runs were computed, from what they left in their folders."""
    finished = [run for run in runs if run.is_finished()]
    environments = [RecordedRun(run.folder, {}).environment for run in finished]
    results = [run.result() or {} for run in finished]
    times = [start["time"] for each in environments for start in each.get("starts", [])]

    def distinct(key: str) -> list[Any]:
        found = [each[key] for each in environments if each.get(key) is not None]
        return list({json.dumps(value): value for value in found}.values())

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
