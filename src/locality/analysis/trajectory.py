"""How the attention of a run changed while it was trained, from the copies of its weights it kept.

Training knows nothing of instruments: a run that was asked to (`schedule.snapshot_every`) leaves
weights in its folder, and they are measured afterwards, all on the same images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from locality.analysis.samples import sample
from locality.analysis.summary import Record, measure_model
from locality.data import open_data
from locality.errors import UserError
from locality.training.plan import make_plan
from locality.training.runs import RunFolder, initial_model


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
        attention layer]}. A layer's record has `name` and `kind`, and one entry per snapshot in
        `nonlocality` (mean over heads and images, Eq. 8), `nonlocality_per_head` and `gates`
        (σ(λ) per head; None where there is none).

    Raises:
        UserError: if the run kept no snapshots.
    """
    run = RunFolder(folder)
    config = run.config()
    files = snapshot_files(folder)
    splits = open_data(config.data, config.seed)
    model = initial_model(folder)
    plan = make_plan(config, len(splits.train))
    chosen = sample(splits.val, config.augment, model.img_size, images)
    layers: list[dict[str, Any]] = []
    for file in files.values():
        model.load_state_dict(load_file(file))
        measured = measure_model(model, chosen.images)["layers"]
        if not layers:
            layers = [_empty(layer) for layer in measured]
        for kept, layer in zip(layers, measured, strict=True):
            kept["nonlocality"].append(layer["nonlocality"]["layer_mean"])
            kept["nonlocality_per_head"].append(layer["nonlocality"]["mean"])
            if kept["gates"] is not None:
                kept["gates"].append(layer["gates"])
    return {
        "images": len(chosen.images),
        "steps": list(files),
        "epochs": [plan.epoch(step) for step in files],
        "layers": layers,
    }


def _empty(layer: Record) -> dict[str, Any]:
    return {
        "name": layer["name"],
        "kind": layer["kind"],
        "grid": layer["grid"],
        "nonlocality": [],
        "nonlocality_per_head": [],
        "gates": None if layer["gates"] is None else [],
    }
