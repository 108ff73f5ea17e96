"""ConViT's figures: accuracy over data, size and training; nonlocality, gates and maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from locality.analysis.pictures import validation_sample
from locality.analysis.recording import run_pictures
from locality.figures import diagrams, maps
from locality.figures.charts import percent
from locality.figures.curves import Line, gate_lines, nonlocality_lines
from locality.layers.conv_init import corner_heads
from locality.models import ImageClassifier, build
from locality.models.variants import variant
from locality.papers import published
from locality.papers.convit import taught
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
from locality.papers.specs import REGISTRY, Figure, Panel, Series, experiment, shaded

_AVERAGED_IMAGES = 100
_SHOWN_IMAGES = 3


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

    def panel(title: str, names: Iterable[str], of: Callable[[str, str], Quantity]) -> Panel:
        series = tuple(
            Series(
                name,
                combined(
                    lambda parameters, top1: {"x": [parameters], "y": [top1]},
                    of(name, "parameters"),
                    of(name, "top1"),
                ),
                name.partition("-")[0].lower(),
            )
            for name in names
        )
        return Panel(title, "parameters (M)", "top-1 (%)", series, log_x=True, scatter=True)

    def here(role: str, metric: str) -> Quantity:
        return s.measured({"top1": TOP1, "parameters": PARAMETERS}[metric], role, seeds=roles[role])

    def there(row: str, metric: str) -> Quantity:
        return computed(partial(float, tables[row][metric].value))

    return panel("Here", roles, here), *(panel(title, of, there) for title, of in printed.items())


@experiment("convit/figure-1")
def figure_1(s: Scale) -> Figure:
    """The paper's sketch as a measurement: convolutions, gated layers, plain attention."""
    fractions = (0.05, 0.2, 1.0)
    series, named = [], dict[str, Quantity]()
    for (label, row), colour in zip(
        REGISTRY["convit/figure-1"].rows.items(), ("other", "convit", "deit"), strict=True
    ):
        top1 = [s.measured(TOP1, **row, fraction=f) for f in fractions]
        series.append(Series(label, over([100 * f for f in fractions], top1), colour))
        named |= {f"{label}, few images": top1[0], f"{label}, all images": top1[-1]}
    panel = Panel("Inductive bias", "training images (%)", "top-1 (%)", tuple(series), log_x=True)
    return Figure((panel,), named=named)


@experiment("convit/figure-2a")
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
        gain = over(parts, list(map(relative_gain, found["ConViT"], found["DeiT"])))
        gains.append(Series(title.lower(), gain, "other", dashed=title == "Published"))
    panels.append(Panel("ConViT over DeiT", label, "% of DeiT's top-1", tuple(gains), log_x=True))
    return Figure(tuple(panels))


@experiment("convit/figure-2b")
def figure_2b(s: Scale) -> Figure:
    """Accuracy against the number of parameters."""
    roles = {f"{family}-{size}": s.seeds_of(size) for family in FAMILIES for size in s.sizes}
    others = [f"ResNet-{depth}" for depth in (50, 101, 152)]
    others += [f"T2T-ViT_t-{depth}" for depth in (14, 19, 24)]
    printed = {"Published": [*published.rows("convit/table-1"), *others]}
    return Figure(accuracy_by_size(s, roles, printed))


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


@experiment("convit/figure-8")
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
    stages = {"early": TOP1_EARLY, "after 30% of training": third, "at the end": TOP1}
    by_stage = {
        label: over([float(n) for n in counts], [_with_gpsa(s, measure, n) for n in counts])
        for label, measure in stages.items()
    }
    panels = (
        Panel("Locality strength", "α", "final top-1 (%)", shaded(by_strength), log_x=True),
        Panel("GPSA layers", "number of GPSA layers", "top-1 (%)", shaded(by_stage)),
    )
    # The paper's example is 9 of its 10 gated layers.
    least, *_, all_of_them = s.gpsa_counts
    most = 9 if 9 in s.gpsa_counts else all_of_them
    many, none = (_with_gpsa(s, TOP1, layers) for layers in (most, 0))
    named = {
        "strong": _with_gpsa(s, TOP1, all_of_them, s.strengths[-1]),
        "weak": _with_gpsa(s, TOP1, all_of_them, s.strengths[0]),
        "many": many,
        "few": _with_gpsa(s, TOP1, least),
        "none": none,
        "boost": ratio(many, none),
        "early boost": ratio(_with_gpsa(s, TOP1_EARLY, most), _with_gpsa(s, TOP1_EARLY, 0)),
    }
    return Figure(panels, named=named)


@experiment("convit/figure-9")
def figure_9(s: Scale) -> Figure:
    """Learning curves of DeiT, of ConViT with PSA, and of ConViT."""
    convit, deit = (f"{family}-{'B' if s.comparable else 'S'}" for family in FAMILIES)
    series, named = [], {}
    for label, colour, role, fields in (
        ("ConViT (GPSA)", "convit", convit, {}),
        ("ConViT with PSA", "other", convit, {"positional_attention": "psa"}),
        ("DeiT", "deit", deit, {}),
    ):
        series.append(Series(label, s.measured(LEARNING_CURVE, role, fields=fields), colour))
        named[label] = s.measured(TOP1, role, fields=fields)
        named[f"{label}, early"] = s.measured(TOP1_EARLY, role, fields=fields)
    panel = Panel("Learning curves", "epochs", "top-1 (%)", tuple(series))
    return Figure((panel,), named=named)


@experiment("convit/figure-11")
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
    named = {
        name: relative_gain(*both(BEST_TOP1, size, seeds=s.few_seeds))
        for name, size in (("smallest", sizes[0]), ("largest", sizes[-1]))
    }
    return Figure(tuple(panels), named=named)


@experiment("convit/figure-12")
def figure_12(s: Scale) -> Figure:
    """Learning curves for numbers of GPSA layers (left) and the rows of Table 3 (right)."""
    by_count = {f"{n} GPSA": _with_gpsa(s, LEARNING_CURVE, n) for n in s.gpsa_counts}
    deit = Series("DeiT", _with_gpsa(s, LEARNING_CURVE, 0), "deit")
    rows = REGISTRY["convit/table-3"].rows
    by_row = {label: s.measured(LEARNING_CURVE, **row, **s.small) for label, row in rows.items()}
    ingredients = tuple(
        replace(series, colour={"a": "convit", "e": "deit"}.get(series.label[0], series.colour))
        for series in shaded(by_row)
    )
    panels = (
        Panel("Number of GPSA layers", "epochs", "top-1 (%)", (deit, *shaded(by_count))),
        Panel("Ingredients", "epochs", "top-1 (%)", ingredients),
    )
    return Figure(panels)


# -- nonlocality and gates over training -----------------------------------------------------------


class Watched:
    """What `TRAJECTORY` measures of a run's attention over its snapshots, as arrays.

    Attributes:
        far: nonlocality, (layers, snapshots).
        grown: how much each layer's has from before the first step to the end, (layers,).
        by_head: nonlocality, (layers, snapshots, heads).
        gates: σ(λ), (gated layers, snapshots, heads).
        mean_gates: over heads, (gated layers, snapshots).
        early: which snapshot is early in training.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        layers = found["layers"]
        gates = [layer["gates"] for layer in layers if layer["gates"] is not None]
        self.far = np.array([layer["nonlocality"] for layer in layers])
        self.grown = self.far[:, -1] - self.far[:, 0]
        self.by_head = np.array([layer["nonlocality_per_head"] for layer in layers])
        self.gates = np.array(gates)
        self.mean_gates = np.array([[fmean(heads) for heads in layer] for layer in gates])
        self.early = found["early"]

    @property
    def fallen_early(self) -> float:
        """The least that any layer's nonlocality has fallen early in training."""
        return min(self.far[:, 0] - self.far[:, self.early])

    @property
    def half(self) -> int:
        """Of the gated layers; an odd one in the middle belongs to none."""
        return max(1, len(self.gates) // 2)

    def above_deeper(self, values: Sequence[float]) -> float:
        """How much the mean over the first half of the gated layers is above the deeper half's."""
        return fmean(values[: self.half]) - fmean(values[-self.half :])


def _watched(*trajectories: Quantity, unit: str = "tokens") -> Callable[..., Quantity]:
    """What turns a function of runs' attention over training into a quantity."""

    def number(function: Callable[..., float]) -> Quantity:
        return combined(lambda *found: function(*map(Watched, found)), *trajectories, unit=unit)

    return number


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


def _over_training(title: str, y_label: str, lines: list[Line], trajectory: Quantity) -> Panel:
    series = tuple(
        Series(each.label, combined(each.curve, trajectory), each.colour, each.dashed, each.band)
        for each in lines
    )
    return Panel(title, "epochs", y_label, series)


def _nonlocality_panel(s: Scale, role: str, trajectory: Quantity, title: str = "") -> Panel:
    lines = nonlocality_lines(s.architecture(role).depth)
    return _over_training(title or role, "nonlocality (tokens)", lines, trajectory)


def _gate_panels(s: Scale, size: str) -> tuple[Panel, ...]:
    """Layer by layer."""
    role = f"ConViT-{size}"
    trajectory = s.measured(TRAJECTORY, role, seeds=s.seeds_of(size))
    model = s.architecture(role)
    return tuple(
        _over_training(
            f"{role}, layer {n + 1}", "gate σ(λ)", gate_lines(n, model.num_heads), trajectory
        )
        for n in range(model.gpsa_layers)
    )


@experiment("convit/figure-5")
def figure_5(s: Scale) -> Figure:
    """Eq. 8 by layer, from snapshots."""
    gated = s.architecture("ConViT-S").gpsa_layers
    found = {role: s.measured(TRAJECTORY, role) for role in ("DeiT-S", "ConViT-S")}
    deit, convit = map(_watched, found.values())

    def above_middle(watched: Watched, layer: int) -> float:
        """How much further a gated layer leaves locality than those between first and last."""
        return watched.grown[layer] - fmean(watched.grown[1 : gated - 1])

    named = {
        "fallen early": deit(lambda w: w.fallen_early),
        "first": deit(lambda w: -w.grown[0]),
        "climbed": deit(lambda w: w.far[-1, -1] - w.far[-1, w.early]),
        "last": deit(lambda w: w.far[-1, -1] - w.far[0, -1]),
        "least step": deit(lambda w: min(np.diff(w.far[:, -1]))),
        "gated": convit(lambda w: min(w.grown[:gated])),
        "first gated": convit(lambda w: above_middle(w, 0)),
        "last gated": convit(lambda w: above_middle(w, gated - 1)),
        "second gated": convit(lambda w: min(np.delete(w.grown[:gated], 1)) - w.grown[1]),
    }
    if s.comparable:
        ends = (each(lambda w: fmean(w.far[:gated, -1])) for each in (deit, convit))
        named |= zip(("DeiT's end", "ConViT's end"), ends, strict=True)
    panels = tuple(_nonlocality_panel(s, *each) for each in found.items())
    return Figure(panels, named=named)


@experiment("convit/figure-6")
def figure_6(s: Scale) -> Figure:
    """σ(λ) of every head, layer by layer."""
    gate = _watched(s.measured(TRAJECTORY, "ConViT-S"), unit="of attention")
    near_0 = gate(lambda w: 0.1 - max(w.mean_gates[-w.half :, -1]))
    named = {
        "fallen": gate(lambda w: min(w.mean_gates[:, 0] - w.mean_gates[:, -1])),
        "near 0": _unless_out_of_reach(s, near_0),
        "first half": gate(lambda w: w.above_deeper(w.mean_gates[:, -1])),
        "spread": gate(lambda w: w.above_deeper([pstdev(heads) for heads in w.gates[:, -1]])),
    }
    return Figure(_gate_panels(s, "S"), named=named)


@experiment("convit/figure-10")
def figure_10(s: Scale) -> Figure:
    """The two trajectories, and where they end."""
    found = {"no": s.measured(TRAJECTORY, "DeiT-S"), "hard": taught(s, TRAJECTORY, "DeiT-S")}
    named: dict[str, Quantity] = {}
    for label, trajectory in found.items():
        watched = _watched(trajectory)
        named |= {
            f"{label}, fallen early": watched(lambda w: w.fallen_early),
            f"{label}, late": watched(lambda w: fmean(w.far[:, -1] - w.far[:, w.early])),
            f"{label}, end": watched(lambda w: fmean(w.far[:, -1])),
        }
    panels = tuple(
        _nonlocality_panel(s, "DeiT-S", trajectory, f"{label} distillation")
        for label, trajectory in found.items()
    )
    return Figure(panels, named=named)


@experiment("convit/figure-13")
def figure_13(s: Scale) -> Figure:
    """As Fig. 5."""
    roles = [f"{family}-{size}" for size in ("Ti", "B") for family in FAMILIES[::-1]]
    found = {role: s.measured(TRAJECTORY, role, seeds=s.few_seeds) for role in roles}
    named = {}
    for role, trajectory in found.items():
        watched = _watched(trajectory)
        named[f"{role}, first"] = watched(lambda w: w.grown[0])
        named[f"{role}, mean"] = watched(lambda w: fmean(w.grown))
        named[f"{role}, gated"] = watched(lambda w: min(w.grown[: len(w.gates)]))
    gated = (named[f"ConViT-{size}, gated"] for size in ("Ti", "B"))
    named["gated"] = combined(min, *gated, unit="tokens")
    panels = tuple(_nonlocality_panel(s, *each) for each in found.items())
    return Figure(panels, named=named)


@experiment("convit/figure-14")
def figure_14(s: Scale) -> Figure:
    """As Fig. 6."""
    named = {}
    for size in ("Ti", "S", "B"):
        trajectory = s.measured(TRAJECTORY, f"ConViT-{size}", seeds=s.few_seeds)
        layers = _watched(trajectory, unit="layers")(lambda w: int(sum(w.mean_gates[:, -1] > 0.1)))
        named[f"{size} layers"] = _unless_out_of_reach(s, layers)  # that still use position
        named[f"{size} fallen"] = _watched(trajectory)(
            lambda w: fmean(w.mean_gates[:, 0]) - fmean(w.mean_gates[:, -1])
        )
    both = (named["Ti fallen"], named["B fallen"])
    named["fallen"] = combined(min, *both, unit="of attention")
    return Figure((*_gate_panels(s, "Ti"), *_gate_panels(s, "B")), named=named)


# -- architecture and maps -------------------------------------------------------------------------


@cache
def skeleton(name: str) -> ImageClassifier:
    """One of the papers' models, without data in its tensors."""
    with torch.device("meta"):
        return build(name)


@experiment("convit/figure-4")
def figure_4(s: Scale) -> Figure:
    """Drawn from the paper's models as they are built here, whatever the scale."""

    def draw(_: list[Path]) -> Any:
        deit, convit = build("deit_small"), build("convit_small")
        columns = {"ViT (DeiT-S)": diagrams.outline(deit), "ConViT-S": diagrams.outline(convit)}
        layer = diagrams.gated_layer(convit.blocks[0].attn)  # type: ignore[index, union-attr]
        return diagrams.draw_columns(columns | {"GPSA layer (Eq. 6–7)": layer})

    def positional() -> float:
        parameters = skeleton("convit_small").named_parameters()
        sizes = {name: tensor.numel() for name, tensor in parameters}
        own = sum(n for name, n in sizes.items() if name.endswith(("v_pos", "gating")))
        return 100 * own / sum(sizes.values())

    named = {"positional": computed(positional, "% of the parameters")}
    return Figure(draw=draw, named=named)


@experiment("convit/figure-3")
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

    return Figure(draw=draw)


def _maps_figure(
    s: Scale, size: str, images: Sequence[int], named: Mapping[str, Quantity] = {}
) -> Figure:
    roles = [f"DeiT-{size}", f"ConViT-{size}"]
    runs = tuple(s.runs(role, seeds=s.seeds[:1])[0] for role in roles)
    layers = (1, s.architecture(roles[1]).gpsa_layers - 1)

    def draw(folders: list[Path]) -> Any:
        taken = [run_pictures(folder, max(images) + 1) for folder in folders]
        return maps.maps(list(zip(roles, taken, strict=True)), layers, image=images)

    return Figure(draw=draw, drawn=runs, named=named, values={"last": layers[1] + 1})


@experiment("convit/figure-7")
def figure_7(s: Scale) -> Figure:
    """One image."""
    return _maps_figure(s, "Ti", images=[0])


@experiment("convit/figure-15")
def figure_15(s: Scale) -> Figure:
    """Averages over images."""
    runs = s.runs("DeiT-Ti", seeds=s.few_seeds[:1])
    deep = max(1, round(0.75 * s.architecture("DeiT-Ti").depth))

    def draw(folders: list[Path]) -> Any:
        taken = [
            ("before training", run_pictures(folders[0], _AVERAGED_IMAGES, trained=False)),
            ("after", run_pictures(folders[0], _AVERAGED_IMAGES)),
        ]
        return maps.maps(taken, (0, deep), image=None)

    watched = _watched(s.measured(TRAJECTORY, "DeiT-Ti", seeds=s.few_seeds))
    named = {
        "first": watched(lambda w: -w.grown[0]),
        "late": watched(lambda w: w.far[deep, -1] - w.far[0, -1]),
    }
    values = {"images": _AVERAGED_IMAGES, "layer": deep + 1}
    return Figure(draw=draw, drawn=runs, named=named, values=values)


@experiment("convit/figure-16")
def figure_16(s: Scale) -> Figure:
    """Other images than Fig. 7."""
    return _maps_figure(s, "Ti", images=range(1, 1 + _SHOWN_IMAGES))


@experiment("convit/figure-17")
def figure_17(s: Scale) -> Figure:
    """As Fig. 16, with what the paper says of the maps."""
    gated = s.architecture("ConViT-S").gpsa_layers
    deit, convit = (s.measured(TRAJECTORY, role) for role in ("DeiT-S", "ConViT-S"))

    def nearer(deit: Watched, convit: Watched) -> float:
        gaps = deit.far[:, -1] - convit.far[:, -1]
        return gaps[1] - gaps[gated - 1]

    def varied(watched: Watched) -> float:
        """How much further apart in distance the heads of a layer have come."""
        return fmean(pstdev(of[-1]) - pstdev(of[0]) for of in watched.by_head[:gated])

    both = _watched(deit, convit)
    mixed = _watched(convit, unit="of attention")
    named = {
        "nearer": both(nearer),
        "mixed": mixed(lambda w: pstdev(w.gates[1, -1]) - pstdev(w.gates[-1, -1])),
        "varied": both(lambda deit, convit: varied(convit) - varied(deit)),
    }
    return _maps_figure(s, "S", range(1, 1 + _SHOWN_IMAGES), named)
