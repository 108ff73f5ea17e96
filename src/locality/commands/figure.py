"""`locality figure`: one of the papers' figures of attention, from one's own runs or models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locality.commands.parsing import Parser, add_model_options
from locality.errors import unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from locality.figures import NamedFigure


def main(arguments: Sequence[str]) -> None:
    """Draw the figure and print the paths of its PNG and SVG."""
    from locality.figures import FIGURES

    kinds = "; ".join(
        f"{name}: {kind.about}, from {kind.takes} ({kind.papers})" for name, kind in FIGURES.items()
    )
    parser = Parser("figure", f"Draw a figure as PNG and SVG. {kinds}.")
    parser.add_argument("name", help=", ".join(FIGURES))
    parser.add_argument("sources", nargs="+", help="run folders, models, or images")
    add_model_options(parser)
    parser.add_argument(
        "--images", nargs="+", default=None, help="files or folders; a run's own unless given"
    )
    parser.add_argument("--layers", type=list[int] | None, default=None, help="such as [2,10]")
    parser.add_argument("--heads", type=int, default=4, help="how many heads of each layer")
    parser.add_argument(
        "--place",
        type=tuple[float, float],
        default=(0.5, 0.5),
        help="where to look from, as fractions of height and width",
    )
    parser.add_argument("--count", type=int, default=100, help="how many images at most")
    parser.add_argument("--output", default=None, help="path without suffix; the name unless given")
    options = parser.read(arguments)
    if options.name not in FIGURES:
        raise unknown("figure", options.name, FIGURES)

    from locality import checks
    from locality.figures.style import save

    checks.integer("heads", options.heads, 1)
    checks.integer("count", options.count, 1)
    figure = _draw(FIGURES[options.name], options)
    output = Path(options.output or options.name)
    output.parent.mkdir(parents=True, exist_ok=True)
    for path in save(figure, output):
        print(path)


def _draw(kind: NamedFigure, options: Any) -> Figure:
    from locality.commands.opening import image_files, open_given, read_image, run_images

    if kind.takes == "runs":
        return kind.draw(options.sources)
    given = options.sources if kind.takes == "images" else options.images
    if given is None:
        images = [image for _, image in run_images(options.sources[0], options.count)]
    else:
        images = [read_image(file) for file in islice(image_files(given), options.count)]
    if kind.takes == "images":
        return kind.draw(images, place=options.place)
    models = [open_given(source, options) for source in options.sources]
    layers = None if options.layers is None else [layer - 1 for layer in options.layers]
    return kind.draw(models, images, layers=layers, heads=options.heads, place=options.place)
