"""The evaluation crop: timm's pixels at bounded cost, by Pillow alone.

A process that decodes images for `serve` imports this, so it needs neither torch nor timm.
"""

from __future__ import annotations

import math

from PIL import Image

from locality.data.config import Preprocessing
from locality.data.decoding import convert

# Resized whole, an image of 1 × 20,000 pixels would take gigabytes.
_MAX_ASPECT = 16
_MAX_SHOWN = 448


def resize_and_crop(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """The image at the preprocessing's size: resized and cut to its centre, or squashed.

    An image more than 16 times as long as the crop loses its ends first, which the crop leaves out
    in any case. That rounds differently, by less than a pixel of the result.
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
        # Pillow widens before it shortens.
        image = image.resize((image.width, rows), filter_)
    image = image.resize((columns, rows), filter_)
    left, top = round((columns - width) / 2), round((rows - height) / 2)
    return image.crop((left, top, left + width, top + height))


def high_resolution_crop(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """What `resize_and_crop` leaves of an image, in RGB with more pixels, up to 448 a side."""
    height, width = preprocessing.size
    factor = max(1, min(_MAX_SHOWN, *image.size) // max(height, width))
    larger = preprocessing.at((factor * height, factor * width))
    return resize_and_crop(convert(image, "RGB"), larger)


def _covering(image: Image.Image, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of the image's aspect ratio, at least as many of each as given.

    Rounded as timm does, which leaves square ones to torchvision.
    """
    if rows == columns:
        short = min(image.size)
        return rows * image.height // short, columns * image.width // short
    ratio = min(image.height / rows, image.width / columns)
    return round(image.height / ratio), round(image.width / ratio)
