"""Measuring the attention of a run and saving the results in its folder.

A run may be measured during training,

    train(config, folder, callback=AttentionRecorder(every=5))

which appends a line to `over_training.jsonl` for every measurement: an interrupted run loses none.
A finished run may be measured before and after training (`record`). Snapshots of its weights
(`schedule.snapshot_every`) may be measured later (`measure_trajectory`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from locality import checks
from locality.analysis.baselines import record_baselines
from locality.analysis.measures import Record, measure_model
from locality.analysis.pictures import (
    capture_pictures,
    sample,
    sample_at,
    save_pictures,
    validation_sample,
)
from locality.data import open_data
from locality.errors import UserError
from locality.files import parse_json, read_text, write_atomic
from locality.models import ImageClassifier
from locality.training.config import RunConfig
from locality.training.devices import resolve_accelerator
from locality.training.evaluation import PredictionCollector, evaluate_run
from locality.training.model import initial_model, load_run
from locality.training.optim import make_plan
from locality.training.resolved_run import ResolvedRun
from locality.training.run_folder import RunFolder

MEASURES = "measures.json"
PICTURES = "attention.npz"
MISTAKES = "mistakes.npz"
MAX_MISTAKES = 20
HISTORY = "over_training.jsonl"
_MAX_HISTORY_BYTES = 1 << 28


def record(folder: Path | str, images: int = 256, pictures: int = 6) -> Record:
    """Measure a run's model before and after training, and keep pictures of its attention.

    Writes `measures.json` (see `measure_model`; "before" is the model as its seed initialises it)
    and `attention.npz` (see `capture_pictures`) into the run folder, and `mistakes.npz`: its most
    confident mistakes with the last layer's attention. A run without predictions gets them now.
    Nothing else in its folder changes.

    Args:
        folder: of a finished run.
        images: how many validation images to measure on; all of them if there are fewer.
        pictures: how many of them to keep attention pictures of.

    Returns:
        the content of `measures.json`.

    Raises:
        UserError: if the folder is no run folder, or its run has not finished.
    """
    run = RunFolder(folder)
    if run.result() is None:
        raise UserError(f"run folder {folder} has no result.json: its run has not finished")
    model, config = load_run(folder)
    chosen = validation_sample(config, model.img_size, max(images, pictures))
    found = capture_pictures(model, chosen.first(pictures))
    save_pictures(found, Path(folder) / PICTURES)
    _record_mistakes(run, model, config)
    measures = {
        "before": measure_model(initial_model(folder), chosen.images[:images]),
        "after": measure_model(model, chosen.images[:images]),
    }
    write_atomic(run.path / MEASURES, json.dumps(measures, allow_nan=False) + "\n")
    return measures


def _record_mistakes(run: RunFolder, model: ImageClassifier, config: RunConfig) -> None:
    splits = open_data(config.data, config.seed)
    if not run.predictions_file.exists():
        collector = PredictionCollector(len(splits.val), torch.device("cpu"))
        evaluate_run(run.path, splits=splits, on_batch=collector)
        collector.write(run.predictions_file, splits.val, splits.classes)
    predictions = run.predictions()
    wrong = predictions.indices[predictions.mistakes(MAX_MISTAKES)]
    if len(wrong):
        size = config.input.at(model.img_size)
        found = capture_pictures(model, sample_at(splits.val, size, wrong, splits.classes), None)
        last = found.layers[-1]
        last = replace(last, mixed=last.mixed.mean(axis=1, keepdims=True), gates=None)
        save_pictures(replace(found, layers=[last]), run.path / MISTAKES)


def record_missing(folders: Iterable[Path]) -> None:
    """Measure those runs that have finished and were not measured yet, and their baselines."""
    finished = [run for run in map(RunFolder, folders) if run.result_file.exists()]
    for run in finished:
        if not (run.path / MEASURES).exists() or not run.predictions_file.exists():
            record(run.path)
    record_baselines(run.path for run in finished)


@dataclass
class AttentionRecorder:
    """A callback of `locality.training.train` that measures attention (Figs. 5, 6, 10, 13, 14).

    It measures before the first step, after the last, and every `every` epochs or steps between
    (the unit of the run's schedule). A measurement costs about one training step on as many images,
    so it stays under 2% of a run's time if `every` is more than 50 of those steps.

    Attributes:
        every: epochs or steps between two measurements.
        images: how many validation images to measure on; all of them if there are fewer.
    """

    every: float
    images: int = 64
    _seen: dict[Path, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        checks.number("measure_every", self.every, 0, above=True)
        checks.integer("measure_images", self.images, 1)

    def __call__(self, folder: Path, run: ResolvedRun, step: int, model: ImageClassifier) -> None:
        """Measure the model where it is due and write the result down."""
        if not run.plan.due_from_start(step, self.every):
            return
        started = time.perf_counter()
        if folder not in self._seen:
            _drop_partial_line(folder)
            chosen = sample(run.splits.val, run.config.input.at(model.img_size), self.images)
            self._seen[folder] = chosen.images.to(next(model.parameters()).device)
        measured = measure_model(model, self._seen[folder])
        entry = {
            "step": step,
            "epoch": run.plan.epoch(step),
            "seconds": round(time.perf_counter() - started, 4),
        }
        with (folder / HISTORY).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry | measured, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_history(folder: Path | str) -> list[Record]:
    """The measurements made during training, in order of steps; empty if there are none.

    A record is that of `measure_model` with `step`, `epoch` and the `seconds` it took. Where a
    resumed run measured a step again, the later record counts; a line that a killed process left
    half-written does not.

    Raises:
        UserError: if the file holds something else.
    """
    path = Path(folder) / HISTORY
    if not path.exists():
        return []
    records = [parse_json(line, str(path)) for line in _complete_lines(path)]
    checks.shaped(str(path), records, [{"step": int, "epoch": float, "layers": [dict]}])
    by_step = {record["step"]: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _drop_partial_line(folder: Path) -> None:
    """Remove a half-written last line, so that the next one begins on its own."""
    path = folder / HISTORY
    if path.exists():
        write_atomic(path, "".join(f"{line}\n" for line in _complete_lines(path)))


def _complete_lines(path: Path) -> list[str]:
    return read_text(path, _MAX_HISTORY_BYTES).split("\n")[:-1]


def trajectory(folder: Path | str) -> Record:
    """A run's attention over training, as measured during it or else from snapshots.

    Returns as `measure_trajectory`.

    Raises:
        UserError: if it was neither measured nor kept snapshots.
    """
    return recorded_trajectory(folder) or measure_trajectory(folder)


def recorded_trajectory(folder: Path | str) -> Record | None:
    """A run's attention as measured during training; None if it was not."""
    history = read_history(folder)
    return _to_curves(history) if history else None


def measure_trajectory(folder: Path | str, images: int = 256) -> Record:
    """The measures of every snapshot of a run on the same validation images, on a GPU if any.

    Args:
        folder: of the run.
        images: how many images; all of them if there are fewer.

    Returns:
        {"images": n, "steps": […], "epochs": […], "layers": [one record per
        attention layer]}. A layer's record has `name`, `kind` and `grid`, and one entry per
        snapshot in `nonlocality` (mean over heads and images, Eq. 8), `nonlocality_per_head` and
        `gates` (σ(λ) per head; None where there is none).

    Raises:
        UserError: if the run kept no snapshots.
    """
    files = sorted(RunFolder(folder).snapshots.glob("step-*.safetensors"))
    if not files:
        raise UserError(
            f"run folder {folder} has no record of its attention over training; train with "
            f"--measure_every or schedule.snapshot_every"
        )
    config = RunFolder(folder).config()
    splits = open_data(config.data, config.seed)
    device = torch.device(resolve_accelerator("auto"))
    model = initial_model(folder).to(device)
    plan = make_plan(config, len(splits.train))
    chosen = sample(splits.val, config.input.at(model.img_size), images).images.to(device)

    def measured() -> Iterable[Record]:
        for file in files:
            model.load_state_dict(load_file(file))
            step = int(file.stem.partition("-")[2])
            yield {"step": step, "epoch": plan.epoch(step)} | measure_model(model, chosen)

    return _to_curves(list(measured()))


def _to_curves(records: list[Record]) -> Record:
    """Measurements in order of time as one curve per layer."""
    over_time = zip(*(record["layers"] for record in records), strict=True)
    return {
        "images": records[0]["images"],
        "steps": [record["step"] for record in records],
        "epochs": [record["epoch"] for record in records],
        "layers": [
            {name: layers[0][name] for name in ("name", "kind", "grid")}
            | {
                "nonlocality": [layer["nonlocality"]["layer_mean"] for layer in layers],
                "nonlocality_per_head": [layer["nonlocality"]["mean"] for layer in layers],
                "gates": layers[0]["gates"] and [layer["gates"] for layer in layers],
            }
            for layers in over_time
        ],
    }
