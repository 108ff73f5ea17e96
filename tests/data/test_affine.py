"""Random maps of images: crops, flips, affine maps."""

import pytest
import torch
import torch.nn.functional as F

from locality.data.config import AugmentConfig
from locality.data.preprocessing import affine_matrices, warp, window_maps

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
