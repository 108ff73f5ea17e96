"""ConViT's tables: which runs each needs, what is measured on them, what the paper concludes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from locality.analysis.masks import content_off, position_embedding_off, position_off
from locality.papers.measures import (
    INFERENCE_SPEED,
    TOP1,
    TOP5,
    Measure,
    Quantity,
    masked_top1,
    relative_gain,
)
from locality.papers.scales import Scale
from locality.papers.specs import Claim, Column, Row, Table, columns, experiment

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
    rows, claims = [], []
    for size in s.sizes:
        deit, convit = (
            Row(
                role,
                {
                    **s.counted(role),
                    "speed": s.measured(INFERENCE_SPEED, role, seeds=s.seeds[:1]),
                    "top1": s.measured(TOP1, role, seeds=s.seeds_of(size)),
                    "top5": s.measured(TOP5, role, seeds=s.seeds_of(size)),
                },
            )
            for role in (f"DeiT-{size}", f"ConViT-{size}")
        )
        rows += [deit, convit]
        above = convit.cells["top1"] - deit.cells["top1"]
        claims.append(Claim(f"{convit.label} is above {deit.label}", above))
    about = "Accuracy, size and speed of ConViT and DeiT, all trained from scratch."
    shown = columns("parameters", "flops", "speed", "top1", "top5")
    return Table(about, shown, tuple(rows), tuple(claims))


@experiment("convit/table-2", "Sample efficiency: ConViT-S and DeiT-S on parts of the data")
def table_2(s: Scale) -> Table:
    """Accuracy on fractions of the training images, and the relative gain of ConViT."""
    shown, rows, claims = {}, [], []
    for fraction in s.fractions:
        cells = {}
        for measure, metric in ((TOP1, "top-1"), (TOP5, "top-5")):
            deit, convit = (
                s.measured(measure, role, fraction=fraction) for role in ("DeiT-S", "ConViT-S")
            )
            cells[f"DeiT-S/{measure.name}"] = deit
            cells[f"ConViT-S/{measure.name}"] = convit
            cells[f"gap/{measure.name}"] = relative_gain(convit, deit)
            shown[f"DeiT-S/{measure.name}"] = Column(f"DeiT, {metric}")
            shown[f"ConViT-S/{measure.name}"] = Column(f"ConViT, {metric}")
            shown[f"gap/{measure.name}"] = Column(f"gap, {metric}", signed=True)
        rows.append(Row(percent(fraction), cells))
        above = cells["ConViT-S/top1"] - cells["DeiT-S/top1"]
        with_part = f"with {percent(fraction)} of the images"
        claims.append(Claim(f"{with_part}, ConViT is above DeiT", above))
    least, all_data = rows[0], rows[-1]
    claims.append(
        Claim(
            f"the relative gain is larger with {least.label} of the images than with "
            f"{all_data.label}",
            least.cells["gap/top1"] - all_data.cells["gap/top1"],
        )
    )
    about = (
        "A fraction of each class's training images, the number of images shown unchanged. The gap "
        "is ConViT's gain in per cent of DeiT's accuracy."
    )
    return Table(about, shown, tuple(rows), tuple(claims))


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
    claims = (
        Claim("all data: GPSA alone (d) is above DeiT (e)", full["d"] - full["e"]),
        Claim("all data: the whole ConViT (a) is above DeiT (e)", full["a"] - full["e"]),
        Claim("10%: GPSA alone (d) is above DeiT (e)", tenth["d"] - tenth["e"]),
        Claim("10%: gating helps (c above d)", tenth["c"] - tenth["d"]),
        Claim("10%: convolutional initialisation helps (b above d)", tenth["b"] - tenth["d"]),
        Claim(
            "10%: both together help more than initialisation alone (a above b)",
            tenth["a"] - tenth["b"],
        ),
        Claim(
            "10%: both together help more than gating alone (a above c)", tenth["a"] - tenth["c"]
        ),
        Claim("10%: ConViT (a) is above DeiT (e)", tenth["a"] - tenth["e"]),
        Claim("10%: DeiT (e) is above GPSA frozen at random (g)", tenth["e"] - tenth["g"]),
        Claim("10%: frozen random convolutions (f) are above DeiT (e)", tenth["f"] - tenth["e"]),
        Claim(
            "all data: frozen random convolutions (f) almost equal DeiT (e)",
            full["f"] - full["e"],
            margin=1.0,
        ),
        Claim("all data: DeiT (e) is above GPSA frozen at random (g)", full["e"] - full["g"]),
    )
    about = "Top-1 of ConViT with parts of it frozen or removed; e is DeiT."
    return Table(about, shown, tuple(rows), claims)


def distilled(s: Scale) -> dict[str, Any]:
    """The choices of runs that learn from the scale's teacher, for Table 4 and Fig. 10."""
    runs = s.teacher_runs()
    return {
        "objective__teacher": str(runs[0].folder) if runs else s.teacher,
        "label": f"taught by {s.teacher}",
        "needs": runs,
        "keep_weights": True,
    }


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
    rows = []
    for role in roles:
        plain, taught = s.measured(TOP1, role), s.measured(TOP1, role, **distilled(s))
        rows.append(Row(role, {"none": plain, "hard": taught, "gain": taught - plain}))
    deit, convit = rows[0].cells["gain"], rows[-1].cells["gain"]
    claims = (
        Claim("distillation helps DeiT", deit),
        Claim("distillation helps ConViT", convit),
        Claim("DeiT gains more than ConViT", deit - convit),
    )
    about = f"Half of the target is the class that the teacher ({s.teacher}) finds most likely."
    return Table(about, shown, tuple(rows), claims)


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
    more = rows[0].cells["loss"] - rows[1].cells["loss"]
    about = "Top-1 of trained models with the absolute position embedding masked and not."
    return Table(about, shown, tuple(rows), (Claim("DeiT loses more than ConViT", more),))


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
    first, last = (row.cells["position"] - row.cells["content"] for row in (rows[0], rows[-1]))
    claims = (
        Claim("in all gated layers, masking content costs more than masking position", last),
        Claim("in the first layers, both cost about the same", first, margin=5.0),
    )
    about = "Top-1 of a trained ConViT whose first gated layers attend by position or content only."
    return Table(about, shown, tuple(rows), claims)
