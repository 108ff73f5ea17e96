"""One model's attention on a set of images, summed up in numbers that fit a JSON file."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from timm.models.convit import GPSA
from torch import Tensor, nn

from locality.analysis import measures
from locality.analysis.taps import (
    LayerView,
    attention_layers,
    capture,
    evaluating,
    maps_of,
    timm_grid,
)
from locality.errors import UserError
from locality.layers.grid import Grid

Record = dict[str, Any]


def measure_model(model: nn.Module, images: Tensor, batch_size: int = 8) -> Record:
    """Nonlocality, entropy, gates and centres of every layer and head, on real layer inputs.

    The model is put in evaluation mode for the measurement and left as it was. Images pass in
    batches, and of each layer's attention only its measures are kept.

    Args:
        model: one of ours, or a timm ViT.
        images: (n, C, H, W), normalised as the model expects, on the model's device.
        batch_size: how many images pass at a time; changes no number. Few keep what is computed of
            a layer in the cache: 64 take twice the time on a processor, and eight times the memory.

    Returns:
        {"images": n, "layers": [one record per attention layer, in depth order]}. A layer's record
        has its `name`, `kind` ("gpsa", "psa" or "sa"), `grid` and `key_grid`, and

        - `nonlocality`, `entropy`: {"mean", "std"} with one number per head, over images;
            "layer_mean" and "layer_std" for the mean over heads (Eq. 8);
        - `content_nonlocality`, `position_nonlocality`: per head, null where there is no such part;
        - `class_token_share`: per head, what patches pay to the class token; null without one;
        - `gates` σ(λ), `centres` Δ, `strengths` α, `spans`: per head, null where not defined.

    Raises:
        UserError: if there is no image, or the model's attention cannot be read.
    """
    if len(images) == 0:
        raise UserError("there is no image to measure attention on")
    collected: dict[int, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    described: dict[int, Record] = {}

    def reduce(view: LayerView) -> None:
        for name, values in _per_image(view).items():
            collected[view.index][name].append(values.double().cpu())
        described.setdefault(view.index, _describe(view))

    with evaluating(model), capture(model, on_layer=reduce):
        for batch in images.split(batch_size):
            model(batch)
    layers = []
    for index in sorted(described):
        values = {name: torch.cat(parts) for name, parts in collected[index].items()}
        layers.append(described[index] | _summed_up(values))
    return {"images": len(images), "layers": layers}


@torch.no_grad()
def released_nonlocality(model: nn.Module, images: Tensor) -> list[list[float]]:
    """Nonlocality as the authors' released script computes it, to compare with its old curves.

    It feeds the patch embedding of the images, without position embedding, norm or class token, to
    every layer's attention, whatever the layer really gets to see. `measure_model` measures on what
    each layer is given.

    Args:
        model: a DeiT or ConViT, ours or timm's.
        images: (n, C, H, W), normalised.

    Returns:
        one list per layer of one number per head, averaged over images.

    Raises:
        UserError: for a model whose layers do not all take tokens of the patch embedding's width.
    """
    layers = attention_layers(model)
    embed = getattr(model, "patch_embed", None)
    if embed is None:
        raise UserError(
            f"the released script's nonlocality feeds one patch embedding to every layer, which "
            f"{type(model).__name__} does not have"
        )
    tokens, grid = _embedded(embed, images)
    return [
        measures.nonlocality(maps_of(module, tokens, grid).mixed, grid).double().mean(0).tolist()
        for _, module in layers
    ]


def _embedded(embed: nn.Module, images: Tensor) -> tuple[Tensor, Grid]:
    """The patch embedding's output as tokens (B, N, C), and their grid."""
    embedded = embed(images)
    if isinstance(embed, nn.Conv2d):
        return embedded.flatten(2).transpose(1, 2), (embedded.shape[2], embedded.shape[3])
    # timm's gives (B, N, C), or (B, H, W, C) where image sizes may vary.
    grid = timm_grid(embed, images)
    return embedded.reshape(len(images), -1, embedded.shape[-1]), grid


def _per_image(view: LayerView) -> dict[str, Tensor]:
    """The measures of one layer that depend on the image, each (B, h)."""
    maps = view.maps
    prefix = maps.prefix_tokens
    places = (maps.query_grid, maps.key_grid, prefix, view.key_stride)
    values = {
        "nonlocality": measures.nonlocality(maps.mixed, *places),
        "entropy": measures.entropy(maps.mixed, prefix),
    }
    if prefix:
        values["class_token_share"] = measures.class_token_share(maps.mixed, prefix)
    if maps.content is not None:
        values["content_nonlocality"] = measures.nonlocality(maps.content, *places)
    return values


def _describe(view: LayerView) -> Record:
    """What of one layer does not depend on the image."""
    maps, v_pos = view.maps, positional_vectors(view.module)
    focus = (None, None, None) if v_pos is None else measures.positional_focus(v_pos)
    far = None
    if maps.position is not None:
        places = (maps.query_grid, maps.key_grid, 0, view.key_stride)
        far = measures.nonlocality(maps.position, *places)
    return {
        "name": view.name,
        "kind": "gpsa" if maps.gate is not None else "sa" if maps.position is None else "psa",
        "grid": list(maps.query_grid),
        "key_grid": list(maps.key_grid),
        "heads": maps.mixed.shape[1],
        "gates": _plain(maps.gate),
        "position_nonlocality": _plain(far),
    } | dict(zip(("centres", "strengths", "spans"), map(_plain, focus), strict=True))


def positional_vectors(module: nn.Module) -> Tensor | None:
    """v_pos of a positional layer as (h, 3), ours or timm's; None for a layer without one."""
    v_pos = getattr(module, "v_pos", None)
    if v_pos is None and isinstance(module, GPSA):
        v_pos = module.pos_proj.weight[:, [2, 1, 0]]
    return None if v_pos is None else v_pos.detach()


def _summed_up(values: dict[str, Tensor]) -> Record:
    """Means and deviations over images of measures (n, h)."""
    record: Record = {}
    for name in ("nonlocality", "entropy"):
        per_layer = values[name].nanmean(dim=1)
        record[name] = {
            "mean": _plain(values[name].nanmean(dim=0)),
            "std": _plain(_deviation(values[name])),
            "layer_mean": _plain(per_layer.nanmean()),
            "layer_std": _plain(_deviation(per_layer)),
        }
    for name in ("class_token_share", "content_nonlocality"):
        record[name] = _plain(values[name].nanmean(dim=0)) if name in values else None
    return record


def _deviation(values: Tensor) -> Tensor:
    """Standard deviation over the first dimension, with n in the denominator; nan left out."""
    return (values - values.nanmean(dim=0)).square().nanmean(dim=0).sqrt()


def _plain(values: Tensor | None) -> Any:
    """Nested lists of numbers, or one number; null for what JSON cannot say (nan, infinity)."""
    if values is None:
        return None

    def clean(item: Any) -> Any:
        if isinstance(item, list):
            return [clean(part) for part in item]
        return item if math.isfinite(item) else None

    return clean(values.double().cpu().tolist())
