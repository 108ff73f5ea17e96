"""ConViT's tables and curves of accuracy: which runs each needs, and what is measured on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from statistics import linear_regression
from typing import Any

from torch import nn

from locality.analysis.taps import content_off, position_embedding_off, position_off
from locality.figures.charts import percent
from locality.models import variant
from locality.runner.runs import Run
from locality.training import replace
from locality_papers import published
from locality_papers.measures import (
    BEST_TOP1,
    CURVE_OVER_FRACTION,
    INFERENCE_SPEED,
    LEARNING_CURVE,
    PARAMETERS,
    TOP1,
    TOP1_EARLY,
    TOP5,
    Measure,
    Quantity,
    absent,
    combined,
    computed,
    masked_top1,
    ratio,
    relative_gain,
    top1_at,
)
from locality_papers.specs import (
    FAMILIES,
    FRACTIONS,
    REGISTRY,
    Figure,
    Panel,
    Row,
    Scale,
    Series,
    Table,
    experiment,
    shaded,
)

BEST_CONVOLUTIONAL = "best of several thousand convolutional nets, 10% (Zhai et al.)"


@experiment("convit/table-1")
def table_1(s: Scale) -> Table:
    """Parameters, cost, speed and accuracy of every size."""
    rows = []
    for size in s.sizes:
        for role in (f"DeiT-{size}", f"ConViT-{size}"):
            speed = s.measured(INFERENCE_SPEED, role, seeds=s.seeds_of(size))
            top = {m.name: s.measured(m, role, seeds=s.seeds_of(size)) for m in (TOP1, TOP5)}
            rows.append(Row(role, {**s.counted(role), "speed": speed, **top}))
    named = {}
    for role in ("ConViT-S+", "DeiT-B"):
        named[role] = s.measured(TOP1, role, seeds=s.few_seeds)
        named[f"{role}'s parameters"] = s.counted(role)["parameters"]
    for role in ("DeiT-S", "ConViT-S", "ConViT-S+", "DeiT-B"):
        named[f"{role}'s speed"] = s.measured(INFERENCE_SPEED, role, seeds=s.few_seeds)
    return Table(tuple(rows), named=named)


@experiment("convit/table-2")
def table_2(s: Scale) -> Table:
    """Accuracy on fractions of the training images, and the relative gain of ConViT."""
    rows = []
    for fraction in s.fractions:
        cells: dict[str, Quantity] = {}
        for m in (TOP1, TOP5):
            deit, convit = (
                s.measured(m, role, fraction=fraction) for role in ("DeiT-S", "ConViT-S")
            )
            cells |= {f"DeiT-S/{m.name}": deit, f"ConViT-S/{m.name}": convit}
            cells[f"gap/{m.name}"] = relative_gain(convit, deit)
        rows.append(Row(percent(fraction), cells))
    if s.fractions != FRACTIONS:
        return Table(tuple(rows))
    top1 = {family: [row.cells[f"{family}-S/top1"] for row in rows] for family in FAMILIES}
    named = {
        f"{family}'s step, {percent(lower)} to {percent(upper)}": more - fewer
        for family, found in top1.items()
        for (lower, fewer), (upper, more) in pairwise(zip(FRACTIONS, found, strict=True))
    }
    scarcity = [-math.log10(fraction) for fraction in FRACTIONS]
    for m in (TOP1, TOP5):
        gaps = [row.cells[f"gap/{m.name}"] for row in rows]
        named[f"slope of {m.name}"] = combined(
            lambda *v: linear_regression(scarcity, v).slope,
            *gaps,
            unit=f"{gaps[0].unit} per tenfold fewer images",
        )
    classical = published.value("convit/text", BEST_CONVOLUTIONAL, "top1").value
    named["over convolutional nets"] = (
        top1["ConViT"][FRACTIONS.index(0.1)] - classical
        if s.comparable
        else absent("those nets were trained on ImageNet")
    )
    return Table(tuple(rows), named=named)


@experiment("convit/table-3")
def table_3(s: Scale) -> Table:
    """Rows a to g on all data and on 10% of it.

    Rows f and g cross out "Train gating" too, which footnote 4 explains as λ frozen at 0.
    """
    changed = REGISTRY["convit/table-3"].rows
    top1 = {
        part: {label: s.measured(TOP1, **row, fraction=fraction) for label, row in changed.items()}
        for part, fraction in (("full", 1.0), ("10%", 0.1))
    }
    rows = []
    for label in changed:
        cells = {part: of[label] for part, of in top1.items()}
        if label != "e: DeiT":
            cells |= {f"{part} over e": of[label] - of["e: DeiT"] for part, of in top1.items()}
        rows.append(Row(label, cells))
    return Table(tuple(rows))


def taught(s: Scale, measure: Measure, role: str) -> Quantity:
    """A measure of runs that learn from the scale's teacher, for Table 4 and Fig. 10.

    The teacher is trained twice as long as they are, on the training images that none of them sees.
    """
    base = s.base("DeiT-S", s.models["DeiT-S"][0])
    needs: tuple[Run, ...] = ()
    if not s.teacher_is_public:
        seen = base.data.train_part[1]
        if seen == 1.0:
            return absent("the students see all training images: none are left for a teacher")
        settings: dict[str, Any] = {
            "model.name": s.teacher,
            "model.img_size": base.model.img_size or variant(base.model.name).config.img_size,
            "model.patch_size": None,
            "data.root": s.root_of(base.data.dataset),
            "data.train_part": (seen, 1.0),
            **base.schedule.lasting(2),
        }
        needs = (s.run(replace(base, settings), f"teacher {s.teacher}"),)
    return s.measured(
        measure,
        role,
        objective__teacher=str(needs[0].folder) if needs else s.teacher,
        label=f"taught by {s.teacher}",
        needs=needs,
        keep_weights=True,
    )


@experiment("convit/table-4")
def table_4(s: Scale) -> Table:
    """Accuracy with and without a teacher."""
    rows = []
    # Elsewhere the paper's comparison of unequal sizes says nothing.
    for role in ("DeiT-S", *(("DeiT-B",) if s.comparable else ()), "ConViT-S+"):
        plain, hard = s.measured(TOP1, role), taught(s, TOP1, role)
        rows.append(Row(role, {"none": plain, "hard": hard, "gain": hard - plain}))
    return Table(tuple(rows), named={"ConViT-S": s.measured(TOP1, "ConViT-S")})


@experiment("convit/table-5")
def table_5(s: Scale) -> Table:
    """Accuracy of trained models without their absolute position embedding."""
    measure = masked_top1("position embedding masked", position_embedding_off)
    rows = []
    for family in FAMILIES[::-1]:
        role = f"{family}-{s.masked_size}"
        masked, unmasked = s.measured(measure, role), s.measured(TOP1, role)
        cells = {"masked": masked, "unmasked": unmasked, "loss": unmasked - masked}
        rows.append(Row(role, cells, printed=f"{family}-Ti"))
    return Table(tuple(rows))


@experiment("convit/table-6")
def table_6(s: Scale) -> Table:
    """Accuracy of a trained ConViT with one half of its first layers' attention masked."""
    role = f"ConViT-{s.masked_size}"

    def without(part: str, layers: int) -> Quantity:
        def mask(model: nn.Module) -> AbstractContextManager[Any]:
            return (content_off if part == "content" else position_off)(model, layers)

        return s.measured(masked_top1(f"{part} masked in the first {layers} layers", mask), role)

    rows = []
    for layers, printed in zip(s.masked_layers, ("3", "5", "10"), strict=True):
        cells = {part: without(part, layers) for part in ("content", "position")}
        cells["none"] = s.measured(TOP1, role)
        rows.append(Row(f"first {layers} layers (paper: {printed})", cells, printed))
    half = combined(lambda whole: whole / 2, cells["none"])
    quarter = combined(lambda whole: whole / 4, cells["none"])
    return Table(tuple(rows), named={"half of it": half, "quarter of it": quarter})


# -- figures ---------------------------------------------------------------------------------------


def over(xs: Sequence[float], parts: Sequence[Quantity]) -> Quantity:
    """Numbers as a curve: x → the quantity of that x."""
    return combined(lambda *values: {"x": list(xs), "y": list(values)}, *parts)


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
    rows, table = table_2(s).rows, published.rows("convit/table-2")
    parts, label = [100 * fraction for fraction in s.fractions], "training images (%)"
    cells: dict[str, Mapping[str, Mapping[str, Quantity]]] = {
        "Here": {row.label: row.cells for row in rows},
        "Published": {
            row: {column: computed(partial(float, of.value)) for column, of in table[row].items()}
            for row in map(percent, s.fractions)
        },
    }
    panels, gains = [], []
    for title, by_row in cells.items():
        found = {f: [row[f"{f}-S/top1"] for row in by_row.values()] for f in FAMILIES}
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
    named = {
        name: relative_gain(*both(BEST_TOP1, size, seeds=s.few_seeds))
        for name, size in (("smallest", sizes[0]), ("largest", sizes[-1]))
    }
    if s.comparable:
        cifar: dict[str, Any] = {
            "data__dataset": "cifar100",
            "schedule__epochs": 3000.0,
            "schedule__eval_every": 30.0,
            "seeds": s.few_seeds,
        }
        lines = {size: both(LEARNING_CURVE, size, **cifar) for size in sizes}
        panels.insert(0, panel("CIFAR-100 at 224 px", "epochs", lines))
        reached = top1_at("after 1,000 epochs", lambda schedule: 1000.0)
        named["ConViT-Ti+ on CIFAR-100"] = s.measured(reached, "ConViT-Ti+", **cifar)
        named["ConViT-Ti+ at the end"] = s.measured(TOP1, "ConViT-Ti+", **cifar)
    return Figure(tuple(panels), named=named)


@experiment("convit/figure-12")
def figure_12(s: Scale) -> Figure:
    """Learning curves for numbers of GPSA layers (left) and the rows of Table 3 (right)."""
    by_count = {f"{n} GPSA": _with_gpsa(s, LEARNING_CURVE, n) for n in s.gpsa_counts}
    deit = Series("DeiT", _with_gpsa(s, LEARNING_CURVE, 0), "deit")
    rows = REGISTRY["convit/table-3"].rows
    by_row = {label: s.measured(LEARNING_CURVE, **row, **s.small) for label, row in rows.items()}
    ingredients = shaded(by_row, {"a: ConViT": "convit", "e: DeiT": "deit"})
    panels = (
        Panel("Number of GPSA layers", "epochs", "top-1 (%)", (deit, *shaded(by_count))),
        Panel("Ingredients", "epochs", "top-1 (%)", ingredients),
    )
    return Figure(panels)
