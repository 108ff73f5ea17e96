"""Running the instruments on a finished run, and leaving what they found in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from locality.analysis.pictures import Pictures, save_pictures, take_pictures
from locality.analysis.samples import validation_sample
from locality.analysis.summary import Record, measure_model
from locality.checkpoints.reading import read_json
from locality.errors import UserError
from locality.files import write_atomic
from locality.training.runs import RunFolder, initial_model, load_run

MEASURES = "measures.json"
PICTURES = "attention.npz"


def record(folder: Path | str, images: int = 256, pictures: int = 6) -> Record:
    """Measure a run's model before and after training, and keep pictures of its attention.

    Writes `measures.json` (see `measure_model`; "before" is the model as its seed initialises it)
    and `attention.npz` (see `take_pictures`) into the run folder. Nothing else in it changes.

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
    found = take_pictures(model, chosen.first(pictures))
    save_pictures(found, Path(folder) / PICTURES)
    initial = initial_model(folder)
    return add_measures(
        folder,
        {
            "before": measure_model(initial, chosen.images[:images]),
            "after": measure_model(model, chosen.images[:images]),
        },
    )


def run_pictures(folder: Path | str, count: int, trained: bool = True) -> Pictures:
    """What the heads of a run's model look at from the centre of its first validation images.

    Args:
        folder: of the run.
        count: how many images.
        trained: whether to look at the model it ended with or at the one it started from.
    """
    model, config = load_run(folder)
    model = model if trained else initial_model(folder)
    return take_pictures(model, validation_sample(config, model.img_size, count))


def read_measures(folder: Path | str) -> Record:
    """The content of a run's `measures.json`; empty if nothing was measured yet.

    Raises:
        UserError: if the file is damaged.
    """
    path = Path(folder) / MEASURES
    return read_json(path) if path.exists() else {}


def add_measures(folder: Path | str, entries: dict[str, Any]) -> Record:
    """Add or replace entries of a run's `measures.json`, atomically; returns all of them."""
    content = read_measures(folder) | entries
    write_atomic(Path(folder) / MEASURES, json.dumps(content, allow_nan=False) + "\n")
    return content
