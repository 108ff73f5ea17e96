"""Random search of settings for small images, the same for every model.

    python benchmarks/tune.py --output digits.csv
    python benchmarks/tune.py --images digits-half --output half.csv
    python benchmarks/tune.py --images photographs --trials 1 2 3 --output photographs.csv
    python benchmarks/tune.py --models timm/test_resnet timm/cct_2 --output peers.csv
                                                               (CCT needs vit-pytorch)

A trial draws its settings from its number and trains each model once, on images that nothing else
uses: 70 digits of a quarter (`data.part` (0, 0.25)), evaluated on 381; half of that quarter; or 500
photographs of clothes, evaluated on 3,000 others. All trials share images and seed. Finished rows
of the table are kept, so the search can be stopped and resumed.

Rule, fixed on 2026-11-25 before the first run: the recipe takes the trial with the highest mean
top-1 over ConViT, DeiT and CvT and both numbers of digits, equally weighted. For photographs it is
the trial with the highest mean over the three, among the eight best on digits. A CNN and CCT each
take their own best mean over the same images.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from locality.training import train
from locality.training.recipes import recipe

MODELS = ("convit_nano", "deit_nano", "cvt_nano")
DIGITS = {"data.part": (0.0, 0.25), "schedule.steps": 750, "schedule.eval_every": 750}
PHOTOGRAPHS = {
    "data.train_part": (0.5, 0.6),
    "data.val_part": (0.6, 0.65),
    "data.fraction": 1 / 12,
    "schedule.steps": 1000,
    "schedule.warmup": 100,
    "schedule.eval_every": 1000,
}
# Images → recipe, its settings, and the seed.
IMAGES: dict[str, tuple[str, dict[str, Any], int]] = {
    "digits": ("digits", DIGITS | {"data.val_fraction": 0.85}, 1000),
    "digits-half": ("digits", DIGITS | {"data.val_fraction": 0.5}, 2000),
    "photographs": ("fashion_mnist", PHOTOGRAPHS, 3000),
}
# Models on photographs have one more layer; a ResNet halves the size five times.
OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("photographs", "convit_nano"): {"model.depth": 5, "model.gpsa_layers": 3},
    ("photographs", "deit_nano"): {"model.depth": 5},
    ("photographs", "cvt_nano"): {
        "model.patch_size": None,
        "model.embed_stride": [2, 2, 1],
    },
    ("digits", "timm/test_resnet"): {"model.img_size": 32},
    ("digits-half", "timm/test_resnet"): {"model.img_size": 32},
    # 4×4 tokens, as the transformers have.
    ("digits", "timm/cct_2"): {"model.img_size": 16, "model.pixels": 16},
    ("digits-half", "timm/cct_2"): {"model.img_size": 16, "model.pixels": 16},
    ("photographs", "timm/test_resnet"): {"model.patch_size": None},
    ("photographs", "timm/cct_2"): {"model.patch_size": None},
}


def draw(trial: int) -> dict[str, float | str | None]:
    """The settings of a trial; rate and decay are log-uniform."""
    rng = random.Random(trial)
    return {
        "optim.name": "adamuon",
        "optim.lr": round(5e-4 * 16 ** rng.random(), 6),
        "optim.weight_decay": round(0.01 * 30 ** rng.random(), 4),
        "augment.affine": rng.choice([0, 5, 10, 15]),
        "augment.mixup": rng.choice([0, 0.2, 0.4]),
        "augment.cutmix": rng.choice([0, 0.5]),
        "objective.label_smoothing": rng.choice([0, 0.1]),
        "augment.random_erasing": rng.choice([0, 0, 0.25]),
        "engine.ema_decay": rng.choice([None, 0.99, 0.995]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="table to write or extend")
    parser.add_argument("--trials", type=int, nargs="+", default=range(24))
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--images", choices=IMAGES, default="digits")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds, instead of the default one")
    parser.add_argument("--set", nargs="+", default=[], help="NAME=VALUE, instead of the trial's")
    options = parser.parse_args()
    if "timm/cct_2" in options.models:
        import cct  # noqa: F401 (registers it)
    name, fixed, usual_seed = IMAGES[options.images]
    given = {key: json.loads(value) for key, value in (each.split("=") for each in options.set)}
    columns = ["model", "trial", "seed", *(draw(0) | given), "top1", "seconds"]
    done = set()
    if options.output.exists():
        with options.output.open() as file:
            table = csv.DictReader(file)
            if table.fieldnames != columns:
                parser.error(f"{options.output} has other columns; choose another --output")
            done = {tuple(row.values())[:-2] for row in table}
    else:
        options.output.write_text(",".join(columns) + "\n")
    for trial in options.trials:
        for seed, model in product(options.seeds or [usual_seed], options.models):
            settings = draw(trial) | given
            row = [model, trial, seed, *settings.values()]
            if tuple("" if value is None else str(value) for value in row) in done:
                continue
            config = recipe(
                name,
                fixed
                | {
                    "model.name": model,
                    "seed": seed,
                    "engine.precision": "fp32",
                }
                | OWN.get((options.images, model), {})
                | settings,
            )
            with TemporaryDirectory() as folder:
                result = train(config, folder, quiet=True)
            row += [result["top1"], result["seconds"]]
            with options.output.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(row)
            print(*row)


if __name__ == "__main__":
    main()
