"""How the attention of a run changed while it was trained.

Two ways lead here. A run may have been measured while it went on (`over_training.py`), which keeps
numbers and no weights; or it may have kept copies of its weights (`schedule.snapshot_every`), which
can be measured afterwards, as often as one likes and on any number of images.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from locality.analysis.over_training import read_history
from locality.analysis.samples import sample
from locality.analysis.summary import Record, measure_model
from locality.data import open_data
from locality.errors import UserError
from locality.training.plan import make_plan
from locality.training.runs import RunFolder, initial_model


def trajectory(folder: Path | str, images: int = 256) -> Record:
    """A run's attention over its training: as it was measured then, or else from its snapshots.

    Args and returns as `measure_trajectory`; `images` counts for snapshots alone.

    Raises:
        UserError: if it was neither measured nor kept snapshots.
    """
    recorded = recorded_trajectory(folder)
    if recorded is not None:
        return recorded
    if not has_snapshots(folder):
        raise UserError(
            f"run folder {folder} says nothing of its training: train with --measure_every, or "
            f"with schedule.snapshot_every set"
        )
    return measure_trajectory(folder, images)


def recorded_trajectory(folder: Path | str) -> Record | None:
    """A run's attention as it was measured while it went on; None if it was not."""
    history = read_history(folder)
    return _collected(history) if history else None


def has_snapshots(folder: Path | str) -> bool:
    """Whether a run kept copies of its weights."""
    return any((Path(folder) / "snapshots").glob("step-*.safetensors"))


def snapshot_files(folder: Path | str) -> dict[int, Path]:
    """The weights that a run kept along the way: finished steps → file, in order.

    Raises:
        UserError: if it kept none.
    """
    files = sorted((Path(folder) / "snapshots").glob("step-*.safetensors"))
    if not files:
        raise UserError(
            f"run folder {folder} has no snapshots of its weights; train with "
            f"schedule.snapshot_every set"
        )
    return {int(file.stem.partition("-")[2]): file for file in files}


def measure_trajectory(folder: Path | str, images: int = 256) -> Record:
    """The measures of every snapshot of a run on the same validation images.

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
    files = snapshot_files(folder)
    config = RunFolder(folder).config()
    splits = open_data(config.data, config.seed)
    model = initial_model(folder)
    plan = make_plan(config, len(splits.train))
    chosen = sample(splits.val, config.augment, model.img_size, images)

    def measured() -> Iterable[Record]:
        for step, file in files.items():
            model.load_state_dict(load_file(file))
            found = measure_model(model, chosen.images)
            yield {"step": step, "epoch": plan.epoch(step)} | found

    return _collected(list(measured()))


def _collected(records: list[Record]) -> Record:
    """Measures in order of time, turned into one curve per layer."""
    return {
        "images": records[0]["images"],
        "steps": [record["step"] for record in records],
        "epochs": [record["epoch"] for record in records],
        "layers": [
            _curves([record["layers"][index] for record in records])
            for index in range(len(records[0]["layers"]))
        ],
    }


def _curves(layers: list[Record]) -> dict[str, Any]:
    """One layer over time."""
    first = layers[0]
    return {
        "name": first["name"],
        "kind": first["kind"],
        "grid": first["grid"],
        "nonlocality": [layer["nonlocality"]["layer_mean"] for layer in layers],
        "nonlocality_per_head": [layer["nonlocality"]["mean"] for layer in layers],
        "gates": None if first["gates"] is None else [layer["gates"] for layer in layers],
    }
