"""The explorer: one HTML file in which one clicks a patch and sees what every head looks at.

The file needs no server and no network. What is in it, for each model and image, are the scores of
every head as integer factors, compressed with zlib, which browsers inflate natively; the page
multiplies out the row of the clicked patch. Positional attention is a formula of three numbers per
head, so those three numbers are stored, and mixed attention is computed from both parts and the
gate, as the layer does.

Content attention is a softmax of scores Q Kᵀ/√d, an N×N matrix of rank d at most. Scores count only
up to a constant per row, so a map is stored as two thin integer matrices A and B with

    |step² · Aᵀ B − (score − mean of its row)|  ≤  tolerance   for every query and key.

Every attention read back is then within a factor e^±(2·tolerance) of the true one, small or large.
"""

from __future__ import annotations

import base64
import copy
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor, nn

from locality import __version__
from locality.analysis.measures import measure_model, positional_vectors
from locality.analysis.pictures import DECADES, close_up, data_address, prepared
from locality.analysis.taps import LayerView, capture, evaluating
from locality.checkpoints import Classifier
from locality.errors import UserError
from locality.layers.grid import Window
from locality.models.variants import family_of
from locality.templates import render, write_page

TOLERANCE = 0.02
"""Largest error of an attention score: every attention shown is within e^±0.04 of the true one."""
MAX_MEGABYTES = 29.0
"""What the data of one model may take before the tolerance is loosened."""
_LOOSER = (0.04, 0.08, 0.16, 0.2)  # e^±0.4 would say little; larger data is written as it is
_MOST_MODELS = 4
_RANK_GUESS = 80  # heads are hardly ever wider than 64
_TRIALS = 6
_SMALLEST, _LARGEST = -(2**15), 2**15 - 1
_MEASURED = ("name", "kind", "heads", "grid", "key_grid", "gates")


Integers = npt.NDArray[np.int16]


def write_explorer(
    subjects: Sequence[Classifier],
    images: Sequence[Image.Image],
    output: Path | str,
    names: Sequence[str] | None = None,
) -> Path:
    """Write the explorer of some models on some images.

    Args:
        output: the HTML file to write; its folder is created.
        subjects, images, names: as for `explorer_page`.

    Returns:
        the path of the file.

    Raises:
        UserError: as `explorer_page`.
    """
    return write_page(output, explorer_page(subjects, images, names))


def explorer_page(
    subjects: Sequence[Classifier],
    images: Sequence[Image.Image],
    names: Sequence[str] | None = None,
) -> str:
    """The page of some models on some images.

    Attention scores are within `TOLERANCE`. It is doubled, to 0.2 at most, and the page says so,
    where a model's data would take more than `MAX_MEGABYTES`.

    Args:
        subjects: one to four models, shown side by side on the same patch.
        images: what they look at; each model prepares them in its own way.
        names: what to call the images.

    Raises:
        UserError: if there is no model or no image, or a model's attention cannot be read.
    """
    if not 1 <= len(subjects) <= _MOST_MODELS:
        raise UserError(f"the explorer shows 1 to {_MOST_MODELS} models, not {len(subjects)}")
    samples = [prepared(subject, images) for subject in subjects]
    observed = [
        _observe(subject, chosen.images.double())
        for subject, chosen in zip(subjects, samples, strict=True)
    ]
    page = {
        "decades": DECADES,
        "images": [
            {
                "source": data_address(close_up(subjects[0].preprocessing, image)),
                "name": names[index] if names else f"image {index + 1}",
            }
            for index, image in enumerate(images)
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
    return render(
        "locality.analysis",
        "explorer.html",
        data=Markup(data),
        blobs=blobs,
        models=page["models"],
        version=__version__,
    )


def _observe(subject: Classifier, batch: Tensor) -> tuple[dict[str, Any], list[str]]:
    """One model on all images: what the page says of it, and its attention, image by image."""
    # In double precision no attention vanishes, so that every score can be read off its logarithm.
    model = copy.deepcopy(subject.module()).double()
    subject.check_logits(subject.logits(batch.to(next(subject.module().parameters()))))
    for tolerance in (TOLERANCE, *_LOOSER):
        seen = [_pack(model, image, tolerance) for image in batch.split(1)]
        blobs = [base64.b64encode(zlib.compress(packed, 9)).decode() for packed, _, _ in seen]
        if sum(map(len, blobs)) <= MAX_MEGABYTES * 1e6:
            break
    layers = seen[0][1]
    for layer, found in zip(layers, measure_model(model, batch)["layers"], strict=True):
        layer |= {name: found[name] for name in _MEASURED}
        layer["nonlocality"] = found["nonlocality"]["mean"]
    most = [logits.softmax(dim=-1).max(dim=-1) for _, _, logits in seen]
    about = {
        "label": subject.name,
        "family": family_of(getattr(model, "variant", None)),
        "tolerance": tolerance,
        "layers": layers,
        "predictions": [
            f"{subject.label(int(index))} ({100 * float(value):.3g}%)" for value, index in most
        ],
    }
    return about, blobs


def _pack(
    model: nn.Module, image: Tensor, tolerance: float
) -> tuple[bytes, list[dict[str, Any]], Tensor]:
    """One image's attention, head after head; of each layer what measures do not say; logits."""
    parts: list[bytes] = []
    layers: list[dict[str, Any]] = []

    def keep(view: LayerView) -> None:
        v_pos = positional_vectors(view.module)
        window = getattr(view.module, "window", Window())
        layers.append(
            {
                "key_stride": list(view.key_stride),
                "padding": [window.before, window.after],
                "first": window.first,
                "prefix": view.maps.prefix_tokens,
                "position": None if v_pos is None else v_pos.tolist(),
            }
        )
        # A layer without a separate content part has one softmax, which is its content.
        content = view.maps.mixed if view.maps.content is None else view.maps.content
        parts.extend(factorise(head.cpu(), tolerance).pack() for head in content[0])

    with evaluating(model), capture(model, on_layer=keep):
        logits = model(image)
    return b"".join(parts), layers, logits


@dataclass(frozen=True)
class Factors:
    """Scores of one head, up to a constant per query: step² · queriesᵀ @ keys.

    Attributes:
        queries: (r, Nq) int16.
        keys: (r, Nk) int16.
        step: the unit of both.
    """

    queries: Integers
    keys: Integers
    step: float

    def pack(self) -> bytes:
        """As bytes: how many components there are and the step, then the integers.

        Little-endian: uint32 components, float32 step; then, for queries and for keys, the low
        bytes of the integers plus 128, and their high bytes, which are zero where they are small.
        """
        kept = self.queries.any(1) & self.keys.any(1)
        parts = [struct.pack("<If", kept.sum(), self.step)]
        for matrix in (self.queries, self.keys):
            # Bytes of like kind side by side compress better.
            both = (matrix[kept] + np.int16(128)).astype("<u2").view(np.uint8).reshape(-1, 2)
            parts += [both[:, 0].tobytes(), both[:, 1].tobytes()]
        return b"".join(parts)


def factorise(content: Tensor, tolerance: float) -> Factors:
    """Factors of one head's content attention.

    Args:
        content: (Nq, Nk) attention in double precision, no entry zero.
        tolerance: the largest error of a score.

    Raises:
        ValueError: if an entry is zero or not a number, so that its score is not known, or if
            the scores span too much for the tolerance.
    """
    scores = content.log()
    if not scores.isfinite().all():
        raise ValueError("attention of exactly zero has no finite score; use double precision")
    scores = scores - scores.mean(dim=1, keepdim=True)
    left, values, right = _decompose(scores, tolerance)
    queries, keys = left * values.sqrt(), right * values.sqrt()
    largest = queries.square().sum(1).max() + keys.square().sum(1).max()
    # Rounding moves each factor by up to half a step; errors of many components partly cancel.
    step = 2 * tolerance / max(float(largest) ** 0.5, 1e-9)
    for _ in range(_TRIALS):
        found, error = _quantised(scores, queries, keys, step)
        if error <= tolerance:
            return found
        # The error grows about in proportion to the step: aim at just below the tolerance.
        step *= 0.95 * tolerance / error
    raise ValueError(
        f"scores that span {float(scores.max() - scores.min()):.0f} cannot be kept to "
        f"±{tolerance:g} in 16 bits; allow a larger tolerance"
    )


def _quantised(scores: Tensor, queries: Tensor, keys: Tensor, step: float) -> tuple[Factors, float]:
    """Factors in units of `step`, and the largest error of the scores they give."""
    # The step as the reader of the packed form will know it.
    step = float(np.float32(step))
    asking, asked = (
        (factor.T / step).round().clamp(_SMALLEST, _LARGEST).numpy().astype(np.int16)
        for factor in (queries, keys)
    )
    found = Factors(asking, asked, step)
    product = torch.from_numpy(found.queries.T.astype(np.float64) @ found.keys) * step**2
    return found, float((product - scores).abs().max())


def _decompose(scores: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """U, S, V with scores = U diag(S) Vᵀ, exact for what the tolerance can see."""
    if min(scores.shape) > 2 * _RANK_GUESS:
        # Twice as many random directions as there can be dimensions miss none of them.
        left, values, right = torch.svd_lowrank(scores, q=_RANK_GUESS, niter=2)
        if (left * values @ right.T - scores).abs().max() < tolerance / 100:
            return left, values, right
    left, values, right = torch.linalg.svd(scores, full_matrices=False)
    return left, values, right.T
