"""Recipes: named runs, each a function that returns a complete configuration.

Docstrings give the command, the cost and the expected result. Cost is in exaFLOPs (10¹⁸) of
training: 3 × forward, 2 operations per multiply-accumulate; docs/clusters.md has the hours. The
ImageNet-sized recipes have not been run here: their expected numbers are the papers'.

Any setting can be overridden on the command line:
`locality train digits --model.name deit_nano --data.fraction 0.05`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from locality.checks import ImageSize, typed
from locality.data.config import AugmentConfig, DataConfig, InputConfig
from locality.errors import lookup
from locality.models.config import to_2tuple
from locality.models.variants import PREFIX, named, variant
from locality.settings import replace, settings_of
from locality.training.config import (
    EngineConfig,
    ObjectiveConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
)

# The DeiT recipe's augmentation, which both papers use for all from-scratch ImageNet runs.
DEIT_AUGMENT = AugmentConfig(
    crop="resized",
    hflip=0.5,
    color_jitter=0.4,
    auto_augment="rand-m9-mstd0.5-inc1",
    random_erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
    mixup_prob=1.0,
    mixup_switch_prob=0.5,
    repeats=3,
)


def _as(base: RunConfig, recipe: str, **groups: Any) -> RunConfig:
    """The recipe `base` under another name, with some settings of its groups changed.

    Numbers stay as written; `recipe` converts them to the settings' types.
    """
    for group, changed in groups.items():
        if isinstance(changed, Mapping):
            groups[group] = dataclasses.replace(getattr(base, group), **changed)
    return dataclasses.replace(base, recipe=recipe, **groups)


def digits(model: str = "convit_nano") -> RunConfig:
    """Handwritten digits of 8×8 pixels: the small-image recipe.

    Command: `locality train digits`, and `--model.name deit_nano` for the baseline.
    Cost: 1,200 steps of 64 images, about 50 s on one core.
    Expect: 92% for ConViT and 90% for DeiT on 5% of the images (`--data.fraction 0.05`), 100% and
    99% on all (one seed).
    Chosen from 24 random settings on a quarter of the images, `--data.part "[0, 0.25]"`
    (docs/recipes.md); report results on the others, "[0.25, 1]".
    """
    return RunConfig(
        recipe="digits",
        model=named(model),
        data=DataConfig("digits"),
        input=InputConfig(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_pct=1.0),
        augment=AugmentConfig(
            crop="pad", pad=1, hflip=0.0, affine=5.0, mixup=0.2, random_erasing=0.25
        ),
        optim=OptimConfig("adamuon", lr=6.2e-3, weight_decay=0.1),
        schedule=ScheduleConfig(steps=1200, warmup=100, eval_every=120),
        objective=ObjectiveConfig(label_smoothing=0.1),
        engine=EngineConfig(batch_size=64),
    )


def fashion_mnist(model: str = "convit_nano") -> RunConfig:
    """Fashion-MNIST: photographs of clothes, 28×28, in 7×7 patches, or 14×14 with patch size 2.

    Command: `locality train fashion_mnist`, and `--model.name deit_nano` for the baseline. Without
    Debian's dataset-fashion-mnist, also `--data.root DATA --data.download true`.
    Cost: 3,000 steps of 64 images, 4 to 8 minutes on one core; 14×14 patches cost 5 times as much.
    Expect: not in the papers; docs/findings.md has our results.
    Chosen on 500 photographs from the eight best settings on digits (docs/recipes.md).
    """
    patched = model.startswith(PREFIX) or hasattr(variant(model).config, "patch_size")
    return _as(
        digits(model),
        "fashion_mnist",
        model=named(model, img_size=28, patch_size=4 if patched else None),
        data={"dataset": "fashion_mnist"},
        augment={"affine": 0.0, "mixup": 0.4, "cutmix": 0.5},
        optim={"lr": 7.1e-3, "weight_decay": 0.016},
        objective={"label_smoothing": 0.0},
        schedule={"steps": 3000, "warmup": 200, "eval_every": 300},
    )


def convit_cifar(model: str = "convit_micro", dataset: str = "cifar100") -> RunConfig:
    """CIFAR-100 or CIFAR-10 at its own 32×32 pixels, for ConViT and DeiT, on one GPU.

    Published: DeiT's recipe unchanged, for 1000 epochs at 224 pixels (appendix C), nothing at 32
    pixels. Kept from it: AdamW, weight decay, cosine, warm-up, mixup, cutmix, RandAugment, erasing,
    label smoothing and stochastic depth.

    Our choice: 8×8 patches of 4 pixels and a model of 2 million parameters, a fifteenth of the
    cost of an epoch; the padded crop that is usual on CIFAR, since a random area of 8% has too few
    pixels; no repeated augmentation; twice the learning rate, 1e-3 per 512 images, at batches of
    256; 200 epochs. These choices were not tuned, and no run of this length has been made here.

    Command: `locality train convit_cifar --data.root DATA --data.download true`, and
    `--data.dataset cifar10`, `--model deit_micro`.
    Cost: 0.008 exaFLOPs for `convit_micro`, minutes on a GPU.
    Expect: not measured here, not in the paper; 75.3% (ConViT-Ti, Li et al. 2022) on CIFAR-100.
    """
    return _as(
        deit_300(model),
        "convit_cifar",
        model=named(model, img_size=32, drop_path_rate=0.1),
        data={"dataset": dataset, "workers": 4},
        input={"crop_pct": 1.0},
        augment={"crop": "pad", "pad": 4, "repeats": 1},
        optim={"lr": 1e-3, "eps": None, "decay_positions": False},
        schedule={"epochs": 200, "warmup": 10, "eval_every": 5},
        engine={"batch_size": 256},
    )


def cvt_cifar(model: str = "cvt_micro", dataset: str = "cifar100") -> RunConfig:
    """CIFAR-100 or CIFAR-10 from scratch at its own 32×32 pixels, for CvT, on one GPU.

    Published: transfer from ImageNet-22k to CIFAR at 384 pixels (Table 4); nothing from
    scratch or at 32 pixels. Kept from the ImageNet recipe: what it shares with DeiT's, and weight
    decay 0.05.

    Our choice: strides of 2, 2 and 1 instead of 4, 2 and 2, so that the stages have 16×16, 8×8 and
    8×8 tokens; everything else as in `convit_cifar`, to compare the two. These choices were not
    tuned, and no run of this length has been made here.

    Command: `locality train cvt_cifar --data.root DATA --data.download true`, and
    `--data.dataset cifar10`.
    Cost: 0.007 exaFLOPs for `cvt_micro`, minutes on a GPU.
    Expect: not measured here, not in the paper; 73.5% (CvT-13, Liu et al. 2021) on CIFAR-100.
    """
    return _as(convit_cifar(model, dataset), "cvt_cifar")


def deit_300(model: str = "convit_small") -> RunConfig:
    """ImageNet from scratch in 300 epochs, as DeiT and ConViT were trained (ConViT Table 1).

    The learning rate is 5e-4 per 512 images, so 1e-3 at the batch of 1024. The cosine spans all 300
    epochs, of which the first 5 are warm-up; timm's 10 epochs of cool-down would follow, but the
    released code never runs them. Weight decay applies to v_pos as in that code.

    Wider "+" models take 4e-4 at a batch of 512 (§3). On a fraction of the images,
    `--schedule.constant_images true` shows as many (Table 2): see docs/training.md.

    Differs from the released code: the learning rate follows the step, theirs the previous epoch
    (epochs 0 and 1 both train at 1e-6); class token and position embedding have no weight decay,
    while theirs, wrapped for several processes, decays them.

    Command: `locality train deit_300 --data.root IMAGENET`, under torchrun on several GPUs.
    Cost: 13 exaFLOPs for `convit_small`, 3 for `convit_tiny`, 40 for `convit_base`.
    Expect: top-1 73.1 (`convit_tiny`), 81.3 (`convit_small`), 82.4 (`convit_base`); 72.2, 79.8,
    81.8 for their `deit_` namesakes.
    """
    return RunConfig(
        recipe="deit_300",
        model=named(model, img_size=224, drop_path_rate=0.1),
        data=DataConfig("imagenet", workers=8),
        augment=DEIT_AUGMENT,
        optim=OptimConfig(
            "adamw", lr=5e-4, lr_batch=512, weight_decay=0.05, eps=1e-8, decay_positions=True
        ),
        schedule=ScheduleConfig(epochs=300, steps=None, warmup=5, eval_every=1),
        objective=ObjectiveConfig(label_smoothing=0.1),
        engine=EngineConfig(batch_size=1024),
    )


def cvt_300(model: str = "cvt_13") -> RunConfig:
    """ImageNet from scratch in 300 epochs, as CvT was trained (CvT §4.1, Table 3).

    The paper prints a learning rate of 0.02 at a batch of 2048. This recipe follows the released
    configuration, with a tenth of that, 2.5e-4 per 256 images. Weight decay is 0.05 for CvT-13 and
    0.1 for larger models; CvT-21 has repeated augmentation.

    Differs from the released file of CvT-21, which besides mixup and cutmix has only crop and flip;
    the paper, and this recipe, give every model DeiT's augmentation.

    Command: `locality train cvt_300 --data.root IMAGENET`
    Cost: 11 exaFLOPs for `cvt_13`, 17 for `cvt_21`.
    Expect: top-1 81.6 (`cvt_13`), 82.5 (`cvt_21`).
    """
    decay = 0.05 if model.startswith("cvt_13") else 0.1
    return RunConfig(
        recipe="cvt_300",
        model=named(model, img_size=224),
        data=DataConfig("imagenet", workers=8),
        augment=dataclasses.replace(DEIT_AUGMENT, repeats=3 if model == "cvt_21" else 1),
        optim=OptimConfig("adamw", lr=2.5e-4, lr_batch=256, weight_decay=decay),
        schedule=ScheduleConfig(epochs=300, steps=None, warmup=5, eval_every=1),
        objective=ObjectiveConfig(label_smoothing=0.1),
        engine=EngineConfig(batch_size=2048, channels_last=True),
    )


# Mild: stronger RandAugment posterises and inverts images, which then do not look like photographs.
PHOTO_AUGMENT = AugmentConfig(
    crop="resized", scale=(0.35, 1.0), hflip=0.5, auto_augment="rand-m5-mstd0.5-inc1"
)
SMALL_SIDE = 96
"""Largest image side in pixels for which `photos` uses its small-image settings."""


def is_small(img_size: Any) -> bool:
    """Whether `photos` uses its settings for small images."""
    return max(to_2tuple(img_size)) <= SMALL_SIDE


def padding(img_size: Any) -> int:
    """`augment.pad` of `photos` for small images, an eighth of their longer side."""
    return max(to_2tuple(img_size)) // 8


def photos(model: str = "cvt_photo", img_size: ImageSize | None = None) -> RunConfig:
    """A custom dataset of hundreds to thousands of photographs, from scratch in ten minutes.

    Images of up to 96 pixels are cropped, flipped and recoloured a little; random areas and affine
    maps blur so few pixels, and RandAugment takes as long as a small model. Larger ones have random
    areas and mild RandAugment. Label smoothing keeps the model from overfitting. The EXIF
    orientation is applied, and the aspect ratio is kept: evaluation crops the centre. The last
    weights are kept, those of the lowest learning rate.

    Command: `locality train photos --data.root FOLDER`, or `locality train FOLDER`. Image size and
    batch are then chosen for the images; the length is that of `--minutes`, `--steps` or
    `--epochs`.
    Cost: ten minutes anywhere.
    Expect: depends on the images; pretrained weights (`finetune`) help more than time.
    """
    network, augment = named(model, img_size=img_size), PHOTO_AUGMENT
    small = is_small(network.img_size)
    optim = OptimConfig("adamw", lr=1e-3, lr_batch=64, weight_decay=0.05)
    if small:
        augment = AugmentConfig(
            crop="pad", pad=padding(network.img_size), hflip=0.5, padding="border", color_jitter=0.2
        )
        optim = OptimConfig("adamuon", lr=6e-3, weight_decay=0.05)
    return RunConfig(
        recipe="photos",
        model=network if small else network.with_overrides(drop_path_rate=0.1),
        data=DataConfig("folder", exif=True, val_fraction=0.1),
        input=InputConfig(crop_pct=1.0, decode="shrunk"),
        augment=augment,
        optim=optim,
        schedule=ScheduleConfig(steps=2000, warmup=30, eval_every=200),
        objective=ObjectiveConfig(label_smoothing=0.1),
        engine=EngineConfig(batch_size=64 if small else 32),
    )


def photo_weights(model: str = "cvt_photo_plus", img_size: ImageSize | None = 64) -> RunConfig:
    """Weights that know photographs: Tiny ImageNet's 100,000 of 64 pixels, from scratch.

    The settings of `photos` for small images, with batches of 128.

    Command: `locality train photo_weights --data.root tiny-imagenet-200`
    Cost: 0.0002 exaFLOPs; 7,000 steps of `cvt_photo_plus` took 1.9 hours of one core.
    Expect: 49.1% of 200 classes for `cvt_photo_plus` (one run).
    """
    return _as(
        photos(model, img_size),
        "photo_weights",
        data={"dataset": "tiny_imagenet"},
        schedule={"steps": 7000, "warmup": 200, "eval_every": 1000, "save_every": 500},
        engine={"batch_size": 128, "precision": "fp32"},
    )


def finetune(
    model: str = "convit_tiny",
    weights: str = "convit_tiny.fb_in1k",
    img_size: ImageSize | None = None,
) -> RunConfig:
    """Fine-tuning on a custom dataset.

    The classifier is fitted first. Early layers learn more slowly than late ones (`layer_decay`),
    at a fortieth of the rate from scratch. Below 5,000 images areas are large, and RandAugment,
    mixup and cutmix are off: a run of minutes then sees each image a few times. Of a run of steps
    or epochs, the weights of the best evaluation are kept. At 96 pixels or fewer all of this is as
    in `photos`, since weights of that size know little.

    Command: `locality train finetune --data.root FOLDER --weights WEIGHTS`, or `locality
    finetune FOLDER --from WEIGHTS`: a run folder, a file, public weights, or "timm/" and a timm
    model name. Architecture and preprocessing are then those of the weights; the batch is chosen as
    in `photos`. `--model.img_size` changes the resolution.
    Cost: ten minutes.
    Expect: depends on the images.
    """
    scratch = photos(model, img_size)
    start = {"weights": weights, "model": named(model, img_size=img_size)}
    if is_small(scratch.model.img_size):
        return _as(scratch, "finetune", **start, optim={"probe": True})
    length = {"steps": 500, "warmup": 50, "eval_every": 50, "patience": 150}
    return _as(
        scratch,
        "finetune",
        **start,
        augment={"scale": (0.8, 1.0), "ratio": (0.8, 1.25), "auto_augment": None},
        optim={"lr": 1e-4, "layer_decay": 0.75, "lr_batch": 256, "clip_grad": 1.0, "probe": True},
        schedule=length | {"warmup_lr": 0.0, "min_lr": 1e-6},
    )


RECIPES: dict[str, Callable[..., RunConfig]] = {
    function.__name__: function
    for function in (
        *(digits, fashion_mnist, convit_cifar, cvt_cifar, deit_300, cvt_300),
        *(photos, photo_weights, finetune),
    )
}
"""All recipes by name."""


CUSTOM_DATA_RECIPES = ("photos", "finetune")
"""Recipes whose remaining settings `autofit` chooses for the images and the machine."""


def default_model(name: str) -> str:
    """The name of a recipe's model."""
    return inspect.signature(lookup("recipe", name, RECIPES)).parameters["model"].default


# Arguments of recipes that other settings depend on, such as CvT's weight decay on the model.
_CHOICES = {
    "model": "model.name",
    "img_size": "model.img_size",
    "weights": "weights",
    "dataset": "data.dataset",
}


def converted(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, as their types; those of models stay as they are.

    Raises:
        UserError: for a value of another type, or out of range.
    """
    types = settings_of(RunConfig)
    return {
        n: typed(n, x, types[n].hint) if n in types and not n.startswith("model.") else x
        for n, x in changes.items()
    }


def recipe(name: str, changes: Mapping[str, Any] = {}) -> RunConfig:
    """The configuration of a recipe, with settings changed and those that depend on them.

    Args:
        name: one of `RECIPES`.
        changes: settings by dotted name.

    Raises:
        UserError: if a name is unknown (with the nearest), or as `settings.replace`.
    """
    function, changes = lookup("recipe", name, RECIPES), converted(changes)
    known = inspect.signature(function).parameters
    choices = {key: changes[at] for key, at in _CHOICES.items() if key in known and at in changes}
    config = function(**choices)
    if not changes:
        return config
    return replace(config, _rescaled_schedule(config.schedule, changes) | changes)


def _rescaled_schedule(recipe: ScheduleConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule settings that depend on the length, if that is changed.

    In another unit, all of them are scaled with the length, with at most 20 evaluations. In a
    shorter run in the recipe's own unit, only the warm-up is scaled. A patience equal to
    the run's length, which keeps the best weights, stays equal. In minutes, lengths are fixed.
    """
    if changes.get("schedule.minutes") is not None:
        return {f"schedule.{name}": value for name, value in _MINUTES.items()}
    unit, other = ("epochs", "steps") if recipe.steps is None else ("steps", "epochs")
    length = changes.get(f"schedule.{other}")
    if length is None:
        share = min(1, max(0, changes.get(f"schedule.{unit}") or recipe.length) / recipe.length)
        changed = {"schedule.warmup": share * recipe.warmup}
        given = changes.get(f"schedule.{unit}")
        keeps_best = given is not None and recipe.patience == recipe.length
        return changed | ({"schedule.patience": given} if keeps_best else {})
    scale = length / getattr(recipe, unit)
    parts = ("warmup", "eval_every", "save_every", "snapshot_every", "patience")
    own = {part: getattr(recipe, part) for part in parts}
    scaled = {f"schedule.{part}": scale * n for part, n in own.items() if n is not None}
    scaled["schedule.eval_every"] = max(scaled["schedule.eval_every"], length / 20)
    return {f"schedule.{unit}": None, **scaled}


# The schedule of a run of minutes.
_MINUTES: dict[str, Any] = {"constant_images": False, "warmup": 30, "eval_every": 50}
_MINUTES |= dict.fromkeys(("steps", "epochs", "patience", "save_every", "snapshot_every"))


def describe(name: str) -> str:
    """The docstring of a recipe: summary, command, cost and expected result."""
    return inspect.getdoc(lookup("recipe", name, RECIPES)) or ""
