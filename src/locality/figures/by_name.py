"""The papers' figures of attention, from anyone's runs, models and images, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure
from PIL import Image

from locality.analysis import kinds
from locality.analysis.pictures import Pictures, Sample, observable, prepared, take_pictures
from locality.analysis.recording import trajectory
from locality.checkpoints import Classifier
from locality.errors import UserError
from locality.figures import maps as drawn
from locality.figures.over_training import Course, gates_over_training, nonlocality_over_training
from locality.figures.style import FAMILY_NAMES
from locality.models import create_model
from locality.models.variants import family_of
from locality.training.config import RunConfig
from locality.training.runs import RunFolder
from locality.training.settings import to_dict


def courses_of(folders: Sequence[Path | str]) -> list[Course]:
    """Measured runs, those that differ in their seed alone together, in the order given.

    Raises:
        UserError: if a folder is no run, or says nothing of its training.
    """
    configs = [RunFolder(folder).config() for folder in folders]
    grouped: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        grouped.setdefault(_kind(config), []).append(index)
    courses = []
    for members in grouped.values():
        label = _label(configs[members[0]], configs)
        courses.append(Course(label, [trajectory(folders[index]) for index in members]))
    return courses


def nonlocality(folders: Sequence[Path | str]) -> Figure:
    """Nonlocality over training (Figs. 5, 10, 13): `locality figure nonlocality RUN…`."""
    return nonlocality_over_training(courses_of(folders))


def gates(folders: Sequence[Path | str]) -> Figure:
    """Gates over training (Figs. 6, 14) of one kind of run: `locality figure gates RUN…`.

    Raises:
        UserError: if the runs are of several kinds, or have no gates.
    """
    gated = [course for course in courses_of(folders) if course.gated_layers()]
    if len(gated) > 1:
        raise UserError(
            f"these runs are of {len(gated)} kinds ({', '.join(each.label for each in gated)}); "
            f"draw the gates of one at a time"
        )
    if not gated:
        raise UserError("none of these runs has gates; only ConViT has")
    return gates_over_training(gated[0])


def maps(
    models: Sequence[Classifier],
    images: Sequence[Image.Image],
    layers: Sequence[int] | None = None,
    heads: int = 4,
    place: tuple[float, float] = (0.5, 0.5),
) -> Figure:
    """Attention from one patch of the first image (Figs. 7, 16, 17): `locality figure maps`.

    Args:
        models: drawn side by side.
        images: at least one.
        layers, heads: which; see `locality.figures.maps`.
        place: where to look from, as fractions of (height, width).
    """
    return drawn.maps(_pictures(models, images[:1], place), layers, heads)


def mean_maps(
    models: Sequence[Classifier],
    images: Sequence[Image.Image],
    layers: Sequence[int] | None = None,
    heads: int = 4,
    place: tuple[float, float] = (0.5, 0.5),
) -> Figure:
    """Attention averaged over images (Fig. 15): `locality figure mean-maps`. Args as `maps`."""
    return drawn.maps(_pictures(models, images, place), layers, heads, image=None)


def initial_maps(
    images: Sequence[Image.Image],
    strengths: Sequence[float] = (0.5, 2.0),
    place: tuple[float, float] = (0.5, 0.5),
) -> Figure:
    """Untrained layers of a ConViT-Ti on the first image (Fig. 3): `locality figure initial-maps`.

    Args:
        images: at least one.
        strengths, place: see `locality.figures.maps.initial_maps`.
    """
    subject = Classifier.of(create_model("convit_tiny"))
    return drawn.initial_maps(_prepared(subject, images[:1]), "convit_tiny", {}, strengths, place)


@dataclass(frozen=True)
class FigureKind:
    """A figure that can be asked for by name.

    Attributes:
        papers: the published figures of this kind.
        takes: "runs" (measured run folders), "models" with images, or "images" alone.
        about: what it shows.
        draw: the function; its first argument is what it `takes`, and images follow models.
    """

    papers: str
    takes: Literal["runs", "models", "images"]
    about: str
    draw: Callable[..., Figure]


FIGURES: dict[str, FigureKind] = {
    "nonlocality": FigureKind(
        "ConViT Figs. 5, 10, 13", "runs", "how far every layer looks, over training", nonlocality
    ),
    "gates": FigureKind(
        "ConViT Figs. 6, 14", "runs", "position or content: every gate over training", gates
    ),
    "maps": FigureKind(
        "ConViT Figs. 7, 16, 17", "models", "what heads look at from one patch of an image", maps
    ),
    "mean-maps": FigureKind(
        "ConViT Fig. 15", "models", "the same, averaged over all images given", mean_maps
    ),
    "initial-maps": FigureKind(
        "ConViT Fig. 3", "images", "self-attention and PSA before training", initial_maps
    ),
}


def _pictures(
    models: Sequence[Classifier], images: Sequence[Image.Image], place: tuple[float, float]
) -> list[tuple[str, Pictures]]:
    """What models' heads look at from one place of images, each model prepared in its own way."""
    return [
        (model.name, take_pictures(observable(model), _prepared(model, images), place))
        for model in models
    ]


def _prepared(model: Classifier, images: Sequence[Image.Image]) -> Sample:
    if not images:
        raise UserError("give at least one image to look at")
    return prepared(model, images)


def _kind(config: RunConfig) -> str:
    return f"{config.data.fraction:g} {kinds.kind(to_dict(config))}"


def _label(config: RunConfig, others: Sequence[RunConfig]) -> str:
    """The model's family, and in what it differs from the others."""
    name = config.model.name
    family = family_of(name)
    rivals = {other.model.name for other in others if family_of(other.model.name) == family}
    label = FAMILY_NAMES.get(family, name) if len(rivals) == 1 else name
    if len({other.data.fraction for other in others}) > 1:
        label += f", {100 * config.data.fraction:g}% of the images"
    if any(other.objective.teacher for other in others):
        label += ", distilled" if config.objective.teacher else ", no distillation"
    alike = [other for other in others if _basics(other) == _basics(config)]
    names = kinds.unlike(to_dict(other) for other in alike)
    return f"{label} ({kinds.in_words(to_dict(config), names)})" if names else label


def _basics(config: RunConfig) -> tuple[str, float, bool]:
    """What a label says in any case, as far as it tells runs apart."""
    return config.model.name, config.data.fraction, config.objective.teacher is not None
