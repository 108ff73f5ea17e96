"""The style of all figures: a palette for colour-blind readers, and PNG and SVG output."""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from locality.files import write_output

# Wong's palette (Nature Methods 8, 441), told apart under every common colour blindness. Families
# keep their colour in every figure, and their marker, for those who print in grey.
CONVIT, DEIT, CVT, OTHER = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
FAMILY_COLOURS = {"convit": CONVIT, "deit": DEIT, "cvt": CVT}
FAMILY_MARKERS = {"convit": "o", "deit": "s", "cvt": "^"}
INK, FAINT = "#1a1a1a", "#8a8a8a"

MAP_COLOURS = "viridis"
"""For attention: rises evenly in lightness, so that it reads in grey and to the colour-blind."""

GATE_COLOURS = LinearSegmentedColormap.from_list("gate", ["#ffffff", "#c1121f"])
"""White: the head attends to content (σ(λ) = 0). Red: to position (σ(λ) = 1)."""

_SETTINGS: Any = matplotlib.rc_params_from_file(
    Path(__file__).with_suffix(".mplstyle"), use_default_template=False
)

_CSS_COLOURS = FAMILY_COLOURS | {"other": OTHER, "ink": INK, "faint": FAINT}


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """In the block figures are made and drawn in this style."""
    # Between values near the largest float, as of a loss that diverges, ticks overflow.
    with matplotlib.rc_context(_SETTINGS), np.errstate(over="ignore"):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of width × height inches. Make it inside `settings()`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


FORMS: dict[str, tuple[bytes, dict[str, Any]]] = {
    ".png": (b"Software\0locality", {"dpi": 160, "metadata": {"Software": "locality"}}),
    ".svg": (b"<dc:title>locality<", {"metadata": {"Date": None, "Creator": "locality"}}),
}
"""The files of a figure: by suffix, what marks them as ours and how they are written."""


def save(figure: Figure, path: Path | str, overwrite: bool = False) -> list[Path]:
    """Write a figure as PNG and SVG, next to each other, whatever suffix `path` has.

    Returns:
        the two paths.

    Raises:
        UserError: if there is a file that `save` did not write, and is not to be overwritten.
    """
    path = Path(path)
    written = []
    for suffix, (mark, options) in FORMS.items():
        target = path.with_suffix(suffix)
        content = figure_bytes(figure, suffix[1:], **options)
        write_output(target, content, mark, overwrite)
        written.append(target)
    return written


def figure_bytes(figure: Figure, form: str = "png", **options: Any) -> bytes:
    """A figure on white, as the content of a PNG or SVG file."""
    buffer = io.BytesIO()
    with settings():
        figure.savefig(buffer, format=form, **{"facecolor": "white", **options})
    return buffer.getvalue()


def inline_svg(figure: Figure, identifier: str, description: str) -> str:
    """A figure as SVG to stand inside an HTML page, in the page's own colours and font.

    Args:
        figure: drawn in the colours above, which become CSS variables (--convit, --deit, --cvt,
            --other, --ink, --faint) so that a page can have a light and a dark theme.
        identifier: unique on the page; prefixes every id of the drawing.
        description: the text for screen readers.
    """
    clear: Any = {"facecolor": "none", "transparent": True, "metadata": {"Date": None}}
    text = figure_bytes(figure, "svg", **clear).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{identifier}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{identifier}-", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    for name, colour in _CSS_COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    head = f'<svg role="img" aria-label="{html.escape(description)}" '
    text = re.sub(r'(<svg .*?)width="[^"]*" height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg ", head, 1)


def family_colour(family: str) -> str:
    """The colour of a model family ("convit", "deit", "cvt"), the same in every figure."""
    return FAMILY_COLOURS.get(family, OTHER)


def family_style(family: str) -> dict[str, Any]:
    """The colour and the marker of a model family."""
    return {"color": family_colour(family), "marker": FAMILY_MARKERS.get(family, "D")}
