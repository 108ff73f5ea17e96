"""The live page: one HTML file that computes small models itself, in JavaScript.

As the explorer, it needs no server and no network. It holds the weights in half precision and a
few example images. `templates/forward.js` is the forward pass of `models/vit.py` with the maps of
every head, so that gates and the strength of locality can be moved while one looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image

from locality import __version__
from locality.analysis.explorer import half_precision, known_labels, to_blob, to_script
from locality.analysis.measures import nonlocality_unit
from locality.analysis.pictures import DECADES, prepare_sample
from locality.checkpoints import Classifier
from locality.errors import UserError
from locality.models.base import position_embedding
from locality.models.config import ViTConfig
from locality.models.variants import FAMILY_NAMES, family_of
from locality.templates import render

MAX_MEGABYTES = 10
"""Of weights in single precision, beyond which a model is too slow to be computed in a page."""

DRAWN_SIZE = (8, 8)
"""The images that drawings can be made into: the digits' own."""

_MAX_MODELS = 4


def live_page(
    subjects: Sequence[Classifier],
    images: Sequence[Image.Image],
    labels: Sequence[str] = (),
    digits: bool = False,
    about: str | None = None,
    names: Sequence[str] = (),
) -> str:
    """The live page of some models.

    Args:
        subjects: one to four DeiT or ConViT on images of one size, shown side by side.
        images: examples to choose from.
        labels: the class of each, by which the page counts how many are recognised; or none.
        digits: there is a place to draw on, for models of 8×8 digits.
        names: of the images' files, or none.
        about: HTML that stands below, on a page of the site, which links to the site's others.

    Raises:
        UserError: if a model is too large for a page or no DeiT or ConViT, if they take images of
            different sizes, or there is no image.
    """
    if not 1 <= len(subjects) <= _MAX_MODELS:
        raise UserError(f"the live page shows 1 to {_MAX_MODELS} models, not {len(subjects)}")
    models = [_describe(subject) for subject in subjects]
    forms = {(*model["size"], len(model["mean"])) for model, _ in models}
    if len(forms) > 1:
        listed = " and ".join("{}×{} pixels with {} channels".format(*form) for form in forms)
        raise UserError(
            f"the live page gives all models the same images, and these take {listed}; "
            f"write a page for each"
        )
    ((height, width, channels),) = forms
    if channels == 1:  # the three that are shown are equal then, and the first is what it sees
        images = [image.convert("L") for image in images]
    shown = prepare_sample(subjects[0], images).shown[..., :channels]
    for subject in subjects:
        subject.check_logits(subject.logits(subject.prepare(images)))
    unit, divisors, uniform = nonlocality_unit([model for model, _ in models])
    for (model, _), divisor in zip(models, divisors, strict=True):
        model["unit"] = divisor
    preprocessing = subjects[0].preprocessing
    page = {
        "decades": DECADES,
        "unit": unit,
        "uniform": uniform,
        "crop_pct": preprocessing.crop_pct,
        "crop_mode": preprocessing.crop_mode,
        "interpolation": preprocessing.interpolation,
        "size": [height, width],
        "channels": channels,
        "images": len(images),
        "labels": known_labels(labels, subjects),
        "names": list(names),
        "digits": digits and (height, width) == DRAWN_SIZE,
        "models": [model for model, _ in models],
    }
    blobs = [(f"weights-{at}", to_blob(weights)) for at, (_, weights) in enumerate(models)]
    blobs.append(("images", to_blob(np.ascontiguousarray(shown).tobytes())))
    return render(
        "locality.analysis",
        "live.html",
        data=to_script(page),
        blobs=blobs,
        digits=page["digits"],
        models=page["models"],
        unit=unit,
        version=__version__,
        site=about is not None,
        about=Markup(about or ""),
    )


def _describe(subject: Classifier) -> tuple[dict[str, Any], bytes]:
    """A model's description for `forward.js`, and its weights in half precision."""
    model, preprocessing = subject.module(), subject.preprocessing
    config: Any = model.config
    # What `forward.js` computes; another kind of attention is not taken for one of these.
    if not isinstance(config, ViTConfig) or (
        config.gpsa_layers and config.positional_attention not in ("gpsa", "psa")
    ):
        raise UserError(
            f"{subject.name} cannot be computed in a page: --live is for DeiT and ConViT; leave "
            f"--live out for the explorer, which shows every model on images chosen beforehand"
        )
    if not config.num_classes or not config.global_pool:
        raise UserError(f"{subject.name} has no classifier, whose answers the live page would show")
    grid = config.grids(preprocessing.size)[0]
    state = {name: each.detach().float().cpu() for name, each in model.state_dict().items()}
    if "pos_embed" in state:
        prefix = int(config.embed_class_token)
        own = config.native_grids[0]
        state["pos_embed"] = position_embedding(state["pos_embed"], own, grid, prefix)
    size = 4 * sum(each.numel() for each in state.values())
    if size > MAX_MEGABYTES * 1e6:
        raise UserError(
            f"{subject.name} has {size / 1e6:.1f} MB of weights, and a page computes up to "
            f"{MAX_MEGABYTES} MB; leave --live out for the explorer, which holds attention only"
        )
    family = family_of(model.variant)
    joins_late = config.has_class_token and not config.embed_class_token
    about = {
        "label": subject.name,
        "family": family,
        "title": FAMILY_NAMES.get(family, subject.name),
        "classes": [subject.label(index) for index in range(config.num_classes)],
        "size": list(preprocessing.size),
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "kind": config.positional_attention if config.gpsa_layers else "sa",
        "patch": config.patch_size,
        "grid": list(grid),
        "width": config.embed_dim,
        "heads": config.num_heads,
        "depth": config.depth,
        "eps": model.norm.eps,
        "pool": config.global_pool,
        "embedsToken": config.embed_class_token,
        # Before which block; -1 if it is there before the first or never.
        "tokenJoins": config.gpsa_layers if joins_late else -1,
        "weights": [[name, each.numel()] for name, each in state.items()],
    }
    flat = torch.cat([each.flatten() for each in state.values()])
    return about, half_precision(flat, f"the weights of {subject.name}")
