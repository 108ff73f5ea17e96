"""ConViT's figures of attention: nonlocality and gates over training, and maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from locality.analysis.pictures import validation_sample
from locality.analysis.recording import run_pictures
from locality.figures import maps
from locality.models.factory import variant
from locality.papers.convit import distilled, seeds_of
from locality.papers.measures import TRAJECTORY
from locality.papers.quantities import Absent, Combined, Quantity, difference
from locality.papers.scales import EARLY, Scale
from locality.papers.sizes import depth_of, gated_layers_of, heads_of
from locality.papers.specs import Claim, Drawing, Figure, Panel, Series, experiment

# The unit of gates, which are shares.
_SHARE = "of attention"
_AVERAGED_IMAGES = 100


@experiment("convit/figure-3", "Convolutional initialisation of positional attention")
def figure_3(s: Scale) -> Figure:
    """Attention maps of untrained layers: self-attention, and PSA at two strengths."""
    name, overrides = s.models["ConViT-S"]
    config = s.config("ConViT-S")

    def draw(_: list[Path]) -> Any:
        size = config.model.img_size or variant(name).config.img_size
        image = validation_sample(config, size, 1)
        return maps.initial_maps(image, name, {**overrides, "img_size": size}, seed=config.seed)

    about = (
        "Untrained layers on one image. Self-attention (b) sees shapes; positional attention with "
        "the convolutional initialisation at α = 0.5 (c) and 2 (d) sees only places."
    )
    return Figure(about, drawing=Drawing((), draw))


def nonlocality_of(trajectory: Quantity, layer: int) -> Quantity:
    """The nonlocality of a layer over epochs."""

    def curve(measured: Any) -> Any:
        return {"x": measured["epochs"], "y": measured["layers"][layer]["nonlocality"]}

    return Combined(curve, (trajectory,))


def gate_of(trajectory: Quantity, layer: int, head: int | None = None) -> Quantity:
    """σ(λ) of a head, or the mean over the heads of a layer, over epochs."""

    def curve(measured: Any) -> Any:
        gates = measured["layers"][layer]["gates"]
        values = [sum(each) / len(each) if head is None else each[head] for each in gates]
        return {"x": measured["epochs"], "y": values}

    return Combined(curve, (trajectory,))


def layer_number(trajectory: Quantity, function: Callable[[list[list[float]]], float]) -> Quantity:
    """A number from the nonlocality of all layers over snapshots."""
    return Combined(
        lambda measured: function([layer["nonlocality"] for layer in measured["layers"]]),
        (trajectory,),
    )


def _early(values: list[float]) -> float:
    """The value at the snapshot nearest to the end of the early part of training."""
    return values[max(1, round(EARLY * (len(values) - 1)))]


def _nonlocality_panel(s: Scale, role: str, title: str, **choices: Any) -> Panel:
    trajectory = s.measured(TRAJECTORY, role, **choices)
    layers = depth_of(s, role)
    series = tuple(
        Series(f"layer {layer + 1}", nonlocality_of(trajectory, layer), f"depth:{layer / layers}")
        for layer in range(layers)
    )
    return Panel(title, "epochs", "nonlocality (patches)", series)


def _nonlocality_claims(s: Scale, size: str) -> tuple[Claim, ...]:
    chosen = {"seeds": seeds_of(s, size)}
    deit = s.measured(TRAJECTORY, f"DeiT-{size}", **chosen)
    convit = s.measured(TRAJECTORY, f"ConViT-{size}", **chosen)
    gated = gated_layers_of(s, f"ConViT-{size}")

    def final_mean(layers: list[list[float]]) -> float:
        return sum(layer[-1] for layer in layers[:gated]) / gated

    return (
        Claim("early in training, every layer of DeiT becomes more local",
              layer_number(deit, lambda layers: min(v[0] - _early(v) for v in layers)),
              unit="patches"),
        Claim("DeiT's last layer ends less local than its first",
              layer_number(deit, lambda layers: layers[-1][-1] - layers[0][-1]), unit="patches"),
        Claim("every gated layer of ConViT leaves locality over training",
              layer_number(convit, lambda layers: min(v[-1] - v[0] for v in layers[:gated])),
              unit="patches"),
        Claim("ConViT's gated layers end more local than DeiT's layers of the same depth",
              difference(layer_number(deit, final_mean), layer_number(convit, final_mean)),
              unit="patches"),
    )  # fmt: skip


@experiment("convit/figure-5", "Nonlocality over training, DeiT-S and ConViT-S")
def figure_5(s: Scale) -> Figure:
    """Eq. 8 by layer, from snapshots."""
    panels = tuple(
        _nonlocality_panel(s, f"{family}-S", f"{family}-S") for family in ("DeiT", "ConViT")
    )
    about = "Nonlocality (Eq. 8) of every layer, on the layer's own inputs."
    return Figure(about, panels, claims=_nonlocality_claims(s, "S"))


def _gate_panels(s: Scale, size: str) -> tuple[Panel, ...]:
    role = f"ConViT-{size}"
    trajectory = s.measured(TRAJECTORY, role, seeds=seeds_of(s, size))
    heads = heads_of(s, role)
    panels = []
    for layer in range(gated_layers_of(s, role)):
        series = [
            Series(
                f"head {head + 1}",
                gate_of(trajectory, layer, head),
                f"depth:{head / heads}",
                band=False,
            )
            for head in range(heads)
        ]
        series.append(Series("mean", gate_of(trajectory, layer), "ink"))
        title = f"{role}, layer {layer + 1}"
        panels.append(Panel(title, "epochs", "gate σ(λ)", tuple(series)))
    return tuple(panels)


def _mean_gate(trajectory: Quantity, function: Callable[[list[list[float]]], float]) -> Quantity:
    """A number from the mean gates of the gated layers over snapshots."""

    def number(measured: Any) -> float:
        means = [
            [sum(gates) / len(gates) for gates in layer["gates"]]
            for layer in measured["layers"]
            if layer["gates"] is not None
        ]
        return function(means)

    return Combined(number, (trajectory,))


@experiment("convit/figure-6", "Gates over training, ConViT-S")
def figure_6(s: Scale) -> Figure:
    """σ(λ) of every head, layer by layer."""
    trajectory = s.measured(TRAJECTORY, "ConViT-S")
    claims = (
        Claim("the mean gate of every layer falls over training",
              _mean_gate(trajectory, lambda layers: min(v[0] - v[-1] for v in layers)),
              unit=_SHARE),
        Claim("the last gated layer ends with less positional attention than the first",
              _mean_gate(trajectory, lambda layers: layers[0][-1] - layers[-1][-1]), unit=_SHARE),
    )  # fmt: skip
    about = "The share σ(λ) of positional attention, per head; black: mean over heads."
    return Figure(about, _gate_panels(s, "S"), claims=claims)


def _maps_figure(s: Scale, size: str, image: int) -> Figure:
    runs = []
    for family in ("DeiT", "ConViT"):
        try:
            runs.append(s.runs(f"{family}-{size}", seeds=(0,))[0])
        except ValueError as error:
            return Figure("", panels=(Panel("", "", "", (Series("", Absent(str(error))),)),))
    layers = (1, gated_layers_of(s, f"ConViT-{size}") - 1)
    titles = [f"DeiT-{size}", f"ConViT-{size}"]

    def draw(folders: list[Path]) -> Any:
        taken = [run_pictures(folder, image + 1) for folder in folders]
        return maps.maps(list(zip(titles, taken, strict=True)), layers, image=image)

    about = (
        f"Attention from the centre patch in layers {layers[0] + 1} and {layers[1] + 1}. Colours "
        f"are logarithmic; frames go from white (content) to red (position)."
    )
    return Figure(about, drawing=Drawing(tuple(runs), draw))


@experiment("convit/figure-7", "Attention maps of DeiT-Ti and ConViT-Ti")
def figure_7(s: Scale) -> Figure:
    """One image."""
    return _maps_figure(s, "Ti", image=0)


@experiment("convit/figure-10", "Nonlocality of DeiT-S with and without distillation")
def figure_10(s: Scale) -> Figure:
    """The two trajectories, and where they end."""
    taught = distilled(s)
    panels = (
        _nonlocality_panel(s, "DeiT-S", "no distillation"),
        _nonlocality_panel(s, "DeiT-S", "hard distillation", **taught),
    )

    def final(layers: list[list[float]]) -> float:
        return sum(layer[-1] for layer in layers) / len(layers)

    plain = layer_number(s.measured(TRAJECTORY, "DeiT-S"), final)
    pulled = layer_number(s.measured(TRAJECTORY, "DeiT-S", **taught), final)
    claims = (Claim("a convolutional teacher leaves DeiT more local at the end",
                    difference(plain, pulled), unit="patches"),)  # fmt: skip
    return Figure("Nonlocality (Eq. 8) of every layer of DeiT.", panels, claims=claims)


def _sizes_without_middle(s: Scale) -> tuple[str, ...]:
    return tuple(size for size in ("Ti", "B") if f"ConViT-{size}" in s.models)


@experiment("convit/figure-13", "Nonlocality of the tiny and base models")
def figure_13(s: Scale) -> Figure:
    """As Fig. 5."""
    sizes = _sizes_without_middle(s)
    panels = tuple(
        _nonlocality_panel(s, f"{family}-{size}", f"{family}-{size}", seeds=seeds_of(s, size))
        for size in sizes
        for family in ("DeiT", "ConViT")
    )

    def first_layer(family: str, size: str) -> Quantity:
        trajectory = s.measured(TRAJECTORY, f"{family}-{size}", seeds=seeds_of(s, size))
        return layer_number(trajectory, lambda layers: layers[0][-1])

    claims = tuple(
        Claim(f"the first layer of the larger {family} ends less local",
              difference(first_layer(family, sizes[-1]), first_layer(family, sizes[0])),
              unit="patches")
        for family in ("DeiT", "ConViT")
    )  # fmt: skip
    return Figure("Nonlocality (Eq. 8) of every layer.", panels, claims=claims)


@experiment("convit/figure-14", "Gates of the tiny and base models")
def figure_14(s: Scale) -> Figure:
    """As Fig. 6."""
    sizes = _sizes_without_middle(s)
    panels = tuple(panel for size in sizes for panel in _gate_panels(s, size))

    def final(size: str) -> Quantity:
        trajectory = s.measured(TRAJECTORY, f"ConViT-{size}", seeds=seeds_of(s, size))
        return _mean_gate(trajectory, lambda layers: sum(v[-1] for v in layers) / len(layers))

    claims = (Claim("the larger ConViT keeps more positional attention",
                    difference(final(sizes[-1]), final(sizes[0])), unit=_SHARE),)  # fmt: skip
    return Figure("The share σ(λ) of positional attention, per head.", panels, claims=claims)


@experiment("convit/figure-15", "Mean attention maps of DeiT before and after training")
def figure_15(s: Scale) -> Figure:
    """Averages over 100 images."""
    size = "Ti" if "DeiT-Ti" in s.models else "S"
    run = s.runs(f"DeiT-{size}", seeds=seeds_of(s, size)[:1])[0]
    layers = (0, max(1, round(0.75 * depth_of(s, f"DeiT-{size}"))))

    def draw(folders: list[Path]) -> Any:
        taken = [
            ("before training", run_pictures(folders[0], _AVERAGED_IMAGES, trained=False)),
            ("after", run_pictures(folders[0], _AVERAGED_IMAGES)),
        ]
        return maps.maps(taken, layers, image=None)

    about = (
        f"Attention from the centre patch, averaged over {_AVERAGED_IMAGES} images, in "
        f"layers {layers[0] + 1} and {layers[1] + 1}."
    )
    return Figure(about, drawing=Drawing((run,), draw))


@experiment("convit/figure-16", "More attention maps of DeiT-Ti and ConViT-Ti")
def figure_16(s: Scale) -> Figure:
    """Another image than Fig. 7."""
    return _maps_figure(s, "Ti", image=1)


@experiment("convit/figure-17", "Attention maps of DeiT-S and ConViT-S")
def figure_17(s: Scale) -> Figure:
    """As Fig. 16."""
    return _maps_figure(s, "S", image=1)
