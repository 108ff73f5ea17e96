"""ConViT's tables: which runs each needs, what is measured on them, what the paper concludes."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from locality.analysis.masks import content_off, position_embedding_off, position_off
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
from locality.papers.scales import FRACTIONS, Scale
from locality.papers.specs import Claimed, Column, Row, Table, columns, experiment, said
from locality.runner.runs import Run
from locality.training import replace

SIZES = ("Ti", "Ti+", "S", "S+", "B", "B+")
BEST_CONVOLUTIONAL = "best of several thousand convolutional nets, 10% (Zhai et al.)"

_UNGATED = {"freeze_gating": True, "gating_init": 0.0}
ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "a": ("ConViT", {}),
    "b": ("gate frozen at λ = 0", _UNGATED),
    "c": ("no convolutional init", {"conv_init": False}),
    "d": ("neither", {**_UNGATED, "conv_init": False}),
    "e": ("DeiT", {}),
    "f": ("GPSA frozen at conv. init", {**_UNGATED, "freeze_gpsa": True}),
    "g": ("GPSA frozen, random init", {**_UNGATED, "freeze_gpsa": True, "conv_init": False}),
}
"""The rows of Table 3: what they are and which fields of the model they change.

Rows f and g cross out "Train gating" too, which footnote 4 explains as λ frozen at 0.
"""


def ablation(s: Scale, row: str, measure: Measure, **choices: Any) -> Quantity:
    """A measure of a row of Table 3."""
    role = "DeiT-S+" if row == "e" else "ConViT-S+"
    return s.measured(measure, role, fields=ABLATIONS[row][1], **choices)


def percent(fraction: float) -> str:
    """A fraction as the paper writes it: "5%"."""
    return f"{100 * fraction:g}%"


@experiment("convit/table-1", "ConViT and DeiT of six sizes")
def table_1(s: Scale) -> Table:
    """Parameters, cost, speed and accuracy of every size."""

    def cells(role: str, seeds: tuple[int, ...]) -> dict[str, Quantity]:
        speed = s.measured(INFERENCE_SPEED, role, seeds=s.seeds[:1])
        accuracies = {m.name: s.measured(m, role, seeds=seeds) for m in (TOP1, TOP5)}
        return {**s.counted(role), "speed": speed, **accuracies}

    rows: list[Row] = []
    claims: Claimed = {}
    for size in SIZES:
        text = f"ConViT-{size} is above DeiT-{size}"
        if size not in s.sizes:
            claims[text] = absent("another size of Table 1 is filled by the same model here")
            continue
        deit, convit = (
            Row(role, cells(role, s.seeds_of(size))) for role in (f"DeiT-{size}", f"ConViT-{size}")
        )
        rows += [deit, convit]
        claims[text] = convit.cells["top1"] - deit.cells["top1"]
    slower = s.measured(INFERENCE_SPEED, "DeiT-S") - s.measured(INFERENCE_SPEED, "ConViT-S")
    larger = s.measured(TOP1, "ConViT-S+", seeds=s.few_seeds) - s.measured(
        TOP1, "DeiT-B", seeds=s.few_seeds
    )
    recipe = "learning rate and batch are those of the other models here"
    claims |= {
        "positional attention slows ConViT down: DeiT-S shows more images per second": slower,
        "ConViT-S+ is above the larger DeiT-B": larger,
        "at the lower rate and batch DeiT-B+ falls below DeiT-S+": absent(recipe),
        "… and ConViT-B+ does not fall below ConViT-S+": absent(recipe),
    }
    about = "Accuracy, size and speed of ConViT and DeiT, all trained from scratch."
    shown = columns("parameters", "flops", "speed", "top1", "top5")
    return Table(about, shown, tuple(rows), said("§3, p. 6", claims))


@experiment("convit/table-2", "Sample efficiency: ConViT-S and DeiT-S on parts of the data")
def table_2(s: Scale) -> Table:
    """Accuracy on fractions of the training images, and the relative gain of ConViT."""
    shown: dict[str, Column] = {}
    cells: dict[str, dict[str, Quantity]] = {percent(fraction): {} for fraction in s.fractions}
    for measure, metric in ((TOP1, "top-1"), (TOP5, "top-5")):
        names = [f"{column}/{measure.name}" for column in ("DeiT-S", "ConViT-S", "gap")]
        for fraction in s.fractions:
            deit, convit = (
                s.measured(measure, role, fraction=fraction) for role in ("DeiT-S", "ConViT-S")
            )
            gap = relative_gain(convit, deit)
            cells[percent(fraction)] |= zip(names, (deit, convit, gap), strict=True)
        shown |= zip(
            names,
            (
                Column(f"DeiT, {metric}"),
                Column(f"ConViT, {metric}"),
                Column(f"gap, {metric}", signed=True),
            ),
            strict=True,
        )

    def of(name: str) -> list[Quantity]:
        return [row[name] for row in cells.values()]

    claims: Claimed = {
        f"with {part} of the images, ConViT is above DeiT": row["ConViT-S/top1"]
        - row["DeiT-S/top1"]
        for part, row in cells.items()
    }
    if s.fractions == FRACTIONS:
        deits, convits, tenth = of("DeiT-S/top1"), of("ConViT-S/top1"), FRACTIONS.index(0.1)
        scarcity = [-math.log10(fraction) for fraction in FRACTIONS]
        classical = published.value("convit/text", BEST_CONVOLUTIONAL, "top1").value
        claims |= {
            "DeiT loses accuracy with every step to fewer images": least_step(deits),
            "ConViT loses accuracy with every step to fewer images": least_step(convits),
            "ConViT loses less than DeiT from all images to 10% of them": (
                (deits[-1] - deits[tenth]) - (convits[-1] - convits[tenth])
            ),
            "the relative gain grows as the images get fewer": slope(scarcity, of("gap/top1")),
            "… and so does that of top-5": slope(scarcity, of("gap/top5")),
            "with 10% of the images ConViT is above the best convolutional net": (
                combined(lambda top1: top1 - classical, convits[tenth])
                if s.comparable
                else absent("those nets were trained on ImageNet")
            ),
        }
    about = (
        "A fraction of each class's training images, the number of images shown unchanged. The gap "
        "is ConViT's gain in per cent of DeiT's accuracy."
    )
    rows = tuple(Row(part, row) for part, row in cells.items())
    return Table(about, shown, rows, said("§3, p. 6, Table 2", claims))


@experiment("convit/table-3", "Ablation of gating, convolutional initialisation and GPSA")
def table_3(s: Scale) -> Table:
    """Rows a to g on all data and on 10% of it."""
    shown = {
        "full": Column("all data"),
        "full over e": Column("over e", signed=True),
        "10%": Column("10% of the data"),
        "10% over e": Column("over e, 10%", signed=True),
    }
    full, tenth = (
        {row: ablation(s, row, TOP1, fraction=fraction) for row in ABLATIONS}
        for fraction in (1.0, 0.1)
    )
    rows = []
    for row, (label, _) in ABLATIONS.items():
        cells = {"full": full[row], "10%": tenth[row]}
        if row != "e":
            cells |= {"full over e": full[row] - full["e"], "10% over e": tenth[row] - tenth["e"]}
        rows.append(Row(f"{row}: {label}", cells))
    claims = said(
        "§4, pp. 8–9, Table 3",
        {
            "all data: GPSA alone (d) is above DeiT (e)": full["d"] - full["e"],
            "all data: convolutional init adds to GPSA alone (b above d)": full["b"] - full["d"],
            "all data: gating adds to convolutional init (a above b)": full["a"] - full["b"],
            "all data: gating alone is no help (c equals d)": (full["c"] - full["d"], 1.0),
            "all data: frozen convolutions (f) equal DeiT (e)": (full["f"] - full["e"], 1.0),
            "all data: GPSA frozen at random (g) falls below DeiT (e)": full["e"] - full["g"],
            "all data: frozen convolutions (f) are above random (g)": full["f"] - full["g"],
            "10%: GPSA alone (d) is above DeiT (e)": tenth["d"] - tenth["e"],
            "10%: gating helps (c above d)": tenth["c"] - tenth["d"],
            "10%: convolutional initialisation helps (b above d)": tenth["b"] - tenth["d"],
            "10%: both are above initialisation alone (a above b)": tenth["a"] - tenth["b"],
            "10%: both are above gating alone (a above c)": tenth["a"] - tenth["c"],
            "10%: frozen convolutions (f) are above DeiT (e)": tenth["f"] - tenth["e"],
            "gating and initialisation bring more at 10% than on all data": (
                (tenth["a"] - tenth["d"]) - (full["a"] - full["d"])
            ),
        },
    )
    about = "Top-1 of ConViT with parts of it frozen or removed; e is DeiT."
    return Table(about, shown, tuple(rows), claims)


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


@experiment("convit/table-4", "Hard distillation from a convolutional teacher")
def table_4(s: Scale) -> Table:
    """Accuracy with and without a teacher."""
    shown = {
        "none": Column("no distillation"),
        "hard": Column("hard distillation"),
        "gain": Column("gain", signed=True),
    }
    # Elsewhere the paper's comparison of unequal sizes says nothing.
    roles = ("DeiT-S", *(("DeiT-B",) if s.comparable else ()), "ConViT-S+")
    cells = {}
    for role in roles:
        plain, hard = s.measured(TOP1, role), taught(s, TOP1, role)
        cells[role] = {"none": plain, "hard": hard, "gain": hard - plain}
    deit, convit = cells["DeiT-S"], cells["ConViT-S+"]
    text = "with a teacher, DeiT-B is above ConViT-S+"
    claims: Claimed = {
        "distillation helps DeiT": deit["gain"],
        "distillation helps ConViT": convit["gain"],
        "DeiT gains more than ConViT": deit["gain"] - convit["gain"],
        "ConViT without a teacher equals DeiT with one": (convit["none"] - deit["hard"], 1.0),
        text: cells["DeiT-B"]["hard"] - convit["hard"]
        if s.comparable
        else absent("the sizes of its models here are not in the paper's proportion"),
    }
    about = (
        f"Half of the target is the class that the teacher ({s.teacher}) finds most likely; it was "
        f"trained on images that are not the students'."
    )
    rows = tuple(Row(role, row) for role, row in cells.items())
    return Table(about, shown, rows, said("app. B", claims))


@experiment("convit/table-5", "Position embedding masked at test time")
def table_5(s: Scale) -> Table:
    """Accuracy of trained models without their absolute position embedding."""
    shown = {
        "masked": Column("masked"),
        "unmasked": Column("no mask"),
        "loss": Column("loss", signed=True),
    }
    measure = masked_top1("position embedding masked", position_embedding_off)
    rows = []
    for family in ("DeiT", "ConViT"):
        role = f"{family}-{s.masked_size}"
        masked, unmasked = s.measured(measure, role), s.measured(TOP1, role)
        cells = {"masked": masked, "unmasked": unmasked, "loss": unmasked - masked}
        rows.append(Row(role, cells, printed=f"{family}-Ti"))
    deit, convit = (row.cells["loss"] for row in rows)
    claims: Claimed = {
        "DeiT loses more than ConViT": deit - convit,
        "DeiT loses much: more than 10 points": combined(lambda loss: loss - 10, deit),
        "ConViT loses little: less than 10 points": combined(lambda loss: 10 - loss, convit),
    }
    about = "Top-1 of trained models with the absolute position embedding masked and not."
    return Table(about, shown, tuple(rows), said("app. F, Table 5", claims))


@experiment("convit/table-6", "Content or position masked at test time")
def table_6(s: Scale) -> Table:
    """Accuracy of a trained ConViT with one half of its first layers' attention masked."""
    shown = {
        "content": Column("content masked"),
        "position": Column("position masked"),
        "none": Column("no mask"),
    }
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
    first, half, last = (row.cells["position"] - row.cells["content"] for row in rows)
    left = combined(lambda top1, whole: top1 - whole / 2, cells["position"], cells["none"])
    claims: Claimed = {
        "in the first layers, masking content or position costs the same": (first, 5.0),
        "in half of the gated layers, masking content costs more": half,
        "in all gated layers, masking content costs more": last,
        "… and without position more than half of the accuracy is left": left,
    }
    about = "Top-1 of a trained ConViT whose first gated layers attend by position or content only."
    return Table(about, shown, tuple(rows), said("app. F, Table 6", claims))
