"""Style of all figures: a colour-blind-safe palette, PNG and SVG output."""

import contextlib
import html
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_hex
from matplotlib.figure import Figure

from locality.analysis.pictures import DECADES
from locality.errors import printable

# Wong's palette (Nature Methods 8, 441), safe for common colour blindness. Each family has one
# colour and one marker in all figures, so that they stay distinct in grey.
CONVIT, DEIT, CVT, OTHER = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
_FAMILY_COLOURS = {"convit": CONVIT, "deit": DEIT, "cvt": CVT}
_FAMILY_MARKERS = {"convit": "o", "deit": "s", "cvt": "^"}
INK, FAINT = "#1a1a1a", "#8a8a8a"

MAP_COLOURS = "viridis"
"""Colour map of attention: lightness increases evenly, so it is readable in grey."""

GATE_COLOURS = LinearSegmentedColormap.from_list("gate", ["#ffffff", "#c1121f"])
"""White: attention by content (σ(λ) = 0). Red: by position (σ(λ) = 1)."""

REACH = 10.0 ** (DECADES / 2)
"""`uniform_colour` spans uniform attention / REACH … uniform attention · REACH."""
_EVEN = LogNorm(1 / REACH, REACH, clip=True)

_SETTINGS: Any = matplotlib.rc_params_from_file(
    Path(__file__).with_suffix(".mplstyle"), use_default_template=False
)

_CSS_COLOURS = _FAMILY_COLOURS | {"other": OTHER, "ink": INK, "faint": FAINT}


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Context manager: create and draw figures in this style."""
    # Ticks overflow for values near the largest float, such as a diverging loss.
    with matplotlib.rc_context(_SETTINGS), np.errstate(over="ignore"):
        yield


def figure_bytes(figure: Figure, form: str = "png", **options: Any) -> bytes:
    """A figure on white as PNG or SVG bytes."""
    buffer = io.BytesIO()
    with settings(), warnings.catch_warnings():
        # Browsers have other fonts than matplotlib.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(buffer, format=form, **{"facecolor": "white", **options})
    return buffer.getvalue()


def inline_svg(figure: Figure, title: str) -> Markup:
    """A figure as inline SVG for an HTML page, with the page's colours and font.

    Args:
        figure: drawn in the colours of this module, which are replaced by CSS variables (--convit,
            --deit, --cvt, --other, --ink, --faint) to support light and dark themes.
        title: for screen readers; unique on the page, since it prefixes all ids in the SVG.
    """
    prefix = re.sub(r"\W+", "-", title)
    clear: Any = {"facecolor": "none", "transparent": True, "metadata": {"Date": None}}
    text = printable(figure_bytes(figure, "svg", **clear).decode(), keep="\n")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    for name, colour in _CSS_COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    head = f'<svg role="img" aria-label="{html.escape(title)}" '
    text = re.sub(r'(<svg .*?)width="[^"]*" height="[^"]*"', r"\1", text, count=1)
    return Markup(text.replace("<svg ", head, 1))


def family_colour(family: str) -> str:
    """The colour of a model family ("convit", "deit", "cvt")."""
    return _FAMILY_COLOURS.get(family, OTHER)


def family_style(family: str) -> dict[str, Any]:
    """The colour and marker of a model family."""
    return {"color": family_colour(family), "marker": _FAMILY_MARKERS.get(family, "D")}


def map_to_rgb(attention: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
    """Colour a map (H, W) by `uniform_colour`, one pixel per patch: (H, W, 3)."""
    colours = matplotlib.colormaps[MAP_COLOURS](_EVEN(attention * attention.size))
    return (colours[..., :3] * 255).round().astype(np.uint8)


def uniform_colour(times: float) -> str:
    """The CSS colour of `times` uniform attention, clipped at `REACH`."""
    return to_hex(matplotlib.colormaps[MAP_COLOURS](_EVEN(times)))


def gate_colour(gate: float) -> str:
    """The CSS colour of a gate, from white (content) to red (position)."""
    return to_hex(GATE_COLOURS(gate))
