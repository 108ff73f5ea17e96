"""ConViT's figures: accuracy over data, size and training; nonlocality, gates and maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch

from locality.analysis.measures import token_distances
from locality.analysis.pictures import validation_sample
from locality.analysis.recording import run_pictures
from locality.figures import diagrams, maps
from locality.layers.conv_init import corner_heads
from locality.models import ImageClassifier, build
from locality.models.variants import variant
from locality.papers import published
from locality.papers.convit import ABLATIONS, ablation, percent, taught
from locality.papers.measures import (
    BEST_TOP1,
    CURVE_OVER_FRACTION,
    LEARNING_CURVE,
    PARAMETERS,
    TOP1,
    TOP1_EARLY,
    TRAJECTORY,
    Measure,
    Quantity,
    absent,
    combined,
    computed,
    ratio,
    relative_gain,
    summed_rate,
    top1_at,
)
from locality.papers.scales import FAMILIES, Scale
from locality.papers.specs import Drawing, Figure, Panel, Series, experiment, said, shaded

_AVERAGED_IMAGES = 100
_SHOWN_IMAGES = 3

Trajectory = Mapping[str, Any]
"""What `TRAJECTORY` measures: attention over the snapshots of one run."""


def over(xs: Sequence[float], parts: Sequence[Quantity]) -> Quantity:
    """Numbers as a curve: x → the quantity of that x."""
    return combined(lambda *values: {"x": list(xs), "y": list(values)}, *parts)


# -- accuracy --------------------------------------------------------------------------------------


def accuracy_by_size(
    s: Scale, roles: Mapping[str, tuple[int, ...]], printed: Mapping[str, Iterable[str]]
) -> tuple[Panel, ...]:
    """Top-1 against parameters: a panel of ours, over their seeds, and panels of what is printed.

    Args:
        s: the scale.
        roles: role → its seeds.
        printed: title of a panel → rows of ConViT's Table 1 or CvT's Table 3.
    """
    tables = published.rows("cvt/table-3") | published.rows("convit/table-1")

    def panel(title: str, points: Mapping[str, tuple[Quantity, Quantity]]) -> Panel:
        series = tuple(
            Series(
                name,
                combined(lambda parameters, top1: {"x": [parameters], "y": [top1]}, *point),
                name.partition("-")[0].lower(),
            )
            for name, point in points.items()
        )
        return Panel(title, "parameters (M)", "top-1 (%)", series, log_x=True, scatter=True)

    def millions(role: str, seeds: tuple[int, ...]) -> Quantity:
        return combined(lambda n: n / 1e6, s.measured(PARAMETERS, role, seeds=seeds))

    def as_printed(row: str, metric: str) -> Quantity:
        return computed(partial(float, tables[row][metric].value))

    ours = {
        role: (millions(role, seeds), s.measured(TOP1, role, seeds=seeds))
        for role, seeds in roles.items()
    }
    theirs = {
        title: {row: (as_printed(row, "parameters"), as_printed(row, "top1")) for row in rows}
        for title, rows in printed.items()
    }
    return tuple(panel(title, points) for title, points in ({"Here": ours} | theirs).items())


@experiment("convit/figure-1", "Soft inductive biases help without being restrictive")
def figure_1(s: Scale) -> Figure:
    """The paper's sketch as a measurement: convolutions, gated layers, plain attention."""
    fractions = (0.05, 0.2, 1.0)
    biases: dict[str, tuple[str, str, dict[str, Any]]] = {
        "hard: convolutions": ("ConViT-3×3", "other", {"positional_attention": "conv"}),
        "soft: ConViT": ("ConViT-3×3", "convit", {}),
        "none: DeiT": ("DeiT-3×3", "deit", {}),
    }
    series, top1 = [], []
    for label, (role, colour, fields) in biases.items():
        top1.append([s.measured(TOP1, role, fraction=f, fields=fields) for f in fractions])
        series.append(Series(label, over([100 * f for f in fractions], top1[-1]), colour))
    hard, soft, none = top1
    claims = {
        "with few images, convolutions are above attention": hard[0] - none[0],
        "with all images, what is soft is above what is hard": soft[-1] - hard[-1],
    }
    about = "The first layers are 3×3 convolutions, gated positional attention, or attention."
    panel = Panel("Inductive bias", "training images (%)", "top-1 (%)", tuple(series), log_x=True)
    return Figure(about, (panel,), claims=said("§1, p. 2, Fig. 1", claims))


@experiment("convit/figure-2a", "Sample efficiency")
def figure_2a(s: Scale) -> Figure:
    """Accuracy against the fraction of the data, and the relative improvement."""
    table = published.rows("convit/table-2")

    def here(family: str, fraction: float) -> Quantity:
        return s.measured(TOP1, f"{family}-S", fraction=fraction)

    def there(family: str, fraction: float) -> Quantity:
        return computed(partial(float, table[percent(fraction)][f"{family}-S/top1"].value))

    parts, label = [100 * fraction for fraction in s.fractions], "training images (%)"
    panels, gains = [], []
    for title, top1 in (("Here", here), ("Published", there)):
        found = {family: [top1(family, f) for f in s.fractions] for family in FAMILIES}
        series = tuple(
            Series(f"{family}-S", over(parts, curve), family.lower())
            for family, curve in found.items()
        )
        panels.append(Panel(title, label, "top-1 (%)", series, log_x=True))
        pairs = zip(found["ConViT"], found["DeiT"], strict=True)
        gain = over(parts, [relative_gain(*pair) for pair in pairs])
        gains.append(Series(title.lower(), gain, "other", dashed=title == "Published"))
    panels.append(Panel("ConViT over DeiT", label, "% of DeiT's top-1", tuple(gains), log_x=True))
    return Figure("Table 2 as curves, where its claims stand.", tuple(panels))


@experiment("convit/figure-2b", "Parameter efficiency")
def figure_2b(s: Scale) -> Figure:
    """Accuracy against the number of parameters."""
    roles = {f"{family}-{size}": s.seeds_of(size) for family in FAMILIES for size in s.sizes}
    others = [f"ResNet-{depth}" for depth in (50, 101, 152)]
    others += [f"T2T-ViT_t-{depth}" for depth in (14, 19, 24)]
    panels = accuracy_by_size(s, roles, {"Published": [*published.rows("convit/table-1"), *others]})
    return Figure("The models of Table 1 on all data; its claims stand there.", panels)


def _with_gpsa(s: Scale, measure: Measure, layers: int, strength: float = 1.0) -> Quantity:
    """A cell of Figs. 8 and 12; the model's own values are left out, to share its runs."""
    if layers == 0:
        return s.measured(measure, "DeiT-S+", seeds=s.few_seeds, **s.small)
    fields: dict[str, Any] = {}
    if layers != s.gpsa_counts[-1]:
        fields["gpsa_layers"] = layers
    if strength != 1.0:
        fields["locality_strength"] = strength
    return s.measured(measure, "ConViT-S+", seeds=s.few_seeds, fields=fields, **s.small)


@experiment("convit/figure-8", "Accuracy against locality strength and number of GPSA layers")
def figure_8(s: Scale) -> Figure:
    """Final accuracy (left) and accuracy at stages of training (right)."""
    by_strength = {
        f"{layers} GPSA layer{'s' if layers > 1 else ''}": over(
            s.strengths, [_with_gpsa(s, TOP1, layers, each) for each in s.strengths]
        )
        for layers in s.gpsa_counts
    }
    counts = (0, *s.gpsa_counts)
    third = top1_at("after 30% of training", lambda schedule: 0.3 * schedule.length)
    by_stage = {
        label: over([float(n) for n in counts], [_with_gpsa(s, measure, n) for n in counts])
        for label, measure in (
            ("early", TOP1_EARLY),
            ("after 30% of training", third),
            ("at the end", TOP1),
        )
    }
    panels = (
        Panel("Locality strength", "α", "final top-1 (%)", shaded(by_strength), log_x=True),
        Panel("GPSA layers", "number of GPSA layers", "top-1 (%)", shaded(by_stage)),
    )
    # The paper's example is 9 of its 10 gated layers.
    most, least = 9 if 9 in s.gpsa_counts else s.gpsa_counts[-1], s.gpsa_counts[0]
    strong, weak = (_with_gpsa(s, TOP1, s.gpsa_counts[-1], s.strengths[i]) for i in (-1, 0))
    many, few, none = (_with_gpsa(s, TOP1, layers) for layers in (most, least, 0))
    boost = ratio(_with_gpsa(s, TOP1_EARLY, most), _with_gpsa(s, TOP1_EARLY, 0))
    claims = {
        "final accuracy grows with the locality strength": strong - weak,
        "final accuracy grows with the number of GPSA layers": many - few,
        "at the end, GPSA layers are above none": many - none,
        "early, GPSA layers multiply accuracy by more than at the end": boost - ratio(many, none),
        "early, they almost double it: by more than 1.5": combined(
            lambda times: times - 1.5, boost, unit="times"
        ),
    }
    about = (
        "On the smaller training set; zero GPSA layers is DeiT. Early is a twentieth of the run "
        "after its warm-up: the paper's boost is ×1.87 then and ×1.47 at the end."
    )
    return Figure(about, panels, claims=said("§4, pp. 8–9, Fig. 8", claims))


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
    _, psa_early, deit_early = three(TOP1_EARLY)
    claims = {
        "early in training, PSA with convolutional init is above DeiT": psa_early - deit_early,
        "at the end, DeiT is above PSA": deit - psa,
        "at the end, GPSA is above PSA": gpsa - psa,
        "PSA's layers stay convolutions that ignore content": absent(
            "the initialisation decides it: W_qry = W_key = 0 get no gradient from each other"
        ),
    }
    about = "PSA adds content and position before one softmax (Eq. 4); GPSA mixes two (Eq. 7)."
    panel = Panel("Learning curves", "epochs", "top-1 (%)", series)
    return Figure(about, (panel,), claims=said("app. A, Fig. 9", claims))


@experiment("convit/figure-11", "Learning curves by size and by fraction of the data")
def figure_11(s: Scale) -> Figure:
    """Curves of ConViT (solid) and DeiT (dashed)."""
    sizes = [size for size in s.sizes if size.endswith("+")] or s.sizes

    def both(measure: Measure, size: str, **choices: Any) -> tuple[Quantity, ...]:
        return tuple(s.measured(measure, f"{family}-{size}", **choices) for family in FAMILIES)

    def panel(title: str, x_label: str, found: Mapping[str, tuple[Quantity, ...]]) -> Panel:
        families = (
            shaded(
                {f"{family}, {label}": pair[index] for label, pair in found.items()},
                dashed=family == "DeiT",
            )
            for index, family in enumerate(FAMILIES)
        )
        series = tuple(series for pair in zip(*families, strict=True) for series in pair)
        return Panel(title, x_label, "top-1 (%)", series)

    by_size = {size: both(LEARNING_CURVE, size, seeds=s.seeds_of(size)) for size in sizes}
    by_fraction = {
        percent(f): both(CURVE_OVER_FRACTION, "S+", fraction=f) for f in s.fractions[::-1]
    }
    panels = [
        panel("Size of the model", "epochs", by_size),
        panel("Fraction of the data", "fraction of training (%)", by_fraction),
    ]
    if s.comparable:
        cifar: dict[str, Any] = {
            "data__dataset": "cifar100",
            "schedule__epochs": 3000.0,
            "schedule__eval_every": 30.0,
            "seeds": s.few_seeds,
        }
        lines = {size: both(LEARNING_CURVE, size, **cifar) for size in sizes}
        panels.insert(0, panel("CIFAR-100 at 224 px", "epochs", lines))

    def gain(size: str) -> Quantity:
        return relative_gain(*both(BEST_TOP1, size, seeds=s.few_seeds))

    cifar_100 = absent("needs 1,000 epochs of CIFAR-100 at 224 pixels")
    claims = {
        "the relative improvement grows with the size of the model": (
            gain(sizes[-1]) - gain(sizes[0])
        ),
        "ConViT-Ti+ reaches 82.1% on CIFAR-100 after 1,000 epochs": cifar_100,
        "… which is above EfficientNets": cifar_100,
        "… after which ConViTs overfit": cifar_100,
    }
    about = "Solid: ConViT. Dashed: DeiT. Improvements are those of the best evaluations."
    return Figure(about, tuple(panels), claims=said("app. C, Fig. 11", claims))


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


# -- nonlocality and gates over training -----------------------------------------------------------


def far(trajectory: Trajectory) -> list[list[float]]:
    """Nonlocality of every layer over snapshots."""
    return [layer["nonlocality"] for layer in trajectory["layers"]]


def grown(trajectory: Trajectory, layers: int | None = None) -> list[float]:
    """How much the nonlocality of (the first) layers has grown from before the first step."""
    return [values[-1] - values[0] for values in far(trajectory)[:layers]]


def gates(trajectory: Trajectory, snapshot: int = -1) -> list[list[float]]:
    """The gates σ(λ) of every gated layer's heads at a snapshot."""
    return [
        layer["gates"][snapshot] for layer in trajectory["layers"] if layer["gates"] is not None
    ]


def halves(layers: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The first half of some layers and the deeper one, without the middle of an odd number."""
    half = max(1, len(layers) // 2)
    return layers[:half], layers[-half:]


def _fallen_early(trajectory: Trajectory) -> float:
    """The least that any layer's nonlocality has fallen early in training."""
    return min(values[0] - values[trajectory["early"]] for values in far(trajectory))


def _watched(s: Scale, role: str, function: Callable[..., float], **choices: Any) -> Quantity:
    """A number in tokens from the attention of a role's runs over training."""
    return combined(function, s.measured(TRAJECTORY, role, **choices), unit="tokens")


def _unless_out_of_reach(s: Scale, quantity: Quantity) -> Quantity:
    """A quantity that needs gates near 0, where training is long enough for one to get there."""
    (reach,) = (
        summed_rate(s.runs("ConViT-S", seeds=s.seeds[:1])[0].config).evaluate({}).by_seed.values()
    )
    if reach > 3.2:  # σ(1 − 3.2) = 0.1
        return quantity
    return absent(
        f"λ moves by at most about the sum of the learning rates, {reach:.2g} here, and starts 3.2 "
        f"away from σ(λ) = 0.1"
    )


def _curve(trajectory: Quantity, values: Callable[[Any], Sequence[float]]) -> Quantity:
    """Something of a trajectory's layers over epochs."""
    return combined(lambda m: {"x": m["epochs"], "y": list(values(m["layers"]))}, trajectory)


def _nonlocality_panel(s: Scale, role: str, title: str, trajectory: Quantity) -> Panel:
    """A line for every layer, and where attention that is the same everywhere would be."""

    def curve(layer: int) -> Quantity:
        return _curve(trajectory, lambda layers: layers[layer]["nonlocality"])

    def uniform(layers: Sequence[Any]) -> list[float]:
        away = float(token_distances(tuple(layers[0]["grid"])).mean())
        return [away] * len(layers[0]["nonlocality"])

    depth = s.architecture(role).depth
    series = shaded({f"layer {layer + 1}": curve(layer) for layer in range(depth)})
    line = Series("uniform attention", _curve(trajectory, uniform), "", dashed=True, band=False)
    return Panel(title, "epochs", "nonlocality (tokens)", (*series, line))


def _gate_panels(s: Scale, size: str) -> tuple[Panel, ...]:
    """σ(λ) of every head, and the mean over heads, layer by layer."""
    role = f"ConViT-{size}"
    trajectory = s.measured(TRAJECTORY, role, seeds=s.seeds_of(size))
    model = s.architecture(role)

    def gate(layer: int, of: Callable[[list[float]], float]) -> Quantity:
        return _curve(trajectory, lambda layers: [of(heads) for heads in layers[layer]["gates"]])

    panels = []
    for layer in range(model.gpsa_layers):
        heads = {f"head {n + 1}": gate(layer, itemgetter(n)) for n in range(model.num_heads)}
        series = (*shaded(heads, band=False), Series("mean", gate(layer, fmean), "ink"))
        panels.append(Panel(f"{role}, layer {layer + 1}", "epochs", "gate σ(λ)", series))
    return tuple(panels)


@experiment("convit/figure-5", "Nonlocality over training, DeiT-S and ConViT-S")
def figure_5(s: Scale) -> Figure:
    """Eq. 8 by layer, from snapshots."""
    gated = s.architecture("ConViT-S").gpsa_layers
    deit, convit = (partial(_watched, s, role) for role in ("DeiT-S", "ConViT-S"))

    def end(trajectory: Trajectory) -> float:
        return fmean(values[-1] for values in far(trajectory)[:gated])

    def climbed(trajectory: Trajectory) -> float:
        return far(trajectory)[-1][-1] - far(trajectory)[-1][trajectory["early"]]

    def away(trajectory: Trajectory, layer: int) -> float:
        """How much further a gated layer leaves locality than those between first and last."""
        found = grown(trajectory, gated)
        return found[layer] - fmean(found[1:-1])

    def second(trajectory: Trajectory) -> float:
        first, least, *others = grown(trajectory, gated)
        return min(first, *others) - least

    claims = {
        "early in training, every layer of DeiT becomes more local": deit(_fallen_early),
        "DeiT's first layer stays more local than it started": deit(lambda m: -grown(m)[0]),
        "DeiT's last layer climbs back after that": deit(climbed),
        "DeiT's last layer ends less local than its first": deit(
            lambda m: far(m)[-1][-1] - far(m)[0][-1]
        ),
        "DeiT ends less local from each layer to the next": deit(
            lambda m: min(b[-1] - a[-1] for a, b in zip(far(m), far(m)[1:], strict=False))
        ),
        "every gated layer of ConViT leaves locality": convit(lambda m: min(grown(m, gated))),
        "ConViT's gated layers end more local than DeiT's": (
            deit(end) - convit(end)
            if s.comparable
            else absent("the initialisation decides it in runs of this length")
        ),
        "the first gated layer leaves it further than those between": convit(
            partial(away, layer=0)
        ),
        "the last gated layer leaves it further than those between": convit(
            partial(away, layer=-1)
        ),
        "the second gated layer leaves it least": convit(second),
    }
    panels = tuple(
        _nonlocality_panel(s, role, role, s.measured(TRAJECTORY, role))
        for role in ("DeiT-S", "ConViT-S")
    )
    about = "Nonlocality (Eq. 8) of every layer on its own inputs, over training."
    return Figure(about, panels, claims=said("§4, p. 7, Fig. 5", claims))


@experiment("convit/figure-6", "Gates over training, ConViT-S")
def figure_6(s: Scale) -> Figure:
    """σ(λ) of every head, layer by layer."""

    def gate(function: Callable[[Trajectory], float]) -> Quantity:
        trajectory = s.measured(TRAJECTORY, "ConViT-S")
        return combined(function, trajectory, unit="of attention")

    def fallen(trajectory: Trajectory) -> float:
        pairs = zip(gates(trajectory, 0), gates(trajectory), strict=True)
        return min(fmean(before) - fmean(after) for before, after in pairs)

    def first_over_deeper(trajectory: Trajectory, of: Callable[[list[float]], float]) -> float:
        first, deeper = halves([of(heads) for heads in gates(trajectory)])
        return fmean(first) - fmean(deeper)

    def left(trajectory: Trajectory) -> float:
        return 0.1 - max(fmean(heads) for heads in halves(gates(trajectory))[1])

    claims = {
        "the mean gate of every layer falls over training": gate(fallen),
        "the deeper half's mean gates end near 0: below 0.1": _unless_out_of_reach(s, gate(left)),
        "the deeper half ends with less positional attention than the first": gate(
            partial(first_over_deeper, of=fmean)
        ),
        "the gates of the first half end further apart than the deeper ones'": (
            gate(partial(first_over_deeper, of=pstdev))
        ),
    }
    about = "The gate σ(λ) of positional attention, per head; black: mean over heads."
    return Figure(about, _gate_panels(s, "S"), claims=said("§4, pp. 7–8, Fig. 6", claims))


@experiment("convit/figure-10", "Nonlocality of DeiT-S with and without distillation")
def figure_10(s: Scale) -> Figure:
    """The two trajectories, and where they end."""
    plain, hard = s.measured(TRAJECTORY, "DeiT-S"), taught(s, TRAJECTORY, "DeiT-S")

    def of(trajectory: Quantity, function: Callable[[Trajectory], float]) -> Quantity:
        return combined(function, trajectory, unit="tokens")

    def end(trajectory: Trajectory) -> float:
        return fmean(values[-1] for values in far(trajectory))

    def late(trajectory: Trajectory) -> float:
        return fmean(values[-1] - values[trajectory["early"]] for values in far(trajectory))

    claims = {
        "with a teacher every layer becomes more local early": of(hard, _fallen_early),
        "with a teacher nonlocality grows less late": of(plain, late) - of(hard, late),
        "a convolutional teacher leaves DeiT more local": of(plain, end) - of(hard, end),
    }
    panels = tuple(
        _nonlocality_panel(s, "DeiT-S", title, trajectory)
        for title, trajectory in (("no distillation", plain), ("hard distillation", hard))
    )
    about = "Nonlocality (Eq. 8) of every layer of DeiT."
    return Figure(about, panels, claims=said("app. B, Fig. 10", claims))


@experiment("convit/figure-13", "Nonlocality of the tiny and base models")
def figure_13(s: Scale) -> Figure:
    """As Fig. 5."""

    def size(role: str, function: Callable[[Trajectory], float]) -> Quantity:
        return _watched(s, role, function, seeds=s.few_seeds)

    def gated(role: str) -> Quantity:
        layers = s.architecture(role).gpsa_layers
        return size(role, lambda trajectory: min(grown(trajectory, layers)))

    claims: dict[str, Quantity] = {}
    for family in FAMILIES:
        for text, of in (
            (f"the first layer of the larger {family} grows less local", lambda m: grown(m)[0]),
            (f"the larger {family} grows less local on average", lambda m: fmean(grown(m))),
        ):
            claims[text] = size(f"{family}-B", of) - size(f"{family}-Ti", of)
    claims["every gated layer of ConViT-Ti and of ConViT-B leaves locality"] = combined(
        min, gated("ConViT-Ti"), gated("ConViT-B"), unit="tokens"
    )
    panels = tuple(
        _nonlocality_panel(s, role, role, s.measured(TRAJECTORY, role, seeds=s.few_seeds))
        for role in (f"{family}-{name}" for name in ("Ti", "B") for family in FAMILIES[::-1])
    )
    about = "Nonlocality (Eq. 8) of every layer; sizes are compared by how much it has grown."
    return Figure(about, panels, claims=said("app. D, Fig. 13", claims))


@experiment("convit/figure-14", "Gates of the tiny and base models")
def figure_14(s: Scale) -> Figure:
    """As Fig. 6."""

    def layers(size: str) -> Quantity:
        """How many layers still use position."""
        trajectory = s.measured(TRAJECTORY, f"ConViT-{size}", seeds=s.few_seeds)
        count = combined(lambda m: sum(fmean(g) > 0.1 for g in gates(m)), trajectory, unit="layers")
        return _unless_out_of_reach(s, count)

    def fallen(size: str) -> Quantity:
        trajectory = s.measured(TRAJECTORY, f"ConViT-{size}", seeds=s.few_seeds)
        return combined(
            lambda m: fmean(map(fmean, gates(m, 0))) - fmean(map(fmean, gates(m))), trajectory
        )

    tiny, small, base = (layers(size) for size in ("Ti", "S", "B"))
    claims = {
        "in ConViT-Ti and ConViT-B the mean gate falls over training": combined(
            min, fallen("Ti"), fallen("B"), unit="of attention"
        ),
        "ConViT-S uses position in more layers than ConViT-Ti": small - tiny,
        "ConViT-B uses position in more layers than ConViT-S": base - small,
    }
    panels = (*_gate_panels(s, "Ti"), *_gate_panels(s, "B"))
    about = "The gate σ(λ) of positional attention, per head."
    return Figure(about, panels, claims=said("§4, p. 8, and app. D, Fig. 14", claims))


# -- architecture and maps -------------------------------------------------------------------------


@cache
def skeleton(name: str) -> ImageClassifier:
    """One of the papers' models, without data in its tensors."""
    with torch.device("meta"):
        return build(name)


@experiment("convit/figure-4", "Architecture of the ConViT")
def figure_4(s: Scale) -> Figure:
    """Drawn from the paper's models as they are built here, whatever the scale."""

    def draw(_: list[Path]) -> Any:
        deit, convit = build("deit_small"), build("convit_small")
        columns = {"ViT (DeiT-S)": diagrams.outline(deit), "ConViT-S": diagrams.outline(convit)}
        layer = diagrams.gated_layer(convit.blocks[0].attn)  # type: ignore[index, union-attr]
        return diagrams.draw_columns(columns | {"GPSA layer (Eq. 6–7)": layer})

    def spared() -> float:
        parameters = skeleton("convit_small").named_parameters()
        sizes = {name: tensor.numel() for name, tensor in parameters}
        positional = sum(n for name, n in sizes.items() if name.endswith(("v_pos", "gating")))
        return 1 - 100 * positional / sum(sizes.values())

    text = "positional attention adds few parameters: less than 1% of ConViT-S"
    about = "What an image passes through, read off the models: layers, tokens, widths."
    claims = said("§3, p. 5", {text: computed(spared, "% of the parameters")})
    return Figure(about, drawing=Drawing((), draw), claims=claims)


@experiment("convit/figure-3", "Convolutional initialisation of positional attention")
def figure_3(s: Scale) -> Figure:
    """Attention maps of untrained layers: self-attention, and PSA at two strengths."""
    name, overrides = s.models["ConViT-S"]
    config = s.runs("ConViT-S", seeds=s.seeds[:1])[0].config

    def draw(_: list[Path]) -> Any:
        size = config.model.img_size or variant(name).config.img_size
        fields = {**overrides, "img_size": size}
        if config.model.patch_size is not None:
            fields["patch_size"] = config.model.patch_size
        heads = corner_heads(s.architecture("ConViT-S").num_heads)
        image = validation_sample(config, size, 1)
        return maps.initial_maps(image, name, fields, seed=config.seed, heads=heads)

    about = (
        "Untrained layers on one image; the four heads are the corners of the kernel, in the "
        "paper's order. Self-attention (b) sees shapes, PSA at α = 0.5 (c) and 2 (d) places."
    )
    return Figure(about, drawing=Drawing((), draw))


def _maps_figure(
    s: Scale, size: str, where: str, images: Sequence[int], claims: Mapping[str, Quantity] = {}
) -> Figure:
    roles = [f"DeiT-{size}", f"ConViT-{size}"]
    runs = tuple(s.runs(role, seeds=s.seeds[:1])[0] for role in roles)
    layers = (1, s.architecture(roles[1]).gpsa_layers - 1)

    def draw(folders: list[Path]) -> Any:
        taken = [run_pictures(folder, max(images) + 1) for folder in folders]
        return maps.maps(list(zip(roles, taken, strict=True)), layers, image=images)

    about = (
        f"Attention from the centre patch in layers {layers[0] + 1} and {layers[1] + 1}. Colours "
        f"are logarithmic; frames go from white (content) to red (position)."
    )
    return Figure(about, drawing=Drawing(runs, draw), claims=said(where, claims))


@experiment("convit/figure-7", "Attention maps of DeiT-Ti and ConViT-Ti")
def figure_7(s: Scale) -> Figure:
    """One image."""
    return _maps_figure(s, "Ti", "", images=[0])


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

    deep = layers[1]
    claims = {
        "DeiT-Ti's first layer comes to look near the query": _watched(
            s, "DeiT-Ti", lambda m: -grown(m)[0], seeds=s.few_seeds
        ),
        "a late layer of DeiT-Ti looks further than its first": _watched(
            s, "DeiT-Ti", lambda m: far(m)[deep][-1] - far(m)[0][-1], seeds=s.few_seeds
        ),
    }
    about = (
        f"Attention from the centre patch, averaged over {_AVERAGED_IMAGES} images, in "
        f"layers {layers[0] + 1} and {layers[1] + 1}."
    )
    return Figure(about, drawing=Drawing(runs, draw), claims=said("app. E, Fig. 15", claims))


@experiment("convit/figure-16", "More attention maps of DeiT-Ti and ConViT-Ti")
def figure_16(s: Scale) -> Figure:
    """Other images than Fig. 7."""
    return _maps_figure(s, "Ti", "", images=range(1, 1 + _SHOWN_IMAGES))


@experiment("convit/figure-17", "Attention maps of DeiT-S and ConViT-S")
def figure_17(s: Scale) -> Figure:
    """As Fig. 16, with what the paper says of the maps."""
    gated = s.architecture("ConViT-S").gpsa_layers
    deit, convit = (s.measured(TRAJECTORY, role) for role in ("DeiT-S", "ConViT-S"))

    def nearer(deit: Trajectory, convit: Trajectory) -> float:
        gaps = [far(deit)[layer][-1] - far(convit)[layer][-1] for layer in (1, gated - 1)]
        return gaps[0] - gaps[1]

    def varied(trajectory: Trajectory) -> float:
        """How much further apart in distance the heads of a layer have come."""
        heads = [layer["nonlocality_per_head"] for layer in trajectory["layers"][:gated]]
        return fmean(pstdev(values[-1]) - pstdev(values[0]) for values in heads)

    def mixed(trajectory: Trajectory) -> float:
        found = gates(trajectory)
        return pstdev(found[1]) - pstdev(found[-1])

    claims = {
        "ConViT's last gated layer ends nearer to DeiT's than its second": combined(
            nearer, deit, convit, unit="tokens"
        ),
        "the second layer's gates differ more than the last gated one's": (
            combined(mixed, convit, unit="of attention")
        ),
        "ConViT's heads come to differ more than DeiT's": combined(
            lambda deit, convit: varied(convit) - varied(deit), deit, convit, unit="tokens"
        ),
    }
    return _maps_figure(s, "S", "§4, p. 8, Fig. 7, and app. E", range(1, 1 + _SHOWN_IMAGES), claims)
