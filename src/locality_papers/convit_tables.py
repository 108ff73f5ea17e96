"""ConViT's tables of accuracy: which runs each needs, what is measured on them, what it claims."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
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
    INFERENCE_SPEED,
    TOP1,
    TOP5,
    Measure,
    Quantity,
    absent,
    combined,
    masked_top1,
    relative_gain,
)
from locality_papers.scales import FAMILIES, FRACTIONS, Scale
from locality_papers.specs import (
    Cells,
    Claims,
    Column,
    Expect,
    Row,
    Table,
    as_printed,
    claims_at,
    experiment,
    rows_of,
    standard_columns,
    stated,
)

BEST_CONVOLUTIONAL = "best of several thousand convolutional nets, 10% (Zhai et al.)"


@experiment("convit/table-1", "ConViT and DeiT of six sizes")
def table_1(s: Scale) -> Table:
    """Parameters, cost, speed and accuracy of every size."""
    cells: Cells = {}
    for size in s.sizes:
        for role in (f"DeiT-{size}", f"ConViT-{size}"):
            measures = (INFERENCE_SPEED, TOP1, TOP5)
            found = s.counted(role) | {
                name: s.measured(m, role, seeds=s.seeds_of(size))
                for name, m in zip(("speed", "top1", "top5"), measures, strict=True)
            }
            cells[role] = as_printed("convit/table-1", role, found)

    def above(first: str, second: str, otherwise: str) -> Quantity:
        if first in cells and second in cells:
            return cells[first]["top1"] - cells[second]["top1"]
        return absent(otherwise)

    def larger(metric: str, first: str, second: str, otherwise: str) -> Quantity:
        """The first less the second, where models have the paper's sizes."""
        if s.comparable:
            return cells[first][metric] - cells[second][metric]
        return absent(otherwise)

    shared = "another size of Table 1 is filled by the same model here"
    recipe = "learning rate and batch are those of the other models here"
    chosen = "true or not by construction: the sizes of the two models were chosen here"
    overhead = "the speed of models this small is that of starting their operations"
    slower = "positional attention slows ConViT down: DeiT-S shows more images per second"
    falls = "at the lower rate and batch DeiT-B+ falls below DeiT-S+"
    claims: Claims = {
        f"ConViT-{size} is above DeiT-{size}": above(f"ConViT-{size}", f"DeiT-{size}", shared)
        for size in ("Ti", "Ti+", "S", "S+", "B", "B+")
    }
    claims |= {
        slower: larger("speed", "DeiT-S", "ConViT-S", overhead),
        "ConViT-S+ is above the larger DeiT-B": larger("top1", "ConViT-S+", "DeiT-B", chosen),
        "… with fewer parameters": larger("parameters", "DeiT-B", "ConViT-S+", chosen),
        "… and more images per second": larger("speed", "ConViT-S+", "DeiT-B", chosen),
        falls: above("DeiT-S+", "DeiT-B+", recipe),
        "… and ConViT-B+ does not fall below ConViT-S+": above("ConViT-B+", "ConViT-S+", recipe),
    }
    columns = {
        **standard_columns("parameters", "flops"),
        "speed": Column("images/s, inference", "", 0),
        **standard_columns("top1"),
        "top5": Column("top-5"),
    }
    return Table(
        rows_of(cells),
        columns,
        about="Accuracy, size and speed of ConViT and DeiT, all trained from scratch.",
        claims=claims_at("§3, p. 6", claims),
    )


@experiment("convit/table-2", "Sample efficiency: ConViT-S and DeiT-S on parts of the data")
def table_2(s: Scale) -> Table:
    """Accuracy on fractions of the training images, and the relative gain of ConViT."""
    cells: dict[float, dict[str, Quantity]] = {}
    for fraction in s.fractions:
        found: dict[str, Quantity] = {}
        for m in (TOP1, TOP5):
            pair = {
                f"{role}/{m.name}": s.measured_on_part(m, role, fraction)
                for role in ("DeiT-S", "ConViT-S")
            }
            pair = as_printed("convit/table-2", percent(fraction), pair)
            deit, convit = pair.values()
            found |= pair | {f"gap/{m.name}": relative_gain(convit, deit)}
        cells[fraction] = found
    claims: Claims = {
        f"with {percent(fraction)} of the images, ConViT is above DeiT": of["ConViT-S/top1"]
        - of["DeiT-S/top1"]
        for fraction, of in cells.items()
    }
    if s.fractions == FRACTIONS:
        claims |= _over_fractions(s, cells)
    columns = {
        f"{column}/{m.name}": Column(f"{name}, {title}", signed=column == "gap")
        for m, title in ((TOP1, "top-1"), (TOP5, "top-5"))
        for column, name in (("DeiT-S", "DeiT"), ("ConViT-S", "ConViT"), ("gap", "gap"))
    }
    return Table(
        tuple(Row(percent(fraction), of) for fraction, of in cells.items()),
        columns,
        about="A fraction of each class's training images, the number of images shown unchanged"
        f"{s.about_length}. The gap is ConViT's gain in per cent of DeiT's accuracy.",
        claims=claims_at("§3, p. 6, Table 2", claims),
    )


def _over_fractions(s: Scale, cells: dict[float, dict[str, Quantity]]) -> Claims:
    """The claims of Table 2 that compare fractions."""
    top1 = {family: [of[f"{family}-S/top1"] for of in cells.values()] for family in FAMILIES}

    def steps(family: str) -> dict[str, Quantity]:
        return {
            f"{percent(lower)} to {percent(upper)}": more - fewer
            for (lower, fewer), (upper, more) in pairwise(zip(cells, top1[family], strict=True))
        }

    def slope(m: Measure) -> Quantity:
        """How fast the gap grows as images get fewer."""
        scarcity = [-math.log10(fraction) for fraction in cells]
        gaps = [of[f"gap/{m.name}"] for of in cells.values()]
        return combined(
            lambda *v: linear_regression(scarcity, v).slope,
            *gaps,
            unit=f"{gaps[0].unit} per tenfold fewer images",
        )

    def lost(family: str) -> Quantity:
        return top1[family][FRACTIONS.index(1.0)] - top1[family][FRACTIONS.index(0.1)]

    classical = published.value("convit/text", BEST_CONVOLUTIONAL, "top1").value
    above_classical = absent("those nets were trained on ImageNet")
    if s.comparable:
        above_classical = top1["ConViT"][FRACTIONS.index(0.1)] - classical
    return {
        "DeiT loses accuracy with every step to fewer images": steps("DeiT"),
        "ConViT loses accuracy with every step to fewer images": steps("ConViT"),
        "ConViT loses less than DeiT from all images to 10% of them": lost("DeiT") - lost("ConViT"),
        "the relative gain grows as the images get fewer": Expect(
            slope(TOP1), where="app. C, Fig. 11"
        ),
        "… and so does that of top-5": slope(TOP5),
        "with 10% of the images ConViT is above the best convolutional net": Expect(
            above_classical, where="§3, pp. 6–7"
        ),
    }


_UNGATED = {"freeze_gating": True, "gating_init": 0.0}
INGREDIENTS: dict[str, dict[str, Any]] = {
    "a: ConViT": {"role": "ConViT-S+"},
    "b: gate frozen at λ = 0": {"role": "ConViT-S+", "fields": _UNGATED},
    "c: no convolutional init": {"role": "ConViT-S+", "fields": {"conv_init": False}},
    "d: neither": {"role": "ConViT-S+", "fields": {**_UNGATED, "conv_init": False}},
    "e: DeiT": {"role": "DeiT-S+"},
    "f: GPSA frozen at conv. init": {
        "role": "ConViT-S+",
        "fields": {**_UNGATED, "freeze_gpsa": True},
    },
    "g: GPSA frozen, random init": {
        "role": "ConViT-S+",
        "fields": {**_UNGATED, "freeze_gpsa": True, "conv_init": False},
    },
}
"""The rows of Table 3. f and g cross out "Train gating" too, which footnote 4 explains as λ frozen
at 0."""


@experiment("convit/table-3", "Ablation of gating, convolutional initialisation and GPSA")
def table_3(s: Scale) -> Table:
    """Rows a to g on all data and on 10% of it."""
    parts = {"full": 1.0, "10%": 0.1}
    cells: Cells = {
        label: as_printed(
            "convit/table-3",
            label[0],
            {part: s.measured(TOP1, **row, fraction=f) for part, f in parts.items()},
        )
        for label, row in INGREDIENTS.items()
    }
    full, tenth = ({label[0]: of[part] for label, of in cells.items()} for part in parts)
    for label, of in cells.items():
        if label != "e: DeiT":
            of |= {f"{part} over e": of[part] - cells["e: DeiT"][part] for part in parts}
    claims: Claims = {
        "all data: GPSA alone (d) is above DeiT (e)": full["d"] - full["e"],
        "all data: convolutional init adds to GPSA alone (b above d)": full["b"] - full["d"],
        "all data: gating adds to convolutional init (a above b)": full["a"] - full["b"],
        "all data: gating alone is no help (c equals d)": Expect(full["c"] - full["d"], within=1),
        "all data: frozen convolutions (f) equal DeiT (e)": Expect(full["f"] - full["e"], within=1),
        "all data: GPSA frozen at random (g) falls below DeiT (e)": full["e"] - full["g"],
        "all data: frozen convolutions (f) are above random (g)": full["f"] - full["g"],
        "10%: GPSA alone (d) is above DeiT (e)": tenth["d"] - tenth["e"],
        "10%: gating helps (c above d)": tenth["c"] - tenth["d"],
        "10%: convolutional initialisation helps (b above d)": tenth["b"] - tenth["d"],
        "10%: both are above initialisation alone (a above b)": tenth["a"] - tenth["b"],
        "10%: both are above gating alone (a above c)": tenth["a"] - tenth["c"],
        "10%: gating and initialisation complement each other: together they bring the sum": Expect(
            (tenth["a"] - tenth["b"]) - (tenth["c"] - tenth["d"]), 1
        ),
        "10%: frozen convolutions (f) are above DeiT (e)": tenth["f"] - tenth["e"],
        "gating and initialisation bring more at 10% than on all data": (tenth["a"] - tenth["d"])
        - (full["a"] - full["d"]),
    }
    return Table(
        rows_of(cells),
        {
            "full": Column("all data"),
            "full over e": Column("over e", signed=True),
            "10%": Column("10% of the data"),
            "10% over e": Column("over e, 10%", signed=True),
        },
        about="Top-1 of ConViT with parts of it frozen or removed; e is DeiT.",
        claims=claims_at("§4, pp. 8–9, Table 3", claims),
    )


def with_teacher(s: Scale, measure: Measure, role: str) -> Quantity:
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


@experiment("convit/table-4", "Hard distillation from a convolutional teacher")
def table_4(s: Scale) -> Table:
    """Accuracy with and without a teacher."""
    cells: Cells = {}
    # Elsewhere the paper's comparison of unequal sizes says nothing.
    for role in ("DeiT-S", *(("DeiT-B",) if s.comparable else ()), "ConViT-S+"):
        pair = {"none": s.measured(TOP1, role), "hard": with_teacher(s, TOP1, role)}
        cells[role] = as_printed("convit/table-4", role, pair)
        cells[role]["gain"] = cells[role]["hard"] - cells[role]["none"]
    deit, convit = cells["DeiT-S"], cells["ConViT-S+"]
    larger = absent("the sizes of its models here are not in the paper's proportion")
    if "DeiT-B" in cells:
        larger = cells["DeiT-B"]["hard"] - convit["hard"]
    claims: Claims = {
        "distillation helps DeiT": deit["gain"],
        "distillation helps ConViT": convit["gain"],
        "DeiT gains more than ConViT": deit["gain"] - convit["gain"],
        "ConViT without a teacher equals DeiT with one": Expect(
            stated(s.measured(TOP1, "ConViT-S"), 81.3) - deit["hard"], within=1, where="§3, p. 6"
        ),
        "with a teacher, DeiT-B is above ConViT-S+": larger,
    }
    return Table(
        rows_of(cells),
        {
            "none": Column("no distillation"),
            "hard": Column("hard distillation"),
            "gain": Column("gain", signed=True),
        },
        about=f"Half of the target is the class that the teacher ({s.teacher}) finds most likely; "
        f"it was trained on images that are not the students'.",
        claims=claims_at("app. B", claims),
    )


@experiment("convit/table-5", "Position embedding masked at test time")
def table_5(s: Scale) -> Table:
    """Accuracy of trained models without their absolute position embedding."""
    measure = masked_top1("position embedding masked", position_embedding_off)
    rows, loss = [], {}
    for family in FAMILIES[::-1]:
        role = f"{family}-{s.masked_size}"
        pair = {"masked": s.measured(measure, role), "unmasked": s.measured(TOP1, role)}
        pair = as_printed("convit/table-5", f"{family}-Ti", pair)
        loss[family] = pair["unmasked"] - pair["masked"]
        rows.append(Row(role, pair | {"loss": loss[family]}, printed=f"{family}-Ti"))
    claims: Claims = {
        "DeiT loses more than ConViT": loss["DeiT"] - loss["ConViT"],
        "DeiT loses much: more than 10 points": Expect(loss["DeiT"] - 10, least=0),
        "ConViT loses little: less than 10 points": Expect(10 - loss["ConViT"], least=0),
    }
    return Table(
        tuple(rows),
        {
            "masked": Column("masked"),
            "unmasked": Column("no mask"),
            "loss": Column("loss", signed=True),
        },
        about="Top-1 of trained models with the absolute position embedding masked and not. The "
        "claims' 10 points are ours; the paper says little and much.",
        claims=claims_at("app. F, Table 5", claims),
    )


@experiment("convit/table-6", "Content or position masked at test time")
def table_6(s: Scale) -> Table:
    """Accuracy of a trained ConViT with one half of its first layers' attention masked."""
    role = f"ConViT-{s.masked_size}"

    def without(part: str, layers: int) -> Quantity:
        def mask(model: nn.Module) -> AbstractContextManager[Any]:
            return (content_off if part == "content" else position_off)(model, layers)

        return s.measured(masked_top1(f"{part} masked in the first {layers} layers", mask), role)

    rows, cells = [], {}
    for layers, printed in zip(s.masked_layers, ("3", "5", "10"), strict=True):
        found = {part: without(part, layers) for part in ("content", "position")}
        found |= {"none": s.measured(TOP1, role)}
        cells[printed] = as_printed("convit/table-6", printed, found)
        rows.append(Row(f"first {layers} layers (paper: {printed})", cells[printed], printed))
    first, half, every = cells.values()
    claims: Claims = {
        "in the first layers, masking content or position costs the same": Expect(
            first["position"] - first["content"], 5
        ),
        "in half of the gated layers, masking content costs more": half["position"]
        - half["content"],
        "in all gated layers, masking content costs more": every["position"] - every["content"],
        "… and without position more than half of the accuracy is left": Expect(
            every["position"] - combined(lambda top1: top1 / 2, every["none"]), least=0
        ),
        "… but without content less than a quarter": Expect(
            combined(lambda top1: top1 / 4, every["none"]) - every["content"], least=0
        ),
    }
    return Table(
        tuple(rows),
        {
            "content": Column("content masked"),
            "position": Column("position masked"),
            "none": Column("no mask"),
        },
        about="Top-1 of a trained ConViT whose first gated layers attend by position or content "
        "only. The claims' half and quarter are ours; the paper says that one masking kills "
        "performance and the other does not.",
        claims=claims_at("app. F, Table 6", claims),
    )
