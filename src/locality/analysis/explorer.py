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
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor, nn

from locality._version import __version__
from locality.analysis.factors import factorise
from locality.analysis.pictures import DECADES, data_address, observable, prepared
from locality.analysis.summary import measure_model, positional_vectors
from locality.analysis.taps import LayerView, capture
from locality.checkpoints import Classifier
from locality.errors import UserError
from locality.files import render, write_atomic
from locality.models.variants import family_of

TOLERANCE = 0.02
"""Largest error of an attention score: every attention shown is within e^±0.04 of the true one."""
MAX_MEGABYTES = 29.0
"""What the data of one model may take before the tolerance is loosened."""
_LOOSEST = 0.2  # e^±0.4 would say little; larger data is written as it is
_MOST_MODELS = 4
_MEASURED = ("name", "kind", "heads", "grid", "key_grid", "gates")


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
    page = {
        "decades": DECADES,
        "images": [
            {
                "source": data_address(shown),
                "name": names[index] if names else f"image {index + 1}",
            }
            for index, shown in enumerate(prepared(first, images).shown)
        ],
        "models": [about for about, _ in observed],
    }
    blobs = [
        (f"blob-{model}-{image}", Markup(blob))
        for model, (_, packed) in enumerate(observed)
        for image, blob in enumerate(packed)
    ]
    # "<" could end the script element that the data stands in.
    data = json.dumps(page, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    html = render(
        "locality.analysis",
        "explorer.html",
        data=Markup(data),
        blobs=blobs,
        models=page["models"],
        version=__version__,
    )
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, html)
    return output


def _observe(
    subject: Classifier, images: Sequence[Image.Image], tolerance: float
) -> tuple[dict[str, Any], list[str]]:
    """One model on all images: what the page says of it, and its attention, image by image."""
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
    for layer, found in zip(layers, measure_model(model, batch)["layers"], strict=True):
        layer |= {name: found[name] for name in _MEASURED}
        layer["nonlocality"] = found["nonlocality"]["mean"]
    about = {
        "label": subject.name,
        "family": family_of(getattr(model, "variant", None)),
        "tolerance": tolerance,
        "layers": layers,
        "predictions": _predictions(subject, model, batch),
    }
    return about, blobs


@torch.no_grad()
def _pack(model: nn.Module, image: Tensor, tolerance: float) -> tuple[bytes, list[dict[str, Any]]]:
    """One image's attention in all layers, head after head, and what measures do not say."""
    parts: list[bytes] = []
    layers: list[dict[str, Any]] = []

    def keep(view: LayerView) -> None:
        v_pos = positional_vectors(view.module)
        layers.append(
            {
                "key_stride": list(view.key_stride),
                "prefix": view.maps.prefix_tokens,
                "position": None if v_pos is None else v_pos.tolist(),
            }
        )
        # A layer without a separate content part has one softmax, which is its content.
        content = view.maps.mixed if view.maps.content is None else view.maps.content
        parts.extend(factorise(head.cpu(), tolerance).pack() for head in content[0])

    with capture(model, on_layer=keep):
        model(image)
    return b"".join(parts), layers


@torch.no_grad()
def _predictions(subject: Classifier, model: nn.Module, batch: Tensor) -> list[str]:
    """The most probable class of every image, with its probability."""
    probabilities = torch.cat([model(image[None]) for image in batch]).softmax(dim=-1)
    return [
        f"{subject.label(int(index))} ({100 * float(value):.3g}%)"
        for value, index in zip(*probabilities.max(dim=-1), strict=True)
    ]
