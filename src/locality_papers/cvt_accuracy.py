"""CvT's accuracy, compared with other models, and after transfer to other images."""

from typing import Any

from locality.data.config import AugmentConfig, DataConfig, InputConfig
from locality.models.variants import named
from locality.runner.runs import Request
from locality.training import OptimConfig, RunConfig, ScheduleConfig, recipe, replace
from locality.training.config import EngineConfig
from locality_papers import published
from locality_papers.convit_curves import add_accuracy_by_size, share
from locality_papers.experiment import STANDARD, Column, Experiment, experiment
from locality_papers.measures import TOP1, count, count_role
from locality_papers.runs import PAPERS_MODELS, Scale

OURS = ("DeiT-S", "DeiT-B", "CvT-13", "CvT-21", "CvT-13-NAS")
"""Rows of Table 3 trained from scratch at 224 pixels."""


@experiment("cvt/table-3", "Accuracy, compared with other models")
def table_3(t: Experiment, s: Scale) -> None:
    """Our runs, fine-tuned runs, and models of other authors with public weights."""
    t.about = "Trained from scratch unless the row says otherwise."
    t.columns = STANDARD
    for row in published.rows("cvt/table-3"):
        _add_row(t, s, row)
    t.where, top1 = "§4.2", "top1"
    questions = {
        "Is CvT-13 above DeiT-S?": ("CvT-13", "DeiT-S"),
        "Is CvT-21 above the larger DeiT-B?": ("CvT-21", "DeiT-B"),
        "Is CvT-13 above ResNet-152?": ("CvT-13", "ResNet-152"),
        "Is CvT-13-NAS above CvT-13?": ("CvT-13-NAS", "CvT-13"),
        "From ImageNet-22k, is CvT-W24 above ViT-L/16?": ("CvT-W24↑384 22k", "ViT-L/16↑384 22k"),
    }
    for text, (first, second) in questions.items():
        t.ask(text, (first, top1), (second, top1))
    if not s.comparable:
        for part in (fraction for fraction in s.fractions if fraction < 1):
            label = f"{100 * part:g}%"
            keys = [t.run(role, label, TOP1, role, fraction=part) for role in ("CvT-13", "DeiT-S")]
            t.ask(f"With {label} of the images, is CvT-13 above DeiT-S?", *keys, where="")


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


def pretrained(s: Scale, role: str, seed: int) -> Request:
    """The pre-training run of a model on ImageNet-22k, for 90 epochs, as ViT's; CvT gives none."""
    model = s.models[role][0]
    chosen = {"model.name": model, "seed": seed, "data.root": s.root_of("imagenet22k")}
    images = {"data.dataset": "folder", "data.val_fraction": 0.005}
    changes = images | {"schedule.epochs": 90, "recipe": "cvt_22k"}
    config = replace(recipe("cvt_300", chosen), changes)
    return s.run(config, f"{model} on ImageNet-22k seed {seed}")


def finetune_384(model: str, weights: str, target: str, **data: Any) -> RunConfig:
    """Fine-tuning at 384 pixels (CvT §4.1, Tables 3 and 4).

    SGD with momentum 0.9 and a cosine at a batch of 512, for 20,000 steps on ImageNet, 10,000 on
    CIFAR, 500 on Pets and Flowers-102. The papers give neither learning rate nor clipping; ViT,
    whose fine-tuning CvT adopts, clips at 1 and searches rates around 0.01. Evaluation squashes the
    image to a square, as the released code does at 384 pixels.

    Differs from the released code, which fine-tunes on random crops of the resized image (here, on
    random areas of it), and resamples position embeddings linearly (here, bicubically).
    """
    steps = {"imagenet": 20_000, "cifar10": 10_000, "cifar100": 10_000}.get(target, 500)
    return RunConfig(
        recipe="finetune_384",
        weights=weights,
        model=named(model, img_size=384),
        data=DataConfig(target, workers=8, **data),
        input=InputConfig(crop_pct=1.0, crop_mode="squash"),
        augment=AugmentConfig(crop="resized", scale=(0.25, 1.0), hflip=0.5),
        optim=OptimConfig("sgd", lr=0.01, weight_decay=0.0, momentum=0.9, clip_grad=1.0),
        schedule=ScheduleConfig(
            steps=steps, warmup=steps // 40, warmup_lr=0.0, min_lr=0.0, eval_every=steps / 20
        ),
        engine=EngineConfig(batch_size=512, channels_last=True),
    )


def tuned(s: Scale, start: Request, target: str) -> Request:
    """The run that fine-tunes the weights of `start` at 384 pixels."""
    model, seed = start.config.model.name, start.config.seed
    config = finetune_384(model, str(start.folder), target, root=s.root_of(target))
    return s.run(
        replace(config, {"seed": seed}), f"{model} at 384 px on {target} seed {seed}", (start,)
    )


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
    t.about = "Pre-trained on ImageNet-22k, top-1 after fine-tuning at 384 pixels on each target."
    targets = ("cifar10", "cifar100", "pets", "flowers102")
    t.columns = {target: Column(target, digits=2) for target in targets}
    for row in published.rows("cvt/table-4"):
        for target in targets:
            if row not in s.models:
                t.missing(row, target, "pre-trained by others; no fine-tuned weights are published")
            elif not s.comparable:
                t.missing(row, target, "the scale has no larger dataset to pre-train on")
            else:
                starts = (pretrained(s, row, seed) for seed in s.seeds)
                t.add(row, target, TOP1, (tuned(s, start, target) for start in starts))
    text = "Fine-tuned on CIFAR-10, is CvT-W24 above BiT-M, which is three times as large?"
    t.ask(text, ("CvT-W24", "cifar10"), ("BiT-M", "cifar10"), where="§4.3")


@experiment("cvt/figure-1", "Accuracy against parameters")
def figure_1(t: Experiment, s: Scale) -> None:
    """Our runs of CvT, DeiT and ConViT, and both panels of the paper."""
    t.about = f"Trained from scratch on {share(s.fraction)}."
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
