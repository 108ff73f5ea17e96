"""Cost of the ImageNet recipes on eight H100s: the tables of docs/scale.md.

    python benchmarks/scale.py

The numbers are those of `locality train RECIPE --dry_run`; rates come from `benchmarks/results/`
instead of being measured here.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from locality.data.sources import DataSplits, ImageSource
from locality.training import replace
from locality.training.config import ModelConfig, RunConfig
from locality.training.cost import (
    Cost,
    DryRun,
    format_bytes,
    format_duration,
    forward_macs,
    image_counts,
)
from locality.training.recipes import cvt_22k, cvt_300, deit_300, deit_300_plus, finetune_384
from locality.training.resolved_run import ResolvedRun

RESULTS = Path(__file__).parent / "results"
GPU, GPUS = "nvidia-h100-80gb-hbm3-2026-11-23", 8
PEAK = 989e12  # operations per second of an H100 SXM, bf16, dense, from its data sheet
CARD = 80e9  # bytes of memory
IMAGES_PER_GPU = (64, 128, 512)
# Sizes of ImageNet's training and validation archives; also used for ImageNet-22k.
IMAGE_BYTES = (147_897_477_120 + 6_744_924_160) / (1_281_167 + 50_000)

# The plain ViT of a ConViT's width and heads.
MEASURED = {
    "convit": {"convit_tiny": "locality", "convit_small": "locality"},
    "deit": {"convit_tiny": "plain ViT", "convit_small": "plain ViT"},
    "cvt": {"cvt_13": "locality"},
}


class Counted(ImageSource):
    """A source that only has a number of images."""

    def __init__(self, count: int, classes: int) -> None:
        self.labels = np.arange(count) % classes

    def read(self, index: int) -> Image.Image:
        raise NotImplementedError

    describe = read


def measured(model: str, contender: str = "locality", precision: str = "bf16") -> dict[str, Any]:
    """A recorded training step on one GPU."""
    record = json.loads((RESULTS / f"{GPU}.json").read_text())["measured"]
    return next(
        row
        for result in record["224 px, batches of 64: inference and a training step"]
        for row in result["rows"]
        if (result["model"], row["contender"], row["task"], row["precision"])
        == (model, contender, "training", precision)
    )


def fraction_of_peak(model: ModelConfig, classes: int) -> float:
    """Fraction of peak of the family's measured model with the nearest multiply-accumulates."""
    family, size = model.name.partition("_")[0], forward_macs(model, classes)
    found = []
    for name, contender in MEASURED[family].items():
        network = name if contender == "locality" else f"{name.replace('convit', 'deit')}_baseline"
        macs = forward_macs(ModelConfig(network), 1000)
        rate = measured(name, contender)["images_per_second"]
        found.append((abs(math.log(size / macs)), 6 * macs * rate / PEAK))
    return min(found)[1]


def loading_seconds() -> float:
    """Seconds to read an image on one core."""
    record = json.loads((RESULTS / "loader.json").read_text())["measured"]["loader"][0]
    return 1 / record["rows"][0]["images_per_second"]


def plan(config: RunConfig) -> DryRun:
    """The dry run of a recipe in bf16 on eight GPUs, without its images and without GPUs."""
    training, validation, classes = image_counts(config)
    engine = {"devices": GPUS, "precision": "bf16-mixed", "accelerator": "cpu"}
    config = replace(config, {f"engine.{name}": value for name, value in engine.items()})
    names = [str(label) for label in range(classes)]
    splits = DataSplits("counted", names, Counted(training, classes), Counted(validation, classes))
    run = ResolvedRun(config, splits)
    rate = GPUS * PEAK * fraction_of_peak(config.model, classes) / (6 * run.macs)
    workers = config.data.workers * GPUS
    cost = Cost(*run.counts, loading_seconds(), 1 / rate, workers, on_processor=False)
    return DryRun(run, cost, rate, round(IMAGE_BYTES * (training + validation)))


def finetuned_w24() -> RunConfig:
    """CvT-W24 at 384 pixels, with random weights, which cost the same."""
    config = finetune_384("cvt_w24", weights="run")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights=None))


def recipes() -> list[RunConfig]:
    """A run for every ImageNet model of the README."""
    sizes = ("tiny", "small", "base")
    return [
        *(deit_300(f"{family}_{size}") for family in ("deit", "convit") for size in sizes),
        *(deit_300_plus(f"convit_{size}_plus") for size in sizes),
        *(cvt_300(name) for name in ("cvt_13", "cvt_21")),
        cvt_22k("cvt_w24"),
        finetuned_w24(),
    ]


def row(config: RunConfig) -> tuple[dict[str, str], dict[str, str]]:
    """A row of the time table, and one of the bytes table."""
    dry = plan(config)
    run = dry.run
    share = 6 * run.macs * dry.rate / GPUS / PEAK
    name = {"recipe": f"`{config.recipe}`", "model": f"`{config.model.name}`"}
    time = {
        "operations": f"{dry.cost.operations(run.plan.images) / 1e18:.3g}·10¹⁸",
        "of peak": f"{100 * share:.1f}%",
        "time": format_duration(3600 * dry.hours),
        "a step": f"{1000 * dry.step_seconds:.0f} ms",
        "cores to read": f"{dry.cost.cores:,}",
    }
    size = {
        "images": format_bytes(dry.file_bytes),
        "gradients sent": format_bytes(dry.wire_bytes),
        "per second": f"{format_bytes(dry.wire_bytes / dry.step_seconds)}",
        "activations": format_bytes(run.activation_bytes),
        "weights, gradients, moments": format_bytes(run.state_bytes),
    }
    return name | time, name | size


def memory_row(images: int) -> dict[str, str]:
    """Memory of CvT-W24 at 384 pixels by images per GPU; brackets: more than a GPU has."""
    cells = {"images per GPU": f"{images}"}
    for recomputed, suffix in ((False, ""), (True, ", activation checkpointing")):
        changes = {"engine.batch_size": GPUS * images, "engine.grad_checkpointing": recomputed}
        run = plan(replace(finetuned_w24(), changes)).run
        for shards, strategy in ((1, "DDP"), (GPUS, f"sharded over {GPUS}")):
            total = run.activation_bytes + run.state_bytes / shards
            text = format_bytes(total)
            cells[f"{strategy}{suffix}"] = text if total < CARD else f"({text})"
    return cells


def table(rows: Sequence[dict[str, str]]) -> str:
    """Rows as Markdown."""
    lines = [
        list(rows[0]),
        ["---:" if cell[0] in "(0123456789" else "---" for cell in rows[0].values()],
        *(list(r.values()) for r in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> list[str]:
    """All tables; takes a minute or two."""
    times, sizes = zip(*map(row, recipes()), strict=True)
    return [*map(table, (times, sizes, [memory_row(images) for images in IMAGES_PER_GPU]))]


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
