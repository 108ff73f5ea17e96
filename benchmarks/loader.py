"""Images per second and core of the DeiT recipe's loader, beside timm's and torchvision's.

python benchmarks/loader.py --output loader.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import Work, interleave, machine, timed_rows, to_table
from PIL import Image
from timm.data import ImageDataset, Mixup, create_loader
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from locality.data import Preprocessing, train_loader
from locality.data.config import DEFAULT_DECODING, IMAGENET_MEAN, IMAGENET_STD
from locality.data.folder import list_folder
from locality.files import write_atomic
from locality.training.recipes import DEIT_AUGMENT

_SIZE = 224


def run_loading(rounds: int, files: int = 256, batch_size: int = 64) -> dict[str, Any]:
    """Measure how fast one thread decodes, augments, normalises and mixes JPEG files.

    Seconds are processor time, so waiting for a disk does not count. Every contender reads the same
    files once per round, in its own order. torchvision's RandAugment changes every image twice,
    timm's policy once on average.

    Args:
        rounds: timings per contender.
        files: number of files to write, about 500×375 pixels and 110 kB each.
        batch_size: a divisor of `files`.

    Returns:
        A result like that of `run_benchmark`.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), files)
        contenders = _contenders(folder, batch_size)
        work = {label: _mixed(batches) for label, batches in contenders.items()}
        here = torch.device("cpu")
        timing = interleave(work, here, rounds, clock=time.process_time)
    what = {"task": "loading", "img_size": _SIZE, "precision": "fp32", "mode": "one core"}
    return {
        "model": f"the DeiT recipe's images ({files} JPEG files)",
        "machine": machine(here),
        "rows": timed_rows(timing, files, what),
    }


def write_photographs(folder: Path, count: int) -> None:
    """Write JPEG files with the spectrum of photographs (amplitude 1 / frequency), four classes."""
    generator = np.random.default_rng(0)
    for number in range(count):
        height, width = (500, 375) if number % 4 == 0 else (375, 500)
        frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
        spectrum = generator.normal(size=(3, *frequency.shape, 2)).view(np.complex128)[..., 0]
        fields = np.fft.irfft2(spectrum / np.maximum(frequency, 1 / 500) ** 1.1, (height, width))
        fields /= fields.std(axis=(1, 2), keepdims=True)
        # Channels are correlated, as in photographs.
        colours = np.array([[55, 12, 0], [55, 0, 12], [55, -6, -6]])
        pixels = 120 + np.einsum("cf,fyx->yxc", colours, fields)
        place = folder / f"class {number % 4}"
        place.mkdir(exist_ok=True)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(place / f"{number}.jpg", quality=90)


def _contenders(folder: str, batch_size: int) -> dict[str, Iterable[Any]]:
    """Loaders of one pass over the files, by name, all in this process."""
    listing = list_folder(folder)
    augment = dataclasses.replace(DEIT_AUGMENT, repeats=1)
    source = listing.source(listing.files, DEFAULT_DECODING)
    contenders: dict[str, Iterable[Any]] = {
        "locality": train_loader(
            source,
            augment,
            Preprocessing(_SIZE),
            batch_size=batch_size,
            seed=0,
            stop_step=len(source) // batch_size,
        )
    }
    theirs = create_loader(
        ImageDataset(folder),
        _SIZE,
        batch_size,
        is_training=True,
        re_prob=augment.random_erasing,
        re_mode="pixel",
        color_jitter=augment.color_jitter,
        auto_augment=augment.auto_augment,
        interpolation="bicubic",
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    contenders["timm"] = theirs
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(_SIZE, interpolation=InterpolationMode.BICUBIC, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandAugment(interpolation=InterpolationMode.BILINEAR),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            v2.RandomErasing(augment.random_erasing),
        ]
    )
    files = ImageFolder(folder, transform)
    contenders["torchvision v2"] = DataLoader(files, batch_size, shuffle=True)
    return contenders


def _mixed(batches: Iterable[Any]) -> Work:
    """One pass over a loader's batches, with the recipe's mixup and cutmix."""
    mixup = Mixup(DEIT_AUGMENT.mixup, DEIT_AUGMENT.cutmix, num_classes=4)

    def work() -> None:
        for batch in batches:
            pair = batch if isinstance(batch, list | tuple) else (batch.images, batch.targets)
            mixup(*pair)

    return work


def main() -> None:
    """Measure, print a table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path, default=None, help="write JSON here as well")
    options = parser.parse_args()
    result = run_loading(options.rounds)
    header, cells = to_table(result["rows"])
    print(*map("  ".join, [header, *cells]), sep="\n")
    if options.output:
        write_atomic(options.output, json.dumps([result], indent=2) + "\n")


if __name__ == "__main__":
    main()
