"""Opening whatever a command was given: a run folder, weights, a public name, an ONNX graph."""

from __future__ import annotations

from pathlib import Path

from locality.checkpoints import Classifier, Preprocessing, open_model
from locality.training import RunFolder, load_run


def open_anything(what: str, model: str | None = None) -> Classifier:
    """A classifier from a run folder, weights in any layout, a public name or an ONNX graph.

    Args:
        what: path or name.
        model: the architecture's name, for weights that do not tell it.

    Raises:
        FileNotFoundError, UserError: if it cannot be opened, naming it and the cause.
    """
    return open_model(what, open_run=_open_run, model=model)


def _open_run(folder: Path) -> Classifier:
    model, config = load_run(folder)
    augment = config.augment
    preprocessing = Preprocessing(
        img_size=model.img_size,
        mean=augment.mean,
        std=augment.std,
        interpolation=augment.interpolation,
        crop_pct=augment.crop_pct,
        crop_mode=augment.crop_mode,
    )
    return Classifier.of(model, folder.name, preprocessing, RunFolder(folder).classes())
