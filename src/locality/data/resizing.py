"""The evaluation crop: timm's pixels at bounded cost, with Pillow alone.

The decoding processes of `serve` import this without torch and timm.
"""

from __future__ import annotations

import math

from PIL import Image

from locality.data.config import InputConfig
from locality.data.decoding import convert

# Resized whole, an image of 1 × 20,000 pixels would take gigabytes.
_MAX_ASPECT = 16
_MAX_SHOWN = 448
MOST_CROPPED = 0.2
"""Images that lose a larger share of their pixels in the mean are squashed by default."""


def resize_and_crop(image: Image.Image, preprocessing: InputConfig) -> Image.Image:
    """Resize an image and crop its centre, or squash it, to the preprocessing's size.

    An image more than 16 times as long as the crop first loses its ends, which are outside the
    crop anyway. The rounding then differs by less than a pixel of the result.
    """
    height, width = preprocessing.size
    rows, columns = (math.floor(side / preprocessing.crop_pct) for side in (height, width))
    filter_ = Image.Resampling[preprocessing.interpolation.upper()]
    most_wide = math.ceil(_MAX_ASPECT * image.height * columns / rows)
    most_high = math.ceil(_MAX_ASPECT * image.width * rows / columns)
    if preprocessing.crop_mode == "center":
        left, top = max(0, image.width - most_wide) // 2, max(0, image.height - most_high) // 2
        if left or top:
            image = image.crop((left, top, image.width - left, image.height - top))
        rows, columns = _covering(image, rows, columns)
    elif image.height > most_high:
        # Pillow resizes the width before the height.
        image = image.resize((image.width, rows), filter_)
    image = image.resize((columns, rows), filter_)
    left, top = round((columns - width) / 2), round((rows - height) / 2)
    return image.crop((left, top, left + width, top + height))


def cropped_share(width: int, height: int, shape: tuple[int, int] = (1, 1)) -> float:
    """The share of an image's pixels outside the largest centre crop of a (height, width) shape."""
    sides = width * shape[0], height * shape[1]
    return 1 - min(sides) / max(sides)


def high_resolution_crop(image: Image.Image, preprocessing: InputConfig) -> Image.Image:
    """The crop of `resize_and_crop` in RGB at a higher resolution, up to 448 pixels a side."""
    height, width = preprocessing.size
    factor = max(1, min(_MAX_SHOWN, *image.size) // max(height, width))
    larger = preprocessing.at((factor * height, factor * width))
    return resize_and_crop(convert(image, "RGB"), larger)


def _covering(image: Image.Image, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) in the image's aspect ratio, each at least as large as given.

    Rounded like timm, which leaves squares to torchvision.
    """
    if rows == columns:
        short = min(image.size)
        return rows * image.height // short, columns * image.width // short
    ratio = min(image.height / rows, image.width / columns)
    return round(image.height / ratio), round(image.width / ratio)
