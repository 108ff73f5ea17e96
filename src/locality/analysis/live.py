"""The live page: one HTML file that runs small models in JavaScript.

Like the explorer, it needs no server and no network. It holds the weights in half precision and a
few example images. `templates/forward.js` is the forward pass of `models/convit.py` with all
attention maps, recomputed as the user changes gates and the strength of locality.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image

from locality.analysis.explorer import check_count, half_precision, known_labels, render_page
from locality.analysis.pictures import prepare_sample
from locality.checkpoints import Classifier
from locality.data.config import Preprocessing
from locality.data.decoding import to_rgb
from locality.errors import UserError
from locality.models.base import position_embedding
from locality.models.config import ViTConfig
from locality.models.variants import FAMILY_NAMES, family_of

MAX_MEGABYTES = 10
"""Size of the float32 weights above which a model is too slow for a page."""

DRAWN_SIZE = (8, 8)
"""Image size of the digits data set, the only size with a drawing pad."""


def live_page(
    subjects: Sequence[Classifier],
    images: Sequence[Image.Image],
    labels: Sequence[str] = (),
    digits: bool = False,
    about: str | None = None,
    names: Sequence[str] = (),
) -> str:
    """The live page of one or more models, as HTML.

    Args:
        subjects: one to four DeiT or ConViT models with the same image size, shown side by side.
        images: example images.
        labels: class of each example, from which the page counts correct predictions; or empty.
        digits: add a drawing pad, for models of 8×8 digits.
        names: file names of the images, or empty.
        about: HTML below the models, for a page of the documentation site; adds links to the site.

    Raises:
        UserError: a model is too large or neither DeiT nor ConViT, the models' preprocessing
            differs in more than mean and std, or `images` is empty.
    """
    check_count(subjects)
    models = [_describe(subject) for subject in subjects]
    forms = {_form(subject.preprocessing) for subject in subjects}
    if len(forms) > 1:
        raise UserError(
            f"all models of a live page need the same preprocessing, but these take "
            f"{' and '.join(sorted(forms))}; write one page per model"
        )
    preprocessing = subjects[0].preprocessing
    (height, width), channels = preprocessing.size, len(preprocessing.mean)
    if channels == 1:  # `shown` then has three equal channels, of which the first is kept
        images = [to_rgb(image, preprocessing.decoding).convert("L") for image in images]
    shown = prepare_sample(subjects[0], images).shown[..., :channels]
    for subject in subjects:
        subject.check_one_label()
        subject.check_logits(subject.logits(subject.prepare(images)))
    described = [model for model, _ in models]
    page = {
        "crop_pct": preprocessing.crop_pct,
        "crop_mode": preprocessing.crop_mode,
        "interpolation": preprocessing.interpolation,
        "size": [height, width],
        "channels": channels,
        "images": len(images),
        "labels": known_labels(labels, subjects),
        "names": list(names),
        "digits": digits and (height, width) == DRAWN_SIZE,
        "models": described,
    }
    blobs = {f"weights-{at}": weights for at, (_, weights) in enumerate(models)}
    blobs["images"] = np.ascontiguousarray(shown).tobytes()
    return render_page("live.html", described, blobs, page, about=Markup(about or ""))


def _form(preprocessing: Preprocessing) -> str:
    """The parts of a preprocessing that the page has once for all models."""
    height, width = preprocessing.size
    return (
        f"{height}×{width} pixels with {len(preprocessing.mean)} channels (crop_pct "
        f"{preprocessing.crop_pct}, crop_mode {preprocessing.crop_mode}, "
        f"{preprocessing.interpolation})"
    )


def _describe(subject: Classifier) -> tuple[dict[str, Any], bytes]:
    """A model's description for `forward.js`, and its weights in half precision."""
    model, preprocessing = subject.module(), subject.preprocessing
    config: Any = model.config
    # Only these kinds of attention are implemented in `forward.js`.
    if not isinstance(config, ViTConfig) or (
        config.gpsa_layers and config.positional_attention not in ("gpsa", "psa")
    ):
        raise UserError(
            f"{subject.name} cannot run in a live page, which supports DeiT and ConViT; without "
            f"--live, the explorer shows every model, on given images"
        )
    if not config.num_classes or not config.global_pool:
        raise UserError(f"{subject.name} has no classifier; the live page needs one")
    grid = config.grids(preprocessing.size)[0]
    state = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    if "pos_embed" in state:
        prefix = int(config.embed_class_token)
        own = config.native_grids[0]
        state["pos_embed"] = position_embedding(state["pos_embed"], own, grid, prefix)
    size = 4 * sum(tensor.numel() for tensor in state.values())
    if size > MAX_MEGABYTES * 1e6:
        raise UserError(
            f"{subject.name} has {size / 1e6:.1f} MB of weights; a live page runs models of up to "
            f"{MAX_MEGABYTES} MB; omit --live to write the explorer, which stores attention only"
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
        # Index of the block before which the class token is added; -1 if at the start or never.
        "tokenJoins": config.gpsa_layers if joins_late else -1,
        "weights": [[name, tensor.numel()] for name, tensor in state.items()],
    }
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    return about, half_precision(flat, f"the weights of {subject.name}")
