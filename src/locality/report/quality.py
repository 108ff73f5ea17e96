"""What the report of a single run shows: where it errs, how sure it is, what it learned from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from locality import checks
from locality.analysis.pictures import data_address, load_pictures
from locality.analysis.recording import MISTAKES, MOST_MISTAKES
from locality.analysis.runs import RecordedRun
from locality.data.checking import duplicates
from locality.figures import charts, maps
from locality.files import read_json, read_rows
from locality.training.evaluation import Predictions
from locality.training.runs import RunFolder

_MOST_CLASSES = 20
"""In the confusion matrix, which has to be readable on a phone, and in the table."""


def single_run(run: RecordedRun) -> dict[str, Any]:
    """What the template shows of a report's only run; figures and plain values.

    Raises:
        UserError: if a file in its folder is damaged.
    """
    folder = RunFolder(run.folder)
    evaluated = [row for row in run.curve if {"step", "top1"} <= row.keys()]
    best = max(evaluated, key=lambda row: row["top1"], default=None)
    found: dict[str, Any] = {
        "best": best,
        "kept_step": run.result.get("best_step", run.result.get("steps")),
        "curves": [
            charts.chart(charts.draw_curves, run, columns, best, y_label)
            for columns, y_label in (
                ({"train_top1": "training", "top1": "validation"}, "top-1 accuracy (%)"),
                ({"train_loss": "training", "val_loss": "validation"}, "loss"),
            )
        ],
        "seconds": run.result.get("seconds"),
        "eval_seconds": sum(row.get("eval_seconds", 0) for row in run.timing),
        "skipped": read_rows(folder.skipped_file) if folder.skipped_file.exists() else [],
        "duplicates": duplicates(folder.images_file) if folder.images_file.exists() else None,
        "predictions": None,
        "unread": 0,
    }
    if folder.predictions_file.exists():
        found |= _from_predictions(run, folder.predictions())
    return found


def _from_predictions(run: RecordedRun, predictions: Predictions) -> dict[str, Any]:
    rows = predictions.per_class()
    counts_file = RunFolder(run.folder).counts_file
    counts = read_json(counts_file) if counts_file.exists() else {}
    checks.shaped(str(counts_file), list(counts.values()), [int])
    for name, row in zip(predictions.classes, rows, strict=True):
        row |= {"name": name, "train_images": counts.get(name)}
    errors = [row["images"] + row["called"] - 2 * row["right"] for row in rows]
    shown = sorted(np.argsort(np.negative(errors), kind="stable")[:_MOST_CLASSES].tolist())
    table, error = predictions.calibration()
    names = [predictions.classes[number] for number in shown]
    worst = sorted(
        (row for row in rows if row["images"]), key=lambda row: row["right"] / row["images"]
    )
    return {
        "predictions": predictions,
        "unread": int(run.result["val_images"]) - len(predictions.labels),
        "rows": worst[:_MOST_CLASSES],
        "confusion": charts.chart(charts.draw_confusion, predictions.confusion(shown), names),
        "confused_classes": len(shown),
        "calibration": charts.chart(charts.draw_calibration, table),
        "calibration_error": 100 * error,
        "mistakes": _mistakes(run, predictions),
    }


def _mistakes(run: RecordedRun, predictions: Predictions) -> list[dict[str, Any]]:
    """The most confident mistakes, those with pictures where the instruments took some."""
    path = run.folder / MISTAKES
    taken = load_pictures(path) if path.exists() else None
    return [
        {
            "file": Path(predictions.paths[row]).name,
            "label": predictions.classes[predictions.labels[row]],
            "says": predictions.classes[predictions.predicted[row]],
            "confidence": predictions.confidence[row],
            "image": None if taken is None else data_address(taken.images[place]),
            "map": None
            if taken is None
            else data_address(maps.coloured(taken.layers[-1].mixed[place, 0])),
        }
        for place, row in enumerate(predictions.mistakes(MOST_MISTAKES))
        if taken is None or place < len(taken.images)
    ]
