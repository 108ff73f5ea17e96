"""`locality train FOLDER` beside small models of timm in a plain loop that looks at the clock.

    python benchmarks/minutes.py photos/train photos/test --minutes 3 --seeds 0 1 2 --weights RUN

Both folders have one folder of images per class. The programs train in turn for the same minutes,
so that they meet about the same load; accuracy is that on the second folder. The others are timm's
`test_resnet` (a CNN of 0.37 M parameters) and `test_vit` on one thread: AdamW, images cropped,
flipped and recoloured, a cosine over the time. They train on all images of the first folder,
`locality train` on nine tenths, from the weights of the package and then `--from` each of
`--weights`. Prints a table as CSV.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from locality.data.config import DataConfig
from locality.data.decoding import BadImage
from locality.data.folder import open_folder
from locality.data.sources import ImageSource
from locality.training.autofit import image_size, median_shorter_side, sampled_sizes

RATE, BATCH, WARMUP = 2e-3, 64, 30
# timm's models, with the arguments that take the image size.
PEERS: dict[str, tuple[str, ...]] = {"test_resnet": (), "test_vit": ("img_size",)}


def opened(folder: Path) -> ImageSource:
    """All images of a folder."""
    _, images, _ = open_folder(DataConfig("folder", str(folder)))
    return images


def tensors(source: ImageSource, pixels: int) -> tuple[Tensor, Tensor]:
    """All images, (N, 3, pixels, pixels) in 0 … 1, and their classes."""
    images, labels = [], []
    for index, label in enumerate(source.labels):
        try:
            images.append(np.array(source.read(index).resize((pixels, pixels), 2)))
        except BadImage:
            continue
        labels.append(int(label))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255, torch.tensor(labels)


def peer(train: Path, test: Path, minutes: float, seed: int, name: str) -> tuple[float, int]:
    """Top-1 of one of `PEERS` on `test`, in percent, and its steps."""
    started, seconds = time.perf_counter(), 60 * minutes
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    source = opened(train)
    pixels = image_size(median_shorter_side(sampled_sizes(source)))
    (images, labels), (others, answers) = (tensors(s, pixels) for s in (source, opened(test)))
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    augment = v2.Compose(
        [
            v2.RandomCrop(pixels, padding=max(2, pixels // 8), padding_mode="edge"),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.2, 0.2, 0.2),
        ]
    )
    size: dict[str, Any] = dict.fromkeys(PEERS[name], pixels)
    model = timm.create_model(name, num_classes=int(labels.max()) + 1, **size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    step = 0
    while (share := (time.perf_counter() - started + 3) / seconds) < 1:
        chosen = torch.randperm(len(images))[:BATCH]
        optimizer.param_groups[0]["lr"] = (
            RATE * min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * share)) / 2
        )
        batch = torch.stack([augment(image) for image in images[chosen]])
        logits = model((batch - mean) / std)
        F.cross_entropy(logits, labels[chosen], label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    model.eval()
    with torch.no_grad():
        found = torch.cat([model((part - mean) / std).argmax(1) for part in others.split(100)])
    return 100 * (found == answers).float().mean().item(), step


def locality(
    train: Path, test: Path, minutes: float, seed: int, weights: str = ""
) -> tuple[float, int]:
    """As `peer`, of the command line, from `weights` or else from those of the package."""
    with tempfile.TemporaryDirectory() as folder:
        run, command = f"{folder}/run", [sys.executable, "-m", "locality"]
        given = ["--minutes", f"{minutes:g}", "--seed", str(seed), "--threads", "1"]
        given += ["--from", weights] * bool(weights)
        subprocess.run([*command, "train", train, *given, "--output", run, "--quiet"], check=True)
        evaluated = subprocess.check_output([*command, "eval", run, test, "--json"])
        steps = json.loads(Path(run, "result.json").read_text())["steps"]
    return json.loads(evaluated)["top1"], steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--weights", nargs="*", default=[])
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=PEERS)
    options = parser.parse_args()
    programs: dict[str, Callable[..., tuple[float, int]]] = {"locality": locality}
    programs |= {name: partial(peer, name=name) for name in options.peers}
    programs |= {
        f"locality --from {Path(weights).name}": partial(locality, weights=weights)
        for weights in options.weights
    }
    table = csv.writer(sys.stdout)
    table.writerow(["images", "program", "seed", "top1", "steps", "seconds", "load"])
    for seed in options.seeds:
        for name, program in programs.items():
            load, started = os.getloadavg()[0], time.perf_counter()
            top1, steps = program(options.train, options.test, options.minutes, seed)
            seconds = time.perf_counter() - started
            row = [options.train, name, seed, f"{top1:.1f}", steps, f"{seconds:.0f}", f"{load:.1f}"]
            table.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
