"""CvT's tables and its Figure 1."""

from __future__ import annotations

import json
from typing import Any

import timm
from huggingface_hub import try_to_load_from_cache

from locality.checkpoints import open_model
from locality.data import DataConfig
from locality.errors import UserError
from locality.files import write_atomic
from locality.papers import published
from locality.papers.convit_figures import accuracy_by_size
from locality.papers.measures import (
    TOP1,
    Measure,
    Quantity,
    absent,
    computed,
    measured,
    read_kept,
)
from locality.papers.scales import Scale, counted
from locality.papers.specs import Claim, Column, Figure, Row, Table, columns, experiment
from locality.runner.runs import Run
from locality.training import recipe, replace
from locality.training.config import ModelConfig
from locality.training.evaluation import evaluate_opened, evaluate_run

OURS = ("DeiT-S", "DeiT-B", "CvT-13", "CvT-21", "CvT-13-NAS")
"""The rows of Table 3 that are trained from scratch at 224 pixels."""

PEERS: dict[str, str] = {
    "ResNet-50": "resnet50.tv_in1k",
    "ResNet-101": "resnet101.tv_in1k",
    "ResNet-152": "resnet152.tv_in1k",
    "TNT-S": "tnt_s_legacy_patch16_224.in1k",
    "TNT-B": "tnt_b_patch16_224.in1k",
    "BiT-M↑480 22k": "resnetv2_152x4_bit.goog_in21k_ft_in1k",
    "ViT-B/16↑384 22k": "vit_base_patch16_384.orig_in21k_ft_in1k",
}
"""Other people's models in Table 3 → timm's name of their public weights, where it has them."""

_FILES = {
    "imagenet": "the folder of ImageNet-1k",
    "imagenet_v2": "the folder of ImageNet-V2",
    "imagenet_real": "the file of the ReaL labels (real.json)",
}
_METRICS = {"top1": "imagenet", "real": "imagenet_real", "v2": "imagenet_v2"}


def _built(name: str, img_size: int | None = None) -> dict[str, Quantity]:
    """Size and cost of one of the paper's models, at its own image size or another."""
    return counted(lambda: (ModelConfig(name, img_size=img_size), 1000))


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
    claims: tuple[Claim, ...] = ()
    if "CvT-13" in s.models:
        above = s.measured(TOP1, "CvT-13") - s.measured(TOP1, "DeiT-S")
        claims = (Claim("CvT-13 is above DeiT-S", above),)
    return Table("Trained from scratch unless the row says otherwise.", shown, rows, claims)


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
    if row not in PEERS:
        return absent("timm does not have these weights")

    def read() -> float:
        data = _labelled(s, dataset)
        kept = s.root / "peers.json"
        known = read_kept(kept)
        key = f"{PEERS[row]} on {dataset}"
        if key not in known:
            known[key] = _evaluate_public(PEERS[row], data)
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


@experiment("cvt/table-4", "Transfer to CIFAR-10 and -100, Pets and Flowers-102")
def table_4(s: Scale) -> Table:
    """Pre-trained on ImageNet-22k, fine-tuned at 384 pixels."""
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
    return Table("Top-1 after fine-tuning on each target.", shown, rows)


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
    claims = (
        Claim("DeiT loses accuracy without its position embedding", deit_loses),
        Claim(
            "CvT without position embeddings equals CvT with one in every stage",
            top1["f"] - top1["c"],
            margin=1.0,
        ),
        Claim("DeiT needs its position embedding more than CvT", deit_loses - cvt_loses),
    )
    about = "Position embeddings present or not while training."
    return Table(about, columns("parameters", "top1"), rows, claims)


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
    claims = (
        Claim("convolutional embedding is above patches", top1["d"] - top1["a"]),
        Claim("patches gain from position embeddings", top1["b"] - top1["a"]),
        Claim(
            "convolutional embedding is above patches with position embeddings",
            top1["d"] - top1["b"],
        ),
    )
    about = "Token embeddings; position embeddings are in every stage (the paper's sizes say so)."
    return Table(about, columns("parameters", "top1"), rows, claims)


@experiment("cvt/table-7", "Stride of the key and value projections")
def table_7(s: Scale) -> Table:
    """Squeezed or not."""
    rows = (_row(s, "a: stride 1", kv_stride=1), _row(s, "b: stride 2"))
    top1 = _top1(rows)
    costs = top1["a"] - top1["b"]
    claims = (
        Claim("stride 1 is above stride 2", costs),
        Claim("stride 2 costs little accuracy", costs, margin=1.0),
    )
    about = "Keys and values on the full grid, or on a quarter of it."
    return Table(about, columns("parameters", "flops", "top1"), rows, claims)


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
    claims = (
        Claim("convolutional projection in all stages is above linear", top1["d"] - top1["a"]),
        Claim("… and above stages 1 and 2 alone", top1["d"] - top1["c"]),
        Claim("… which are above stage 1 alone", top1["c"] - top1["b"]),
        Claim("… which is above linear projection", top1["b"] - top1["a"]),
    )
    return Table("Stages with convolutional projection.", columns("top1"), rows, claims)


@experiment("cvt/figure-1", "Accuracy against parameters")
def figure_1(s: Scale) -> Figure:
    """Our runs of CvT and DeiT, and ConViT for comparison."""
    roles = {
        role: s.seeds if role in ("DeiT-S", "ConViT-S") else s.few_seeds
        for role in ("DeiT-S", "DeiT-B", "ConViT-S", "ConViT-B", "CvT-13", "CvT-21")
        if role in s.models
    }
    panel = accuracy_by_size(s, roles, ("ResNet-50", "ResNet-101", "PVT-Small", "TNT-S"))
    return Figure("All trained from scratch on all data.", (panel,))
