"""CvT's accuracy, compared with other models, and after transfer to other images."""

from __future__ import annotations

import dataclasses
from typing import Any

from locality.models.variants import named
from locality.runner.runs import Run
from locality.training import recipe, replace
from locality_papers import published
from locality_papers.convit_curves import add_accuracy_by_size
from locality_papers.experiment import STANDARD, Column, Experiment, experiment, minus
from locality_papers.measures import TOP1, count, count_role
from locality_papers.runs import PAPERS_MODELS, Scale

OURS = ("DeiT-S", "DeiT-B", "CvT-13", "CvT-21", "CvT-13-NAS")
"""Rows of Table 3 trained from scratch at 224 pixels."""


@experiment("cvt/table-3", "Accuracy on ImageNet, compared with other models")
def table_3(t: Experiment, s: Scale) -> None:
    """Our runs, fine-tuned runs, and models of other authors with public weights."""
    t.about = "Trained from scratch unless the row says otherwise."
    t.columns = STANDARD
    for row in published.rows("cvt/table-3"):
        _add_row(t, s, row)
    where, top1 = "§4.2", "top1"
    questions = {
        "Is CvT-13 above DeiT-S?": ("CvT-13", "DeiT-S"),
        "Is CvT-21 above the larger DeiT-B?": ("CvT-21", "DeiT-B"),
        "Is CvT-13 above ResNet-152?": ("CvT-13", "ResNet-152"),
        "Is CvT-13-NAS above CvT-13?": ("CvT-13-NAS", "CvT-13"),
        "From ImageNet-22k, is CvT-W24 above ViT-L/16?": ("CvT-W24↑384 22k", "ViT-L/16↑384 22k"),
    }
    for text, (first, second) in questions.items():
        t.ask(where, text, minus((first, top1), (second, top1)))
    if not s.comparable:
        for part in (fraction for fraction in s.fractions if fraction < 1):
            label = f"{100 * part:g}%"
            keys = [t.run(role, label, TOP1, role, fraction=part) for role in ("CvT-13", "DeiT-S")]
            t.ask("", f"With {label} of the images, is CvT-13 above DeiT-S?", minus(*keys))


def _add_row(t: Experiment, s: Scale, row: str) -> None:
    if row in OURS:
        count_role(t, s, row, row)
        t.run(row, "top1", TOP1, row, seeds=s.few_seeds if row == "DeiT-B" else s.seeds)
    elif row.startswith("CvT"):
        config = named(PAPERS_MODELS[row.partition("↑")[0]], img_size=384)
        count(t, row, lambda: (config, 1000))
        _add_fine_tuned(t, s, row)
    else:
        for name in ("parameters", "flops", "top1"):
            t.missing(row, name, "a model of other authors")


def pretrained(s: Scale, role: str, seed: int) -> Run:
    """The pre-training run of a model on ImageNet-22k."""
    model = s.models[role][0]
    chosen = {"model.name": model, "seed": seed, "data.root": s.root_of("imagenet22k")}
    config = recipe("cvt_22k", chosen)
    return s.run(config, f"{model} on ImageNet-22k seed {seed}")


def tuned(s: Scale, start: Run, target: str) -> Run:
    """The run that fine-tunes the weights of `start` at 384 pixels."""
    model, seed = start.config.model.name, start.config.seed
    chosen = {"model.name": model, "weights": str(start.folder), "seed": seed}
    place = {"data.dataset": target, "data.root": s.root_of(target)}
    config = recipe("finetune_384", chosen | place)
    return s.run(config, f"{model} at 384 px on {target} seed {seed}", (start,))


def _add_fine_tuned(t: Experiment, s: Scale, row: str) -> None:
    """Top-1 of a fine-tuned row of Table 3, such as "CvT-13↑384 22k"."""
    role, _, rest = row.partition("↑")
    if not s.comparable or role not in s.models:
        t.missing(row, "top1", "the scale has no fine-tuning at 384 pixels")
        return
    large = rest.endswith("22k")
    starts = [pretrained(s, role, seed) for seed in s.seeds] if large else s.runs(role)
    t.add(row, "top1", TOP1, (tuned(s, start, "imagenet") for start in starts))


@experiment("cvt/table-4", "Transfer to other images")
def table_4(t: Experiment, s: Scale) -> None:
    """Fine-tuned on each target at a higher resolution than in pre-training."""
    if s.transfer_classes:
        _transfer_of_classes(t, s, s.transfer_classes)
        return
    t.about = "Pre-trained on ImageNet-22k, top-1 after fine-tuning at 384 pixels on each target."
    targets = ("cifar10", "cifar100", "pets", "flowers102")
    t.columns = {target: Column(target, digits=2) for target in targets}
    for row in published.rows("cvt/table-4"):
        for target in targets:
            if row not in s.models:
                t.missing(row, target, "pre-trained by others; no fine-tuned weights are published")
            elif not s.comparable:
                t.missing(row, target, f"scale '{s.name}' has no larger dataset to pre-train on")
            else:
                starts = (pretrained(s, row, seed) for seed in s.seeds)
                t.add(row, target, TOP1, (tuned(s, start, target) for start in starts))


def _transfer_of_classes(t: Experiment, s: Scale, classes: int) -> None:
    """Pre-trained on the first classes, fine-tuned on the others and on digits of more pixels.

    With the paper's optimiser (SGD), for a fifth of the steps. Position embeddings are resampled to
    the larger grid.
    """
    t.about = (
        f"Pre-trained on the first {classes} classes, top-1 after fine-tuning on the others, "
        f"and on handwritten digits at 9/7 of the pixels."
    )
    tuning = recipe("finetune_384", {"model.name": "cvt_13"}).optim
    for role in ("CvT-13", "DeiT-S"):
        runs: dict[str, list[Run]] = {"new classes": [], "digits, more pixels": []}
        for start in s.runs(role, seeds=s.few_seeds, data__first_classes=classes):
            model, schedule = start.config.model, start.config.schedule
            side = model.img_size
            assert isinstance(side, int) and schedule.steps is not None
            larger: dict[str, Any] = {
                "data.dataset": "digits",
                "data.root": None,
                "data.train_part": (0.0, 1.0),
                "model.img_size": side * 9 // 7,
            }
            config = replace(
                dataclasses.replace(start.config, optim=tuning),
                {
                    "weights": str(start.folder),
                    "schedule.steps": schedule.steps // 5,
                    "schedule.warmup": schedule.warmup / 5,
                    "schedule.eval_every": schedule.eval_every / 5,
                    "schedule.min_lr": 0.0,
                    "data.first_classes": None,
                },
            )
            changes = ({"data.skip_classes": classes}, larger)
            for target, changed in zip(runs, changes, strict=True):
                name = f"{model.name} fine-tuned on {target} seed {start.config.seed}"
                runs[target].append(s.run(replace(config, changed), name, (start,)))
        for target, tuned_runs in runs.items():
            t.columns[target] = Column(target)
            t.add(role, target, TOP1, tuned_runs)
    for target in t.columns:
        effect = minus(("CvT-13", target), ("DeiT-S", target))
        t.ask("abstract, §4.3", f"Fine-tuned on {target}, does CvT stay above DeiT?", effect)


@experiment("cvt/figure-1", "Accuracy against parameters")
def figure_1(t: Experiment, s: Scale) -> None:
    """Our runs of CvT, DeiT and ConViT, and both panels of the paper."""
    t.about = "Trained from scratch on all data."
    roles: dict[str, tuple[int, ...]] = {
        role: s.seeds if role in ("DeiT-S", "ConViT-S", "CvT-13") else s.few_seeds
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
    add_accuracy_by_size(t, s, roles, printed)
