"""The explorer: one HTML file in which one clicks a patch and sees what every head looks at.

The file needs no server and no network. What is in it, for each model and image, are the scores of
every head as integer factors (`factors.py`), compressed with zlib, which browsers inflate
natively; the page multiplies out the row of the clicked patch. Positional attention is a formula of
three numbers per head, so those three numbers are stored, and mixed attention is computed from both
parts and the gate, as the layer does.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
import numpy.typing as npt
import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor, nn

from locality._version import __version__
from locality.analysis.factors import factorise
from locality.analysis.pictures import DECADES
from locality.analysis.samples import observable, prepared
from locality.analysis.style import MAP_COLOURS, family_of
from locality.analysis.summary import measure_model, positional_vectors
from locality.analysis.taps import LayerView, capture
from locality.checkpoints import Classifier
from locality.errors import UserError
from locality.files import write_atomic

TOLERANCE = 0.02
"""Largest error of an attention score: every attention shown is within e^±0.04 of the true one."""
MAX_MEGABYTES = 29.0
"""What the data of one model may take before the tolerance is loosened."""
_LOOSEST = 0.2  # e^±0.4 would say little; larger data is written as it is
_MOST_MODELS = 4


@dataclass(frozen=True)
class _Observed:
    """One model on all images, as the page keeps it."""

    about: dict[str, Any]
    blobs: list[str]


def write_explorer(
    subjects: Sequence[Classifier],
    images: Sequence[Image.Image],
    output: Path | str,
    names: Sequence[str] | None = None,
    tolerance: float = TOLERANCE,
) -> Path:
    """Write the explorer of some models on some images.

    Args:
        subjects: one to four models, shown side by side on the same patch.
        images: what they look at; each model prepares them in its own way.
        output: the HTML file to write; its folder is created.
        names: what to call the images.
        tolerance: largest error of an attention score. It is doubled, to 0.2 at most, and the page
            says so, where a model's data would take more than `MAX_MEGABYTES`.

    Returns:
        the path of the file.

    Raises:
        UserError: if there is no model or no image, or a model's attention cannot be read.
    """
    if not 1 <= len(subjects) <= _MOST_MODELS:
        raise UserError(f"the explorer shows 1 to {_MOST_MODELS} models, not {len(subjects)}")
    if not images:
        raise UserError("there is no image to explore")
    observed = [_observe(subject, images, tolerance) for subject in subjects]
    first = subjects[0]
    pages = {
        "version": __version__,
        "decades": DECADES,
        "colours": _colour_table(),
        "images": [
            {
                "source": _picture(shown),
                "name": names[index] if names else f"image {index + 1}",
            }
            for index, shown in enumerate(prepared(first, images).shown)
        ],
        "models": [each.about for each in observed],
    }
    blobs = [
        (f"blob-{model}-{image}", Markup(blob))
        for model, each in enumerate(observed)
        for image, blob in enumerate(each.blobs)
    ]
    html = _render(pages, blobs)
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, html)
    return output


def _observe(subject: Classifier, images: Sequence[Image.Image], tolerance: float) -> _Observed:
    # In double precision no attention vanishes, so that every score can be read off its logarithm.
    model = copy.deepcopy(observable(subject)).double().eval()
    batch = subject.prepare(images).double()
    while True:
        layers: list[dict[str, Any]] = []
        blobs = []
        for index in range(len(batch)):
            packed, layers = _pack(model, batch[index : index + 1], tolerance)
            blobs.append(base64.b64encode(zlib.compress(packed, 9)).decode())
        if sum(map(len, blobs)) <= MAX_MEGABYTES * 1e6 or tolerance >= _LOOSEST:
            break
        tolerance = min(2 * tolerance, _LOOSEST)
    measured = measure_model(model, batch)["layers"]
    for layer, found in zip(layers, measured, strict=True):
        layer["nonlocality"] = found["nonlocality"]["mean"]
    about = {
        "label": subject.name,
        "family": family_of(getattr(model, "variant", None)),
        "tolerance": tolerance,
        "layers": layers,
        "predictions": _predictions(subject, model, batch),
    }
    return _Observed(about, blobs)


@torch.no_grad()
def _pack(model: nn.Module, image: Tensor, tolerance: float) -> tuple[bytes, list[dict[str, Any]]]:
    """One image's attention in all layers, head after head, and what each layer is like."""
    parts: list[bytes] = []
    layers: list[dict[str, Any]] = []

    def keep(view: LayerView) -> None:
        layers.append(_describe(view))
        # A layer without a separate content part has one softmax, which is its content.
        content = view.maps.mixed if view.maps.content is None else view.maps.content
        parts.extend(factorise(head.cpu(), tolerance).pack() for head in content[0])

    with capture(model, on_layer=keep):
        model(image)
    return b"".join(parts), layers


def _describe(view: LayerView) -> dict[str, Any]:
    maps = view.maps
    kind = "gpsa" if maps.gate is not None else "sa" if maps.position is None else "psa"
    v_pos = positional_vectors(view.module)
    return {
        "name": view.name,
        "kind": kind,
        "heads": maps.mixed.shape[1],
        "grid": list(maps.query_grid),
        "keyGrid": list(maps.key_grid),
        "keyStride": list(view.key_stride),
        "prefix": maps.prefix_tokens,
        "gates": None if maps.gate is None else maps.gate.tolist(),
        "position": None if v_pos is None else v_pos.tolist(),
    }


@torch.no_grad()
def _predictions(subject: Classifier, model: nn.Module, batch: Tensor) -> list[str]:
    """The likeliest class of every image, with its probability."""
    probabilities = torch.cat([model(image[None]) for image in batch]).softmax(dim=-1)
    return [
        f"{subject.label(int(index))} ({100 * float(value):.3g}%)"
        for value, index in zip(*probabilities.max(dim=-1), strict=True)
    ]


def _picture(image: npt.NDArray[np.uint8]) -> str:
    """An image as a data address: small ones exactly, large ones as JPEG."""
    buffer = io.BytesIO()
    small = max(image.shape) <= 64
    Image.fromarray(image).save(buffer, format="PNG" if small else "JPEG", quality=88)
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _colour_table() -> list[list[int]]:
    """256 colours (red, green, blue), from the least to the most attention."""
    colours = matplotlib.colormaps[MAP_COLOURS](np.linspace(0, 1, 256))[:, :3]
    return (colours * 255).round().astype(int).tolist()


def _render(page: dict[str, Any], blobs: Sequence[tuple[str, Markup]]) -> str:
    templates = resources.files("locality.analysis") / "templates"
    loader = jinja2.FunctionLoader(lambda name: (templates / name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    # "<" could end the script element that the data stands in.
    data = json.dumps(page, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return environment.get_template("explorer.html").render(
        data=Markup(data), blobs=blobs, models=page["models"], version=page["version"]
    )
