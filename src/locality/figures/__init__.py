"""Figures: style, curves, attention maps, charts, and the named figures of `locality figure`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from locality.files import read_yaml

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class NamedFigure:
    """A figure of `locality figure`.

    Attributes:
        papers: the published figures that it reproduces.
        takes: its input: "runs" (measured run folders), "models" (with images), or "images".
        about: a description.
        function: MODULE:NAME in `locality.figures`.
    """

    papers: str
    takes: Literal["runs", "models", "images"]
    about: str
    function: str

    @property
    def draw(self) -> Callable[..., Figure]:
        """The drawing function, called with (runs), (models, images) or (images)."""
        return pkgutil.resolve_name(f"locality.figures.{self.function}")


FIGURES: dict[str, NamedFigure] = {
    name: NamedFigure(**row)
    for name, row in read_yaml(Path(__file__).with_name("figures.yaml")).items()
}
"""Figures of `locality figure` by name."""
