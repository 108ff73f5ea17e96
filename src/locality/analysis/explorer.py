"""The explorer and the live page: HTML files that show attention, without a server or network.

The explorer shows the attention of all heads from a clicked patch. For each model and image it
holds the queries and keys of all heads in half precision, compressed with zlib, which browsers
inflate natively. The page computes the row softmax(q Kᵀ/√d) of the clicked patch. Positional
attention is stored as its three numbers per head; mixed attention is computed from both parts and
the gate, as in the layer.

The live page runs small models: it holds their weights in half precision and a few example images.
`templates/forward.js` is the forward pass of `models/convit.py` with all attention maps, recomputed
as the user changes gates and the strength of locality.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor, nn

from locality.analysis.measures import measure_model, nonlocality_unit, positional_vectors
from locality.analysis.pictures import DECADES
from locality.analysis.taps import LayerView, capture, mixed_attention
from locality.checkpoints import Classifier
from locality.data.config import Preprocessing
from locality.data.preprocessing import high_resolution_crop
from locality.errors import UserError
from locality.files import atomic_file
from locality.layers.block import eval_mode
from locality.models.config import ViTConfig
from locality.models.transformer import position_embedding
from locality.models.variants import FAMILY_NAMES, family_of
from locality.templates import data_url, render, write_page

_MAX_MODELS = 4
_FEW_CLASSES = 12  # list all classes up to this number
_MEASURED = ("name", "kind", "heads", "grid", "key_grid", "key_stride", "key_offset", "gates")

MAX_MEGABYTES = 10
"""Size of the float32 weights above which a model is too slow for a page."""

DRAWN_SIZE = (8, 8)
"""Image size of the digits data set, the only size with a drawing pad."""


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
        images: the images, decoded as for the first model and preprocessed for each.
        names: names of the images; numbered by default.
        labels: class of each image, shown if a model has this class; or empty.

    Raises:
        UserError: no model, no image, or a model whose attention cannot be read.
    """
    check_count(subjects, images)
    # Without EXIF, so that no later model turns them again.
    images = [Image.fromarray(np.asarray(subjects[0].rgb(image))) for image in images]
    observed = [_observe(subject, subject.prepare(images)) for subject in subjects]
    models = [about for about, _ in observed]
    cuts = [subject.preprocessing for subject in subjects]
    otherwise = {number: cut for number, cut in enumerate(cuts) if _part(cut) != _part(cuts[0])}
    known = known_labels(labels, subjects)
    pictures = [
        {
            "source": data_url(np.asarray(high_resolution_crop(image, cuts[0]))),
            "name": names[index] if names else f"image {index + 1}",
            "label": known[index] if known else None,
            # Other models' parts of the image, if they cut it otherwise.
            "own": {
                number: data_url(np.asarray(high_resolution_crop(image, cut)))
                for number, cut in otherwise.items()
            },
        }
        for index, image in enumerate(images)
    ]
    blobs = {
        f"blob-{model}-{image}": blob
        for model, (_, packed) in enumerate(observed)
        for image, blob in enumerate(packed)
    }
    layers = [layer for about in models for layer in about["layers"]]
    return render_page("explorer.html", layers, blobs, {"images": pictures, "models": models})


def write_maps(
    subjects: Sequence[Classifier],
    images: Sequence[Image.Image],
    output: Path | str,
    names: Sequence[str],
) -> Path:
    """Write the attention of one or more models on some images as a NumPy archive (.npz).

    "1.blocks.0.attn.mixed" is the first model's layer of that name, (images, heads, queries, keys);
    `content`, `position` (heads, queries, keys) and `gate` (heads,) where a layer has them.
    "models" and "images" are the names.

    Returns:
        the path of the file.
    """
    check_count(subjects, images)
    models = [subject.name for subject in subjects]
    arrays = {"models": np.array(models), "images": np.array(names)}
    for number, subject in enumerate(subjects, 1):
        model: Any = subject.module()
        with eval_mode(model), capture(model) as views:
            model(subject.prepare(images))
        for view in views:
            own = ("content", "position", "gate") if view.maps.position is not None else ()
            for part in ("mixed", *own):
                if (values := getattr(view.maps, part)) is not None:
                    arrays[f"{number}.{view.name}.{part}"] = values.float().cpu().numpy()
    with atomic_file(output) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    return Path(output)


def check_count(subjects: Sequence[Classifier], images: Sequence[Image.Image]) -> None:
    """Check that a page can show so many models, and that there are images."""
    if not 1 <= len(subjects) <= _MAX_MODELS:
        raise UserError(f"a page shows 1 to {_MAX_MODELS} models, not {len(subjects)}")
    if not images:
        raise UserError("no images given")


def _part(preprocessing: Preprocessing) -> tuple[float, str, float]:
    """What decides which part of an image a model sees."""
    height, width = preprocessing.size
    return preprocessing.crop_pct, preprocessing.crop_mode, height / width


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
        "size": list(subject.preprocessing.size),
        "prefix": prefix,
        "family": family_of(getattr(model, "variant", None)),
        "layers": list(layers.values()),
        "answers": [_answers(subject, logits) for _, logits in observed],
    }
    return about, [packed for packed, _ in observed]


def _answers(subject: Classifier, logits: Tensor) -> list[tuple[str, float]]:
    """Classes with probabilities: all if few, else the five most probable; none for features."""
    if not subject.are_classes(logits):
        return []
    probabilities = subject.probabilities(logits)[0]
    few = len(probabilities) <= _FEW_CLASSES
    shown = range(len(probabilities)) if few else probabilities.topk(5).indices.tolist()
    return [(subject.label(index), float(probabilities[index])) for index in shown]


def _pack(
    model: nn.Module, image: Tensor, layers: Mapping[str, dict[str, Any]]
) -> tuple[bytes, Tensor]:
    """The queries and keys of one image, and the logits; completes the layers' descriptions."""
    parts: list[bytes] = []

    def add(view: LayerView) -> None:
        _check_formula(view)
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


def _check_formula(view: LayerView) -> None:
    """Check that a layer's attention is what the page computes from the same numbers."""
    maps = view.maps
    computed = mixed_attention(maps.query, maps.key, maps.position, maps.gate)
    if not torch.allclose(computed, maps.mixed, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise UserError(
            f"{view.name} ({type(view.module).__name__}) computes another attention than the "
            f"explorer, which has softmax(QKᵀ/√d) and ConViT's Eq. 4 and 7; `explore --npz` "
            f"writes the layer's own"
        )


def half_precision(numbers: Tensor, what: str) -> bytes:
    """Numbers in half precision: all low bytes, then all high bytes, which compresses better.

    Raises:
        UserError: a number is not finite in half precision; the message starts with `what`.
    """
    half = numbers.half()
    if not half.isfinite().all():
        raise UserError(f"{what} are not finite in half precision; check the weights")
    return half.cpu().contiguous().numpy().view(np.uint8).reshape(-1, 2).T.tobytes()


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
    check_count(subjects, images)
    models, weights = zip(*map(_describe, subjects), strict=True)
    forms = {_form(subject.preprocessing) for subject in subjects}
    if len(forms) > 1:
        raise UserError(
            f"all models of a live page need the same preprocessing, but these take "
            f"{' and '.join(sorted(forms))}; write one page per model"
        )
    preprocessing = subjects[0].preprocessing
    shown = torch.stack(subjects[0].pixels(images)).permute(0, 2, 3, 1)
    for subject in subjects:
        subject.check_one_label()
        subject.check_logits(subject.logits(subject.prepare(images)))
    page = {
        "crop_pct": preprocessing.crop_pct,
        "crop_mode": preprocessing.crop_mode,
        "interpolation": preprocessing.interpolation,
        "size": list(preprocessing.size),
        "channels": len(preprocessing.mean),
        "images": len(images),
        "labels": known_labels(labels, subjects),
        "names": list(names),
        "digits": digits and preprocessing.size == DRAWN_SIZE,
        "models": models,
    }
    blobs = {f"weights-{at}": packed for at, packed in enumerate(weights)}
    blobs["images"] = shown.numpy().tobytes()
    return render_page("live.html", models, blobs, page, about=Markup(about or ""))


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
    model: Any = subject.module()
    preprocessing = subject.preprocessing
    config: Any = model.config
    # Only these kinds of attention are implemented in `forward.js`.
    if not isinstance(config, ViTConfig) or (
        config.gpsa_layers and config.positional_attention not in ("gpsa", "psa")
    ):
        raise UserError(
            f"{subject.name} cannot run in a live page, which computes this library's DeiT and "
            f"ConViT; without --live, the explorer shows every model, on given images"
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
        "temperature": subject.temperature,
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
