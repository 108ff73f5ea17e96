"""CvT's tables and its Figure 1."""

from __future__ import annotations

from typing import Any

from locality.papers import published
from locality.papers.measures import PARAMETERS, TOP1
from locality.papers.peers import peer_top1, top1_on
from locality.papers.quantities import (
    Absent,
    Combined,
    Computed,
    Measure,
    Quantity,
    difference,
)
from locality.papers.scales import Scale
from locality.papers.sizes import built_macs, built_parameters, model_macs, model_parameters
from locality.papers.specs import (
    Cell,
    Claim,
    Column,
    Figure,
    Panel,
    Row,
    Series,
    Table,
    experiment,
)
from locality.papers.transfer import TARGETS, fine_tuned, transferred


@experiment("cvt/table-2", "The architectures: parameters and cost")
def table_2(s: Scale) -> Table:
    """Counted on the models as built; needs no run and no data."""
    columns = (Column("parameters (M)", "M", 2), Column("GMACs", "G", 2))
    rows = []
    for row, printed in published.rows("cvt", "table-2").items():
        name = published.MODELS[row]
        cells = (
            Cell(built_parameters(name), printed["parameters"]),
            Cell(built_macs(name), printed["flops"]),
        )
        rows.append(Row(row, cells))
    return Table("The paper's own models at 224 pixels, whatever the scale.", columns, tuple(rows))


OURS = ("DeiT-S", "DeiT-B", "CvT-13", "CvT-21", "CvT-13-NAS")


@experiment("cvt/table-3", "Accuracy on ImageNet, ReaL and V2, beside other models")
def table_3(s: Scale) -> Table:
    """Our runs, fine-tuned ones, and other people's models with their public weights."""
    columns = (
        Column("parameters (M)", "M", 2),
        Column("GMACs", "G", 3),
        Column("top-1"),
        Column("ReaL"),
        Column("V2"),
    )
    metrics = ("parameters", "flops", "top1", "real", "v2")
    rows = []
    for row, printed in published.rows("cvt", "table-3").items():
        cells = zip(_table_3_row(s, row), metrics, strict=True)
        rows.append(Row(row, tuple(Cell(found, printed.get(metric)) for found, metric in cells)))
    claims: tuple[Claim, ...] = ()
    if "CvT-13" in s.models:
        above = difference(s.measured(TOP1, "CvT-13"), s.measured(TOP1, "DeiT-S"))
        claims = (Claim("CvT-13 is above DeiT-S", above),)
    return Table(
        "Trained from scratch unless the row says otherwise.", columns, tuple(rows), claims
    )


def _table_3_row(s: Scale, row: str) -> tuple[Quantity, ...]:
    if row in OURS:
        seeds = s.few_seeds if row == "DeiT-B" else s.seeds
        judged = [s.measured(measure, row, seeds=seeds) for measure in (TOP1, *_yardsticks(s))]
        return model_parameters(s, row), model_macs(s, row), *judged
    if row.startswith("CvT"):
        runs = fine_tuned(s, row)
        judged = [runs(measure) for measure in (TOP1, *_yardsticks(s))]
        name = published.MODELS[row.partition("↑")[0]]
        return built_parameters(name), built_macs(name, 384), *judged
    if not s.comparable:
        return (
            Absent(f"other people's model, trained on ImageNet; scale '{s.name}' has none"),
        ) * 5
    top1 = [peer_top1(s, row, each) for each in ("imagenet", "imagenet_real", "imagenet_v2")]
    return Absent("not ours to count"), Absent("not ours to count"), *top1


def _yardsticks(s: Scale) -> list[Measure]:
    return [top1_on(s, dataset) for dataset in ("imagenet_real", "imagenet_v2")]


@experiment("cvt/table-4", "Transfer to CIFAR-10 and -100, Pets and Flowers-102")
def table_4(s: Scale) -> Table:
    """Pre-trained on ImageNet-22k, fine-tuned at 384 pixels."""
    rows = []
    for row, printed in published.rows("cvt", "table-4").items():
        found: list[Quantity] = [
            transferred(s, row, target)
            if row in s.models
            else Absent(
                "pre-trained by others on data of their own, and never published fine-tuned"
            )
            for target in TARGETS
        ]
        cells = zip(found, TARGETS, strict=True)
        rows.append(Row(row, tuple(Cell(quantity, printed[target]) for quantity, target in cells)))
    columns = tuple(Column(target, digits=2) for target in TARGETS)
    return Table("Top-1 after fine-tuning on each target.", columns, tuple(rows))


def _cvt(s: Scale, **fields: Any) -> dict[str, Quantity]:
    """Parameters, MACs and accuracy of CvT-13 with some fields changed."""
    changes = {f"model__overrides__{name}": value for name, value in fields.items()}
    return {
        "parameters": model_parameters(s, "CvT-13", **changes),
        "flops": model_macs(s, "CvT-13", **changes),
        "top1": s.measured(TOP1, "CvT-13", **changes),
    }


def _table(
    about: str, place: str, rows: dict[str, dict[str, Quantity]], columns: dict[str, Column],
    claims: tuple[Claim, ...],
) -> Table:  # fmt: skip
    """A table of accuracies by row letter; the letter is what stands before the colon."""
    printed = published.rows("cvt", place)
    return Table(
        about,
        tuple(columns.values()),
        tuple(
            Row(
                label,
                tuple(
                    Cell(found[metric], printed[label.partition(":")[0]].get(metric))
                    for metric in columns
                ),
            )
            for label, found in rows.items()
        ),
        claims,
    )


_PARAMETERS = Column("parameters (M)", "M", 2)
_TOP1 = Column("top-1")


@experiment("cvt/table-5", "Position embeddings")
def table_5(s: Scale) -> Table:
    """CvT does without; DeiT does not."""
    without = {"model__overrides__use_pos_embed": False}
    deit = {
        "parameters": model_parameters(s, "DeiT-S"), "top1": s.measured(TOP1, "DeiT-S"),
    }  # fmt: skip
    blind = {
        "parameters": model_parameters(s, "DeiT-S", **without),
        "top1": s.measured(TOP1, "DeiT-S", **without),
    }
    rows = {
        "a: DeiT-S": deit,
        "b: DeiT-S, none": blind,
        "c: CvT-13, every stage": _cvt(s, position="every"),
        "d: CvT-13, first stage": _cvt(s, position="first"),
        "e: CvT-13, last stage": _cvt(s, position="last"),
        "f: CvT-13, none": _cvt(s),
    }
    top1 = {label[0]: found["top1"] for label, found in rows.items()}
    claims = (
        Claim("DeiT loses accuracy without its position embedding",
              difference(top1["a"], top1["b"])),
        Claim("CvT without position embeddings equals CvT with one in every stage",
              difference(top1["f"], top1["c"]), "equal", 1.0),
        Claim("DeiT needs its position embedding more than CvT",
              difference(difference(top1["a"], top1["b"]), difference(top1["c"], top1["f"]))),
    )  # fmt: skip
    about = "Position embeddings present or not while training."
    return _table(about, "table-5", rows, {"parameters": _PARAMETERS, "top1": _TOP1}, claims)


@experiment("cvt/table-6", "Convolutional token embedding")
def table_6(s: Scale) -> Table:
    """Patches or convolutions, with or without position embeddings."""
    rows = {
        "a: patches": _cvt(s, embedding="patch"),
        "b: patches, position embedding": _cvt(s, embedding="patch", position="every"),
        "c: convolutions, position embedding": _cvt(s, position="every"),
        "d: convolutions": _cvt(s),
    }
    top1 = {label[0]: found["top1"] for label, found in rows.items()}
    claims = (
        Claim("convolutional embedding is above patches", difference(top1["d"], top1["a"])),
        Claim("patches gain from position embeddings", difference(top1["b"], top1["a"])),
        Claim("convolutional embedding is above patches with position embeddings",
              difference(top1["d"], top1["b"])),
    )  # fmt: skip
    about = "Token embeddings; position embeddings are in every stage (the paper's sizes say so)."
    return _table(about, "table-6", rows, {"parameters": _PARAMETERS, "top1": _TOP1}, claims)


@experiment("cvt/table-7", "Stride of the key and value projections")
def table_7(s: Scale) -> Table:
    """Squeezed or not."""
    rows = {"a: stride 1": _cvt(s, kv_stride=1), "b: stride 2": _cvt(s)}
    top1 = {label[0]: found["top1"] for label, found in rows.items()}
    columns = {"parameters": _PARAMETERS, "flops": Column("GMACs", "G", 3), "top1": _TOP1}
    claims = (
        Claim("stride 1 is above stride 2", difference(top1["a"], top1["b"])),
        Claim("stride 2 costs little accuracy", difference(top1["a"], top1["b"]), "equal", 1.0),
    )
    return _table("Keys and values on the full grid, or on a quarter of it.",
                  "table-7", rows, columns, claims)  # fmt: skip


@experiment("cvt/table-8", "Convolutional or linear projection, stage by stage")
def table_8(s: Scale) -> Table:
    """From none of the stages to all three."""
    kinds = {
        "a: no stage": ["linear", "linear", "linear"],
        "b: stage 1": ["conv", "linear", "linear"],
        "c: stages 1 and 2": ["conv", "conv", "linear"],
    }
    rows = {label: _cvt(s, projection=kind) for label, kind in kinds.items()}
    rows["d: all stages"] = _cvt(s)
    top1 = {label[0]: found["top1"] for label, found in rows.items()}
    claims = (
        Claim("convolutional projection in all stages is above linear",
              difference(top1["d"], top1["a"])),
        Claim("… and above stages 1 and 2 alone", difference(top1["d"], top1["c"])),
        Claim("… which are above stage 1 alone", difference(top1["c"], top1["b"])),
        Claim("… which is above linear projection", difference(top1["b"], top1["a"])),
    )  # fmt: skip
    return _table("Stages with convolutional projection.", "table-8", rows, {"top1": _TOP1}, claims)


@experiment("cvt/figure-1", "Accuracy against parameters")
def figure_1(s: Scale) -> Figure:
    """Our runs of CvT and DeiT, and ConViT for comparison."""
    series = []
    for role in ("DeiT-S", "DeiT-B", "ConViT-S", "ConViT-B", "CvT-13", "CvT-21"):
        if role in s.models:
            chosen = {"seeds": s.seeds if role in ("DeiT-S", "ConViT-S") else s.few_seeds}
            point = Combined(
                lambda p, t: {"x": [p / 1e6], "y": [t]},
                (s.measured(PARAMETERS, role, **chosen), s.measured(TOP1, role, **chosen)),
            )
            series.append(Series(role, point, role.partition("-")[0].lower()))
    if s.comparable:
        series += [_printed(row) for row in ("ResNet-50", "ResNet-101", "PVT-Small", "TNT-S")]
    panel = Panel(
        "Accuracy and size", "parameters (M)", "top-1 (%)", tuple(series), True, scatter=True
    )
    return Figure("All trained from scratch on all data.", (panel,))


def _printed(row: str) -> Series:
    def point() -> Any:
        printed = published.rows("cvt", "table-3")[row]
        return {"x": [printed["parameters"].value], "y": [printed["top1"].value]}

    return Series(f"{row} (published)", Computed(point), "other")
