"""Image size, batch and threads of a run on custom images.

The recipes `photos` and `finetune` set the rest. The same images give the same settings on every
machine, but for the threads; how many steps there are depends on `schedule.minutes`.
"""

import contextlib
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from locality.data import DataSplits
from locality.data.decoding import MOST_CROPPED, BadImage, cropped_share
from locality.data.sources import ImageSource
from locality.errors import UserError
from locality.machine import idle_processors
from locality.models.config import CvTConfig, ViTConfig, to_2tuple
from locality.models.variants import PREFIX, variant
from locality.settings import replace
from locality.training.config import RunConfig
from locality.training.recipes import PHOTO_AUGMENT, default_model, is_small, padding

SIZES = (28, 32, 48, 64)
"""Image sizes in pixels: a run has the largest that its images reach, else the first."""

PROBED_SIZES = (96, 128, 160)
"""Image sizes for fine-tuning, beside the weights' own."""

_MOST_THREADS = 4  # small models gain nothing from more

FINETUNED_MIX_IMAGES = 5000
"""Fine-tuning on fewer images augments them little."""

_SAMPLED_IMAGES = 32


def provisional(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that `autofit` replaces, so that a run can be checked before its images are open."""
    if name != "photos" or given.keys() & {"model.img_size", "model.patch_size"}:
        return {}
    return sized(given.get("model.name") or default_model(name), SIZES[-1])


def autofit(
    config: RunConfig, splits: DataSplits, given: Mapping[str, Any]
) -> tuple[RunConfig, list[str], list[Any]]:
    """Choose the settings of a run on custom images.

    Args:
        config: the run, of the recipe "photos" or "finetune".
        splits: its images.
        given: settings to keep, by dotted name.

    Returns:
        the complete run, notes on the choices, and image sizes from which a probe may choose.

    Raises:
        UserError: if the images cannot be used.
    """
    sizes = sampled_sizes(splits.train)
    side = median_shorter_side(sizes)
    chosen, crop = crop_settings(given, sizes)
    if provisional(config.recipe, given):
        size = image_size(side)
        chosen |= sized(config.model.name, size) | {"augment.pad": padding(size)}
    small, images = is_small(config.model.img_size), len(splits.train)
    chosen["engine.batch_size"] = batch_size(images, small)
    if small:
        chosen["engine.threads"] = idle_processors(_MOST_THREADS)
    elif config.recipe == "finetune" and images >= FINETUNED_MIX_IMAGES:
        strong = {"mixup": 0.8, "cutmix": 1.0} | {
            name: getattr(PHOTO_AUGMENT, name) for name in ("scale", "ratio", "auto_augment")
        }
        chosen |= {f"augment.{name}": value for name, value in strong.items()}
    notes = [f"images have about {side} pixels on the shorter side{crop}"]
    if config.augment.hflip:
        notes.append(
            "images are flipped left to right; --augment.hflip 0 where that changes the class"
        )
    if config.recipe == "photos":
        notes += [
            "a small CNN by the same recipe: --model timm/test_resnet",
            f"pretrained weights help small datasets most: locality finetune "
            f"{config.data.root} --from FILE, or a public name such as convit_tiny.fb_in1k",
        ]
    chosen = {name: value for name, value in chosen.items() if name not in given}
    config = replace(config, chosen)
    return config, notes, probed_sizes(config, side)


def probed_sizes(config: RunConfig, side: int) -> list[Any]:
    """Image sizes from which fine-tuning on images of `side` pixels chooses.

    The weights' own and smaller ones; of weights of fewer pixels, also the smallest of
    `PROBED_SIZES`, if the images reach it.
    """
    model, (smallest, *_) = config.model, PROBED_SIZES
    own, fixed = model.img_size, "img_size" in getattr(model, "arguments", {})
    sizes = []
    for size in () if fixed else PROBED_SIZES:
        with contextlib.suppress(UserError):  # not a multiple of the patches
            replace(config, {"model.img_size": size})
            sizes += [size] if size < min(to_2tuple(own)) or size == smallest <= side else []
    return sorted({*sizes, own}, key=lambda size: math.prod(to_2tuple(size)))


def image_size(side: int) -> int:
    """The image size of a run for images of `side` pixels."""
    return max((size for size in SIZES if size <= side), default=SIZES[0])


def sized(model: str, size: int) -> dict[str, Any]:
    """Image size of a model, and its patches or keys.

    At least 7×7 patches of at most 8 pixels; a CvT's stage of 2×2 tokens has all four as keys,
    since attention to one key does nothing.
    """
    chosen: dict[str, Any] = {"model.img_size": size}
    config = None if model.startswith(PREFIX) else variant(model).config
    if isinstance(config, ViTConfig):
        chosen["model.patch_size"] = 4 if size in (28, 48) else max(1, min(8, size // 8))
    if isinstance(config, CvTConfig) and config.grids((size, size))[-1] <= (2, 2):
        chosen["model.kv_stride"] = (*config.per_stage("kv_stride")[:-1], 1)
    return chosen


def batch_size(images: int, small: bool) -> int:
    """The batch size for this many training images; `small` as by `is_small`."""
    if images >= 20_000:
        return 128
    return 64 if small or images >= 2000 else 32


def median_shorter_side(sizes: Iterable[tuple[int, int]]) -> int:
    """The median shorter side of images, in pixels."""
    return round(statistics.median(map(min, sizes)))


def sampled_sizes(source: ImageSource) -> list[tuple[int, int]]:
    """(width, height) of a sample of images, in pixels."""
    sizes = []
    for index in np.linspace(0, len(source) - 1, min(_SAMPLED_IMAGES, len(source))).astype(int):
        with contextlib.suppress(BadImage):
            sizes.append(source.size(int(index)))
    if not sizes:
        raise UserError(f"none of the sampled images can be read, such as {source.describe(0)}")
    return sizes


def crop_settings(
    given: Mapping[str, Any], sizes: list[tuple[int, int]]
) -> tuple[dict[str, Any], str]:
    """Settings that keep the ends of long images, unless given, and what a centre crop drops."""
    shape = to_2tuple(given.get("model.img_size") or 1)
    dropped = statistics.mean(cropped_share(*size, shape) for size in sizes)
    if dropped < 0.005 or given.get("input.crop_mode") == "squash":
        return {}, ""
    said = f"; a centre crop drops {dropped:.0%} of the pixels"
    if dropped <= MOST_CROPPED or "input.crop_mode" in given:
        return {}, said
    # A random area of a long image is a short piece of it.
    squash = {"input.crop_mode": "squash", "augment.crop": "pad"}
    return squash, f"{said}, so images are squashed (--input.crop_mode center crops them)"
