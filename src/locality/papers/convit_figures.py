"""ConViT's figures: accuracy over data, size and training; nonlocality, gates and maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from locality.analysis.pictures import validation_sample
from locality.analysis.recording import run_pictures
from locality.figures import maps
from locality.models.variants import variant
from locality.papers import published
from locality.papers.convit import ABLATIONS, ablation, distilled, percent
from locality.papers.measures import (
    BEST_TOP1,
    CURVE_OVER_FRACTION,
    LEARNING_CURVE,
    PARAMETERS,
    TOP1,
    TRAJECTORY,
    Measure,
    Quantity,
    combined,
    computed,
    relative_gain,
    top1_at,
)
from locality.papers.scales import FAMILIES, Scale
from locality.papers.specs import Claim, Drawing, Figure, Panel, Series, experiment, shaded

EARLY = 0.1
"""The fraction of training that counts as early: 30 of the paper's 300 epochs."""

_AVERAGED_IMAGES = 100


def over(xs: Sequence[float], parts: Sequence[Quantity]) -> Quantity:
    """Numbers as a curve: x → the quantity of that x."""
    return combined(lambda *values: {"x": list(xs), "y": list(values)}, *parts)


def accuracy_by_size(
    s: Scale, roles: Mapping[str, tuple[int, ...]], others: Sequence[str]
) -> Panel:
    """Top-1 against parameters: one point per role, over its seeds, and the printed ones of others.

    Args:
        s: the scale; where ours compare with the paper's, `others` are shown too.
        roles: role → its seeds.
        others: rows of CvT's Table 3.
    """
    series = []
    for role, seeds in roles.items():
        point = combined(
            lambda parameters, top1: {"x": [parameters / 1e6], "y": [top1]},
            s.measured(PARAMETERS, role, seeds=seeds),
            s.measured(TOP1, role, seeds=seeds),
        )
        series.append(Series(role, point, role.partition("-")[0].lower()))
    for row in others if s.comparable else ():
        printed = published.rows("cvt/table-3")[row]
        at = {"x": [printed["parameters"].value], "y": [printed["top1"].value]}
        series.append(Series(f"{row} (published)", computed(partial(dict, at)), "other"))
    return Panel(
        "Accuracy and size", "parameters (M)", "top-1 (%)", tuple(series), log_x=True, scatter=True
    )


@experiment("convit/figure-2a", "Sample efficiency")
def figure_2a(s: Scale) -> Figure:
    """Accuracy against the fraction of the data, and the relative improvement."""
    parts = [100 * fraction for fraction in s.fractions]
    top1 = {
        family: [s.measured(TOP1, f"{family}-S", fraction=f) for f in s.fractions]
        for family in FAMILIES
    }
    gains = [relative_gain(*pair) for pair in zip(top1["ConViT"], top1["DeiT"], strict=True)]
    accuracy = tuple(
        Series(f"{family}-S", over(parts, found), family.lower()) for family, found in top1.items()
    )
    gain = (Series("ConViT over DeiT", over(parts, gains), "other"),)
    label = "training images (%)"
    panels = (
        Panel("Accuracy", label, "top-1 (%)", accuracy, log_x=True),
        Panel("Relative improvement", label, "% of DeiT's top-1", gain, log_x=True),
    )
    text = "the relative improvement grows as the data shrinks"
    claims = (Claim(text, gains[0] - gains[-1]),)
    return Figure("Table 2 as curves: fractions of each class's images.", panels, claims=claims)


@experiment("convit/figure-2b", "Parameter efficiency")
def figure_2b(s: Scale) -> Figure:
    """Accuracy against the number of parameters."""
    roles = {f"{family}-{size}": s.seeds_of(size) for family in FAMILIES for size in s.sizes}
    panel = accuracy_by_size(s, roles, ("ResNet-50", "ResNet-101", "ResNet-152"))
    return Figure("The models of Table 1, on all data.", (panel,))


def _with_gpsa(s: Scale, measure: Measure, layers: int, strength: float = 1.0) -> Quantity:
    """A cell of Figs. 8 and 12; the model's own values are left out, to share its runs."""
    if layers == 0:
        return s.measured(measure, "DeiT-S", seeds=s.few_seeds, **s.small)
    fields: dict[str, Any] = {}
    if layers != s.gpsa_counts[-1]:
        fields["gpsa_layers"] = layers
    if strength != 1.0:
        fields["locality_strength"] = strength
    return s.measured(measure, "ConViT-S", seeds=s.few_seeds, fields=fields, **s.small)


@experiment("convit/figure-8", "Accuracy against locality strength and number of GPSA layers")
def figure_8(s: Scale) -> Figure:
    """Final accuracy (left) and accuracy at stages of training (right)."""
    by_strength = {
        f"{layers} GPSA layer{'s' if layers > 1 else ''}": over(
            s.strengths, [_with_gpsa(s, TOP1, layers, each) for each in s.strengths]
        )
        for layers in s.gpsa_counts
    }
    early = top1_at(EARLY)
    counts = (0, *s.gpsa_counts)
    by_stage = {
        f"after {percent(fraction)} of training": over(
            [float(layers) for layers in counts],
            [_with_gpsa(s, measure, layers) for layers in counts],
        )
        for fraction, measure in ((EARLY, early), (0.3, top1_at(0.3)), (1.0, TOP1))
    }
    panels = (
        Panel("Locality strength", "α", "final top-1 (%)", shaded(by_strength), log_x=True),
        Panel("GPSA layers", "number of GPSA layers", "top-1 (%)", shaded(by_stage)),
    )
    most, least = s.gpsa_counts[-1], s.gpsa_counts[0]
    strong, weak = (_with_gpsa(s, TOP1, most, s.strengths[index]) for index in (-1, 0))
    many, few = _with_gpsa(s, TOP1, most), _with_gpsa(s, TOP1, least)
    boost_early = _with_gpsa(s, early, most) - _with_gpsa(s, early, 0)
    boost = many - _with_gpsa(s, TOP1, 0)
    claims = (
        Claim("final accuracy grows with the locality strength", strong - weak),
        Claim("final accuracy grows with the number of GPSA layers", many - few),
        Claim(
            "the boost over DeiT is larger early in training than at its end", boost_early - boost
        ),
    )
    about = "On the scale's smaller training set. Zero GPSA layers is DeiT."
    return Figure(about, panels, claims=claims)


@experiment("convit/figure-9", "PSA in GPSA's place: gating is what keeps the gain")
def figure_9(s: Scale) -> Figure:
    """Learning curves of DeiT, of ConViT with PSA, and of ConViT."""
    size = "B" if s.comparable else "S"

    def three(measure: Measure) -> tuple[Quantity, Quantity, Quantity]:
        convit, deit = (f"{family}-{size}" for family in FAMILIES)
        return (
            s.measured(measure, convit),
            s.measured(measure, convit, fields={"positional_attention": "psa"}),
            s.measured(measure, deit),
        )

    labels = (("ConViT (GPSA)", "convit"), ("ConViT with PSA", "other"), ("DeiT", "deit"))
    series = tuple(
        Series(label, curve, colour)
        for (label, colour), curve in zip(labels, three(LEARNING_CURVE), strict=True)
    )
    gpsa, psa, deit = three(TOP1)
    _, psa_early, deit_early = three(top1_at(EARLY))
    claims = (
        Claim(
            "early in training, PSA with convolutional init is above DeiT", psa_early - deit_early
        ),
        Claim("at the end, DeiT is above PSA", deit - psa),
        Claim("at the end, GPSA is above PSA", gpsa - psa),
    )
    about = "PSA adds content and position before one softmax (Eq. 4); GPSA mixes two (Eq. 7)."
    return Figure(about, (Panel("Learning curves", "epochs", "top-1 (%)", series),), claims=claims)


@experiment("convit/figure-11", "Learning curves by size and by fraction of the data")
def figure_11(s: Scale) -> Figure:
    """Curves of ConViT (solid) and DeiT (dashed)."""
    sizes = [size for size in s.sizes if size.endswith("+")] or s.sizes

    def curves(found: Mapping[str, tuple[Quantity, ...]]) -> tuple[Series, ...]:
        families = (
            shaded(
                {f"{family}, {label}": pair[index] for label, pair in found.items()},
                dashed=family == "DeiT",
            )
            for index, family in enumerate(FAMILIES)
        )
        return tuple(series for pair in zip(*families, strict=True) for series in pair)

    def both(measure: Measure, size: str, **choices: Any) -> tuple[Quantity, ...]:
        return tuple(s.measured(measure, f"{family}-{size}", **choices) for family in FAMILIES)

    by_size = {size: both(LEARNING_CURVE, size, seeds=s.seeds_of(size)) for size in sizes}
    by_fraction = {
        percent(f): both(CURVE_OVER_FRACTION, "S", fraction=f) for f in s.fractions[::-1]
    }
    panels = [
        Panel("Size of the model", "epochs", "top-1 (%)", curves(by_size)),
        Panel("Fraction of the data", "fraction of training (%)", "top-1 (%)", curves(by_fraction)),
    ]
    if s.comparable:
        cifar: dict[str, Any] = {
            "data__dataset": "cifar100",
            "schedule__epochs": 3000.0,
            "schedule__eval_every": 30.0,
            "seeds": s.few_seeds,
        }
        lines = curves({size: both(LEARNING_CURVE, size, **cifar) for size in sizes})
        panels.insert(0, Panel("CIFAR-100 at 224 px", "epochs", "top-1 (%)", lines))

    def gain(size: str, **choices: Any) -> Quantity:
        return relative_gain(*both(BEST_TOP1, size, **choices))

    larger = gain(sizes[-1], seeds=s.few_seeds) - gain(sizes[0], seeds=s.few_seeds)
    fewer = gain("S", fraction=s.fractions[0]) - gain("S", fraction=s.fractions[-1])
    claims = (
        Claim("the relative improvement grows with the size of the model", larger),
        Claim("the relative improvement grows as the data shrinks", fewer),
    )
    about = "Solid: ConViT. Dashed: DeiT. Improvements are those of the best evaluations."
    return Figure(about, tuple(panels), claims=claims)


@experiment("convit/figure-12", "What each ingredient does to the dynamics of learning")
def figure_12(s: Scale) -> Figure:
    """Learning curves for numbers of GPSA layers (left) and the rows of Table 3 (right)."""
    by_count = {f"{n} GPSA": _with_gpsa(s, LEARNING_CURVE, n) for n in s.gpsa_counts}
    deit = Series("DeiT", _with_gpsa(s, LEARNING_CURVE, 0), "deit")
    by_row = tuple(
        replace(series, colour={"a": "convit", "e": "deit"}.get(series.label[0], series.colour))
        for series in shaded(
            {
                f"{row}: {label}": ablation(s, row, LEARNING_CURVE, **s.small)
                for row, (label, _) in ABLATIONS.items()
            }
        )
    )
    panels = (
        Panel("Number of GPSA layers", "epochs", "top-1 (%)", (deit, *shaded(by_count))),
        Panel("Ingredients", "epochs", "top-1 (%)", by_row),
    )
    return Figure("On the scale's smaller training set.", panels)


def _curve(trajectory: Quantity, values: Callable[[Any], Sequence[float]]) -> Quantity:
    """Something of a trajectory's layers over epochs."""
    return combined(lambda m: {"x": m["epochs"], "y": list(values(m["layers"]))}, trajectory)


def _nonlocality(trajectory: Quantity, function: Callable[[list[list[float]]], float]) -> Quantity:
    """A number from the nonlocality of all layers over snapshots."""
    return combined(
        lambda m: function([layer["nonlocality"] for layer in m["layers"]]),
        trajectory,
        unit="patches",
    )


def _mean_gates(trajectory: Quantity, function: Callable[[list[list[float]]], float]) -> Quantity:
    """A number from the mean gates of the gated layers over snapshots."""
    return combined(
        lambda m: function(
            [[_mean(g) for g in each["gates"]] for each in m["layers"] if each["gates"] is not None]
        ),
        trajectory,
        unit="of attention",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _last(layers: list[list[float]]) -> float:
    """The mean over layers at the end of training."""
    return _mean([layer[-1] for layer in layers])


def _nonlocality_panel(s: Scale, role: str, title: str = "", **choices: Any) -> Panel:
    trajectory = s.measured(TRAJECTORY, role, **choices)
    depth = s.architecture(role).depth

    def curve(layer: int) -> Quantity:
        return _curve(trajectory, lambda layers: layers[layer]["nonlocality"])

    series = shaded({f"layer {layer + 1}": curve(layer) for layer in range(depth)})
    return Panel(title or role, "epochs", "nonlocality (patches)", series)


def _gate_panels(s: Scale, size: str) -> tuple[Panel, ...]:
    """σ(λ) of every head, and the mean over heads, layer by layer."""
    role = f"ConViT-{size}"
    trajectory = s.measured(TRAJECTORY, role, seeds=s.seeds_of(size))
    model = s.architecture(role)

    def gate(layer: int, of: Callable[[list[float]], float]) -> Quantity:
        return _curve(trajectory, lambda layers: [of(gates) for gates in layers[layer]["gates"]])

    panels = []
    for layer in range(model.gpsa_layers):
        heads = {f"head {n + 1}": gate(layer, itemgetter(n)) for n in range(model.num_heads)}
        series = (*shaded(heads, band=False), Series("mean", gate(layer, _mean), "ink"))
        panels.append(Panel(f"{role}, layer {layer + 1}", "epochs", "gate σ(λ)", series))
    return tuple(panels)


@experiment("convit/figure-5", "Nonlocality over training, DeiT-S and ConViT-S")
def figure_5(s: Scale) -> Figure:
    """Eq. 8 by layer, from snapshots."""
    deit, convit = (s.measured(TRAJECTORY, role) for role in ("DeiT-S", "ConViT-S"))
    gated = s.architecture("ConViT-S").gpsa_layers

    def early(values: list[float]) -> float:
        return values[max(1, round(EARLY * (len(values) - 1)))]

    def end(trajectory: Quantity) -> Quantity:
        return _nonlocality(trajectory, lambda layers: _last(layers[:gated]))

    claims = (
        Claim(
            "early in training, every layer of DeiT becomes more local",
            _nonlocality(deit, lambda layers: min(v[0] - early(v) for v in layers)),
        ),
        Claim(
            "DeiT's last layer ends less local than its first",
            _nonlocality(deit, lambda layers: layers[-1][-1] - layers[0][-1]),
        ),
        Claim(
            "every gated layer of ConViT leaves locality over training",
            _nonlocality(convit, lambda layers: min(v[-1] - v[0] for v in layers[:gated])),
        ),
        Claim(
            "ConViT's gated layers end more local than DeiT's layers of the same depth",
            end(deit) - end(convit),
        ),
    )
    about = "Nonlocality (Eq. 8) of every layer, on the layer's own inputs."
    panels = tuple(_nonlocality_panel(s, role) for role in ("DeiT-S", "ConViT-S"))
    return Figure(about, panels, claims=claims)


@experiment("convit/figure-6", "Gates over training, ConViT-S")
def figure_6(s: Scale) -> Figure:
    """σ(λ) of every head, layer by layer."""
    trajectory = s.measured(TRAJECTORY, "ConViT-S")
    claims = (
        Claim(
            "the mean gate of every layer falls over training",
            _mean_gates(trajectory, lambda layers: min(v[0] - v[-1] for v in layers)),
        ),
        Claim(
            "the last gated layer ends with less positional attention than the first",
            _mean_gates(trajectory, lambda layers: layers[0][-1] - layers[-1][-1]),
        ),
    )
    about = "The gate σ(λ) of positional attention, per head; black: mean over heads."
    return Figure(about, _gate_panels(s, "S"), claims=claims)


@experiment("convit/figure-10", "Nonlocality of DeiT-S with and without distillation")
def figure_10(s: Scale) -> Figure:
    """The two trajectories, and where they end."""
    taught = distilled(s)
    panels = (
        _nonlocality_panel(s, "DeiT-S", "no distillation"),
        _nonlocality_panel(s, "DeiT-S", "hard distillation", **taught),
    )
    plain, pulled = (
        _nonlocality(s.measured(TRAJECTORY, "DeiT-S", **choices), _last) for choices in ({}, taught)
    )
    text = "a convolutional teacher leaves DeiT more local at the end"
    claims = (Claim(text, plain - pulled),)
    return Figure("Nonlocality (Eq. 8) of every layer of DeiT.", panels, claims=claims)


@experiment("convit/figure-13", "Nonlocality of the tiny and base models")
def figure_13(s: Scale) -> Figure:
    """As Fig. 5."""

    def first_layer(role: str) -> Quantity:
        trajectory = s.measured(TRAJECTORY, role, seeds=s.few_seeds)
        return _nonlocality(trajectory, lambda layers: layers[0][-1])

    claims = tuple(
        Claim(
            f"the first layer of the larger {family} ends less local",
            first_layer(f"{family}-B") - first_layer(f"{family}-Ti"),
        )
        for family in ("DeiT", "ConViT")
    )
    panels = tuple(
        _nonlocality_panel(s, f"{family}-{size}", seeds=s.few_seeds)
        for size in ("Ti", "B")
        for family in ("DeiT", "ConViT")
    )
    return Figure("Nonlocality (Eq. 8) of every layer.", panels, claims=claims)


@experiment("convit/figure-14", "Gates of the tiny and base models")
def figure_14(s: Scale) -> Figure:
    """As Fig. 6."""
    tiny, base = (
        _mean_gates(s.measured(TRAJECTORY, role, seeds=s.few_seeds), _last)
        for role in ("ConViT-Ti", "ConViT-B")
    )
    text = "the larger ConViT keeps more positional attention"
    claims = (Claim(text, base - tiny),)
    panels = (*_gate_panels(s, "Ti"), *_gate_panels(s, "B"))
    return Figure("The gate σ(λ) of positional attention, per head.", panels, claims=claims)


@experiment("convit/figure-3", "Convolutional initialisation of positional attention")
def figure_3(s: Scale) -> Figure:
    """Attention maps of untrained layers: self-attention, and PSA at two strengths."""
    name, overrides = s.models["ConViT-S"]
    config = s.runs("ConViT-S")[0].config

    def draw(_: list[Path]) -> Any:
        size = config.model.img_size or variant(name).config.img_size
        image = validation_sample(config, size, 1)
        return maps.initial_maps(image, name, {**overrides, "img_size": size}, seed=config.seed)

    about = (
        "Untrained layers on one image. Self-attention (b) sees shapes; positional attention with "
        "the convolutional initialisation at α = 0.5 (c) and 2 (d) sees only places."
    )
    return Figure(about, drawing=Drawing((), draw))


def _maps_figure(s: Scale, size: str, image: int) -> Figure:
    roles = [f"DeiT-{size}", f"ConViT-{size}"]
    runs = tuple(s.runs(role, seeds=s.seeds[:1])[0] for role in roles)
    layers = (1, s.architecture(roles[1]).gpsa_layers - 1)

    def draw(folders: list[Path]) -> Any:
        taken = [run_pictures(folder, image + 1) for folder in folders]
        return maps.maps(list(zip(roles, taken, strict=True)), layers, image=image)

    about = (
        f"Attention from the centre patch in layers {layers[0] + 1} and {layers[1] + 1}. Colours "
        f"are logarithmic; frames go from white (content) to red (position)."
    )
    return Figure(about, drawing=Drawing(runs, draw))


@experiment("convit/figure-7", "Attention maps of DeiT-Ti and ConViT-Ti")
def figure_7(s: Scale) -> Figure:
    """One image."""
    return _maps_figure(s, "Ti", image=0)


@experiment("convit/figure-15", "Mean attention maps of DeiT before and after training")
def figure_15(s: Scale) -> Figure:
    """Averages over images."""
    runs = s.runs("DeiT-Ti", seeds=s.few_seeds[:1])
    layers = (0, max(1, round(0.75 * s.architecture("DeiT-Ti").depth)))

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
    return Figure(about, drawing=Drawing(runs, draw))


@experiment("convit/figure-16", "More attention maps of DeiT-Ti and ConViT-Ti")
def figure_16(s: Scale) -> Figure:
    """Another image than Fig. 7."""
    return _maps_figure(s, "Ti", image=1)


@experiment("convit/figure-17", "Attention maps of DeiT-S and ConViT-S")
def figure_17(s: Scale) -> Figure:
    """As Fig. 16."""
    return _maps_figure(s, "S", image=1)
