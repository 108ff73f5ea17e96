"""Configuration of data: the dataset, preprocessing and augmentation."""

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from locality import checks
from locality.errors import UserError, wrap_errors
from locality.settings import check, setting

# Pillow warns of decompression bombs beyond this many pixels, and refuses twice as many.
PIXEL_LIMIT = 89_478_485

# Statistics of ImageNet's training images, per channel, 0 … 1; public weights expect them.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a dataset without its files; `locality.data.datasets` opens it.

    Attributes:
        images: numbers of training images, validation images and classes, for plans; None if
            they are known once it is opened.
        needs_root: whether a folder has to be given.
        title: its name in messages.
        content: what torchvision's reader expects in the folder, if that reads it.
        of: the dataset of which it shows the patches of `patch` pixels in another order: one for
            all images, or this `share` of them in orders of their own.
    """

    images: tuple[int, int, int] | None = None
    needs_root: bool = True
    title: str = ""
    content: str = ""
    of: str = ""
    patch: int = 0
    share: float | None = None


DATASETS = {
    "digits": DatasetInfo(needs_root=False),
    "folder": DatasetInfo(),
    "table": DatasetInfo(),
    "arrow": DatasetInfo(),
    "fashion_mnist": DatasetInfo((60_000, 10_000, 10), False, "Fashion-MNIST", "FashionMNIST/raw"),
    "cifar10": DatasetInfo(
        *((50_000, 10_000, 10), True, "CIFAR-10"),
        content="cifar-10-batches-py, unpacked from cifar-10-python.tar.gz",
    ),
    "cifar10_jpeg": DatasetInfo((50_000, 10_000, 10), title="CIFAR-10 as JPEG files"),
    "cifar100": DatasetInfo(
        *((50_000, 10_000, 100), True, "CIFAR-100"),
        content="cifar-100-python, unpacked from cifar-100-python.tar.gz",
    ),
    "flowers102": DatasetInfo(
        *((2_040, 6_149, 102), True, "Flowers-102"),
        content="flowers-102 with jpg/, imagelabels.mat and setid.mat",
    ),
    "pets": DatasetInfo(
        *((3_680, 3_669, 37), True, "Oxford-IIIT Pets"),
        content="oxford-iiit-pet with images/ and annotations/",
    ),
    "imagenet": DatasetInfo((1_281_167, 50_000, 1000)),
    "imagenet100": DatasetInfo((128_117, 5_000, 100)),
    "tiny_imagenet": DatasetInfo((100_000, 10_000, 200)),
}
"""What is known of each dataset, by name."""

_SHUFFLED = {"permuted": None, "shuffled_25": 0.25, "shuffled_50": 0.5, "shuffled_100": 1.0}
DATASETS |= {
    f"{of}_{kind}": replace(DATASETS[of], title="", content="", of=of, patch=patch, share=share)
    for of, patch in (("digits", 2), ("fashion_mnist", 4), ("cifar10_jpeg", 4))
    for kind, share in _SHUFFLED.items()
}

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
Part = tuple[checks.Share, checks.Share]
GreyBits = Annotated[int, Meta(ge=8, le=16)]


@dataclass(frozen=True)
class Decoding:
    """Decoding settings; see `locality.data.decoding`.

    Attributes:
        exif: apply the EXIF orientation.
        max_pixels: refuse larger images before allocating memory.
        grey_bits: as in `DataConfig`.
        least: decode a JPEG at the smallest of its scales (1, 1/2, 1/4, 1/8) whose sides are at
            least as long; None decodes in full.
    """

    exif: bool = False
    max_pixels: int = PIXEL_LIMIT
    grey_bits: int = 16
    least: int | None = None


DEFAULT_DECODING = Decoding()


@dataclass(frozen=True)
class DataConfig:
    """The training and validation images of a run.

    Attributes:
        dataset: digits, folder (a folder of images per class), table, arrow, cifar10,
            cifar10_jpeg (CIFAR-10 as files in train/CLASS and test/CLASS), cifar100, fashion_mnist,
            flowers102, pets, imagenet, imagenet100, tiny_imagenet,
            or, with shuffled patches (`locality.data.datasets`), digits_permuted,
            digits_shuffled_25, digits_shuffled_50, digits_shuffled_100, and the same of
            fashion_mnist and cifar10_jpeg.
        root: folder of the dataset; `digits` has none, and `fashion_mnist` needs none if Debian's
            package is installed.
        download: let torchvision fetch what is missing (CIFAR, Fashion-MNIST, Flowers-102, Pets).
        part: part of each class's images available for training and evaluation, as two fractions
            of a fixed order: (0, 0.25) to choose settings and (0.25, 1) to report share no image,
            whatever the other settings.
        fraction: fraction of each class's training images to keep, in (0, 1].
        subset: "balanced" is a seeded random choice, nested across fractions; "sorted" keeps the
            first int(n · fraction) file names of each class, as the code released with the ConViT
            paper does.
        train_part: part of each class's training images to use, as two fractions of an order drawn
            by `split_seed`: (0, 0.2) and (0.2, 1) share no image. `fraction` applies to this part.
        val_part: evaluate on this part of the training images instead of the validation split, to
            choose settings; must not overlap `train_part`.
        fold: (i, k) evaluates on the i-th (from 0) of k equal parts of the training images and
            trains on the others; an existing validation split is ignored.
        val_fraction: fraction of each class held out if the dataset has no validation split.
        split_seed: seed of that split and of the parts; not the run's, so that all seeds share the
            validation images.
        on_bad_image: what to do with a file that cannot be decoded: "error" stops and names it,
            "skip" leaves it out and counts it, "auto" skips in training and stops in evaluation.
        on_changed_images: what to do if a run is resumed and its images differ from those of the
            checkpoint: "error" stops and names them, "resume" continues.
        max_bad_images: how many different files may be skipped before the run stops.
        exif: apply the EXIF orientation. Off by default, as in the published evaluations.
        grey_bits: bits that 16-bit greys use: 12 if 4095 is white, as in files of many cameras.
        label: the class of an image in a folder: "top" is the folder below the root or the split,
            "parent" the folder that holds the image, "path" all folders in between.
        image_column: image column of an `arrow` dataset, if several qualify, or of a `table`, by
            name or, if it has no heading, number from 1; "image" by default.
        label_column: the same for labels.
        group_column: column of an `arrow` dataset or `table` that names an image's group, such as
            its subject; a split keeps a group on one side.
        group_by: regular expression that finds the group in that column, or else in the file's
            name: '([^_]+)_' is what stands before the first underscore.
        allow_outside: read images outside the folder that a `table` or `arrow` dataset refers to.
            Off by default: they could be any file on this machine.
        workers: processes that load images; 0 loads in the training process.
    """

    dataset: str = "digits"
    root: str | None = setting(None, "execution")
    download: bool = setting(False, "execution")
    part: Part = (0.0, 1.0)
    fraction: checks.PositiveShare = setting(1.0, "replicate")
    subset: Literal["balanced", "sorted"] = "balanced"
    train_part: Part = (0.0, 1.0)
    val_part: Part | None = None
    fold: tuple[int, int] | None = setting(None, "replicate")
    val_fraction: checks.ProperShare = 0.25
    split_seed: checks.Natural = setting(0, "replicate")
    on_bad_image: Literal["auto", "error", "skip"] = setting("auto", "execution")
    on_changed_images: Literal["error", "resume"] = setting("error", "execution")
    max_bad_images: checks.Natural = setting(100, "execution")
    exif: bool = False
    grey_bits: GreyBits = 16
    label: Literal["top", "parent", "path"] = "top"
    image_column: str | None = None
    label_column: str | None = None
    group_column: str | None = None
    group_by: str | None = None
    allow_outside: bool = False
    workers: checks.UpTo4096 = setting(0, "execution")

    def __post_init__(self) -> None:
        checks.typed("dataset", self.dataset, Literal[*DATASETS])
        check(self)
        with wrap_errors(f"group_by is {self.group_by!r}, not a regular expression", re.error):
            re.compile(self.group_by or "")
        for name in ("part", "train_part", "val_part"):
            if (part := getattr(self, name)) and part[0] >= part[1]:
                raise UserError(f"{name} is {part}; give two fractions, the smaller first")
        if self.val_part is not None:
            lows, highs = zip(self.train_part, self.val_part, strict=True)
            if max(lows) < min(highs):
                raise UserError(f"train_part {self.train_part} overlaps val_part {self.val_part}")
        if self.fold is not None:
            checks.integer("fold's k", self.fold[1], 2)
            checks.integer("fold's i", self.fold[0], 0, self.fold[1] - 1)
            if self.val_part is not None or self.train_part != (0.0, 1.0):
                raise UserError("fold divides all images; leave out train_part and val_part")

    @property
    def percent(self) -> str:
        """`fraction` in percent, for names."""
        return f"{100 * self.fraction:g}"

    @property
    def train_share(self) -> float:
        """The share of the training images used, not counting left-out classes."""
        low, high = self.train_part
        return (high - low) * self.fraction * (1 - 1 / self.fold[1] if self.fold else 1)

    @property
    def decoding(self) -> Decoding:
        """The decoding settings."""
        return Decoding(exif=self.exif, grey_bits=self.grey_bits)

    def loading(self, training: bool) -> dict[str, Any]:
        """The arguments of `train_loader` and `eval_loader` that are settings."""
        skipping = {"on_bad_image": self.on_bad(training), "max_bad_images": self.max_bad_images}
        return skipping | {"workers": self.workers}

    def on_bad(self, training: bool) -> Literal["error", "skip"]:
        """`on_bad_image` with "auto" resolved: skip while training, stop in evaluation."""
        if self.on_bad_image == "auto":
            return "skip" if training else "error"
        return self.on_bad_image


@dataclass(frozen=True)
class InputConfig:
    """Deterministic preprocessing of decoded images, in timm's terms.

    Attributes:
        img_size: size of the images in pixels, a number or (height, width); None is the model's
            own.
        mean: mean of each channel, on the 0 … 1 scale.
        std: standard deviation of each channel, on the 0 … 1 scale.
        interpolation: used for every resize.
        crop_pct: the shorter side is resized to image size / crop_pct before the centre crop;
            0.875 is 256 → 224.
        crop_mode: "center" keeps the aspect ratio and crops the centre; "squash" resizes both
            sides, ignoring the aspect ratio.
        decode: "full" decodes images as they are; "shrunk" shrinks them while decoding until the
            shorter side is twice the image size, and keeps them in memory.
    """

    img_size: checks.ImageSize | None = None
    mean: tuple[checks.NotNegative, ...] = IMAGENET_MEAN
    std: tuple[checks.Positive, ...] = IMAGENET_STD
    interpolation: Interpolation = "bicubic"
    crop_pct: Annotated[float, Meta(ge=0.1, le=1)] = 0.875
    crop_mode: Literal["center", "squash"] = "center"
    decode: Literal["full", "shrunk"] = "full"

    def __post_init__(self) -> None:
        check(self)
        if not len(self.mean) == len(self.std) > 0:
            raise UserError(
                f"mean has {len(self.mean)} values and std {len(self.std)}; give one per channel"
            )

    @classmethod
    def imagenet(cls, img_size: int | tuple[int, int], in_chans: int = 3) -> Self:
        """ImageNet's statistics, for models that state none; see `with_channels`."""
        return cls(img_size).with_channels(in_chans)

    def at(self, img_size: int | tuple[int, int]) -> Self:
        """The same preprocessing at another image size."""
        return replace(self, img_size=img_size)

    def with_default_size(self, img_size: int | tuple[int, int]) -> Self:
        """The same preprocessing, with `img_size` if it has none."""
        return self.at(img_size) if self.img_size is None else self

    def with_channels(self, in_chans: int) -> Self:
        """The same preprocessing; for another number of channels, with average mean and std."""
        if in_chans == len(self.mean):
            return self
        mean, std = (sum(of) / len(of) for of in (self.mean, self.std))
        return replace(self, mean=(mean,) * in_chans, std=(std,) * in_chans)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the result, in pixels."""
        if self.img_size is None:
            raise UserError("the preprocessing has no image size; give img_size")
        return self.img_size if isinstance(self.img_size, tuple) else (self.img_size,) * 2

    @property
    def least(self) -> int | None:
        """The shorter side of shrunk images, in pixels; None if they keep their size.

        Twice the image size: a random area of a quarter of the image still has all its pixels.
        """
        side = max(self.size)
        return max(2 * side, math.ceil(side / self.crop_pct)) if self.decode == "shrunk" else None


@dataclass(frozen=True)
class Preprocessing(InputConfig):
    """Preprocessing of image files for a model, including how they are decoded.

    Attributes:
        exif, grey_bits: as in `DataConfig`.
    """

    exif: bool = False
    grey_bits: GreyBits = 16

    @property
    def decoding(self) -> Decoding:
        """How image files are decoded."""
        return Decoding(exif=self.exif, grey_bits=self.grey_bits, least=self.least)


def check_rgb(what: str, channels: int, remedy: str) -> None:
    """Check that a model takes the images of datasets, which are read in RGB."""
    if channels != 3:
        raise UserError(
            f"{what} takes images of {channels} channels, but datasets are read in RGB; {remedy}"
        )


_POLICY = re.compile(
    r"(rand|augmix)(-[a-z]+[\d.]+)*|(original|originalr|v0|v0r|3a)(-[a-z]+[\d.]*)*"
)


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of training images. The defaults are mild; recipes set every value.

    Attributes:
        crop: "resized" is a random area and aspect ratio (RandomResizedCrop); "pad" resizes,
            pads by `pad` pixels and cuts a random window; "none" resizes and cuts the centre.
        pad: padding of the "pad" crop in pixels.
        scale: area range of the "resized" crop, as fractions of the image.
        ratio: aspect-ratio range (width / height) of the "resized" crop.
        hflip: probability of a horizontal flip.
        color_jitter: strength of brightness, contrast and saturation jitter; ignored if
            `auto_augment` is set, as in timm.
        auto_augment: timm's policy string, such as "rand-m9-mstd0.5-inc1".
        affine: strength of random affine maps: rotation by up to this many degrees, and scale and
            shear by up to as many percent.
        padding: what the "pad" crop and affine maps show outside the image: "zeros" is black,
            "border" repeats its border.
        random_erasing: probability of erasing one rectangle with noise.
        interpolation: of the "resized" crop; "random" picks bilinear or bicubic; None is that of
            evaluation.
        mixup: α of mixup's Beta distribution; 0 is off.
        cutmix: α of CutMix's Beta distribution; 0 is off.
        mixup_prob: probability that a batch is mixed.
        mixup_switch_prob: probability of CutMix if both are on.
        repeats: how many times in a row an image is drawn (repeated augmentation).
    """

    crop: Literal["resized", "pad", "none"] = "resized"
    pad: checks.UpTo4096 = 4
    scale: tuple[checks.PositiveShare, checks.PositiveShare] = (0.08, 1.0)
    ratio: tuple[checks.Positive, checks.Positive] = (3 / 4, 4 / 3)
    hflip: checks.Share = 0.5
    color_jitter: checks.NotNegative = 0.0
    auto_augment: str | None = None
    affine: Annotated[float, Meta(ge=0, le=90)] = 0.0
    padding: Literal["zeros", "border"] = "zeros"
    random_erasing: checks.Share = 0.0
    interpolation: Interpolation | Literal["random"] | None = None
    mixup: checks.NotNegative = 0.0
    cutmix: checks.NotNegative = 0.0
    mixup_prob: checks.Share = 1.0
    mixup_switch_prob: checks.Share = 0.5
    repeats: checks.Count = 1

    def __post_init__(self) -> None:
        check(self)
        for name in ("scale", "ratio"):
            if (limits := getattr(self, name)) != tuple(sorted(limits)):
                raise UserError(f"{name} is {limits}; give two numbers, the smaller first")
        # timm asserts on most mistakes in these strings, or ignores them silently.
        if self.auto_augment is not None and not _POLICY.fullmatch(self.auto_augment):
            raise UserError(
                f"auto_augment is '{self.auto_augment}'; give one of timm's policies, such as "
                f"rand-m9-mstd0.5-inc1, augmix-m3-w3, original, v0 or 3a"
            )
