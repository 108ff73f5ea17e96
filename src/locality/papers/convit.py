"""ConViT's tables: which runs each needs, what is measured on them, what the paper concludes."""

from __future__ import annotations

from typing import Any

from locality.analysis.masks import content_off, position_embedding_off, position_off
from locality.papers import published
from locality.papers.measures import TOP1, TOP5, inference_speed, masked_top1
from locality.papers.published import Published
from locality.papers.quantities import Measure, Quantity, difference, relative_gain
from locality.papers.scales import Scale
from locality.papers.sizes import model_macs, model_parameters
from locality.papers.specs import Cell, Claim, Column, Row, Table, experiment

SIZES = ("Ti", "Ti+", "S", "S+", "B", "B+")

ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "a": ("ConViT", {}),
    "b": ("gate frozen at λ = 0", {"freeze_gating": True, "gating_init": 0.0}),
    "c": ("no convolutional init", {"conv_init": False}),
    "d": ("neither", {"freeze_gating": True, "gating_init": 0.0, "conv_init": False}),
    "e": ("DeiT", {}),
    "f": ("GPSA frozen at conv. init", {"freeze_gpsa": True}),
    "g": ("GPSA frozen, random init", {"freeze_gpsa": True, "conv_init": False}),
}
"""The rows of Table 3: what they are and what they change."""


def ablation(s: Scale, row: str, measure: Measure = TOP1, **choices: Any) -> Quantity:
    """A measure, top-1 unless given, of a row of Table 3."""
    role = "DeiT-S+" if row == "e" else "ConViT-S+"
    changes = {f"model__overrides__{name}": value for name, value in ABLATIONS[row][1].items()}
    return s.measured(measure, role, **changes, **choices)


def sizes_of(s: Scale) -> list[str]:
    """The sizes of Table 1 that are models of their own at a scale."""
    there = [size for size in SIZES if f"ConViT-{size}" in s.models]
    return [
        size
        for size in there
        if not (
            size.endswith("+") and s.models.get(f"ConViT-{size[:-1]}") == s.models[f"ConViT-{size}"]
        )
    ]


def seeds_of(s: Scale, size: str) -> tuple[int, ...]:
    """The seeds of a size in Table 1: all where Table 2 needs them too."""
    return s.seeds if size.startswith("S") else s.few_seeds


def _gap(table: str, first: str, second: str, metric: str) -> Published:
    """The difference of two published numbers, as a published number."""
    one, other = (published.value("convit", table, row, metric) for row in (first, second))
    return Published(
        "convit", table, f"{first} over {second}", metric, round(one.value - other.value, 2), "%",
        one.protocol, "computed from the table",
    )  # fmt: skip


@experiment("convit/table-1", "ConViT and DeiT of six sizes")
def table_1(s: Scale) -> Table:
    """Parameters, cost, speed and accuracy of every size."""
    columns = (
        Column("parameters (M)", "M", 2),
        Column("GMACs", "G", 3),
        Column("images/s, inference", "", 0),
        Column("top-1"),
        Column("top-5"),
    )
    rows, claims = [], []
    for size in sizes_of(s):
        for family in ("DeiT", "ConViT"):
            role = f"{family}-{size}"
            printed = published.rows("convit", "table-1")[role]
            chosen: dict[str, Any] = {"seeds": seeds_of(s, size)}
            quantities = (
                model_parameters(s, role),
                model_macs(s, role),
                s.measured(inference_speed(), role, seeds=s.seeds[:1]),
                s.measured(TOP1, role, **chosen),
                s.measured(TOP5, role, **chosen),
            )
            metrics = ("parameters", "flops", "speed", "top1", "top5")
            rows.append(
                Row(
                    role,
                    tuple(
                        Cell(quantity, printed.get(metric))
                        for quantity, metric in zip(quantities, metrics, strict=True)
                    ),
                )
            )
        twins = [
            s.measured(TOP1, f"{family}-{size}", seeds=seeds_of(s, size))
            for family in ("ConViT", "DeiT")
        ]
        claims.append(Claim(f"ConViT-{size} is above DeiT-{size}", difference(*twins)))
    about = "Accuracy, size and speed of ConViT and DeiT, all trained from scratch."
    return Table(about, columns, tuple(rows), tuple(claims))


@experiment("convit/table-2", "Sample efficiency: ConViT-S and DeiT-S on parts of the data")
def table_2(s: Scale) -> Table:
    """Accuracy on fractions of the training images, and the relative gain of ConViT."""
    columns = tuple(
        Column(f"{what}, {metric}", signed=what == "gap")
        for metric in ("top-1", "top-5")
        for what in ("DeiT", "ConViT", "gap")
    )
    rows, gains, differences = [], {}, {}
    for fraction in s.fractions:
        percent = f"{100 * fraction:g}%"
        cells = []
        for measure in (TOP1, TOP5):
            deit = s.measured(measure, "DeiT-S", fraction=fraction)
            convit = s.measured(measure, "ConViT-S", fraction=fraction)
            gain = relative_gain(convit, deit)
            for row, quantity in (("DeiT-S ", deit), ("ConViT-S ", convit), ("gap ", gain)):
                printed = published.value("convit", "table-2", row + percent, measure.name)
                cells.append(Cell(quantity, printed))
            if measure is TOP1:
                gains[percent], differences[percent] = gain, difference(convit, deit)
        rows.append(Row(percent, tuple(cells)))
    claims = [
        Claim(f"with {percent} of the images, ConViT is above DeiT", found)
        for percent, found in differences.items()
    ]
    smallest, largest = (f"{100 * fraction:g}%" for fraction in (s.fractions[0], s.fractions[-1]))
    claims.append(
        Claim(
            f"the relative gain is larger with {smallest} of the images than with {largest}",
            difference(gains[smallest], gains[largest]),
            unit="% of DeiT's accuracy",
        )
    )
    about = (
        "A fraction of each class's training images, the number of images shown unchanged. The gap "
        "is ConViT's gain in per cent of DeiT's accuracy."
    )
    return Table(about, columns, tuple(rows), tuple(claims))


@experiment("convit/table-3", "Ablation of gating, convolutional initialisation and GPSA")
def table_3(s: Scale) -> Table:
    """Rows a to g on all data and on 10% of it."""
    columns = (
        Column("all data"),
        Column("over e", signed=True),
        Column("10% of the data"),
        Column("over e, 10%", signed=True),
    )
    parts = {"full": 1.0, "10%": 0.1}
    top1 = {
        (row, part): ablation(s, row, fraction=fraction)
        for row in ABLATIONS
        for part, fraction in parts.items()
    }
    rows = []
    for row, (label, _) in ABLATIONS.items():
        cells: list[Cell | None] = []
        for part in parts:
            cells.append(Cell(top1[row, part], published.value("convit", "table-3", row, part)))
            over = difference(top1[row, part], top1["e", part])
            cells.append(None if row == "e" else Cell(over, _gap("table-3", row, "e", part)))
        rows.append(Row(f"{row}: {label}", tuple(cells)))

    def above(first: str, second: str, part: str) -> Quantity:
        return difference(top1[first, part], top1[second, part])

    claims = (
        Claim("all data: GPSA alone (d) is above DeiT (e)", above("d", "e", "full")),
        Claim("all data: the whole ConViT (a) is above DeiT (e)", above("a", "e", "full")),
        Claim("10%: GPSA alone (d) is above DeiT (e)", above("d", "e", "10%")),
        Claim("10%: gating helps (c above d)", above("c", "d", "10%")),
        Claim("10%: convolutional initialisation helps (b above d)", above("b", "d", "10%")),
        Claim("10%: both together help more than initialisation alone (a above b)",
              above("a", "b", "10%")),
        Claim("10%: both together help more than gating alone (a above c)",
              above("a", "c", "10%")),
        Claim("10%: ConViT (a) is above DeiT (e)", above("a", "e", "10%")),
        Claim("10%: DeiT (e) is above GPSA frozen at random (g)", above("e", "g", "10%")),
        Claim("10%: frozen random convolutions (f) are above DeiT (e)", above("f", "e", "10%")),
        Claim("all data: frozen random convolutions (f) almost equal DeiT (e)",
              above("f", "e", "full"), "equal", 1.0),
        Claim("all data: DeiT (e) is above GPSA frozen at random (g)", above("e", "g", "full")),
    )  # fmt: skip
    about = "Top-1 of ConViT with parts of it frozen or removed; e is DeiT."
    return Table(about, columns, tuple(rows), claims)


DISTILLED = ("DeiT-S", "DeiT-B", "ConViT-S+")


def distilled(s: Scale) -> dict[str, Any]:
    """The choices of runs that learn from the scale's teacher, for Table 4 and Fig. 10."""
    changes: dict[str, Any] = {"objective__teacher": s.teacher_source(), "seeds": s.seeds}
    changes["label"] = f"taught by {s.teacher}"
    return changes | {"needs": s.teacher_runs(), "keep_weights": True}


@experiment("convit/table-4", "Hard distillation from a convolutional teacher")
def table_4(s: Scale) -> Table:
    """Accuracy with and without a teacher."""
    columns = (Column("no distillation"), Column("hard distillation"), Column("gain", signed=True))
    rows, gains = [], {}
    for role in DISTILLED:
        if not s.comparable and role == "DeiT-B":
            continue  # elsewhere the paper's comparison of unequal sizes says nothing
        plain = s.measured(TOP1, role)
        taught = s.measured(TOP1, role, **distilled(s))
        gains[role] = difference(taught, plain)
        none, hard = (published.value("convit", "table-4", role, part) for part in ("none", "hard"))
        gain = Published("convit", "table-4", role, "gain", round(hard.value - none.value, 2), "%",
                         hard.protocol, "computed from the table")  # fmt: skip
        rows.append(Row(role, (Cell(plain, none), Cell(taught, hard), Cell(gains[role], gain))))
    claims = (
        Claim("distillation helps DeiT", gains["DeiT-S"]),
        Claim("distillation helps ConViT", gains["ConViT-S+"]),
        Claim("DeiT gains more than ConViT", difference(gains["DeiT-S"], gains["ConViT-S+"])),
    )
    about = f"Half of the target is the class that the teacher ({s.teacher}) finds most likely."
    return Table(about, columns, tuple(rows), claims)


@experiment("convit/table-5", "Position embedding masked at test time")
def table_5(s: Scale) -> Table:
    """Accuracy of trained models without their absolute position embedding."""
    columns = (Column("masked"), Column("no mask"), Column("loss", signed=True))
    measure = masked_top1("position embedding masked", position_embedding_off)
    rows, losses = [], []
    for family in ("DeiT", "ConViT"):
        role = f"{family}-{s.masked_size}"
        masked, unmasked = s.measured(measure, role), s.measured(TOP1, role)
        losses.append(difference(unmasked, masked))
        printed = [published.value("convit", "table-5", f"{family}-Ti", part)
                   for part in ("masked", "unmasked")]  # fmt: skip
        lost = Published("convit", "table-5", f"{family}-Ti", "loss",
                         round(printed[1].value - printed[0].value, 2), "%", printed[0].protocol,
                         "computed from the table")  # fmt: skip
        cells = (Cell(masked, printed[0]), Cell(unmasked, printed[1]), Cell(losses[-1], lost))
        rows.append(Row(role, cells))
    claims = (Claim("DeiT loses more than ConViT", difference(*losses)),)
    about = "Top-1 of trained models with the absolute position embedding masked and not."
    return Table(about, columns, tuple(rows), claims)


@experiment("convit/table-6", "Content or position masked at test time")
def table_6(s: Scale) -> Table:
    """Accuracy of a trained ConViT with one half of its first layers' attention masked."""
    columns = (Column("content masked"), Column("position masked"), Column("no mask"))
    role = f"ConViT-{s.masked_size}"
    rows, content, position = [], [], []
    for layers, printed in zip(s.masked_layers, ("3", "5", "10"), strict=True):

        def without(mask: Any, layers: int = layers) -> Any:
            return lambda model: mask(model, layers)

        what = f"masked in the first {layers} layers"
        content.append(s.measured(masked_top1(f"content {what}", without(content_off)), role))
        position.append(s.measured(masked_top1(f"position {what}", without(position_off)), role))
        cells = zip((content[-1], position[-1], s.measured(TOP1, role)),
                    ("content", "position", "none"), strict=True)  # fmt: skip
        rows.append(
            Row(
                f"first {layers} layers (paper: {printed})",
                tuple(
                    Cell(quantity, published.value("convit", "table-6", printed, part))
                    for quantity, part in cells
                ),
            )
        )
    claims = (
        Claim(
            "in all gated layers, masking content costs more than masking position",
            difference(position[-1], content[-1]),
        ),
        Claim(
            "in the first layers, both cost about the same",
            difference(position[0], content[0]),
            "equal",
            5.0,
        ),
    )
    about = "Top-1 of a trained ConViT whose first gated layers attend by position or content only."
    return Table(about, columns, tuple(rows), claims)
