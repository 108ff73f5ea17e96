"""Measure the attention of a run and save the results in its folder.

`record` measures a finished run before and after training, and during training if it saved
snapshots of its weights (`schedule.snapshot_every`).
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from locality.analysis.baselines import record_baselines
from locality.analysis.measures import Record, measure_model
from locality.analysis.pictures import (
    Pictures,
    capture_pictures,
    readable,
    sample,
    sample_at,
    save_pictures,
)
from locality.data import DataSplits, train_loader
from locality.data.config import InputConfig
from locality.data.sources import ImageFingerprint, has_files
from locality.errors import UserError, one_line
from locality.files import read_shaped, write_atomic
from locality.machine import arithmetic_threads, spare_threads
from locality.models import ImageClassifier
from locality.runs import Run
from locality.training.config import RunConfig, read_config
from locality.training.devices import resolve_accelerator
from locality.training.evaluation import PredictionCollector, evaluate_run
from locality.training.model import initial_model, load_run, open_run_data
from locality.training.optim import make_plan

PICTURES = "attention.npz"
MISTAKES = "mistakes.npz"
AUGMENTED = "augmented.npz"
MAX_MISTAKES = 20
TRAJECTORY = "over_training.json"

_PLACES = ("name", "kind", "grid", "key_grid", "key_stride", "key_offset")
_CURVES = {"grid": [int], "nonlocality": [float], "gates?": [[float]]}


def record(folder: Path | str, images: int = 256, pictures: int = 6) -> Record:
    """Measure a run's model before and after training, and save pictures of its attention.

    Writes into the run folder:

    - `measures.json`, see `measure_model`; "before" is the model as initialised by its seed;
    - `attention.npz`, see `capture_pictures`;
    - `mistakes.npz`: the most confident mistakes with the last layer's attention;
    - `augmented.npz`: the first training images as augmented, before mixing;
    - `over_training.json`, see `measure_trajectory`, if the run has snapshots;
    - predictions, if missing.

    Args:
        folder: folder of a finished run.
        images: number of validation images to measure on; at most all of them.
        pictures: number of images to save attention pictures of.

    Returns:
        the content of `measures.json`.

    Raises:
        UserError: `folder` is not a run folder, the run has not finished, or its images have
            changed.
    """
    run = Run(folder)
    if run.read_result() is None:
        raise UserError(f"the run in {folder} has not finished: it has no result.json")
    model, config = load_run(folder)
    splits = open_run_data(folder)
    if run.images_file.exists() and not has_files(run.images_file, splits):
        changes = ImageFingerprint.of(splits).differences(run.images_file)
        raise UserError(f"its images have changed ({changes}); restore them")
    preprocessing = config.input.at(model.img_size)
    if int(run.result["steps"]):
        save_pictures(augmented(config, splits, pictures), run.path / AUGMENTED)
    _record_predictions(run, splits)
    val = readable(run, splits.val)
    few = sample(val, preprocessing, pictures, splits.classes)
    save_pictures(capture_pictures(model, few), run.path / PICTURES)
    _record_mistakes(run, model, splits, preprocessing)
    if _snapshots(run):
        curves = json.dumps(measure_trajectory(folder, images), allow_nan=False)
        write_atomic(run.path / TRAJECTORY, curves + "\n")
    chosen = sample(val, preprocessing, images).images
    measures = {
        "before": measure_model(initial_model(folder), chosen),
        "after": measure_model(model, chosen),
    }
    write_atomic(run.measures_file, json.dumps(measures, allow_nan=False) + "\n")
    return measures


def augmented(config: RunConfig, splits: DataSplits, count: int) -> Pictures:
    """The first training images of a run as its first step saw them, before mixing."""
    preprocessing = config.input.at(config.model.img_size)
    loader = train_loader(
        *(splits.train, config.augment, preprocessing),
        batch_size=min(count, len(splits.train)),
        seed=config.seed,
        stop_step=1,
        **config.data.loading(training=True) | {"workers": 0},
    )
    batch = next(iter(loader))
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (preprocessing.mean, preprocessing.std))
    pixels = (255 * (batch.images * std + mean)).round().clamp(0, 255).to(torch.uint8)
    labels = [splits.classes[label] for label in batch.targets.tolist()]
    return Pictures(pixels.permute(0, 2, 3, 1).numpy(), labels, [], [])


def _record_predictions(run: Run, splits: DataSplits) -> None:
    if not run.predictions_file.exists():
        collector = PredictionCollector(len(splits.val), torch.device("cpu"))
        evaluate_run(run.path, splits=splits, on_batch=collector)
        collector.predictions(splits.val, splits.classes).write(run.predictions_file)


def _record_mistakes(
    run: Run, model: ImageClassifier, splits: DataSplits, preprocessing: InputConfig
) -> None:
    predictions = run.predictions()
    wrong = predictions.indices[predictions.mistakes(MAX_MISTAKES)]
    if len(wrong):
        chosen = sample_at(splits.val, preprocessing, wrong, splits.classes)
        captured = capture_pictures(model, chosen, None)
        last = captured.layers[-1]
        last = replace(last, mixed=last.mixed.mean(axis=1, keepdims=True), gates=None)
        save_pictures(replace(captured, layers=[last]), run.path / MISTAKES)


def record_missing(folders: Iterable[Path]) -> list[str]:
    """Measure finished runs that were not measured yet, and their baselines.

    Returns:
        a sentence on each run that cannot be measured, such as a CNN's.
    """
    refused = []
    finished = [run for run in map(Run, folders) if run.is_finished]
    with arithmetic_threads(spare_threads()):
        for run in finished:
            wanted = [run.measures_file, run.predictions_file]
            wanted += [run.path / TRAJECTORY] if _snapshots(run) else []
            if not all(file.exists() for file in wanted):
                try:
                    record(run.path)
                except (OSError, UserError) as error:
                    refused.append(f"{run.path}: {one_line(error)}")
        record_baselines(run.path for run in finished)
    return refused


def _snapshots(run: Run) -> list[Path]:
    return sorted(run.snapshots.glob("step-*.safetensors"))


def recorded_trajectory(folder: Path | str) -> Record | None:
    """A run's attention over training, as recorded by `record`; None if not recorded.

    Raises:
        UserError: the file has another format.
    """
    shape = {"steps": [int], "epochs": [float], "layers": [_CURVES]}
    return read_shaped(Path(folder) / TRAJECTORY, shape)


def measure_trajectory(folder: Path | str, images: int = 256) -> Record:
    """Measure all snapshots of a run on the same validation images, on a GPU if available.

    Args:
        folder: the run folder.
        images: number of images; at most all of them.

    Returns:
        {"images": n, "steps": […], "epochs": […], "layers": [one record per
        attention layer]}. A layer's record has `name`, `kind`, `grid`, `key_grid` and
        `key_stride`, and one entry per snapshot in `nonlocality` (mean over heads and images,
        Eq. 8), `nonlocality_per_head` and `gates` (σ(λ) per head; None without gates).

    Raises:
        UserError: the run has no snapshots.
    """
    files = _snapshots(Run(folder))
    if not files:
        raise UserError(
            f"run folder {folder} has no snapshots to measure attention over training; train with "
            f"--schedule.snapshot_every"
        )
    config = read_config(folder)
    splits = open_run_data(folder)
    device = torch.device(resolve_accelerator("auto"))
    model = initial_model(folder).to(device)
    plan = make_plan(config, len(splits.train))
    val = readable(Run(folder), splits.val)
    chosen = sample(val, config.input.at(model.img_size), images).images.to(device)

    records: list[Record] = []
    for file in files:
        model.load_state_dict(load_file(file))
        step = int(file.stem.partition("-")[2])
        records.append({"step": step, "epoch": plan.epoch(step)} | measure_model(model, chosen))
    over_time = zip(*(record["layers"] for record in records), strict=True)
    return {
        "images": records[0]["images"],
        "steps": [record["step"] for record in records],
        "epochs": [record["epoch"] for record in records],
        "layers": [
            {name: layers[0][name] for name in _PLACES}
            | {
                "nonlocality": [layer["nonlocality"]["layer_mean"] for layer in layers],
                "nonlocality_per_head": [layer["nonlocality"]["mean"] for layer in layers],
                "gates": layers[0]["gates"] and [layer["gates"] for layer in layers],
            }
            for layers in over_time
        ],
    }
