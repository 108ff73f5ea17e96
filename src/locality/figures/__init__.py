"""Figures from records: their look, curves, attention maps, charts; and the papers' by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

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


def _nonlocality(folders: Sequence[Path | str]) -> Figure:
    return draw(nonlocality_panels(_measured(folders)))


def _gates(folders: Sequence[Path | str]) -> Figure:
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


def _maps(
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


def _initial_maps(
    images: Sequence[Image.Image],
    strengths: Sequence[float] = (0.5, 2.0),
    place: tuple[float, float] = (0.5, 0.5),
) -> Figure:
    """Untrained layers of a ConViT-Ti on the first image (Fig. 3).

    Args:
        images: at least one.
        strengths, place: see `locality.figures.maps.initial_maps`.
    """
    subject = Classifier.of(build("convit_tiny"))
    return maps.initial_maps(prepared(subject, images[:1]), "convit_tiny", {}, strengths, place)


@dataclass(frozen=True)
class NamedFigure:
    """A figure that can be asked for by name.

    Attributes:
        papers: the published figures that it draws.
        takes: "runs" (measured run folders), "models" with images, or "images" alone.
        about: what it shows.
        draw: the function; its first argument is what it `takes`, and images follow models.
    """

    papers: str
    takes: Literal["runs", "models", "images"]
    about: str
    draw: Callable[..., Figure]


FIGURES: dict[str, NamedFigure] = {
    "nonlocality": NamedFigure(
        "ConViT Figs. 5, 10, 13", "runs", "how far every layer looks, over training", _nonlocality
    ),
    "gates": NamedFigure(
        "ConViT Figs. 6, 14", "runs", "position or content: every gate over training", _gates
    ),
    "maps": NamedFigure(
        "ConViT Figs. 7, 16, 17", "models", "what heads look at from one patch of an image", _maps
    ),
    "mean-maps": NamedFigure(
        "ConViT Fig. 15",
        "models",
        "the same, averaged over all images given",
        partial(_maps, mean=True),
    ),
    "initial-maps": NamedFigure(
        "ConViT Fig. 3", "images", "self-attention and PSA before training", _initial_maps
    ),
}
