"""Crops, flips, affine maps, and timm's pixels at evaluation; thin images need no extra memory."""

import contextlib
import resource

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform

from locality.data import AugmentConfig, Preprocessing
from locality.data.preprocessing import (
    affine_matrices,
    eval_transform,
    resize_and_crop,
    train_transform,
    warp,
    window_maps,
)

MIDDLE = torch.full((1, 4), 0.5)


def image(height=8, width=8):
    return torch.randint(0, 256, (1, 3, height, width), generator=torch.Generator().manual_seed(0))


def test_the_middle_of_every_range_is_the_identity():
    pixels = image(6, 10).to(torch.uint8)
    torch.testing.assert_close(
        warp(pixels, affine_matrices(MIDDLE, 30.0)), pixels.float(), atol=1e-3, rtol=0
    )


def test_a_turn_keeps_angles_where_images_are_not_square():
    uniform = MIDDLE.clone()
    uniform[0, 0] = 1.0
    pixels = image(8, 16)
    turned = warp(pixels, affine_matrices(uniform, 90.0))
    # The inner square is turned; what comes from above and below the image is black.
    inner = torch.rot90(pixels[..., 4:12].float(), 1, (2, 3))
    torch.testing.assert_close(turned[..., 4:12], inner, atol=0.1, rtol=0)
    assert max(turned[..., :4].abs().max(), turned[..., 12:].abs().max()) < 0.1


@pytest.mark.parametrize("strength", [5.0, 20.0])
def test_strength_bounds_the_angle_and_the_area(strength):
    maps = affine_matrices(
        torch.rand(1000, 4, generator=torch.Generator().manual_seed(0)), strength
    )
    matrix = maps[:, :, :2]
    angle = torch.atan2(matrix[:, 1, 0], matrix[:, 0, 0]).rad2deg()
    area = torch.linalg.det(matrix).log()
    assert 0.9 * strength < angle.abs().max() <= strength * 1.0001
    assert area.abs().max() <= 2 * strength / 100 + 1e-5
    assert abs(float(area.mean())) < 0.1 * strength / 100
    assert maps[:, :, 2].abs().max() == 0


@pytest.mark.parametrize(("padding", "mode"), [("zeros", "constant"), ("border", "replicate")])
def test_a_window_is_cut_from_the_padded_image(padding, mode):
    pixels, augment = image(6, 9).float(), AugmentConfig(crop="pad", pad=2, hflip=0.5)
    padded = F.pad(pixels, [2] * 4, mode=mode)
    windows = [padded[..., y : y + 6, x : x + 9] for y in range(5) for x in range(5)]
    expected = torch.cat([torch.cat([window, window.flip(-1)]) for window in windows])
    uniform = torch.rand(500, 7, generator=torch.Generator().manual_seed(0))
    images = warp(pixels.expand(500, -1, -1, -1), window_maps(uniform, augment, (6, 9)), padding)
    away = (images[:, None] - expected).abs().amax((2, 3, 4))
    assert away.amin(1).max() < 0.01
    assert len(away.argmin(1).unique()) == len(expected)
    still = AugmentConfig(crop="none", hflip=0.0)
    kept = warp(pixels, window_maps(uniform[:1], still, (6, 9)), padding)
    torch.testing.assert_close(kept, pixels, atol=1e-2, rtol=0)


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
