"""Figures from records: their look, curves, attention maps, charts; and the papers' by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from locality.files import read_yaml

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class NamedFigure:
    """A figure with a name on the command line.

    Attributes:
        papers: the published figures that it draws.
        takes: "runs" (measured run folders), "models" with images, or "images" alone.
        about: a description.
        function: MODULE:NAME in `locality.figures`.
    """

    papers: str
    takes: Literal["runs", "models", "images"]
    about: str
    function: str

    @property
    def draw(self) -> Callable[..., Figure]:
        """The function; its first argument is what it `takes`, and images follow models."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"locality.figures.{module}"), name)


FIGURES: dict[str, NamedFigure] = {
    name: NamedFigure(**row)
    for name, row in read_yaml(Path(__file__).with_name("figures.yaml")).items()
}
"""What `locality figure` draws, by name."""
