"""The figures of attention maps, drawn from runs or from untrained models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from locality.analysis.maps import MapBlock, draw_maps, model_block
from locality.analysis.pictures import Pictures, take_pictures
from locality.analysis.samples import sample
from locality.data import open_data
from locality.models import create_model
from locality.training import RunConfig, load_run
from locality.training.runs import initial_model

_HEADS = 4
_AVERAGED_IMAGES = 100
_PLACE = (0.5, 0.5)


def _pictures(model: nn.Module, config: RunConfig, size: Any, count: int) -> Pictures:
    """Pictures of the first images of a run's validation set."""
    splits = open_data(config.data, config.seed)
    chosen = sample(splits.val, config.augment, size, count)
    labels = [splits.classes[label] for label in chosen.labels]
    return take_pictures(model, chosen.images, chosen.shown, labels, splits.classes, _PLACE)


def trained_maps(
    folders: Sequence[Path], titles: Sequence[str], layers: Sequence[int], image: int
) -> Figure:
    """Maps of trained models side by side, on one image (Figs. 7, 16, 17)."""
    blocks, taken = [], None
    for folder, title in zip(folders, titles, strict=True):
        model, config = load_run(folder)
        taken = _pictures(model, config, model.img_size, image + 1)
        blocks.append(model_block(title, taken, layers, _HEADS, image))
    assert taken is not None
    layer = taken.layers[0]
    return draw_maps(blocks, taken.images[image], (layer.query, layer.grid))


def mean_maps(folder: Path, layers: Sequence[int]) -> Figure:
    """Maps averaged over images, before and after training (Fig. 15)."""
    model, config = load_run(folder)
    blocks = []
    for title, network in (("before training", initial_model(folder)), ("after", model)):
        taken = _pictures(network, config, model.img_size, _AVERAGED_IMAGES)
        blocks.append(model_block(title, taken, layers, _HEADS, None))
    return draw_maps(blocks)


def initial_maps(
    config: RunConfig, name: str, overrides: dict[str, Any], strengths: Sequence[float]
) -> Figure:
    """The first layer before training: self-attention, and PSA at some strengths (Fig. 3)."""
    networks = {"self-attention": {"gpsa_layers": 0}} | {
        f"PSA, α = {strength:g}": {"positional_attention": "psa", "locality_strength": strength}
        for strength in strengths
    }
    blocks: list[MapBlock] = []
    taken = None
    for title, changes in networks.items():
        torch.manual_seed(config.seed)
        model = create_model(name, img_size=config.model.img_size, **(overrides | changes))
        taken = _pictures(model, config, model.img_size, 1)
        blocks.append(model_block(title, taken, [0], _HEADS, 0))
    assert taken is not None
    layer = taken.layers[0]
    return draw_maps(blocks, taken.images[0], (layer.query, layer.grid), own_scale=True)
