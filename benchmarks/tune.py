"""Random search over the recipe for digits: the same settings for ConViT, DeiT and CvT.

    python benchmarks/tune.py --output tuning.csv
    python benchmarks/tune.py --output half.csv --train-images half --trials 20 6 12 23 17 \\
        --models convit_nano deit_nano

Every trial is a draw of settings by its number, trained once for each model on a quarter of the
digits that nothing else uses (`data.part` (0, 0.25)): on 70 of them, evaluated on 381, or on half.
Rows that the table has already are left alone, so that the search can be stopped and goes on.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path
from tempfile import TemporaryDirectory

from locality.training import train
from locality.training.recipes import adjusted

MODELS = ("convit_nano", "deit_nano", "cvt_pico")
FIXED = {"data.part": (0.0, 0.25), "engine.tensorboard": False}
# Training images → the fraction that is evaluated on, and the seed of trial 0.
SIZES = {"70": (0.85, 1000), "half": (0.5, 2000)}


def draw(trial: int) -> dict[str, float | None]:
    """The settings of a trial; rate and decay are uniform in their logarithm."""
    rng = random.Random(trial)
    return {
        "optim.lr": round(5e-4 * 8 ** rng.random(), 6),
        "optim.weight_decay": round(0.01 * 30 ** rng.random(), 4),
        "augment.affine": rng.choice([0, 5, 10, 15, 20, 25]),
        "augment.mixup": rng.choice([0, 0.2, 0.4, 0.8]),
        "augment.cutmix": rng.choice([0, 0, 0.5, 1.0]),
        "objective.label_smoothing": rng.choice([0, 0.1, 0.2]),
        "augment.random_erasing": rng.choice([0, 0, 0.25]),
        "engine.ema_decay": rng.choice([None, None, 0.99]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="table to write, or to go on")
    parser.add_argument("--trials", type=int, nargs="+", default=range(24))
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--train-images", choices=SIZES, default="70")
    options = parser.parse_args()
    columns = ["model", "trial", "seed", *draw(0), "top1", "seconds"]
    done = set()
    if options.output.exists():
        with options.output.open() as file:
            done = {(row["model"], int(row["trial"])) for row in csv.DictReader(file)}
    else:
        options.output.write_text(",".join(columns) + "\n")
    val_fraction, first_seed = SIZES[options.train_images]
    for trial in options.trials:
        for model in options.models:
            if (model, trial) in done:
                continue
            seed, settings = first_seed + trial, draw(trial)
            fixed = FIXED | {"model.name": model, "seed": seed, "data.val_fraction": val_fraction}
            config = adjusted("digits", fixed | settings)
            with TemporaryDirectory() as folder:
                result = train(config, folder, quiet=True)
            row = [model, trial, seed, *settings.values(), result["top1"], result["seconds"]]
            with options.output.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(row)
            print(*row)


if __name__ == "__main__":
    main()
