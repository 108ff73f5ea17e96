"""Hours of the ImageNet recipes on eight H100s: the table of docs/clusters.md.

    python benchmarks/scale.py

Operations are counted; the fraction of a GPU's peak comes from the record of one H100.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from locality import create_model
from locality.models import count_macs

RECORD = Path(__file__).parent / "results/nvidia-h100-80gb-hbm3-2026-11-23.json"
GPUS = 8
PEAK = 989e12  # operations per second of an H100 SXM, bf16, dense, from its data sheet
IMAGENET, IMAGENET_22K = 1_281_167, 14_197_122
# Recipe, model, images seen in training, pixels, classes. CvT-W24 is pre-trained, then fine-tuned.
RUNS = [
    *(
        ("`deit_300`", f"{family}_{size}", 300 * IMAGENET, 224, 1000)
        for family in ("deit", "convit")
        for size in ("tiny", "small", "base")
    ),
    *(("`cvt_300`", name, 300 * IMAGENET, 224, 1000) for name in ("cvt_13", "cvt_21")),
    ("ImageNet-22k", "cvt_w24", 90 * IMAGENET_22K, 224, 21_841),
    ("384 px", "cvt_w24", 20_000 * 512, 384, 1000),
]
# Measured models of each family, and which of the record's contenders is meant.
MEASURED = {
    "convit": {"convit_tiny": "locality", "convit_small": "locality"},
    "deit": {"convit_tiny": "plain ViT", "convit_small": "plain ViT"},
    "cvt": {"cvt_13": "locality"},
}


def operations(model: str, pixels: int, classes: int) -> int:
    """Of a training step for one image: two per multiply-accumulate, the backward pass double."""
    with torch.device("meta"):
        return 6 * count_macs(create_model(model, img_size=pixels, num_classes=classes))


def images_per_second(model: str, contender: str = "locality") -> float:
    """Recorded training in bf16 on one GPU, eager, in batches of 64."""
    measured = json.loads(RECORD.read_text())["measured"]
    return next(
        row["images_per_second"]
        for result in measured["224 px, batches of 64: inference and a training step"]
        for row in result["rows"]
        if (result["model"], row["contender"], row["task"], row["precision"])
        == (model, contender, "training", "bf16")
    )


def fraction_of_peak(model: str, cost: int) -> float:
    """Fraction of peak of the family's measured model with the nearest number of operations."""
    family, fractions = model.partition("_")[0], []
    for name, contender in MEASURED[family].items():
        network = name if contender == "locality" else f"{name.replace('convit', 'deit')}_baseline"
        measured = operations(network, 224, 1000)
        rate = images_per_second(name, contender)
        fractions.append((abs(math.log(cost / measured)), measured * rate / PEAK))
    return min(fractions)[1]


def table() -> str:
    lines = [
        "| recipe | model | operations | of peak | hours |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for recipe, model, images, pixels, classes in RUNS:
        cost = operations(model, pixels, classes)
        fraction = fraction_of_peak(model, cost)
        hours = images * cost / (GPUS * PEAK * fraction) / 3600
        cells = f"{images * cost / 1e18:.3g}·10¹⁸", f"{100 * fraction:.1f}%", f"{hours:.3g}"
        lines.append(f"| {recipe} | `{model}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
