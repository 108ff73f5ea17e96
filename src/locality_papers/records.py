"""An experiment's results as plain values.

For each question a record keeps the effect that answers it: `mean`, `half_width` over seeds, `n`,
the values `by_seed`, `exact` (needs no run), `images` (standard error over the evaluated images),
and `paper` (the paper's effect). `locality_papers.answers` turns effects into answers.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any

from locality import __version__
from locality.analysis.statistics import mean_curve
from locality.runner.runs import Run
from locality.runs import RunFolder
from locality_papers.measures import EMPTY, Failures, Quantity, Values, why_missing
from locality_papers.published import PUBLISHED, as_computed
from locality_papers.scales import Scale
from locality_papers.specs import Experiment, Figure, Panel, Spec, Table, printed_row

Record = dict[str, Any]


def make_record(item: Experiment, spec: Spec, scale: Scale, failures: Failures) -> Record:
    """Evaluate a spec on the finished runs.

    Args:
        item: the experiment.
        spec: its specification at `scale`.
        scale: the scale.
        failures: why runs failed, by folder.

    Returns:
        plain values: `columns` and `rows` of a table or `panels` of a figure, `questions` with the
        effects that answer them, and `provenance`.
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
        record["rows"] = []
        for label, of in spec.cells.items():
            place = item.name, printed_row(label, spec.rows)
            cells = [_cell(of.get(metric), (*place, metric), failures) for metric in spec.columns]
            record["rows"].append({"label": label, "cells": cells})
    elif isinstance(spec, Figure):
        record["panels"] = [_panel(panel, failures) for panel in spec.panels]
        missing = ((run.name, why_missing(run, failures)) for run in spec.drawn)
        record["empty"] = next((f"{name}: {reason}" for name, reason in missing if reason), None)
    record["questions"] = [
        {"text": text, "where": where} | _effect(effect, failures)
        for where, of in spec.questions.items()
        for text, effect in of.items()
    ]
    record["provenance"] = provenance(spec.runs)
    return record


def _cell(
    quantity: Quantity | None, place: tuple[str, str, str], failures: Failures
) -> Record | None:
    if quantity is None:
        return None
    printed = PUBLISHED.get(place)
    if printed is None and quantity.paper is not None:
        printed = as_computed(place[0], quantity.paper)
    paper = None if printed is None else printed._asdict()
    return {"paper": paper} | _evaluated(quantity, failures, _measured)


def _evaluated(quantity: Quantity, failures: Failures, shown: Callable[[Values], Record]) -> Record:
    """A quantity's values as shown in a record, or the reason why there are none."""
    try:
        values = quantity.evaluate(failures)
    except EMPTY as error:
        return {"empty": str(error)}
    return shown(values) | {"problems": list(values.problems), "empty": None}


def _panel(panel: Panel, failures: Failures) -> Record:
    def curve(values: Values) -> Record:
        return mean_curve(list(values.by_seed.values()), partial=True)

    lines = [vars(series) | _evaluated(series.quantity, failures, curve) for series in panel.series]
    for line in lines:
        del line["quantity"]
    axes = {name: value for name, value in vars(panel).items() if name != "series"}
    return axes | {"series": lines}


def _effect(effect: Quantity, failures: Failures) -> Record:
    """The effect that answers a question, seed by seed."""

    def shown(values: Values) -> Record:
        return _measured(values) | {"exact": not effect.runs, "images": values.image_error()}

    paper = None if effect.paper is None else round(effect.paper, 6)
    return {"unit": effect.unit, "paper": paper} | _evaluated(effect, failures, shown)


def _measured(values: Values) -> Record:
    """Mean, interval and values by seed."""
    found = values.estimate()
    by_seed = {str(seed): value for seed, value in values.by_seed.items()}
    return {"mean": found.mean, "half_width": found.half_width, "n": found.n, "by_seed": by_seed}


def provenance(runs: Sequence[Run]) -> Record:
    """Versions, hardware and times of runs, from the files in their folders."""
    finished = [run for run in runs if run.is_finished()]
    environments = [RunFolder(run.folder).environment() for run in finished]
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
