"""ConViT's accuracy curves over data, sizes, layers and epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from locality.figures.charts import percent
from locality_papers import published
from locality_papers.convit_tables import INGREDIENTS, table_2
from locality_papers.measures import (
    BEST_TOP1,
    CURVE_OVER_FRACTION,
    LEARNING_CURVE,
    TOP1,
    TOP1_EARLY,
    Measure,
    Quantity,
    absent,
    combined,
    computed,
    over,
    relative_gain,
    top1_at,
)
from locality_papers.scales import FAMILIES, Scale, variation
from locality_papers.specs import Figure, Panel, Series, experiment, shaded


def _printed(number: published.Published) -> Quantity:
    return computed(lambda: float(number.value))


def accuracy_by_size(
    s: Scale, roles: Mapping[str, tuple[int, ...]], printed: Mapping[str, Iterable[str]]
) -> tuple[Panel, ...]:
    """Top-1 against parameters: one panel of our runs, and panels of published numbers.

    Args:
        s: the scale.
        roles: role → seeds.
        printed: panel title → rows of ConViT's Table 1 or CvT's Table 3.
    """
    tables = published.rows("cvt/table-3") | published.rows("convit/table-1")

    def point(name: str, parameters: Quantity, top1: Quantity) -> Series:
        at = combined(lambda x, y: {"x": [x], "y": [y]}, parameters, top1)
        return Series(name, at, name.partition("-")[0].lower())

    def ours(role: str) -> Series:
        top1 = s.measured(TOP1, role, seeds=roles[role])
        return point(role, s.counted(role)["parameters"], top1)

    def theirs(row: str) -> Series:
        return point(row, *(_printed(tables[row][name]) for name in ("parameters", "top1")))

    panels = {"Here": map(ours, roles)} | {title: map(theirs, of) for title, of in printed.items()}
    return tuple(
        Panel(title, "parameters (M)", "top-1 (%)", tuple(points), log_x=True, scatter=True)
        for title, points in panels.items()
    )


_BIASES: dict[str, dict[str, Any]] = {
    "hard: convolutions": variation(
        "ConViT-3×3", locality_strength=100.0, gating_init=100.0, freeze_gating=True
    ),
    "soft: ConViT": variation("ConViT-3×3"),
    "none: DeiT": variation("DeiT-3×3"),
}


@experiment("convit/figure-1", "Soft inductive biases help without being restrictive")
def figure_1(s: Scale) -> Figure:
    """Measures the paper's sketch: convolutions, gated layers, plain attention."""
    fractions = (0.05, 0.2, 1.0)
    top1 = {
        label: [s.measured(TOP1, **row, fraction=f) for f in fractions]
        for label, row in _BIASES.items()
    }
    series = tuple(
        Series(label, over([100 * f for f in fractions], of), colour)
        for (label, of), colour in zip(top1.items(), ("other", "convit", "deit"), strict=True)
    )
    hard, soft, none = top1.values()
    asked = {
        "With few images, are convolutions above attention?": hard[0] - none[0],
        "With all images, is soft locality above hard?": soft[-1] - hard[-1],
    }
    return Figure(
        (Panel("Inductive bias", "training images (%)", "top-1 (%)", series, log_x=True),),
        about="The first layers are 3×3 convolutions (gated positional attention whose gates stay "
        "at 1, each head on one neighbour), gated positional attention, or attention.",
        questions={"§1, p. 2, Fig. 1": asked},
    )


@experiment("convit/figure-2a", "Sample efficiency")
def figure_2a(s: Scale) -> Figure:
    """Accuracy against the fraction of the data, and the relative improvement."""
    table = published.rows("convit/table-2")
    parts, label = [100 * fraction for fraction in s.fractions], "training images (%)"
    cells: dict[str, Mapping[str, Mapping[str, Quantity]]] = {
        "Here": table_2(s).cells,
        "Published": {
            row: {column: _printed(number) for column, number in table[row].items()}
            for row in map(percent, s.fractions)
        },
    }
    panels, gains = [], []
    for title, by_row in cells.items():
        found = {f: [row[f"{f}-S/top1"] for row in by_row.values()] for f in FAMILIES}
        series = tuple(
            Series(
                s.called(f"{family}-S") if title == "Here" else f"{family}-S",
                over(parts, curve),
                family.lower(),
            )
            for family, curve in found.items()
        )
        panels.append(Panel(title, label, "top-1 (%)", series, log_x=True))
        gain = over(parts, list(map(relative_gain, found["ConViT"], found["DeiT"])))
        gains.append(Series(title.lower(), gain, "other", dashed=title == "Published"))
    panels.append(Panel("ConViT over DeiT", label, "% of DeiT's top-1", tuple(gains), log_x=True))
    return Figure(tuple(panels), about="Table 2 as curves.")


@experiment("convit/figure-2b", "Parameter efficiency")
def figure_2b(s: Scale) -> Figure:
    """Accuracy against the number of parameters."""
    roles = {f"{family}-{size}": s.seeds_of(size) for family in FAMILIES for size in s.sizes}
    others = [f"ResNet-{depth}" for depth in (50, 101, 152)]
    others += [f"T2T-ViT_t-{depth}" for depth in (14, 19, 24)]
    printed = {"Published": [*published.rows("convit/table-1"), *others]}
    return Figure(
        accuracy_by_size(s, roles, printed),
        about="The models of Table 1 on all data.",
    )


_STRENGTHS = (0.5, 1.0, 2.0)  # α, the other axis of Fig. 8


def _with_gpsa(s: Scale, measure: Measure, layers: int, strength: float = 1.0) -> Quantity:
    """A cell of Figs. 8 and 12; default values are omitted, to share runs."""
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
            _STRENGTHS, [_with_gpsa(s, TOP1, layers, each) for each in _STRENGTHS]
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
    few, many, none = (_with_gpsa(s, TOP1, layers) for layers in (least, most, 0))
    weak, *_, strong = (_with_gpsa(s, TOP1, all_of_them, strength) for strength in _STRENGTHS)
    # The paper's boosts are from its Fig. 8.
    early_boost = _with_gpsa(s, TOP1_EARLY, most) / _with_gpsa(s, TOP1_EARLY, 0)
    asked = {
        "Does accuracy grow with the locality strength?": strong - weak,
        "Does accuracy grow with the number of GPSA layers?": many - few,
        "Do GPSA layers help more early in training than at the end?": early_boost.stated(1.87)
        - (many / none).stated(1.47),
    }
    return Figure(
        panels,
        about="On the smaller training set; zero GPSA layers is DeiT. Early is the first "
        "evaluation after the warm-up and a twentieth of the run: the paper's boost is ×1.87 "
        "then and ×1.47 at the end.",
        questions={"§4, pp. 8–9, Fig. 8": asked},
    )


@experiment("convit/figure-9", "PSA instead of GPSA: gating keeps the gain")
def figure_9(s: Scale) -> Figure:
    """Learning curves of DeiT, of ConViT with PSA, and of ConViT."""
    convit, deit = (f"{family}-{'B' if s.comparable else 'S'}" for family in FAMILIES)
    psa = {"positional_attention": "psa"}
    arms = {
        "ConViT (GPSA)": variation(convit),
        "ConViT with PSA": variation(convit, **psa),
        "DeiT": variation(deit),
    }
    colours = dict(zip(arms, ("convit", "other", "deit"), strict=True))
    curves = {label: s.measured(LEARNING_CURVE, **arm) for label, arm in arms.items()}
    gated, alone, none = (s.measured(TOP1, **arm) for arm in arms.values())
    _, alone_early, none_early = (s.measured(TOP1_EARLY, **arm) for arm in arms.values())
    asked = {
        "Without gates, is ConViT above DeiT early in training?": alone_early - none_early,
        "Without gates, is ConViT below DeiT at the end?": none - alone,
        "At the end, are gates (GPSA) above none (PSA)?": gated - alone,
    }
    return Figure(
        (Panel("Learning curves", "epochs", "top-1 (%)", shaded(curves, colours)),),
        about="PSA adds content and position before one softmax (Eq. 4); GPSA mixes two (Eq. 7).",
        questions={"app. A, Fig. 9": asked},
    )


@experiment("convit/figure-11", "Learning curves by size and by fraction of the data")
def figure_11(s: Scale) -> Figure:
    """Curves of ConViT (solid) and DeiT (dashed)."""
    sizes = [size for size in s.sizes if size.endswith("+")] or s.sizes

    def both(measure: Measure, size: str, **choices: Any) -> tuple[Quantity, ...]:
        return tuple(s.measured(measure, f"{family}-{size}", **choices) for family in FAMILIES)

    def panel(title: str, x_label: str, found: Mapping[str, tuple[Quantity, ...]]) -> Panel:
        series = tuple(
            Series(f"{family}, {label}", each, f"depth:{n / len(found)}", family == "DeiT")
            for n, (label, pair) in enumerate(found.items())
            for family, each in zip(FAMILIES, pair, strict=True)
        )
        return Panel(title, x_label, "top-1 (%)", series)

    by_size = {size: both(LEARNING_CURVE, size, seeds=s.seeds_of(size)) for size in sizes}
    by_fraction = {
        percent(f): both(CURVE_OVER_FRACTION, "S+", fraction=f) for f in s.fractions[::-1]
    }
    panels = [
        panel("Size of the model", "epochs", by_size),
        panel("Fraction of the data", "fraction of training (%)", by_fraction),
    ]

    def gain(size: str, printed: str) -> Quantity:
        """Relative gain of a size; the paper's accuracies of Ti+, S+ and B+ are in Table 1."""
        names = [f"{family}-{printed}" for family in FAMILIES]
        papers = [published.rows("convit/table-1")[name]["top1"].value for name in names]
        found = both(BEST_TOP1, size, seeds=s.few_seeds)
        return relative_gain(*map(Quantity.stated, found, papers))

    smallest, largest = gain(sizes[0], "Ti+"), gain(sizes[-1], "B+")
    falling = absent("needs 1,000 epochs of CIFAR-100 at 224 pixels")
    if s.comparable:
        cifar: dict[str, Any] = {
            "data__dataset": "cifar100",
            "schedule__epochs": 3000.0,
            "schedule__eval_every": 30.0,
            "seeds": s.few_seeds,
        }
        lines = {size: both(LEARNING_CURVE, size, **cifar) for size in sizes}
        panels.insert(0, panel("CIFAR-100 at 224 px", "epochs", lines))
        after = top1_at("after 1,000 epochs", lambda schedule: 1000.0)
        top1 = s.measured(after, "ConViT-Ti+", **cifar)
        falling = top1 - s.measured(TOP1, "ConViT-Ti+", **cifar)
    asked = {
        "Does ConViT's relative gain grow with the size of the model?": largest - smallest,
        "After 1,000 epochs of CIFAR-100, does ConViT overfit?": falling,
    }
    return Figure(
        tuple(panels),
        about="Solid: ConViT. Dashed: DeiT. Gains are of the best evaluations.",
        questions={"app. C, Fig. 11": asked},
    )


@experiment("convit/figure-12", "Impact of each ingredient on the dynamics of learning")
def figure_12(s: Scale) -> Figure:
    """Learning curves for numbers of GPSA layers (left) and the rows of Table 3 (right)."""
    by_count = {f"{n} GPSA": _with_gpsa(s, LEARNING_CURVE, n) for n in s.gpsa_counts}
    deit = Series("DeiT", _with_gpsa(s, LEARNING_CURVE, 0), "deit")
    by_row = {
        label: s.measured(LEARNING_CURVE, **row, **s.small) for label, row in INGREDIENTS.items()
    }
    ingredients = shaded(by_row, {"a: ConViT": "convit", "e: DeiT": "deit"})
    panels = (
        Panel("Number of GPSA layers", "epochs", "top-1 (%)", (deit, *shaded(by_count))),
        Panel("Ingredients", "epochs", "top-1 (%)", ingredients),
    )
    return Figure(panels, about="On the scale's smaller training set.")
