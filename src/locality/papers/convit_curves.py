"""ConViT's figures of accuracy: over data, parameters, training, and ingredients."""

from __future__ import annotations

from typing import Any

from locality.papers import published
from locality.papers.convit import ABLATIONS, ablation, seeds_of, sizes_of
from locality.papers.measures import (
    BEST_TOP1,
    CURVE_OVER_SHARE,
    LEARNING_CURVE,
    PARAMETERS,
    TOP1,
    top1_at,
)
from locality.papers.quantities import (
    Combined,
    Computed,
    Measure,
    Quantity,
    difference,
    relative_gain,
)
from locality.papers.scales import EARLY, Scale
from locality.papers.specs import Claim, Figure, Panel, Series, experiment


def over(xs: tuple[float, ...], parts: list[Quantity]) -> Quantity:
    """Numbers as a curve: x → the quantity of that x."""
    return Combined(lambda *values: {"x": list(xs), "y": list(values)}, tuple(parts))


@experiment("convit/figure-2a", "Sample efficiency")
def figure_2a(s: Scale) -> Figure:
    """Accuracy against the fraction of the data, and the relative improvement."""
    percent = tuple(100 * fraction for fraction in s.fractions)
    top1 = {
        family: [s.measured(TOP1, f"{family}-S", fraction=f) for f in s.fractions]
        for family in ("ConViT", "DeiT")
    }
    gains = [relative_gain(a, b) for a, b in zip(top1["ConViT"], top1["DeiT"], strict=True)]
    accuracy = tuple(
        Series(f"{family}-S", over(percent, parts), family.lower())
        for family, parts in top1.items()
    )
    gain = Series("ConViT over DeiT", over(percent, gains), "other")
    label = "training images (%)"
    panels = (
        Panel("Accuracy", label, "top-1 (%)", accuracy, log_x=True),
        Panel("Relative improvement", label, "% of DeiT's top-1", (gain,), log_x=True),
    )
    claims = (
        Claim("the relative improvement grows as the data shrinks",
              difference(gains[0], gains[-1]), unit="% of DeiT's accuracy"),
    )  # fmt: skip
    return Figure("Table 2 as curves: fractions of each class's images.", panels, claims=claims)


def _point(parameters: Quantity, top1: Quantity) -> Quantity:
    return Combined(lambda p, t: {"x": [p / 1e6], "y": [t]}, (parameters, top1))


@experiment("convit/figure-2b", "Parameter efficiency")
def figure_2b(s: Scale) -> Figure:
    """Accuracy against the number of parameters."""
    series = []
    for family in ("ConViT", "DeiT"):
        for size in sizes_of(s):
            role, chosen = f"{family}-{size}", {"seeds": seeds_of(s, size)}
            point = _point(s.measured(PARAMETERS, role, **chosen), s.measured(TOP1, role, **chosen))
            series.append(Series(role, point, family.lower()))
    if s.comparable:
        series += [_published_point(row) for row in ("ResNet-50", "ResNet-101", "ResNet-152")]
    panel = Panel(
        "Accuracy and size", "parameters (M)", "top-1 (%)", tuple(series), True, scatter=True
    )
    return Figure("The models of Table 1, on all data.", (panel,))


def _published_point(row: str) -> Series:
    def point() -> Any:
        printed = published.rows("cvt", "table-3")[row]
        return {"x": [printed["parameters"].value], "y": [printed["top1"].value]}

    return Series(f"{row} (published)", Computed(point), "other")


def _strength_runs(s: Scale, layers: int, strength: float) -> dict[str, Any]:
    """The choices of a cell of Fig. 8; the model's own values are left out, to share its runs."""
    changes: dict[str, Any] = {"seeds": s.few_seeds, **s.small}
    if layers != s.gpsa_counts[-1]:
        changes["model__overrides__gpsa_layers"] = layers
    if strength != 1.0:
        changes["model__overrides__locality_strength"] = strength
    return changes


@experiment("convit/figure-8", "Accuracy against locality strength and number of GPSA layers")
def figure_8(s: Scale) -> Figure:
    """Final accuracy (left) and accuracy at stages of training (right)."""
    most, least = s.gpsa_counts[-1], s.gpsa_counts[0]

    def top1(layers: int, strength: float, share: float = 1.0) -> Quantity:
        measure = TOP1 if share == 1 else top1_at(share)
        if layers == 0:
            return s.measured(measure, "DeiT-S", seeds=s.few_seeds, **s.small)
        return s.measured(measure, "ConViT-S", **_strength_runs(s, layers, strength))

    by_strength = tuple(
        Series(f"{layers} GPSA layer{'s' if layers > 1 else ''}",
               over(s.strengths, [top1(layers, strength) for strength in s.strengths]),
               f"depth:{index / len(s.gpsa_counts)}")
        for index, layers in enumerate(s.gpsa_counts)
    )  # fmt: skip
    shares = (EARLY, 0.3, 1.0)
    counts = (0, *s.gpsa_counts)
    by_stage = tuple(
        Series(f"after {100 * share:g}% of training",
               over(tuple(map(float, counts)), [top1(n, 1.0, share) for n in counts]),
               f"depth:{index / len(shares)}")
        for index, share in enumerate(shares)
    )  # fmt: skip
    panels = (
        Panel("Locality strength", "α", "final top-1 (%)", by_strength, log_x=True),
        Panel("GPSA layers", "number of GPSA layers", "top-1 (%)", by_stage),
    )
    low, high = s.strengths[0], s.strengths[-1]
    claims = (
        Claim("final accuracy grows with the locality strength",
              difference(top1(most, high), top1(most, low))),
        Claim("final accuracy grows with the number of GPSA layers",
              difference(top1(most, 1.0), top1(least, 1.0))),
        Claim("the boost over DeiT is larger early in training than at its end",
              difference(difference(top1(most, 1.0, EARLY), top1(0, 1.0, EARLY)),
                         difference(top1(most, 1.0), top1(0, 1.0)))),
    )  # fmt: skip
    about = "On the scale's smaller training set. Zero GPSA layers is DeiT."
    return Figure(about, panels, claims=claims)


@experiment("convit/figure-9", "PSA in GPSA's place: gating is what keeps the gain")
def figure_9(s: Scale) -> Figure:
    """Learning curves of DeiT, of ConViT with PSA, and of ConViT."""
    size = "B" if s.comparable else "S"
    seeds = {"seeds": s.seeds}
    psa = {"model__overrides__positional_attention": "psa"} | seeds

    def measured(measure: Any, role: str, **choices: Any) -> Quantity:
        return s.measured(measure, f"{role}-{size}", **choices)

    series = (
        Series("ConViT (GPSA)", measured(LEARNING_CURVE, "ConViT", **seeds), "convit"),
        Series("ConViT with PSA", measured(LEARNING_CURVE, "ConViT", **psa), "other"),
        Series("DeiT", measured(LEARNING_CURVE, "DeiT", **seeds), "deit"),
    )
    early = top1_at(EARLY)
    claims = (
        Claim("early in training, PSA with convolutional init is above DeiT",
              difference(measured(early, "ConViT", **psa), measured(early, "DeiT", **seeds))),
        Claim("at the end, DeiT is above PSA",
              difference(measured(TOP1, "DeiT", **seeds), measured(TOP1, "ConViT", **psa))),
        Claim("at the end, GPSA is above PSA",
              difference(measured(TOP1, "ConViT", **seeds), measured(TOP1, "ConViT", **psa))),
    )  # fmt: skip
    about = "PSA adds content and position before one softmax (Eq. 4); GPSA mixes two (Eq. 7)."
    return Figure(about, (Panel("Learning curves", "epochs", "top-1 (%)", series),), claims=claims)


@experiment("convit/figure-11", "Learning curves by size and by fraction of the data")
def figure_11(s: Scale) -> Figure:
    """Curves of ConViT (solid) and DeiT (dashed)."""
    sizes = [size for size in sizes_of(s) if size.endswith("+")] or sizes_of(s)

    def curves(
        choices: dict[str, dict[str, Any]], measure: Measure = LEARNING_CURVE
    ) -> tuple[Series, ...]:
        return tuple(
            Series(f"{family}, {label}", s.measured(measure, f"{family}-{chosen['size']}",
                   **{k: v for k, v in chosen.items() if k != "size"}),
                   f"depth:{index / len(choices)}", dashed=family == "DeiT")
            for index, (label, chosen) in enumerate(choices.items())
            for family in ("ConViT", "DeiT")
        )  # fmt: skip

    by_size = curves({size: {"size": size, "seeds": seeds_of(s, size)} for size in sizes})
    by_fraction = curves(
        {f"{100 * f:g}%": {"size": "S", "fraction": f} for f in s.fractions[::-1]},
        CURVE_OVER_SHARE,
    )
    panels = [
        Panel("Size of the model", "epochs", "top-1 (%)", by_size),
        Panel("Fraction of the data", "share of training (%)", "top-1 (%)", by_fraction),
    ]
    if s.comparable:
        cifar = curves({size: {"size": size, **s.cifar_settings()} for size in sizes})
        panels.insert(0, Panel("CIFAR-100 at 224 px", "epochs", "top-1 (%)", cifar))

    def gain(size: str, **choices: Any) -> Quantity:
        return relative_gain(*(s.measured(BEST_TOP1, f"{family}-{size}", **choices)
                               for family in ("ConViT", "DeiT")))  # fmt: skip

    large, small = (gain(size, seeds=s.few_seeds) for size in (sizes[-1], sizes[0]))
    little, much = (gain("S", fraction=s.fractions[index]) for index in (0, -1))
    claims = (
        Claim("the relative improvement grows with the size of the model",
              difference(large, small), unit="% of DeiT's accuracy"),
        Claim("the relative improvement grows as the data shrinks",
              difference(little, much), unit="% of DeiT's accuracy"),
    )  # fmt: skip
    about = "Solid: ConViT. Dashed: DeiT. Improvements are those of the best evaluations."
    return Figure(about, tuple(panels), claims=claims)


@experiment("convit/figure-12", "What each ingredient does to the dynamics of learning")
def figure_12(s: Scale) -> Figure:
    """Learning curves for numbers of GPSA layers (left) and the rows of Table 3 (right)."""
    by_count = [
        Series("DeiT", s.measured(LEARNING_CURVE, "DeiT-S", seeds=s.few_seeds, **s.small), "deit")
    ]
    for index, layers in enumerate(s.gpsa_counts):
        curve = s.measured(LEARNING_CURVE, "ConViT-S", **_strength_runs(s, layers, 1.0))
        by_count.append(Series(f"{layers} GPSA", curve, f"depth:{index / len(s.gpsa_counts)}"))
    by_row = tuple(
        Series(f"{row}: {label}", _ablation_curve(s, row),
               {"a": "convit", "e": "deit"}.get(row, f"depth:{index / len(ABLATIONS)}"))
        for index, (row, (label, _)) in enumerate(ABLATIONS.items())
    )  # fmt: skip
    panels = (
        Panel("Number of GPSA layers", "epochs", "top-1 (%)", tuple(by_count)),
        Panel("Ingredients", "epochs", "top-1 (%)", by_row),
    )
    return Figure("On the scale's smaller training set.", panels)


def _ablation_curve(s: Scale, row: str) -> Quantity:
    return ablation(s, row, measure=LEARNING_CURVE, **s.small)
