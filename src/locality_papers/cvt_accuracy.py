"""CvT's tables and figures."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import try_to_load_from_cache
from torch import nn

from locality.checkpoints import open_model
from locality.data import DataConfig
from locality.errors import UserError
from locality.layers import Projection
from locality.models import build
from locality.runner.runs import Run
from locality.training import recipe, replace
from locality.training.config import ModelConfig
from locality.training.evaluation import evaluate_opened, evaluate_run
from locality.training.recipes import adjusted
from locality_papers import diagrams, published
from locality_papers.convit import accuracy_by_size
from locality_papers.convit_attention import skeleton
from locality_papers.measures import (
    TOP1,
    Measure,
    Quantity,
    absent,
    combined,
    computed,
    kept,
    measured,
)
from locality_papers.specs import REGISTRY, Column, Figure, Row, Scale, Table, counted, experiment

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


def _saved(full: Quantity, less: Quantity, what: str) -> Quantity:
    return combined(lambda a, b: 100 * (1 - b / a), full, less, unit=f"% of the {what}")


@experiment("cvt/table-2")
def table_2(s: Scale) -> Table:
    """Counted on the models as built; needs no run and no data."""
    rows = published.rows("cvt/table-2")
    return Table(tuple(Row(row, _built(published.MODELS[row])) for row in rows))


@experiment("cvt/table-3")
def table_3(s: Scale) -> Table:
    """Our runs, fine-tuned ones, and other people's models with their public weights."""
    rows = published.rows("cvt/table-3")
    cvt, deit = _built("cvt_21"), _built("deit_base")
    named = {f"fewer {metric}": _saved(deit[metric], cvt[metric], metric) for metric in cvt}
    return Table(tuple(Row(row, _table_3_cells(s, row)) for row in rows), named=named)


def _table_3_cells(s: Scale, row: str) -> dict[str, Quantity]:
    accuracies = {name: _top1_on(s, dataset) for name, dataset in _METRICS.items()} | {"top1": TOP1}
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
        data, name = _labelled(s, dataset), published.PEERS[row]
        s.root.mkdir(parents=True, exist_ok=True)
        path, what = s.root / "peers.json", f"{name} on {dataset}"
        return kept(path, what, lambda: _evaluate_public(name, data))

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
    chosen = {"model.name": model, "seed": seed, "data.root": s.root_of("imagenet22k")}
    config = adjusted("cvt_22k", chosen)
    return s.run(config, f"{model} on ImageNet-22k seed {seed}")


def tuned(s: Scale, start: Run, target: str) -> Run:
    """The run that fine-tunes what another has trained, at 384 pixels."""
    model, seed = start.config.model.name, start.config.seed
    chosen = {"model.name": model, "model.weights": str(start.folder), "seed": seed}
    place = {"data.dataset": target, "data.root": s.root_of(target)}
    config = adjusted("finetune_384", chosen | place)
    return s.run(config, f"{model} at 384 px on {target} seed {seed}", (start,))


def fine_tuned(s: Scale, row: str, measure: Measure) -> Quantity:
    """A measure of a fine-tuned row of Table 3, such as "CvT-13↑384 22k"."""
    role, _, rest = row.partition("↑")
    if not s.transfer or role not in s.models:
        return absent(f"scale '{s.name}' has no images of 384 pixels to fine-tune on")
    large = rest.endswith("22k")
    starts = [pretrained(s, role, seed) for seed in s.seeds] if large else s.runs(role)
    return measured((tuned(s, start, "imagenet") for start in starts), measure)


@experiment("cvt/table-4")
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
        starts = (pretrained(s, role, seed) for seed in s.seeds)
        return measured((tuned(s, start, target) for start in starts), TOP1)

    rows = tuple(
        Row(row, {target: cell(row, target) for target in targets})
        for row in published.rows("cvt/table-4")
    )
    values = {
        "pretrained": "ImageNet-22k",
        "tuned": "at 384 pixels on each target",
        "where": "§4.3, Table 4",
    }
    columns = {target: Column(target, digits=2) for target in targets}
    return Table(rows, columns, values=values)


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

    rows = tuple(Row(role, cells(role)) for role in ("CvT-13", "DeiT-S"))
    values = {
        "pretrained": f"the first {classes} classes",
        "tuned": "on the others, and on handwritten digits at 9/7 of the pixels",
        "where": "abstract, §4.3",
    }
    return Table(rows, {target: Column(target) for target in rows[0].cells}, values=values)


def _changed(s: Scale, name: str, **named: Quantity) -> Table:
    """Parameters, MACs and accuracy of models with some of their fields changed."""
    rows = (
        Row(label, {**s.counted(**row), "top1": s.measured(TOP1, **row)})
        for label, row in REGISTRY[name].rows.items()
    )
    return Table(tuple(rows), named=named)


# Position embeddings; convolutions in the place of patches; convolutional projections by stage.
for _name in ("cvt/table-5", "cvt/table-6", "cvt/table-8"):
    experiment(_name)(partial(_changed, name=_name))


@experiment("cvt/table-7")
def table_7(s: Scale) -> Table:
    """Keys and values squeezed or not."""
    full, squeezed = (_built("cvt_13", kv_stride=stride)["flops"] for stride in (1, 2))
    return _changed(s, "cvt/table-7", saved=_saved(full, squeezed, "MACs"))


@experiment("cvt/figure-1")
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
    return Figure(accuracy_by_size(s, roles, printed))


@experiment("cvt/table-1")
def table_1(s: Scale) -> Table:
    """Counted on the models as they are built, whatever the scale."""

    metrics = REGISTRY["cvt/table-1"].columns
    return Table(
        tuple(
            Row(row, {m: computed(partial(_need, published.MODELS[row], m)) for m in metrics})
            for row in ("DeiT-S", "ConViT-S", "CvT-13")
        )
    )


def _need(name: str, metric: str) -> float:
    model = skeleton(name)
    modules = list(model.modules())
    embed = next(each for each in modules if isinstance(each, nn.Conv2d))
    positions = [t.numel() for path, t in model.named_parameters() if path.endswith("pos_embed")]
    projections = [each.projection for each in modules if isinstance(each, Projection)]
    return {
        "positions": sum(positions) / 1e3,
        "overlap": embed.kernel_size[0] - embed.stride[0],
        "projections": projections.count("conv"),
        "grids": len(set(model.config.grids(model.img_size))),
    }[metric]


@experiment("cvt/figure-2")
def figure_2(s: Scale) -> Figure:
    """Drawn from CvT-13 as it is built, whatever the scale."""

    def draw(_: list[Path]) -> Any:
        model = build("cvt_13")
        layer, grid = _last_attention(model)
        columns = {"(a) CvT-13": diagrams.outline(model)}
        return diagrams.draw_columns(
            columns | {"(b) attention of stage 3": diagrams.projections(layer, grid)}
        )

    return Figure(draw=draw)


def _last_attention(model: Any) -> tuple[Any, Any]:
    """The first attention layer of the last stage, and its grid."""
    return model.stages[-1].blocks[0].attn, model.config.grids(model.img_size)[-1]


@experiment("cvt/figure-3")
def figure_3(s: Scale) -> Figure:
    """Drawn from CvT-13 as it is built, with what convolutions cost and squeezing saves."""
    variants = REGISTRY["cvt/figure-3"].rows

    def draw(_: list[Path]) -> Any:
        models = {title: build("cvt_13", **fields) for title, fields in variants.items()}
        return diagrams.draw_columns(
            {title: diagrams.projections(*_last_attention(m)) for title, m in models.items()}
        )

    linear, conv, _ = (_built("cvt_13", **fields) for fields in variants.values())
    named = {
        metric: combined(
            lambda less, more: 100 * (more / less - 1),
            linear[metric],
            conv[metric],
            unit="% of the linear ones'",
        )
        for metric in linear
    }

    def tokens() -> float:
        layer, grid = _last_attention(skeleton("cvt_13"))
        rows, columns = layer.k.grid(grid)
        return grid[0] * grid[1] / (rows * columns)

    return Figure(draw=draw, named=named | {"tokens": computed(tokens, "times")})
