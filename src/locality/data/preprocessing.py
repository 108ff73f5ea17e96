"""From a decoded image to a normalised tensor, with timm's and torchvision's transforms.

Two stages keep small images cheap: a transform per image returns a uint8 tensor, and `normalise`
turns a whole batch into floats. Together they give the same result as timm's pipeline.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import posterize
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import MaybePILToTensor

from locality.data.config import AugmentConfig, InputConfig
from locality.data.decoding import convert, shrink

# Memory of a Pillow image in RGB.
_PIXEL_BYTES, _OBJECT_BYTES = 4, 1024

# Resized whole, an image of 1 × 20,000 pixels would take gigabytes.
_MAX_ASPECT = 16
_MAX_SHOWN = 448

Size = tuple[int, int]
Step = Callable[[Any], Any]
Images = torch.Tensor | Sequence[torch.Tensor]
"""A batch (B, C, H, W), or its images one by one."""


@dataclass(frozen=True)
class ImageTransform:
    """Turns one image into a (3, H, W) uint8 tensor.

    Attributes:
        size: (H, W) of the result.
        prepare: resizes a PIL image, no-op if already that size; None keeps the original.
        steps: the random steps that follow, on PIL images.
        on_tensors: whether images of this size may be tensors as well as PIL images.
    """

    size: Size
    prepare: Step | None = None
    steps: Sequence[Step] = ()
    on_tensors: bool = False

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.drawn(self.prepared(image))

    def prepared(self, image: Image.Image) -> Any:
        """Apply `prepare`; a tensor if no steps follow."""
        image = image if self.prepare is None else self.prepare(image)
        return image if self.steps else MaybePILToTensor()(image)

    @property
    def prepared_bytes(self) -> float:
        """Memory of a prepared image; infinite if it keeps the original size."""
        size = math.inf if self.prepare is None else math.prod(self.size)
        return _PIXEL_BYTES * size + _OBJECT_BYTES

    def drawn(self, image: Any) -> torch.Tensor:
        """Apply `steps` to a prepared image."""
        for step in self.steps:
            image = step(image)
        return MaybePILToTensor()(image)


def train_transform(augment: AugmentConfig, preprocessing: InputConfig) -> ImageTransform:
    """The random training transform of single images; draws from the three global generators.

    `warp`, `jitter_colors` and, after normalisation, `create_erasing` take batches.
    """
    size, resized = preprocessing.size, augment.crop == "resized"
    primary, secondary, _ = create_transform(
        size,
        is_training=True,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        # timm adds a jitter step for a strength of 0, but not for None.
        color_jitter=(augment.color_jitter if resized else 0.0) or None,  # type: ignore[arg-type]
        auto_augment=augment.auto_augment,
        interpolation=augment.interpolation or preprocessing.interpolation,
        mean=preprocessing.mean,
        std=preprocessing.std,
        normalize=False,
        separate=True,
    )
    steps = _with_black(secondary.transforms)
    if resized:
        return ImageTransform(size, steps=[*primary.transforms, *steps])
    prepare = eval_transform(replace(preprocessing, crop_pct=1.0)).prepare
    return ImageTransform(size, prepare, steps, not steps)


def eval_transform(preprocessing: InputConfig) -> ImageTransform:
    """The evaluation transform: resize and crop the centre, or squash, by `crop_mode`."""
    size = preprocessing.size
    resized = tuple(math.floor(side / preprocessing.crop_pct) for side in size)
    step = partial(resize_and_crop, preprocessing=preprocessing)
    return ImageTransform(size, step, on_tensors=resized == size)


def create_erasing(augment: AugmentConfig) -> RandomErasing | None:
    """timm's random erasing with noise, for normalised tensors; None if it is off."""
    if not augment.random_erasing:
        return None
    return RandomErasing(augment.random_erasing, mode="pixel", max_count=1, device="cpu")


def affine_matrices(uniform: torch.Tensor, strength: float) -> torch.Tensor:
    """Random affine maps for `F.affine_grid`.

    Args:
        uniform: (B, 4) in [0, 1): for rotation, shear, and the scales of both axes.
        strength: largest rotation in degrees, and largest shear and change of scale in percent.

    Returns:
        (B, 2, 3) without translation: rotation @ shear @ scale.
    """
    angle, shear, *scale = (2 * uniform.T - 1) * strength
    angle, zero = torch.deg2rad(angle), torch.zeros_like(angle)
    cos, sin, shear = torch.cos(angle), torch.sin(angle), shear / 100
    # A factor f and its inverse are equally likely, so that images do not shrink on average.
    wide, high = (torch.exp(of / 100) for of in scale)
    rows = (
        (wide * cos, high * (shear * cos - sin), zero),
        (wide * sin, high * (shear * sin + cos), zero),
    )
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=1)


def window_maps(uniform: torch.Tensor, augment: AugmentConfig, size: Size) -> torch.Tensor:
    """Random maps for `warp`: an affine map, a horizontal flip and a shift by whole pixels.

    Args:
        uniform: (B, 7) in [0, 1): for `affine_matrices`, shifts and flip.
        augment: its strengths; only `crop` "pad" shifts.
        size: (H, W) of the images.
    """
    maps = affine_matrices(uniform[:, :4], augment.affine)
    maps[:, 0] *= 1 - 2 * (uniform[:, 6:] < augment.hflip).float()
    pad = augment.pad if augment.crop == "pad" else 0
    pixels = (uniform[:, 4:6] * (2 * pad + 1)).floor() - pad
    maps[:, :, 2] = pixels * 2 / torch.tensor(size[::-1])  # an image is 2 wide
    return maps


def warp(pixels: Images, maps: torch.Tensor, padding: str = "zeros") -> torch.Tensor:
    """(B, C, H, W) uint8, or a list of images → float32, each warped by its map.

    Angles are preserved on images that are not square. Batched for speed: torchvision's
    RandomAffine takes 0.3 ms for one 8×8 image, this 0.2 ms for a batch of 64.
    """
    images = pixels if isinstance(pixels, torch.Tensor) else torch.stack([*pixels])
    height, width = images.shape[-2:]
    aspect = torch.tensor([[1.0, height / width, 1.0], [width / height, 1.0, 1.0]])
    grid = F.affine_grid(maps * aspect, [*images.shape], align_corners=False)
    return F.grid_sample(images.float(), grid, padding_mode=padding, align_corners=False)


def jitter_colors(pixels: Images, uniform: torch.Tensor, strength: float) -> torch.Tensor:
    """(B, 3, H, W) of 0 … 255, or a list → float32 with changed brightness, contrast, saturation.

    As torchvision's ColorJitter in one order, for a whole batch.

    Args:
        pixels: the images.
        uniform: (B, 3) in [0, 1).
        strength: each factor is between 1 − strength and 1 + strength.
    """
    images = (pixels if isinstance(pixels, torch.Tensor) else torch.stack([*pixels])).float()
    factors = (1 + strength * (2 * uniform - 1)).clamp(min=0)[..., None, None, None]
    images = (images * factors[:, 0]).clamp_(0, 255)
    images.lerp_(_grey(images).mean((2, 3), keepdim=True), 1 - factors[:, 1]).clamp_(0, 255)
    return images.lerp_(_grey(images), 1 - factors[:, 2]).clamp_(0, 255)


def _grey(images: torch.Tensor) -> torch.Tensor:
    red, green, blue = images.split(1, dim=1)
    return (0.299 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def normalise(pixels: Images, preprocessing: InputConfig) -> torch.Tensor:
    """(B, C, H, W) of 0 … 255, or a list of images → float32, (x/255 − mean)/std by channel."""
    mean = torch.tensor(preprocessing.mean).view(-1, 1, 1)
    std = torch.tensor(preprocessing.std).view(-1, 1, 1)
    images = torch.empty((len(pixels), *pixels[0].shape), dtype=torch.float32)
    # Listed images one by one: a large image then stays in the processor's cache.
    if isinstance(pixels, torch.Tensor):
        pixels, parts = [pixels], [images]
    else:
        parts = [*images]
    for source, image in zip(pixels, parts, strict=True):
        image.copy_(source).div_(255).sub_(mean).div_(std)
    return images


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm's posterize, where 0 bits give black, as before Pillow 13.

    timm's magnitude 10, which "m9-mstd0.5" draws occasionally, keeps 0 bits; newer versions of
    Pillow raise an error. The published recipes trained with the black images.
    """
    return posterize(image, bits) if bits >= 1 else Image.new(image.mode, image.size)


def _with_black(steps: Sequence[Any]) -> list[Any]:
    """timm's steps, whose operations posterize as `_posterize`."""
    for step in steps:
        for op in (*getattr(step, "ops", ()), *chain.from_iterable(getattr(step, "policy", ()))):
            if op.aug_fn is posterize:
                op.aug_fn = _posterize
    return [*steps]


# -- the evaluation crop: timm's pixels at bounded cost --------------------------------------------


def resize_and_crop(image: Image.Image, preprocessing: InputConfig) -> Image.Image:
    """Resize an image and crop its centre, or squash it, to the preprocessing's size.

    It is shrunk first, if the preprocessing says so.

    An image more than 16 times as long as the crop first loses its ends, which are outside the
    crop anyway. The rounding then differs by less than a pixel of the result.
    """
    image = shrink(image, preprocessing.least)
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
