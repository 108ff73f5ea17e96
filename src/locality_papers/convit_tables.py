"""ConViT's tables of accuracy: their runs and measures."""

from __future__ import annotations

from functools import partial
from typing import Any

from locality.analysis.taps import content_off, position_embedding_off, position_off
from locality.figures.charts import percent
from locality.models import variant
from locality.runner.runs import Run
from locality.training import replace
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
from locality_papers.scales import FAMILIES, FRACTIONS, Scale, variation
from locality_papers.specs import Column, Table, as_printed, experiment, standard_columns


@experiment("convit/table-1", "ConViT and DeiT of six sizes")
def table_1(s: Scale) -> Table:
    """Parameters, cost, speed and accuracy of each size."""
    sizes = {f"{f}-{size}": s.seeds_of(size) for size in s.sizes for f in ("DeiT", "ConViT")}
    measures = {"speed": INFERENCE_SPEED, "top1": TOP1, "top5": TOP5}
    found = s.cells(
        {role: {"role": role, "seeds": seeds} for role, seeds in sizes.items()},
        {metric: {"measure": measure} for metric, measure in measures.items()},
    )
    cells = as_printed("convit/table-1", {role: s.counted(role) | of for role, of in found.items()})
    top1 = {role: of["top1"] for role, of in cells.items()}
    asked = {
        f"Is ConViT-{size} above DeiT-{size}?": top1[f"ConViT-{size}"] - top1[f"DeiT-{size}"]
        for size in s.sizes
    }
    larger = absent("the models of this scale do not have the paper's relative sizes")
    if s.comparable:
        larger = top1["ConViT-S+"] - top1["DeiT-B"]
    return Table(
        cells,
        {
            **standard_columns("parameters", "flops"),
            "speed": Column("images/s, inference", "", 0),
            **standard_columns("top1"),
            "top5": Column("top-5"),
        },
        about="Accuracy, size and speed of ConViT and DeiT, all trained from scratch.",
        questions={"§3, p. 6": asked | {"Is ConViT-S+ above the larger DeiT-B?": larger}},
    )


@experiment("convit/table-2", "Sample efficiency: ConViT-S and DeiT-S on parts of the data")
def table_2(s: Scale) -> Table:
    """Accuracy on fractions of the training images, and the relative gain of ConViT."""
    fractions = {percent(fraction): {"fraction": fraction} for fraction in s.fractions}
    measures = {
        f"{role}/{m.name}": {"role": role, "measure": m}
        for m in (TOP1, TOP5)
        for role in ("DeiT-S", "ConViT-S")
    }
    cells = as_printed("convit/table-2", s.cells(fractions, measures))
    for of in cells.values():
        for m in (TOP1, TOP5):
            pair = of[f"ConViT-S/{m.name}"], of[f"DeiT-S/{m.name}"]
            of[f"gap/{m.name}"] = relative_gain(*pair)
    asked = {
        f"With {part} of the images, is ConViT above DeiT?": of["ConViT-S/top1"] - of["DeiT-S/top1"]
        for part, of in cells.items()
    }
    fewest, most = (cells.get(percent(fraction)) for fraction in (FRACTIONS[0], FRACTIONS[-1]))
    if fewest and most:
        asked["Is ConViT's relative gain larger with few images than with many?"] = (
            fewest["gap/top1"] - most["gap/top1"]
        )
    return Table(
        cells,
        {
            f"{of}/{m.name}": Column(f"{name}, {title}", signed=of == "gap")
            for m, title in ((TOP1, "top-1"), (TOP5, "top-5"))
            for of, name in (("DeiT-S", "DeiT"), ("ConViT-S", "ConViT"), ("gap", "gap"))
        },
        about="Trained on a fraction of each class's images, with equal numbers of images shown. "
        "The gap is ConViT's gain in per cent of DeiT's accuracy.",
        questions={"§3, p. 6, Table 2": asked},
    )


_UNGATED = {"freeze_gating": True, "gating_init": 0.0}
INGREDIENTS: dict[str, dict[str, Any]] = {
    "a: ConViT": variation("ConViT-S+"),
    "b: gate frozen at λ = 0": variation("ConViT-S+", **_UNGATED),
    "c: no convolutional init": variation("ConViT-S+", conv_init=False),
    "d: neither": variation("ConViT-S+", **_UNGATED, conv_init=False),
    "e: DeiT": variation("DeiT-S+"),
    "f: GPSA frozen at conv. init": variation("ConViT-S+", **_UNGATED, freeze_gpsa=True),
    "g: GPSA frozen, random init": variation(
        "ConViT-S+", **_UNGATED, freeze_gpsa=True, conv_init=False
    ),
}
"""The rows of Table 3. In f and g the paper also crosses out "Train gating", which means λ frozen
at 0 (footnote 4)."""


@experiment("convit/table-3", "Ablation of gating, convolutional initialisation and GPSA")
def table_3(s: Scale) -> Table:
    """Rows a to g on all data and on 10%."""
    parts = {"full": 1.0, "10%": 0.1}
    columns = {part: {"measure": TOP1, "fraction": fraction} for part, fraction in parts.items()}
    cells = as_printed("convit/table-3", s.cells(INGREDIENTS, columns))
    full, tenth = ({label[0]: of[part] for label, of in cells.items()} for part in parts)
    for label, of in cells.items():
        if label != "e: DeiT":
            of |= {f"{part} over e": of[part] - cells["e: DeiT"][part] for part in parts}
    asked = {
        "With all images, does positional attention alone help (d, e)?": full["d"] - full["e"],
        "With all images, does convolutional initialisation add to that (b, d)?": full["b"]
        - full["d"],
        "With all images, are frozen convolutions above frozen random attention (f, g)?": full["f"]
        - full["g"],
        "With 10%, does positional attention alone help (d, e)?": tenth["d"] - tenth["e"],
        "With 10%, does gating add to that (c, d)?": tenth["c"] - tenth["d"],
        "With 10%, does a convolutional start add to it (b, d)?": tenth["b"] - tenth["d"],
        "With 10%, are both together above either alone (a, b and c)?": combined(
            lambda a, b, c: a - max(b, c), tenth["a"], tenth["b"], tenth["c"]
        ),
        "With 10%, are frozen convolutions above attention (f, e)?": tenth["f"] - tenth["e"],
    }
    return Table(
        cells,
        {
            "full": Column("all data"),
            "full over e": Column("over e", signed=True),
            "10%": Column("10% of the data"),
            "10% over e": Column("over e, 10%", signed=True),
        },
        about="Top-1 of ConViT with components frozen or removed; e is DeiT.",
        questions={"§4, pp. 8–9, Table 3": asked},
    )


def with_teacher(s: Scale, measure: Measure, role: str) -> Quantity:
    """A measure of runs distilled from the scale's teacher, for Table 4 and Fig. 10.

    The teacher is trained twice as long, on training images that the students do not see.
    """
    base = s.base("DeiT-S")
    needs: tuple[Run, ...] = ()
    if not s.comparable:
        seen = base.data.train_part[1]
        if seen == 1.0:
            return absent("the students use all training images; none are left for a teacher")
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
    # The paper's comparison of unequal sizes is only meaningful with its models.
    roles = ("DeiT-S", *(("DeiT-B",) if s.comparable else ()), "ConViT-S+")
    cells = as_printed(
        "convit/table-4",
        {
            role: {"none": s.measured(TOP1, role), "hard": with_teacher(s, TOP1, role)}
            for role in roles
        },
    )
    for of in cells.values():
        of["gain"] = of["hard"] - of["none"]
    deit, convit = cells["DeiT-S"]["gain"], cells["ConViT-S+"]["gain"]
    asked = {
        "Does distillation help DeiT?": deit,
        "Does distillation help ConViT?": convit,
        "Does DeiT gain more from a teacher than ConViT?": deit - convit,
    }
    return Table(
        cells,
        {
            "none": Column("no distillation"),
            "hard": Column("hard distillation"),
            "gain": Column("gain", signed=True),
        },
        about=f"Half of the target is the prediction of the teacher ({s.teacher}), which was "
        f"trained on other images than the students.",
        questions={"app. B": asked},
    )


@experiment("convit/table-5", "Position embedding masked at test time")
def table_5(s: Scale) -> Table:
    """Accuracy of trained models without their absolute position embedding."""
    masked = masked_top1("position embedding masked", position_embedding_off)
    rows = {f"{family}-{s.masked_size}": f"{family}-Ti" for family in FAMILIES[::-1]}
    found = s.cells(
        {role: {"role": role} for role in rows},
        {"masked": {"measure": masked}, "unmasked": {"measure": TOP1}},
    )
    cells = as_printed("convit/table-5", found, rows)
    for of in cells.values():
        of["loss"] = of["unmasked"] - of["masked"]
    deit, convit = (of["loss"] for of in cells.values())
    asked = {"Without its position embedding, does DeiT lose more than ConViT?": deit - convit}
    return Table(
        cells,
        {
            "masked": Column("masked"),
            "unmasked": Column("no mask"),
            "loss": Column("loss", signed=True),
        },
        rows,
        about="Top-1 of trained models with and without their absolute position embedding.",
        questions={"app. F, Table 5": asked},
    )


@experiment("convit/table-6", "Content or position masked at test time")
def table_6(s: Scale) -> Table:
    """Accuracy of a trained ConViT with content or position masked in its first layers."""
    role = f"ConViT-{s.masked_size}"

    def without(part: str, layers: int) -> Quantity:
        mask = partial(content_off if part == "content" else position_off, layers=layers)
        return s.measured(masked_top1(f"{part} masked in the first {layers} layers", mask), role)

    rows, found = {}, {}
    for layers, printed in zip(s.masked_layers, ("3", "5", "10"), strict=True):
        rows[label := f"first {layers} layers (paper: {printed})"] = printed
        found[label] = {part: without(part, layers) for part in ("content", "position")}
        found[label]["none"] = s.measured(TOP1, role)
    cells = as_printed("convit/table-6", found, rows)
    *_, every = cells.values()
    asked = {
        "Does masking content cost more than masking position?": every["position"]
        - every["content"]
    }
    return Table(
        cells,
        {
            "content": Column("content masked"),
            "position": Column("position masked"),
            "none": Column("no mask"),
        },
        rows,
        about="Top-1 of a trained ConViT whose first gated layers attend by position or content "
        "only.",
        questions={"app. F, Table 6": asked},
    )
