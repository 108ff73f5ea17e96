"""An experiment's outcome as plain values: what is written down and what pages are made of."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

from locality._version import __version__
from locality.analysis.runs import RecordedRun
from locality.analysis.statistics import Estimate, estimate
from locality.papers import published
from locality.papers.measures import Empty, Failures, Quantity
from locality.papers.published import Published
from locality.papers.scales import Scale
from locality.papers.specs import Claim, Experiment, Figure, Panel, Series, Spec, Table
from locality.runner.runs import Run

Record = dict[str, Any]

HOLDS = "holds"
FAILS = "does not hold"
UNDECIDED = "cannot tell at this scale"
NOT_RUN = "not run"
VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN)
LEAST_SEEDS = 3


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
    else:
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
    found = values.estimate()
    return {
        "paper": paper,
        "mean": found.mean,
        "half_width": found.half_width,
        "n": found.n,
        "by_seed": {str(seed): value for seed, value in values.by_seed.items()},
        "problems": list(values.problems),
        "empty": None,
    }


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
    for run in spec.drawing.runs if spec.drawing is not None else ():
        reason = failures.get(run.folder) or (None if run.is_finished() else "not run yet")
        if reason is not None:
            return f"{run.name}: {reason}"
    return None


def decided(claim: Claim, failures: Failures) -> Record:
    """A claim with its verdict and the number it rests on, as plain values."""
    content: Record = {
        "text": claim.text,
        "expects": "above" if claim.margin is None else "equal",
        "margin": claim.margin or 0.0,
        "unit": claim.quantity.unit,
    }
    try:
        found = claim.quantity.evaluate(failures).estimate()
    except Empty as error:
        return content | {"verdict": NOT_RUN, "empty": str(error)}
    return content | {
        "verdict": verdict(claim, found),
        "mean": found.mean,
        "half_width": found.half_width,
        "n": found.n,
        "empty": None,
    }


def verdict(claim: Claim, found: Estimate) -> str:
    """Whether a claim of a paper holds here: by a rule, not by eye.

    A claim is about one number: a difference that should be above 0, or one that should be within
    ± a margin of it. The number has a mean and a 95% interval over seeds, differences taken seed by
    seed. "Above 0" holds if the whole interval is above 0 and does not hold if the whole interval
    is below; "within the margin" holds if the whole interval is inside and does not hold if the
    whole interval is outside. Everything else cannot be told at this scale, and neither can
    anything from fewer than three seeds.
    """
    low, high, margin = found.low, found.high, claim.margin
    if low is None or high is None or found.n < LEAST_SEEDS:
        return UNDECIDED
    if margin is None:
        return HOLDS if low > 0 else FAILS if high < 0 else UNDECIDED
    if -margin <= low and high <= margin:
        return HOLDS
    return FAILS if low > margin or high < -margin else UNDECIDED


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
