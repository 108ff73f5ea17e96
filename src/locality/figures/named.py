"""The papers' figures, each a function; `locality.figures.FIGURES` names them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from locality.analysis.pictures import prepared, take_pictures
from locality.analysis.recording import trajectory
from locality.analysis.runs import group, read_runs
from locality.checkpoints import Classifier
from locality.errors import UserError
from locality.figures import maps
from locality.figures.charts import percent
from locality.figures.curves import draw, gate_panels, nonlocality_panels
from locality.models import build


def _measured(folders: Sequence[Path | str]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Runs measured over training: a label, and a record for each seed.

    Raises:
        UserError: if a folder holds no run, or one says nothing of its training.
    """
    groups = group(read_runs(folders))
    fractions = {fraction for one in groups for fraction in one.fractions}
    return [
        (
            one.label + (f", {percent(part)} of the images" if len(fractions) > 1 else ""),
            [trajectory(run.folder) for run in one.at(part)],
        )
        for one in groups
        for part in one.fractions
    ]


def nonlocality(folders: Sequence[Path | str]) -> Figure:
    """How far every layer looks, over training (Figs. 5, 10, 13)."""
    return draw(nonlocality_panels(_measured(folders)))


def gates(folders: Sequence[Path | str]) -> Figure:
    """Every gate over training (Figs. 6, 14).

    Raises:
        UserError: if the runs have none, or differ in more than their seed.
    """
    panels = [(label, gate_panels(seeds)) for label, seeds in _measured(folders)]
    drawn = [each for each in panels if each[1]]
    if len(drawn) > 1:
        raise UserError(
            f"these runs differ in more than their seed: {'; '.join(label for label, _ in drawn)}. "
            f"Draw the gates of one model, with one set of settings, at a time"
        )
    if not drawn:
        raise UserError("none of these runs has gates; only ConViT has")
    return draw(drawn[0][1], f"Gates of {drawn[0][0]}")


def head_maps(
    models: Sequence[Classifier],
    images: Sequence[Image.Image],
    layers: Sequence[int] | None = None,
    heads: int = 4,
    place: tuple[float, float] = (0.5, 0.5),
    mean: bool = False,
) -> Figure:
    """Attention from one patch: of the first image, or the mean over all of them.

    Args:
        models: drawn side by side; each prepares the images in its own way.
        images: at least one.
        layers, heads: which; see `locality.figures.maps`.
        place: where to look from, as fractions of (height, width).
        mean: over all images.
    """
    chosen = images if mean else images[:1]
    taken = [
        (model.name, take_pictures(model.module(), prepared(model, chosen), place))
        for model in models
    ]
    return maps.maps(taken, layers, heads, image=None if mean else 0)


def initial_maps(images: Sequence[Image.Image], place: tuple[float, float] = (0.5, 0.5)) -> Figure:
    """Untrained layers of a ConViT-Ti on the first image, seen from `place` (Fig. 3)."""
    subject = Classifier.of(build("convit_tiny"))
    return maps.initial_maps(prepared(subject, images[:1]), "convit_tiny", {}, place)


mean_maps = partial(head_maps, mean=True)
