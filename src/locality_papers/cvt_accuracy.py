"""CvT's accuracy, compared with other models, and after transfer to other images."""

from __future__ import annotations

import dataclasses
from typing import Any

import timm
from huggingface_hub import try_to_load_from_cache

from locality.checkpoints import open_model
from locality.data import DataConfig
from locality.errors import UserError
from locality.runner.runs import Run
from locality.training import recipe, replace
from locality.training.evaluation import evaluate_opened
from locality_papers import published
from locality_papers.convit_curves import accuracy_by_size
from locality_papers.cvt_design import built
from locality_papers.measures import (
    TOP1,
    Quantity,
    absent,
    cached_value,
    computed,
    measured,
)
from locality_papers.scales import PAPERS_MODELS, Scale
from locality_papers.specs import (
    Column,
    Figure,
    Table,
    as_printed,
    experiment,
    standard_columns,
)

OURS = ("DeiT-S", "DeiT-B", "CvT-13", "CvT-21", "CvT-13-NAS")
"""Rows of Table 3 trained from scratch at 224 pixels."""


@experiment("cvt/table-3", "Accuracy on ImageNet, compared with other models")
def table_3(s: Scale) -> Table:
    """Our runs, fine-tuned runs, and models of other authors with public weights."""
    place = "cvt/table-3"
    cells = as_printed(place, {row: _table_3_cells(s, row) for row in published.rows(place)})

    def above(first: str, second: str) -> Quantity:
        return cells[first]["top1"] - cells[second]["top1"]

    asked = {
        "Is CvT-13 above DeiT-S?": above("CvT-13", "DeiT-S"),
        "Is CvT-21 above the larger DeiT-B?": above("CvT-21", "DeiT-B"),
        "Is CvT-13 above ResNet-152?": above("CvT-13", "ResNet-152"),
        "Is CvT-13-NAS above CvT-13?": above("CvT-13-NAS", "CvT-13"),
        "From ImageNet-22k, is CvT-W24 above ViT-L/16?": above(
            "CvT-W24↑384 22k", "ViT-L/16↑384 22k"
        ),
    }
    return Table(
        cells,
        standard_columns("parameters", "flops", "top1"),
        about="Trained from scratch unless the row says otherwise.",
        questions={"§4.2": asked},
    )


def _table_3_cells(s: Scale, row: str) -> dict[str, Quantity]:
    if row in OURS:
        seeds = s.few_seeds if row == "DeiT-B" else s.seeds
        return s.counted(row) | {"top1": s.measured(TOP1, row, seeds=seeds)}
    if row.startswith("CvT"):
        return built(PAPERS_MODELS[row.partition("↑")[0]], 384) | {"top1": fine_tuned(s, row)}
    if not s.comparable:
        reason = f"a model of other authors, trained on ImageNet; not used at scale '{s.name}'"
        return dict.fromkeys(("parameters", "flops", "top1"), absent(reason))
    return dict.fromkeys(("parameters", "flops"), absent("a model of other authors")) | {
        "top1": _peer_top1(s, row)
    }


def _peer_top1(s: Scale, row: str) -> Quantity:
    """Top-1 of another author's model, if its public weights are on this machine.

    Nothing is downloaded; otherwise the reason says what to download.
    """
    if row not in published.PEERS:
        return absent("timm does not have these weights")

    def read() -> float:
        if s.data.get("imagenet") is None:
            raise UserError("needs the folder of ImageNet-1k; give --data '{imagenet: PATH}'")
        data, name = DataConfig("imagenet", s.data["imagenet"]), published.PEERS[row]
        s.root.mkdir(parents=True, exist_ok=True)
        path, what = s.root / "peers.json", f"{name} on imagenet"
        return cached_value(path, what, lambda: _evaluate_public(name, data))

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
    """The pre-training run of a model on ImageNet-22k."""
    model = s.models[role][0]
    chosen = {"model.name": model, "seed": seed, "data.root": s.root_of("imagenet22k")}
    config = recipe("cvt_22k", chosen)
    return s.run(config, f"{model} on ImageNet-22k seed {seed}")


def tuned(s: Scale, start: Run, target: str) -> Run:
    """The run that fine-tunes the weights of `start` at 384 pixels."""
    model, seed = start.config.model.name, start.config.seed
    chosen = {"model.name": model, "model.weights": str(start.folder), "seed": seed}
    place = {"data.dataset": target, "data.root": s.root_of(target)}
    config = recipe("finetune_384", chosen | place)
    return s.run(config, f"{model} at 384 px on {target} seed {seed}", (start,))


def fine_tuned(s: Scale, row: str) -> Quantity:
    """Top-1 of a fine-tuned row of Table 3, such as "CvT-13↑384 22k"."""
    role, _, rest = row.partition("↑")
    if not s.comparable or role not in s.models:
        return absent(f"scale '{s.name}' has no fine-tuning at 384 pixels")
    large = rest.endswith("22k")
    starts = [pretrained(s, role, seed) for seed in s.seeds] if large else s.runs(role)
    return measured((tuned(s, start, "imagenet") for start in starts), TOP1)


@experiment("cvt/table-4", "Transfer to other images")
def table_4(s: Scale) -> Table:
    """Fine-tuned on each target at a higher resolution than in pre-training."""
    if s.transfer_classes:
        return _transfer_of_classes(s, s.transfer_classes)
    targets = ("cifar10", "cifar100", "pets", "flowers102")

    def cell(role: str, target: str) -> Quantity:
        if role not in s.models:
            return absent(
                "pre-trained by others on private data; no fine-tuned weights are published"
            )
        if not s.comparable:
            return absent(f"scale '{s.name}' has no larger dataset to pre-train on")
        starts = (pretrained(s, role, seed) for seed in s.seeds)
        return measured((tuned(s, start, target) for start in starts), TOP1)

    return Table(
        {
            row: {target: cell(row, target) for target in targets}
            for row in published.rows("cvt/table-4")
        },
        {target: Column(target, digits=2) for target in targets},
        about="Pre-trained on ImageNet-22k, top-1 after fine-tuning at 384 pixels on each target.",
    )


def _transfer_of_classes(s: Scale, classes: int) -> Table:
    """Pre-trained on the first classes, fine-tuned on the others and on digits of more pixels.

    With the paper's optimiser (SGD), for a fifth of the steps. Position embeddings are resampled to
    the larger grid.
    """

    def cells(role: str) -> dict[str, Quantity]:
        found: dict[str, tuple[Run, ...]] = {"new classes": (), "digits, more pixels": ()}
        for start in s.runs(role, seeds=s.few_seeds, data__first_classes=classes):
            model, schedule = start.config.model, start.config.schedule
            assert isinstance(model.img_size, int) and schedule.steps is not None
            larger: dict[str, Any] = {
                "data.dataset": "digits",
                "data.root": None,
                "data.train_part": (0.0, 1.0),
                "model.img_size": model.img_size * 9 // 7,
            }
            tuning = recipe("finetune_384", {"model.name": "cvt_13"}).optim
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

    of = {role: cells(role) for role in ("CvT-13", "DeiT-S")}

    def above(target: str) -> Quantity:
        return of["CvT-13"][target] - of["DeiT-S"][target]

    asked = {
        "Fine-tuned on new classes, does CvT stay above DeiT?": above("new classes"),
        "Fine-tuned on digits of more pixels, does CvT stay above DeiT?": above(
            "digits, more pixels"
        ),
    }
    return Table(
        of,
        {target: Column(target) for target in of["CvT-13"]},
        about=f"Pre-trained on the first {classes} classes, top-1 after fine-tuning on the others, "
        f"and on handwritten digits at 9/7 of the pixels.",
        questions={"abstract, §4.3": asked},
    )


@experiment("cvt/figure-1", "Accuracy against parameters")
def figure_1(s: Scale) -> Figure:
    """Our runs of CvT, DeiT and ConViT, and both panels of the paper."""
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
    return Figure(accuracy_by_size(s, roles, printed), about="Trained from scratch on all data.")
