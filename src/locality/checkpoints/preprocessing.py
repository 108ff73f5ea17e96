"""How an image has to be prepared for a model: size, crop, interpolation, normalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from PIL import Image
from timm.data import create_transform
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from locality import checks
from locality.data.config import INTERPOLATIONS
from locality.errors import UserError


@dataclass(frozen=True)
class Preprocessing:
    """What happens to an image before the model sees it, in timm's terms.

    Attributes:
        img_size: pixels of the result, a number or (height, width).
        mean, std: of each channel, for normalisation.
        interpolation: "bicubic", "bilinear", "nearest", …
        crop_pct: the share of the resized shorter side that the crop keeps.
        crop_mode: "center" resizes the shorter side and crops; "squash" resizes both sides.
    """

    img_size: int | tuple[int, int] = 224
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: Literal["center", "squash"] = "center"

    def __post_init__(self) -> None:
        checks.image_size(self.img_size)
        checks.one_of("interpolation", self.interpolation, INTERPOLATIONS)
        if not 0 < self.crop_pct <= 1:
            raise UserError(f"crop_pct has to lie in (0, 1], not {self.crop_pct}")
        if self.crop_mode not in ("center", "squash"):
            raise UserError(f"crop_mode='{self.crop_mode}' is not one of 'center', 'squash'")
        if not 0 < len(self.mean) == len(self.std) or min(self.std) <= 0:
            raise UserError(
                f"mean={self.mean} and std={self.std} have to have one value per channel, "
                f"std above 0"
            )

    @classmethod
    def imagenet(cls, img_size: int | tuple[int, int], in_chans: int = 3) -> Preprocessing:
        """ImageNet's, for a model that does not say; without colours, the mean over ImageNet's."""
        if in_chans == 3:
            return cls(img_size)
        mean, std = (sum(of) / 3 for of in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
        return cls(img_size, (mean,) * in_chans, (std,) * in_chans)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the result, in pixels."""
        return self.img_size if isinstance(self.img_size, tuple) else (self.img_size,) * 2

    def transform(self) -> Callable[[Image.Image], Tensor]:
        """From a PIL image to the model's input, (C, H, W) float."""
        return create_transform(
            input_size=(len(self.mean), *self.size),
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
        )

    def to_json(self) -> dict[str, Any]:
        """For `config.json`."""
        return asdict(self)
