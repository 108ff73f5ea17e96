"""Other datasets' images with their patches in another order: a control of locality.

One order for all images hides where patches are, but the content at each position stays as it was.
An order of its own for each image leaves nothing to learn from position.
"""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from locality.data.config import DATASETS, DataConfig
from locality.data.sources import ArraySource, ImageSource


def open_shuffled(config: DataConfig) -> tuple[list[str], ImageSource, ImageSource | None]:
    """Classes and images of the row's dataset `of`; always in the same orders."""
    row = DATASETS[config.dataset]
    opener = pkgutil.resolve_name(f"locality.data.{DATASETS[row['of']]['opener']}")
    classes, *sources = opener(replace(config, dataset=row["of"]))
    train, val = (
        source and ArraySource(_shuffled(source, row), source.labels, f"{config.dataset} {part}")
        for part, source in zip(("train", "val"), sources, strict=True)
    )
    return classes, train, val


def _shuffled(source: ImageSource, row: dict[str, Any]) -> npt.NDArray[np.uint8]:
    assert source.pixels is not None
    images = source.pixels.permute(0, 2, 3, 1).numpy()
    return shuffle_patches(images, row["patch"], row["share"])


def shuffle_patches(
    images: npt.NDArray[np.uint8], patch: int, share: float | None, seed: int = 0
) -> npt.NDArray[np.uint8]:
    """Images (n, H, W, 3) with their patches in another order.

    Args:
        images: the images.
        patch: side of a patch in pixels, a divisor of H and W.
        share: None for one order for all images; else the probability that an image has its own.
        seed: random seed. The images shuffled by a smaller share are among those of a larger.
    """
    (n, height, width, _), rng = images.shape, np.random.default_rng(seed)
    rows, columns = height // patch, width // patch
    cells = images.reshape(n, rows, patch, columns, patch, 3).swapaxes(2, 3)
    orders = np.tile(np.arange(rows * columns), (n, 1))
    if share is None:
        orders[:] = rng.permutation(rows * columns)
    else:
        own = rng.permuted(orders, axis=1)
        orders = np.where(rng.random((n, 1)) < share, own, orders)
    cells = cells.reshape(n, rows * columns, patch, patch, 3)
    cells = np.take_along_axis(cells, orders[:, :, None, None, None], axis=1)
    cells = cells.reshape(n, rows, columns, patch, patch, 3).swapaxes(2, 3)
    return cells.reshape(images.shape)
