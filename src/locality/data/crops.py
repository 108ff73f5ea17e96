"""A folder of images for examples, from scikit-image's photographs."""

import importlib.util
import random
from pathlib import Path

from PIL import Image

from locality.errors import require

PHOTOGRAPHS = (
    *("astronaut.png", "brick.png", "chelsea.png", "coffee.png", "coins.png", "grass.png"),
    *("gravel.png", "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "retina.jpg"),
    "rocket.jpg",
)
"""Of scikit-image, in its folder of data."""


def write_crops(folder: Path | str, train: int = 40, val: int = 40, seed: int = 0) -> None:
    """Write a folder of images: square crops of `PHOTOGRAPHS`, each a class.

    Training images are from the left half of each photograph, others from the right.

    Args:
        folder: where `train` and `val` are made.
        train, val: crops of each photograph.
        seed: of their places.

    Raises:
        UserError: if scikit-image is not installed.
    """
    require("a folder of photographs", "locality[demo]", "skimage")
    spec = importlib.util.find_spec("skimage")
    assert spec is not None and spec.origin is not None
    rng = random.Random(seed)
    for name in PHOTOGRAPHS:
        photo = Image.open(Path(spec.origin).parent / "data" / name).convert("RGB")
        half = photo.width // 2
        for part, left, count in (("train", 0, train), ("val", half, val)):
            here = Path(folder, part, Path(name).stem)
            here.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                side = round(min(half, photo.height) * rng.uniform(0.4, 1))
                x = left + rng.randint(0, half - side)
                y = rng.randint(0, photo.height - side)
                crop = photo.crop((x, y, x + side, y + side))
                crop.resize((112, 112), Image.Resampling.BICUBIC).save(here / f"{index}.png")
