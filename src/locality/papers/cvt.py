"""CvT's tables and figures."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import try_to_load_from_cache
from torch import nn

from locality.checkpoints import open_model
from locality.data import DataConfig
from locality.errors import UserError
from locality.figures import diagrams
from locality.files import write_atomic
from locality.layers import Projection
from locality.models import build
from locality.papers import published
from locality.papers.convit_figures import accuracy_by_size, skeleton
from locality.papers.measures import (
    TOP1,
    Measure,
    Quantity,
    absent,
    combined,
    computed,
    measured,
    read_kept,
)
from locality.papers.scales import Scale, counted
from locality.papers.specs import (
    Claimed,
    Column,
    Drawing,
    Figure,
    Row,
    Table,
    columns,
    experiment,
    said,
)
from locality.runner.runs import Run
from locality.training import recipe, replace
from locality.training.config import ModelConfig
from locality.training.evaluation import evaluate_opened, evaluate_run

OURS = ("DeiT-S", "DeiT-B", "CvT-13", "CvT-21", "CvT-13-NAS")
"""The rows of Table 3 that are trained from scratch at 224 pixels."""

_FILES = {
    "imagenet": "the folder of ImageNet-1k",
    "imagenet_v2": "the folder of ImageNet-V2",
    "imagenet_real": "the file of the ReaL labels (real.json)",
}
_METRICS = {"top1": "imagenet", "real": "imagenet_real", "v2": "imagenet_v2"}


def _built(name: str, img_size: int | None = None, **fields: Any) -> dict[str, Quantity]:
    """Size and cost of one of the paper's models, at its own image size or another."""
    return counted(lambda: (ModelConfig(name, img_size=img_size, overrides=fields), 1000))


@experiment("cvt/table-2", "The architectures: parameters and cost")
def table_2(s: Scale) -> Table:
    """Counted on the models as built; needs no run and no data."""
    shown = columns("parameters") | {"flops": Column("GMACs", "G", 2)}
    rows = tuple(Row(row, _built(published.MODELS[row])) for row in published.rows("cvt/table-2"))
    return Table("The paper's own models at 224 pixels, whatever the scale.", shown, rows)


@experiment("cvt/table-3", "Accuracy on ImageNet, ReaL and V2, beside other models")
def table_3(s: Scale) -> Table:
    """Our runs, fine-tuned ones, and other people's models with their public weights."""
    shown = columns("parameters", "flops", *_METRICS)
    rows = tuple(Row(row, _table_3_cells(s, row)) for row in published.rows("cvt/table-3"))
    top1 = {row.label: row.cells["top1"] for row in rows}

    def above(first: str, second: str) -> Quantity:
        return top1[first] - top1[second]

    claims: Claimed = {
        "CvT-13 is above DeiT-S": above("CvT-13", "DeiT-S"),
        "CvT-21 is above the larger DeiT-B": above("CvT-21", "DeiT-B"),
        "CvT-13 is above PVT-Small": above("CvT-13", "PVT-Small"),
        "CvT-13 is above T2T-ViT_t-14": above("CvT-13", "T2T-ViT_t-14"),
        "CvT-13 is above TNT-S": above("CvT-13", "TNT-S"),
        "CvT-13 is above ResNet-152": above("CvT-13", "ResNet-152"),
        "CvT-13-NAS is above CvT-13": above("CvT-13-NAS", "CvT-13"),
        "CvT-W24 is above BiT-M, both from 22k": above("CvT-W24↑384 22k", "BiT-M↑480 22k"),
    }
    about = "Trained from scratch unless the row says otherwise."
    return Table(about, shown, rows, said("§4.2", claims))


def _table_3_cells(s: Scale, row: str) -> dict[str, Quantity]:
    accuracies = {
        "top1": TOP1,
        "real": _top1_on(s, "imagenet_real"),
        "v2": _top1_on(s, "imagenet_v2"),
    }
    if row in OURS:
        seeds = s.few_seeds if row == "DeiT-B" else s.seeds
        cells = s.counted(row)
        return cells | {name: s.measured(m, row, seeds=seeds) for name, m in accuracies.items()}
    if row.startswith("CvT"):
        cells = _built(published.MODELS[row.partition("↑")[0]], 384)
        return cells | {name: fine_tuned(s, row, m) for name, m in accuracies.items()}
    if not s.comparable:
        reason = f"other people's model, trained on ImageNet; scale '{s.name}' has none"
        return dict.fromkeys(("parameters", "flops", *_METRICS), absent(reason))
    return dict.fromkeys(("parameters", "flops"), absent("not ours to count")) | {
        metric: _peer_top1(s, row, dataset) for metric, dataset in _METRICS.items()
    }


def _labelled(s: Scale, dataset: str) -> DataConfig:
    """One of ImageNet's sets to evaluate on.

    Raises:
        UserError: if its files were not named.
    """
    real = dataset == "imagenet_real"
    for name in ("imagenet", dataset) if real else (dataset,):
        if s.data.get(name) is None:
            raise UserError(f"needs {_FILES[name]}; say where with --data.{name} PATH")
    root = s.data["imagenet" if real else dataset]
    return DataConfig(dataset=dataset, root=root, real_labels=s.data[dataset] if real else None)


def _top1_on(s: Scale, dataset: str) -> Measure:
    """Top-1 of a run's model on ReaL or V2."""

    def read(run: Run) -> float:
        if not s.comparable:
            raise UserError(
                f"{dataset} has the classes of ImageNet-1k, which scale '{s.name}' does not train "
                f"on"
            )
        return float(evaluate_run(run.folder, _labelled(s, dataset))["top1"])

    return Measure(f"top1 on {dataset}", read)


def _peer_top1(s: Scale, row: str, dataset: str) -> Quantity:
    """Top-1 of other people's model with public weights that lie on this machine.

    Nothing is downloaded for it: the reason says what to fetch.
    """
    if row not in published.PEERS:
        return absent("timm does not have these weights")

    def read() -> float:
        data = _labelled(s, dataset)
        kept = s.root / "peers.json"
        known = read_kept(kept)
        key = f"{published.PEERS[row]} on {dataset}"
        if key not in known:
            known[key] = _evaluate_public(published.PEERS[row], data)
            s.root.mkdir(parents=True, exist_ok=True)
            write_atomic(kept, json.dumps(known, indent=2) + "\n")
        return known[key]

    return computed(read)


def _evaluate_public(name: str, data: DataConfig) -> float:
    described = timm.get_pretrained_cfg(name)
    repository = (described and described.hf_hub_id) or f"timm/{name}"
    files = ("model.safetensors", "pytorch_model.bin")
    if not any(isinstance(try_to_load_from_cache(repository, file), str) for file in files):
        raise UserError(
            f"needs the public weights {repository}, which are not on this machine; "
            f"`hf download {repository}` fetches them"
        )
    opened = open_model(f"timm/{name}")
    return float(evaluate_opened(opened, data, batch_size=64)["top1"])


def pretrained(s: Scale, role: str, seed: int) -> Run:
    """The run that pre-trains a model on ImageNet-22k."""
    model = s.models[role][0]
    config = recipe("cvt_22k", model=model, seed=seed)
    config = replace(config, {"data.root": s.root_of("imagenet22k")})
    return s.run(config, f"{model} on ImageNet-22k seed {seed}")


def tuned(s: Scale, start: Run, target: str) -> Run:
    """The run that fine-tunes what another has trained, at 384 pixels."""
    model, seed = start.config.model.name, start.config.seed
    config = recipe(
        "finetune_384", model=model, weights=str(start.folder), dataset=target, seed=seed
    )
    config = replace(config, {"data.root": s.root_of(target)})
    return s.run(config, f"{model} at 384 px on {target} seed {seed}", (start,))


def fine_tuned(s: Scale, row: str, measure: Measure) -> Quantity:
    """A measure of a fine-tuned row of Table 3, such as "CvT-13↑384 22k"."""
    role, _, rest = row.partition("↑")
    if not s.transfer or role not in s.models:
        return absent(f"scale '{s.name}' has no images of 384 pixels to fine-tune on")
    starts = (
        [pretrained(s, role, seed) for seed in s.seeds] if rest.endswith("22k") else s.runs(role)
    )
    return measured(tuple(tuned(s, start, "imagenet") for start in starts), measure)


_BEST_OF_ALL: Claimed = {
    "CvT-W24 is the best on every target": absent(
        "the largest CvT and BiT, pre-trained on ImageNet-22k, are needed"
    )
}


@experiment("cvt/table-4", "Transfer to other images")
def table_4(s: Scale) -> Table:
    """Fine-tuned at a higher resolution than it was pre-trained at, on each target."""
    if s.transfer_classes:
        return _transfer_of_classes(s, s.transfer_classes)
    targets = ("cifar10", "cifar100", "pets", "flowers102")

    def cell(role: str, target: str) -> Quantity:
        if role not in s.models:
            return absent(
                "pre-trained by others on data of their own, and never published fine-tuned"
            )
        if not s.transfer:
            return absent(f"scale '{s.name}' has nothing larger to pre-train on")
        return measured(
            tuple(tuned(s, pretrained(s, role, seed), target) for seed in s.seeds), TOP1
        )

    rows = tuple(
        Row(row, {target: cell(row, target) for target in targets})
        for row in published.rows("cvt/table-4")
    )
    shown = {target: Column(target, digits=2) for target in targets}
    about = "Pre-trained on ImageNet-22k, top-1 after fine-tuning at 384 pixels on each target."
    return Table(about, shown, rows, said("§4.3, Table 4", _BEST_OF_ALL))


def _transfer_of_classes(s: Scale, classes: int) -> Table:
    """Pre-trained on the first classes, fine-tuned on the others and on digits of more pixels.

    The paper's optimiser (SGD) for a fifth of the steps. Position embeddings, where there are any,
    are resampled to the larger grid.
    """

    def cells(role: str) -> dict[str, Quantity]:
        found: dict[str, tuple[Run, ...]] = {"new classes": (), "digits, more pixels": ()}
        for start in s.runs(role, seeds=s.few_seeds, data__first_classes=classes):
            model, schedule = start.config.model, start.config.schedule
            assert model.img_size is not None and schedule.steps is not None
            larger: dict[str, Any] = {
                "data.dataset": "digits",
                "data.root": None,
                "data.train_part": (0.0, 1.0),
                "model.img_size": model.img_size * 9 // 7,
            }
            tuning = recipe("finetune_384", model="cvt_13").optim
            config = replace(
                dataclasses.replace(start.config, optim=tuning),
                {
                    "model.weights": str(start.folder),
                    "schedule.steps": schedule.steps // 5,
                    "schedule.warmup": schedule.warmup / 5,
                    "schedule.eval_every": schedule.eval_every / 5,
                    "schedule.min_lr": 0.0,
                    "data.first_classes": None,
                },
            )
            for target, changes in zip(
                found, ({"data.skip_classes": classes}, larger), strict=True
            ):
                name = f"{model.name} fine-tuned on {target} seed {start.config.seed}"
                found[target] += (s.run(replace(config, changes), name, (start,)),)
        return {target: measured(runs, TOP1) for target, runs in found.items()}

    rows = {role: cells(role) for role in ("CvT-13", "DeiT-S")}
    cvt, deit = rows.values()
    gains = (cvt[target] - deit[target] for target in cvt)
    texts = ("fine-tuned on new classes, CvT stays above DeiT", "… and on digits of more pixels")
    claims: Claimed = _BEST_OF_ALL | dict(zip(texts, gains, strict=True))
    about = (
        f"Pre-trained on the first {classes} classes, top-1 after fine-tuning on the others, and "
        f"on handwritten digits at 9/7 of the pixels."
    )
    shown = {target: Column(target) for target in cvt}
    found = tuple(Row(role, row) for role, row in rows.items())
    return Table(about, shown, found, said("abstract, §4.3", claims))


def _row(s: Scale, label: str, role: str = "CvT-13", **fields: Any) -> Row:
    """Parameters, MACs and accuracy of a model with some fields changed."""
    top1 = s.measured(TOP1, role, fields=fields)
    return Row(label, {**s.counted(role, fields=fields), "top1": top1})


def _top1(rows: tuple[Row, ...]) -> dict[str, Quantity]:
    """Accuracies by the paper's letter of the row."""
    return {row.printed_row: row.cells["top1"] for row in rows}


@experiment("cvt/table-5", "Position embeddings")
def table_5(s: Scale) -> Table:
    """CvT does without; DeiT does not."""
    rows = (
        _row(s, "a: DeiT-S", "DeiT-S"),
        _row(s, "b: DeiT-S, none", "DeiT-S", use_pos_embed=False),
        _row(s, "c: CvT-13, every stage", position="every"),
        _row(s, "d: CvT-13, first stage", position="first"),
        _row(s, "e: CvT-13, last stage", position="last"),
        _row(s, "f: CvT-13, none"),
    )
    top1 = _top1(rows)
    deit_loses, cvt_loses = top1["a"] - top1["b"], top1["c"] - top1["f"]
    claims: Claimed = {
        "DeiT loses accuracy without its position embedding": deit_loses,
        "CvT without position embeddings equals CvT with them": (cvt_loses, 1.0),
        "… with one in the first stage": (top1["d"] - top1["f"], 1.0),
        "… with one in the last stage": (top1["e"] - top1["f"], 1.0),
        "DeiT needs its position embedding more than CvT": deit_loses - cvt_loses,
    }
    about = "Position embeddings present or not while training."
    return Table(about, columns("parameters", "top1"), rows, said("§4.4, Table 5", claims))


@experiment("cvt/table-6", "Convolutional token embedding")
def table_6(s: Scale) -> Table:
    """Patches or convolutions, with or without position embeddings."""
    rows = (
        _row(s, "a: patches", embedding="patch"),
        _row(s, "b: patches, position embedding", embedding="patch", position="every"),
        _row(s, "c: convolutions, position embedding", position="every"),
        _row(s, "d: convolutions"),
    )
    top1 = _top1(rows)
    with_patches, with_convolutions = top1["b"] - top1["a"], top1["c"] - top1["d"]
    claims: Claimed = {
        "convolutional embedding is above patches (d above a)": top1["d"] - top1["a"],
        "… also where both have position embeddings (c above b)": top1["c"] - top1["b"],
        "… and alone above patches with positions (d above b)": top1["d"] - top1["b"],
        "position embeddings bring more to patches than to convolutions": (
            with_patches - with_convolutions
        ),
    }
    about = "Token embeddings; position embeddings are in every stage (the paper's sizes say so)."
    return Table(about, columns("parameters", "top1"), rows, said("§4.4, Table 6", claims))


@experiment("cvt/table-7", "Stride of the key and value projections")
def table_7(s: Scale) -> Table:
    """Squeezed or not."""
    rows = (_row(s, "a: stride 1", kv_stride=1), _row(s, "b: stride 2"))
    top1 = _top1(rows)
    costs = top1["a"] - top1["b"]
    saved = combined(
        lambda full, squeezed: 100 * (1 - squeezed / full) - 30,
        *(_built("cvt_13", kv_stride=stride)["flops"] for stride in (1, 2)),
        unit="% of the MACs",
    )
    claims: Claimed = {
        "stride 1 is above stride 2": costs,
        "stride 2 costs less than a point": combined(lambda points: 1 - points, costs),
        "stride 2 saves 30% of CvT-13's MACs": (saved, 5.0),
    }
    about = "Keys and values on the full grid, or on a quarter of it."
    shown = columns("parameters", "flops", "top1")
    return Table(about, shown, rows, said("§4.4, Table 7", claims))


@experiment("cvt/table-8", "Convolutional or linear projection, stage by stage")
def table_8(s: Scale) -> Table:
    """From none of the stages to all three."""
    rows = (
        _row(s, "a: no stage", projection=["linear", "linear", "linear"]),
        _row(s, "b: stage 1", projection=["conv", "linear", "linear"]),
        _row(s, "c: stages 1 and 2", projection=["conv", "conv", "linear"]),
        _row(s, "d: all stages"),
    )
    top1 = _top1(rows)
    claims: Claimed = {
        "convolutional projection in all stages is above linear": top1["d"] - top1["a"],
        "… and above stages 1 and 2 alone": top1["d"] - top1["c"],
        "… which are above stage 1 alone": top1["c"] - top1["b"],
        "… which is above linear projection": top1["b"] - top1["a"],
    }
    about = "Stages with convolutional projection."
    return Table(about, columns("top1"), rows, said("§4.4, Table 8", claims))


@experiment("cvt/figure-1", "Accuracy against parameters")
def figure_1(s: Scale) -> Figure:
    """Our runs of CvT and DeiT, ConViT for comparison, and both panels of the paper."""
    roles: dict[str, tuple[int, ...]] = {
        role: s.seeds if role in ("DeiT-S", "ConViT-S") else s.few_seeds
        for role in ("DeiT-S", "DeiT-B", "ConViT-S", "ConViT-B", "CvT-13", "CvT-21")
        if role in s.models
    }
    families = ("DeiT", "PVT", "T2T", "TNT", "CvT")
    table = published.rows("cvt/table-3")
    printed = {
        "Published (a): ImageNet-22k first": [row for row in table if row.endswith("22k")],
        "Published (b): ImageNet-1k": [
            row
            for row in table
            if row.startswith(families) and not row.endswith("22k") and "↑" not in row
        ],
    }
    return Figure("Trained from scratch on all data.", accuracy_by_size(s, roles, printed))


@experiment("cvt/table-1", "What the architectures need")
def table_1(s: Scale) -> Table:
    """Counted on the models as they are built, whatever the scale."""
    shown = {
        "positions": Column("position embedding (thousands)", "", 1),
        "overlap": Column("overlap of embedded patches (pixels)", "", 0),
        "projections": Column("convolutional projections", "", 0),
        "grids": Column("token grids", "", 0),
    }

    def counted_on(name: str) -> dict[str, Quantity]:
        def count(metric: str) -> float:
            model = skeleton(name)
            modules = list(model.modules())
            embed = next(each for each in modules if isinstance(each, nn.Conv2d))
            return {
                "positions": sum(
                    tensor.numel()
                    for path, tensor in model.named_parameters()
                    if path.endswith("pos_embed")
                )
                / 1e3,
                "overlap": embed.kernel_size[0] - embed.stride[0],
                "projections": sum(
                    isinstance(each, Projection) and each.projection == "conv" for each in modules
                ),
                "grids": len(set(model.config.grids(model.img_size))),
            }[metric]

        return {metric: computed(partial(count, metric)) for metric in shown}

    rows = tuple(
        Row(row, counted_on(published.MODELS[row])) for row in ("DeiT-S", "ConViT-S", "CvT-13")
    )
    return Table("Read off the paper's models as they are built here.", shown, rows)


@experiment("cvt/figure-2", "The pipeline of CvT")
def figure_2(s: Scale) -> Figure:
    """Drawn from CvT-13 as it is built, whatever the scale."""

    def draw(_: list[Path]) -> Any:
        model = build("cvt_13")
        layer, grid = _last_attention(model)
        columns = {"(a) CvT-13": diagrams.outline(model)}
        return diagrams.draw_columns(
            columns | {"(b) attention of stage 3": diagrams.projections(layer, grid)}
        )

    return Figure("What an image passes through in CvT-13.", drawing=Drawing((), draw))


def _last_attention(model: Any) -> tuple[Any, Any]:
    """The first attention layer of the last stage, and its grid."""
    return model.stages[-1].blocks[0].attn, model.config.grids(model.img_size)[-1]


@experiment("cvt/figure-3", "Linear, convolutional and squeezed projection")
def figure_3(s: Scale) -> Figure:
    """Drawn from CvT-13 as it is built, with what convolutions cost and squeezing saves."""
    variants: dict[str, dict[str, Any]] = {
        "(a) linear": {"projection": ["linear"] * 3},
        "(b) convolutional": {"kv_stride": 1},
        "(c) squeezed": {},
    }

    def draw(_: list[Path]) -> Any:
        models = {title: build("cvt_13", **fields) for title, fields in variants.items()}
        return diagrams.draw_columns(
            {title: diagrams.projections(*_last_attention(m)) for title, m in models.items()}
        )

    linear, conv = (
        _built("cvt_13", **variants[key]) for key in ("(a) linear", "(b) convolutional")
    )

    def added(metric: str) -> Quantity:
        return combined(
            lambda less, more: 2 - 100 * (more / less - 1),
            linear[metric],
            conv[metric],
            unit="% of the linear ones'",
        )

    def tokens() -> float:
        layer, grid = _last_attention(skeleton("cvt_13"))
        rows, columns = layer.k.grid(grid)
        return grid[0] * grid[1] / (rows * columns) - 4

    claims: Claimed = {
        "convolutional projections add few parameters: less than 2%": added("parameters"),
        "… and few MACs: less than 2%": added("flops"),
        "squeezing leaves a quarter of keys and values": (computed(tokens, "times"), 0.01),
    }
    about = "Queries, keys and values of a layer of stage 3."
    return Figure(about, drawing=Drawing((), draw), claims=said("§3.2", claims))
