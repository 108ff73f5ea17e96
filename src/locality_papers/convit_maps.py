"""ConViT's attention maps and architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locality.analysis.pictures import Pictures, capture_pictures, validation_sample
from locality.figures import maps
from locality.layers.position import kernel_size
from locality.models import build
from locality.models.variants import variant
from locality.training.model import initial_model, load_run
from locality_papers import diagrams
from locality_papers.scales import Scale
from locality_papers.specs import Figure, experiment

_AVERAGED_IMAGES = 100
_OTHER_IMAGES = range(1, 4)


@experiment("convit/figure-4", "Architecture of the ConViT")
def figure_4(s: Scale) -> Figure:
    """Drawn from the paper's models; independent of the scale."""

    def draw() -> Any:
        deit, convit = build("deit_small"), build("convit_small")
        columns = {"ViT (DeiT-S)": diagrams.outline(deit), "ConViT-S": diagrams.outline(convit)}
        layer = diagrams.gated_layer(convit.blocks[0].attn)  # type: ignore[index, union-attr]
        return diagrams.draw_columns(columns | {"GPSA layer (Eq. 6–7)": layer})

    return Figure(
        draw=draw,
        about="Layers, tokens and widths, read from the models.",
    )


def corner_heads(num_heads: int) -> list[int]:
    """The heads of a kernel's corners as in ConViT's Fig. 3: (−, +), (−, −), (+, +), (+, −)."""
    k = kernel_size(num_heads)
    return [k - 1, 0, k * k - 1, k * (k - 1)]


@experiment("convit/figure-3", "Convolutional initialisation of positional attention")
def figure_3(s: Scale) -> Figure:
    """Attention maps of untrained layers: self-attention, and PSA at two strengths."""
    config = s.runs("ConViT-S", seeds=s.seeds[:1])[0].config
    name, fields = config.model.name, config.model.fields

    def draw() -> Any:
        shape: Any = variant(name).config.with_overrides(**fields)
        image, heads = validation_sample(config, shape.img_size, 1), corner_heads(shape.num_heads)
        return maps.initial_maps(image, name, fields, seed=config.seed, heads=heads)

    return Figure(
        draw=draw,
        about="Untrained layers on one image; the four heads are the corners of the kernel, in the "
        "paper's order. Self-attention (b) follows shapes, PSA at α = 0.5 (c) and 2 (d) positions.",
    )


def run_pictures(folder: Path | str, count: int, trained: bool = True) -> Pictures:
    """Attention of a run's model from the centre patch of its first validation images.

    Args:
        folder: the run folder.
        count: number of images.
        trained: use the trained model, else the initial one.
    """
    model, config = load_run(folder)
    model = model if trained else initial_model(folder)
    return capture_pictures(model, validation_sample(config, model.img_size, count))


def _maps_figure(s: Scale, size: str, images: Sequence[int]) -> Figure:
    roles = [f"DeiT-{size}", f"ConViT-{size}"]
    runs = tuple(s.runs(role, seeds=s.seeds[:1])[0] for role in roles)
    layers = (1, s.architecture(roles[1]).gpsa_layers - 1)

    def draw() -> Any:
        captured = [run_pictures(run.folder, max(images) + 1) for run in runs]
        return maps.maps(
            list(zip(map(s.called, roles), captured, strict=True)), layers, image=images
        )

    return Figure(
        draw=draw,
        drawn=runs,
        about=f"Attention from the centre patch in layers 2 and {layers[1] + 1}. Colours are "
        f"logarithmic; frames go from white (content) to red (position).",
    )


@experiment("convit/figure-7", "Attention maps of DeiT-Ti and ConViT-Ti")
def figure_7(s: Scale) -> Figure:
    """On one image."""
    return _maps_figure(s, "Ti", [0])


@experiment("convit/figure-16", "More attention maps of DeiT-Ti and ConViT-Ti")
def figure_16(s: Scale) -> Figure:
    """On other images."""
    return _maps_figure(s, "Ti", _OTHER_IMAGES)


@experiment("convit/figure-15", "Mean attention maps of DeiT before and after training")
def figure_15(s: Scale) -> Figure:
    """Averages over images."""
    (run,) = s.runs("DeiT-Ti", seeds=s.few_seeds[:1])
    deep = max(1, round(0.75 * s.architecture("DeiT-Ti").depth))

    def draw() -> Any:
        captured = [
            ("before training", run_pictures(run.folder, _AVERAGED_IMAGES, trained=False)),
            ("after", run_pictures(run.folder, _AVERAGED_IMAGES)),
        ]
        return maps.maps(captured, (0, deep), image=None)

    return Figure(
        draw=draw,
        drawn=(run,),
        about=f"Attention from the centre patch, averaged over {_AVERAGED_IMAGES} images, in "
        f"layers 1 and {deep + 1}.",
    )


@experiment("convit/figure-17", "Attention maps of DeiT-S and ConViT-S")
def figure_17(s: Scale) -> Figure:
    """As Fig. 16."""
    return _maps_figure(s, "S", _OTHER_IMAGES)
