"""ConViT's tables."""

from functools import partial
from typing import Any

from locality.analysis.runs import percent
from locality.analysis.taps import content_off, position_embedding_off, position_off
from locality.runner.runs import Request
from locality.training import replace
from locality_papers.experiment import (
    A_POINT,
    STANDARD,
    Column,
    Experiment,
    experiment,
    largest,
    minus,
    relative_gain,
)
from locality_papers.measures import TOP1, TOP5, count_role, masked_top1
from locality_papers.runs import FAMILIES, Scale, variation
from locality_papers.table import Key, Measure


@experiment("convit/table-1", "ConViT and DeiT of six sizes")
def table_1(t: Experiment, s: Scale) -> None:
    """Parameters, cost and accuracy of each size."""
    t.about = "Accuracy and size of ConViT and DeiT, all trained from scratch."
    t.where = "§3, p. 6"
    t.columns = STANDARD | {"top5": Column("top-5")}
    for size in s.sizes:
        for family in ("DeiT", "ConViT"):
            role = f"{family}-{size}"
            count_role(t, s, role, role)
            for column, measure in (("top1", TOP1), ("top5", TOP5)):
                t.run(role, column, measure, role, seeds=s.seeds_of(size))
        if size != "S" or s.comparable:  # elsewhere the same runs as Table 2's
            convit, deit = f"ConViT-{size}", f"DeiT-{size}"
            t.ask(f"Is {convit} above {deit}?", (convit, "top1"), (deit, "top1"))
    if s.comparable:
        t.ask("Is ConViT-S+ above the larger DeiT-B?", ("ConViT-S+", "top1"), ("DeiT-B", "top1"))


@experiment("convit/table-2", "Sample efficiency: ConViT-S and DeiT-S on parts of the data")
def table_2(t: Experiment, s: Scale) -> None:
    """Accuracy on fractions of the training images, and the relative gain of ConViT."""
    t.where = "§3, p. 6, Table 2"
    t.about = (
        "Trained on a fraction of each class's images, with equal numbers of images shown. "
        "The gap is ConViT's gain in per cent of DeiT's accuracy."
    )
    for title, measure in (("top-1", TOP1), ("top-5", TOP5)):
        deit, convit, gap = (f"{of}/{measure.name}" for of in ("DeiT-S", "ConViT-S", "gap"))
        t.columns[deit] = Column(f"DeiT, {title}")
        t.columns[convit] = Column(f"ConViT, {title}")
        t.columns[gap] = Column(f"gap, {title}", signed=True)
        for part, fraction in zip(map(percent, s.fractions), s.fractions, strict=True):
            for column in (deit, convit):
                role = column.partition("/")[0]
                t.run(part, column, measure, role, fraction=fraction)
            t.derive(part, gap, relative_gain((part, convit), (part, deit)))
    for part in map(percent, s.fractions):
        text = f"With {part} of the images, is ConViT above DeiT?"
        t.ask(text, (part, "ConViT-S/top1"), (part, "DeiT-S/top1"))
    fewest, most = percent(s.fractions[0]), percent(s.fractions[-1])
    full = s.dataset in ("digits", "fashion_mnist")
    task = "with ten classes top-5 is nearly 100%" if full else ""
    text = f"With {fewest} of the images, is ConViT's top-5 above DeiT's?"
    t.ask(text, (fewest, "ConViT-S/top5"), (fewest, "DeiT-S/top5"), task=task)
    if most != fewest:
        text = "Is ConViT's relative gain larger with few images than with many?"
        t.ask(text, (fewest, "gap/top1"), (most, "gap/top1"), unit="% of DeiT's accuracy")


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
def table_3(t: Experiment, s: Scale) -> None:
    """Rows a to g on all data and on 10%."""
    t.about = "Top-1 of ConViT with components frozen or removed; e is DeiT."
    a, b, c, d, e, f, g = INGREDIENTS
    for part, name, fraction in (("full", "all data", 1.0), ("10%", "10% of the data", 0.1)):
        t.columns[part] = Column(name)
        t.columns[f"{part} over e"] = Column(f"over e, {name}", signed=True)
        for label, row in INGREDIENTS.items():
            t.run(label, part, TOP1, **row, fraction=fraction)
            if label != e:
                t.derive(label, f"{part} over e", minus((label, part), (e, part)))
    t.where = "§4, pp. 8–9, Table 3"
    for part, text, first, second in (
        ("full", "With all images, does positional attention alone help (d, e)?", d, e),
        ("full", "With all images, does convolutional initialisation add to that (b, d)?", b, d),
        ("full", "With all images, are frozen convolutions above random attention (f, g)?", f, g),
        ("10%", "With 10%, does positional attention alone help (d, e)?", d, e),
        ("10%", "With 10%, does gating add to that (c, d)?", c, d),
        ("10%", "With 10%, does a convolutional start add to it (b, d)?", b, d),
        ("10%", "With 10%, are frozen convolutions above attention (f, e)?", f, e),
    ):
        t.ask(text, (first, part), (second, part))
    t.ask(
        "With 10%, are both together above either alone (a, b and c)?",
        lambda v: v[a, "10%"] - largest(v[b, "10%"], v[c, "10%"]),
    )
    # "Surprisingly", says the paper.
    text = "With all images, are frozen convolutions less than a point below attention (f, e)?"
    t.ask(text, (f, "full"), (e, "full"), threshold=-A_POINT)


def add_taught(t: Experiment, s: Scale, key: Key, measure: Measure, role: str) -> None:
    """Add a measure of runs distilled from the scale's teacher, for Table 4 and Fig. 10.

    Other scales than `imagenet` train it, twice as long, on training images that no student sees.
    """
    base = s.base("DeiT-S")
    needs: tuple[Request, ...] = ()
    if not s.comparable:
        seen = base.data.train_part[1]
        if seen == 1.0:
            t.missing(*key, "the students use all images; none are left for a teacher")
            return
        length = base.schedule.unit
        settings: dict[str, Any] = {
            "model.name": s.teacher,
            "model.img_size": base.model.img_size,
            "model.patch_size": None,
            "data.root": s.root_of(base.data.dataset),
            "data.train_part": (seen, 1.0),
            f"schedule.{length}": 2 * getattr(base.schedule, length),
        }
        needs = (s.run(replace(base, settings), f"teacher {s.teacher}"),)
    t.run(
        *key,
        measure,
        role,
        objective__teacher=str(needs[0].folder) if needs else s.teacher,
        label=f"taught by {s.teacher}",
        needs=needs,
        keep_weights=True,
    )


@experiment("convit/table-4", "Hard distillation from a convolutional teacher")
def table_4(t: Experiment, s: Scale) -> None:
    """Accuracy with and without a teacher."""
    other = "" if s.comparable else ", which was trained on other images than the students"
    t.about = f"Half of the target is the prediction of the teacher ({s.teacher}){other}."
    t.columns = {
        "none": Column("no distillation"),
        "hard": Column("hard distillation"),
        "gain": Column("gain", signed=True),
    }
    # The paper's comparison of unequal sizes is only meaningful with its models.
    for role in ("DeiT-S", *(("DeiT-B",) if s.comparable else ()), "ConViT-S+"):
        t.run(role, "none", TOP1, role)
        add_taught(t, s, (role, "hard"), TOP1, role)
        t.derive(role, "gain", minus((role, "hard"), (role, "none")))
    t.where, deit, convit = "app. B", ("DeiT-S", "gain"), ("ConViT-S+", "gain")
    t.ask("Does distillation help DeiT?", deit)
    t.ask("Does distillation help ConViT?", convit)
    t.ask("Does DeiT gain more from a teacher than ConViT?", deit, convit)


@experiment("convit/table-5", "Position embedding masked at test time")
def table_5(t: Experiment, s: Scale) -> None:
    """Accuracy of trained models without their absolute position embedding."""
    t.about = "Top-1 of trained models with and without their absolute position embedding."
    if s.masked_size != "Ti":
        t.about += f" The paper's numbers are of its Ti models, ours of size {s.masked_size}."
    t.columns = {
        "masked": Column("masked"),
        "unmasked": Column("no mask"),
        "loss": Column("loss", signed=True),
    }
    measure = masked_top1("position embedding masked", position_embedding_off)
    deit, convit = (f"{family}-{s.masked_size}" for family in FAMILIES[::-1])
    for role, printed in ((deit, "DeiT-Ti"), (convit, "ConViT-Ti")):
        row = role if role == printed else f"{role} (paper: {printed})"
        t.printed[row] = printed
        t.run(row, "masked", measure, role)
        t.run(row, "unmasked", TOP1, role)
        t.derive(row, "loss", minus((row, "unmasked"), (row, "masked")))
    first, second = t.printed
    t.where = "app. F, Table 5"
    text = "Does masking position embeddings cost DeiT more than ConViT?"
    t.ask(text, (first, "loss"), (second, "loss"))
    t.ask("Does masking its position embedding cost ConViT accuracy?", (second, "loss"))


@experiment("convit/table-6", "Content or position masked at test time")
def table_6(t: Experiment, s: Scale) -> None:
    """Accuracy of a trained ConViT with content or position masked in its first layers."""
    t.about = (
        "Top-1 of a trained ConViT whose first gated layers attend by position or content only."
    )
    t.columns = {
        "content": Column("content masked"),
        "position": Column("position masked"),
        "none": Column("no mask"),
    }
    role, masks = f"ConViT-{s.masked_size}", {"content": content_off, "position": position_off}
    for layers, printed in zip(s.masked_layers, ("3", "5", "10"), strict=True):
        row = f"first {layers} layers (paper: {printed})"
        t.printed[row] = printed
        for part, mask in masks.items():
            name = f"{part} masked in the first {layers} layers"
            t.run(row, part, masked_top1(name, partial(mask, layers=layers)), role)
        t.run(row, "none", TOP1, role)
    first, *_, every = t.printed
    task = _CONTENT_UNUSED if s.dataset == "digits" else ""
    t.where = "app. F, Table 6"
    for part in masks:
        text = f"Does masking {part} in the first gated layers cost accuracy?"
        t.ask(text, (first, "none"), (first, part), task=task)
    text = "In the first gated layers, does masking position cost no more than masking content?"
    t.ask(text, (first, "position"), (first, "content"), task=task)
    text = "Does masking content cost more than masking position?"
    t.ask(text, (every, "position"), (every, "content"), task=task)
    text = "Does masking content in all gated layers leave less than in the first?"
    t.ask(text, (first, "content"), (every, "content"), task=task)
    t.ask(
        "Without position in any gated layer, does much of the accuracy remain (over half)?",
        lambda v: v[every, "position"] - v[every, "none"] / 2,
    )


_CONTENT_UNUSED = (
    "of images of 8×8 pixels, in 4×4 tokens, three gated layers of four hardly use content (values "
    "and the last layer carry it); see beyond/shuffled"
)
