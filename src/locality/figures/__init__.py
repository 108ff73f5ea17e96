"""Figures from records: their look, curves, attention maps, charts; and the papers' by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class NamedFigure:
    """A figure that can be asked for by name.

    Attributes:
        papers: the published figures that it draws.
        takes: "runs" (measured run folders), "models" with images, or "images" alone.
        about: what it shows.
        function: in `locality.figures.named`.
    """

    papers: str
    takes: Literal["runs", "models", "images"]
    about: str
    function: str

    @property
    def draw(self) -> Callable[..., Figure]:
        """The function; its first argument is what it `takes`, and images follow models."""
        return getattr(importlib.import_module("locality.figures.named"), self.function)


FIGURES: dict[str, NamedFigure] = {
    "nonlocality": NamedFigure(
        "ConViT Figs. 5, 10, 13", "runs", "how far every layer looks, over training", "nonlocality"
    ),
    "gates": NamedFigure(
        "ConViT Figs. 6, 14", "runs", "position or content: every gate over training", "gates"
    ),
    "maps": NamedFigure(
        "ConViT Figs. 7, 16, 17",
        "models",
        "what heads look at from one patch of an image",
        "head_maps",
    ),
    "mean-maps": NamedFigure(
        "ConViT Fig. 15",
        "models",
        "the same, averaged over all images given",
        "mean_maps",
    ),
    "initial-maps": NamedFigure(
        "ConViT Fig. 3", "images", "self-attention and PSA before training", "initial_maps"
    ),
}
"""What `locality figure` draws, by name."""
