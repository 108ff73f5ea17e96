"""ConViT's tables: which runs each needs, and what is measured on them."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from locality.analysis.masks import content_off, position_embedding_off, position_off
from locality.figures.charts import percent
from locality.models import variant
from locality.papers import published
from locality.papers.measures import (
    INFERENCE_SPEED,
    TOP1,
    TOP5,
    Measure,
    Quantity,
    absent,
    combined,
    least_step,
    masked_top1,
    relative_gain,
    slope,
)
from locality.papers.scales import FAMILIES, FRACTIONS, Scale
from locality.papers.specs import REGISTRY, Row, Table, experiment
from locality.runner.runs import Run
from locality.training import replace

BEST_CONVOLUTIONAL = "best of several thousand convolutional nets, 10% (Zhai et al.)"


@experiment("convit/table-1")
def table_1(s: Scale) -> Table:
    """Parameters, cost, speed and accuracy of every size."""
    rows = []
    for size in s.sizes:
        for role in (f"DeiT-{size}", f"ConViT-{size}"):
            speed = s.measured(INFERENCE_SPEED, role, seeds=s.seeds[:1])
            top = {m.name: s.measured(m, role, seeds=s.seeds_of(size)) for m in (TOP1, TOP5)}
            rows.append(Row(role, {**s.counted(role), "speed": speed, **top}))
    named = {
        f"{role}'s speed": s.measured(INFERENCE_SPEED, role) for role in ("DeiT-S", "ConViT-S")
    }
    named |= {role: s.measured(TOP1, role, seeds=s.few_seeds) for role in ("ConViT-S+", "DeiT-B")}
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
    named = {f"{family}'s least step": least_step(found) for family, found in top1.items()}
    scarcity = [-math.log10(fraction) for fraction in FRACTIONS]
    for m in (TOP1, TOP5):
        gaps = [row.cells[f"gap/{m.name}"] for row in rows]
        named[f"slope of {m.name}"] = slope(scarcity, gaps)
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
    return Table(tuple(rows))


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
    return Table(tuple(rows), named={"half of it": half})
