"""Small image folders on disk."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def write_image(path: Path, seed: int = 0, size: tuple[int, int] = (12, 10)) -> Path:
    """A noise image; the suffix decides the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write_classes(folder: Path, counts: dict[str, int], seed: int = 0) -> Path:
    """A folder per class with that many different images."""
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            write_image(folder / name / f"{number:03d}.png", seed=seed + 1000 * label + number)
    return folder


@pytest.fixture
def train_val(tmp_path):
    """Three classes with 6 training and 2 validation images each."""
    write_classes(tmp_path / "train", {"bee": 6, "ant": 6, "cat": 6})
    write_classes(tmp_path / "val", {"bee": 2, "ant": 2, "cat": 2}, seed=500)
    return tmp_path


@pytest.fixture
def image_file():
    """write_image(path, seed=0, size=(12, 10))."""
    return write_image


@pytest.fixture
def class_folders():
    """write_classes(folder, {class: number of images}, seed=0)."""
    return write_classes
