"""The explorer: one HTML file that shows the attention of all heads from a clicked patch.

The file needs no server and no network. For each model and image it holds the queries and keys of
all heads in half precision, compressed with zlib, which browsers inflate natively. The page
computes the row softmax(q Kᵀ/√d) of the clicked patch. Positional attention is stored as its three
numbers per head; mixed attention is computed from both parts and the gate, as in the layer.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image
from torch import Tensor, nn

from locality.analysis.measures import measure_model, nonlocality_unit, positional_vectors
from locality.analysis.pictures import DECADES, data_url, prepare_sample
from locality.analysis.taps import LayerView, capture, eval_mode
from locality.checkpoints import Classifier
from locality.data.decoding import to_rgb
from locality.data.preprocessing import high_resolution_crop
from locality.errors import UserError
from locality.models.variants import family_of
from locality.templates import render, write_page

_MAX_MODELS = 4
_FEW_CLASSES = 12  # list all classes up to this number
_MEASURED = ("name", "kind", "heads", "grid", "key_grid", "key_stride", "key_offset", "gates")


def write_explorer(
    subjects: Sequence[Classifier],
    images: Sequence[Image.Image],
    output: Path | str,
    names: Sequence[str] | None = None,
    labels: Sequence[str] = (),
) -> Path:
    """Write the explorer of one or more models on some images.

    Args:
        output: the HTML file to write or replace; its folder is created.
        subjects, images, names, labels: see `explorer_page`.

    Returns:
        the path of the file.

    Raises:
        UserError: see `explorer_page`.
    """
    return write_page(output, explorer_page(subjects, images, names, labels=labels))


def explorer_page(
    subjects: Sequence[Classifier],
    images: Sequence[Image.Image],
    names: Sequence[str] | None = None,
    labels: Sequence[str] = (),
) -> str:
    """The explorer of one or more models on some images, as HTML.

    Args:
        subjects: one to four models, shown side by side.
        images: the images, preprocessed for each model.
        names: names of the images; numbered by default.
        labels: class of each image, shown if a model has this class; or empty.

    Raises:
        UserError: no model, no image, or a model whose attention cannot be read.
    """
    check_count(subjects)
    images = [to_rgb(image, subjects[0].preprocessing.decoding) for image in images]
    observed = [_observe(subject, prepare_sample(subject, images).images) for subject in subjects]
    models = [about for about, _ in observed]
    shown = [high_resolution_crop(image, subjects[0].preprocessing) for image in images]
    known = known_labels(labels, subjects)
    pictures = [
        {
            "source": data_url(np.asarray(picture)),
            "name": names[index] if names else f"image {index + 1}",
            "label": known[index] if known else None,
        }
        for index, picture in enumerate(shown)
    ]
    blobs = {
        f"blob-{model}-{image}": blob
        for model, (_, packed) in enumerate(observed)
        for image, blob in enumerate(packed)
    }
    layers = [layer for about in models for layer in about["layers"]]
    return render_page("explorer.html", layers, blobs, {"images": pictures, "models": models})


def check_count(subjects: Sequence[Classifier]) -> None:
    """Check that a page can show so many models."""
    if not 1 <= len(subjects) <= _MAX_MODELS:
        raise UserError(f"a page shows 1 to {_MAX_MODELS} models, not {len(subjects)}")


def render_page(
    template: str,
    grids: Sequence[dict[str, Any]],
    blobs: Mapping[str, bytes],
    page: Mapping[str, Any],
    **content: Any,
) -> str:
    """Render the explorer or the live page.

    Args:
        template: its filename.
        grids: layers or models with a `grid`, to which the `unit` of their nonlocality is added.
        blobs: binary content by the id of its element, embedded zlib-compressed in base64.
        page: the page's data, also variables of the template.
        content: other variables of the template.
    """
    unit, scale, uniform = nonlocality_unit(grids)
    for layer in grids:
        layer["unit"] = scale(layer)
    page = {"decades": DECADES, "unit": unit, "uniform": uniform, **page}
    data = json.dumps(page, separators=(",", ":"), allow_nan=False)
    packed = [
        (name, Markup(base64.b64encode(zlib.compress(blob, 9)).decode()))
        for name, blob in blobs.items()
    ]
    return render(
        "locality.analysis",
        template,
        data=Markup(data.replace("<", "\\u003c")),  # "<" could end the script element
        blobs=packed,
        **page,
        **content,
    )


def known_labels(labels: Sequence[str], subjects: Sequence[Classifier]) -> list[str | None]:
    """Replace labels that no model has as a class by None; an empty list if all would be."""
    classes = {name for subject in subjects for name in subject.classes or ()}
    known = [label if label in classes else None for label in labels]
    return known if any(known) else []


def _observe(subject: Classifier, batch: Tensor) -> tuple[dict[str, Any], list[bytes]]:
    """One model's description, and its queries and keys per image."""
    model = subject.module()
    subject.check_logits(subject.logits(batch))
    layers = {
        record["name"]: {name: record[name] for name in _MEASURED}
        | {"nonlocality": record["nonlocality"]["mean"]}
        for record in measure_model(model, batch)["layers"]
    }
    observed = [_pack(model, image, layers) for image in batch.split(1)]
    prefix = None
    if any(layer["prefix"] for layer in layers.values()):
        # timm sets cls_token to None in models with registers only.
        has_none = getattr(getattr(model, "model", model), "cls_token", "") is None
        prefix = "first register" if has_none else "class token"
    about = {
        "label": subject.name,
        "prefix": prefix,
        "family": family_of(getattr(model, "variant", None)),
        "layers": list(layers.values()),
        "answers": [_answers(subject, subject.probabilities(logits)[0]) for _, logits in observed],
    }
    return about, [packed for packed, _ in observed]


def _answers(subject: Classifier, probabilities: Tensor) -> list[tuple[str, float]]:
    """Classes with their probabilities: all if few, else the five most probable."""
    few = len(probabilities) <= _FEW_CLASSES
    shown = range(len(probabilities)) if few else probabilities.topk(5).indices.tolist()
    return [(subject.label(index), float(probabilities[index])) for index in shown]


def _pack(
    model: nn.Module, image: Tensor, layers: Mapping[str, dict[str, Any]]
) -> tuple[bytes, Tensor]:
    """The queries and keys of one image, and the logits; completes the layers' descriptions."""
    parts: list[bytes] = []

    def add(view: LayerView) -> None:
        v_pos = positional_vectors(view.module)
        layers[view.name].update(
            prefix=view.maps.prefix_tokens,
            position=None if v_pos is None else v_pos.tolist(),
            head_dim=view.maps.key.shape[-1],
        )
        for pair in zip(view.maps.query[0], view.maps.key[0], strict=True):
            what = f"queries or keys of {view.name}"
            parts.extend(half_precision(tensor, what) for tensor in pair)

    with eval_mode(model), capture(model, on_layer=add):
        logits = model(image)
    return b"".join(parts), logits


def half_precision(numbers: Tensor, what: str) -> bytes:
    """Numbers in half precision: all low bytes, then all high bytes, which compresses better.

    Raises:
        UserError: a number is not finite in half precision; the message starts with `what`.
    """
    half = numbers.half()
    if not half.isfinite().all():
        raise UserError(f"{what} are not finite in half precision; check the weights")
    return half.cpu().contiguous().numpy().view(np.uint8).reshape(-1, 2).T.tobytes()
