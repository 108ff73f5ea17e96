"""The evaluation crop matches timm's pixels; thin images need no extra memory."""

import contextlib
import resource

import numpy as np
import psutil
import pytest
from PIL import Image
from timm.data import create_transform

from locality.data import AugmentConfig, Preprocessing
from locality.data.preprocessing import (
    cropped_share,
    eval_transform,
    resize_and_crop,
    train_transform,
)


def timms(image, preprocessing):
    transform = create_transform(
        preprocessing.size,
        interpolation=preprocessing.interpolation,
        crop_pct=preprocessing.crop_pct,
        crop_mode=preprocessing.crop_mode,
        normalize=False,
    )
    return transform(image).permute(1, 2, 0).numpy()


def noise(width, height):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@contextlib.contextmanager
def limited_memory(more):
    """Limit memory to `more` bytes beyond current use."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    held = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (held + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (31, 47), (90, 13)])
@pytest.mark.parametrize("size", [8, (16, 12)])
@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize(("filter_", "crop_pct"), [("bicubic", 0.875), ("nearest", 1.0)])
def test_pixels_are_timms(shape, size, mode, filter_, crop_pct):
    preprocessing = Preprocessing(size, interpolation=filter_, crop_pct=crop_pct, crop_mode=mode)
    image = noise(*shape)
    assert np.array_equal(resize_and_crop(image, preprocessing), timms(image, preprocessing))


@pytest.mark.parametrize(
    ("width", "height", "target", "share"),
    [(9, 9, (1, 1), 0), (9, 3, (1, 1), 2 / 3), (2, 12, (1, 1), 5 / 6), (9, 3, (16, 48), 0)],
)
def test_the_share_that_a_centre_crop_drops(width, height, target, share):
    assert cropped_share(width, height, target) == pytest.approx(share)
    pixels = np.zeros((height, width), np.uint8)
    scale = min(height / target[0], width / target[1])
    rows, columns = (round(side * scale) for side in target)
    pixels[(height - rows) // 2 :][:rows, (width - columns) // 2 :][:, :columns] = 1
    assert 1 - pixels.mean() == pytest.approx(share)


@pytest.mark.parametrize("shape", [(1, 5_000_000), (5_000_000, 1), (2, 1_000_000)])
@pytest.mark.parametrize(
    "transform",
    [
        eval_transform(Preprocessing(384)),
        eval_transform(Preprocessing((384, 192), crop_mode="squash")),
        train_transform(AugmentConfig(), Preprocessing(384)),
        train_transform(AugmentConfig(crop="pad"), Preprocessing(384)),
    ],
)
def test_thin_images_cost_no_more_than_others(shape, transform):
    with limited_memory(500_000_000):
        assert tuple(transform(Image.new("RGB", shape, "red"))[:, 50, 50]) == (255, 0, 0)
