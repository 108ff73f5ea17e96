"""Settings out of range are refused where they are made."""

import dataclasses
import pkgutil
from pathlib import Path

import pytest

from locality.data import DATASETS, AugmentConfig, DataConfig, Preprocessing
from locality.errors import UserError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "digit"}, r"unknown value of dataset 'digit'; did you mean digits"),
        ({"subset": "random"}, r"unknown value of subset 'random'"),
        ({"on_bad_image": "ignore"}, r"unknown value of on_bad_image 'ignore'"),
        ({"fraction": 0.0}, "fraction is"),
        ({"fraction": 1.5}, r"fraction is 1.5"),
        ({"fraction": float("nan")}, r"fraction is nan"),
        ({"fraction": "half"}, r"fraction is 'half'"),
        ({"val_fraction": 1.0}, "val_fraction is"),
        ({"first_classes": 0}, "first_classes is"),
        ({"first_classes": 2.5}, r"first_classes is 2.5"),
        ({"skip_classes": -1}, r"skip_classes is -1"),
        (
            {"train_part": (0.5, 0.5)},
            r"train_part is \(0.5, 0.5\); give two fractions with 0 ≤ low",
        ),
        ({"fold": (3, 3)}, "fold's i is"),
        ({"fold": (0, 2), "train_part": (0, 0.5)}, "leave out train_part"),
        ({"val_part": (0.5, 1)}, "overlap"),
        ({"workers": -1}, r"workers is -1"),
        ({"workers": True}, r"workers is True"),
        ({"subset_seed": -3}, r"subset_seed is -3"),
        ({"split_seed": 0.5}, r"split_seed is 0.5"),
        ({"max_bad_images": -1}, r"max_bad_images is -1"),
        ({"max_pixels": 10**9}, "max_pixels is"),
    ],
)
def test_data_settings(settings, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": "resize"}, r"unknown value of crop 'resize'; did you mean resized"),
        (
            {"interpolation": "cubic"},
            r"unknown value of interpolation 'cubic'; did you mean bicubic",
        ),
        ({"pad": -1}, r"pad is -1"),
        ({"repeats": 0}, r"repeats is 0"),
        ({"hflip": 1.1}, "hflip is"),
        ({"random_erasing": -0.1}, r"random_erasing is -0.1"),
        ({"mixup": float("inf")}, "mixup is"),
        ({"cutmix": -1}, r"cutmix is -1"),
        ({"mixup_prob": 2}, r"mixup_prob is 2"),
        ({"color_jitter": -0.4}, r"color_jitter is -0.4"),
        ({"scale": (0.5, 0.1)}, r"scale is \(0.5, 0.1\); give two numbers with 0 < low ≤ high ≤ 1"),
        ({"scale": (0.5, 1.1)}, r"scale is"),
        ({"ratio": (0.0, 1.0)}, r"ratio is"),
        ({"ratio": (1.0,)}, r"ratio is"),
        ({"auto_augment": "random-m9"}, r"auto_augment is 'random-m9'; give one of timm's"),
        ({"auto_augment": "rand-9"}, r"'9' is not a setting"),
        ({"auto_augment": "rand-m"}, r"'m' is not a setting"),
    ],
)
def test_augment_settings(settings, message):
    with pytest.raises(UserError, match=message):
        AugmentConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_pct": 0.0}, r"crop_pct is 0.0"),
        ({"crop_mode": "centre"}, r"unknown value of crop_mode 'centre'; did you mean center"),
        ({"interpolation": "random"}, r"unknown value of interpolation 'random'"),
        ({"mean": (0.5, 0.5)}, r"mean has 2 values and std 3"),
        ({"std": (0.5, 0.0, 0.5)}, "std is"),
        ({"img_size": 0}, r"img_size is 0"),
        ({"img_size": (8, -8)}, r"img_size is"),
        ({"img_size": (8, 8, 8)}, "img_size is"),
    ],
)
def test_preprocessing_settings(settings, message):
    with pytest.raises(UserError, match=message):
        Preprocessing(**settings)


@pytest.mark.parametrize(
    "policy",
    ["rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.7", "augmix-m5-w4-d2", "3a", "v0", "original-mstd0.5"],
)
def test_policies_of_timm_are_accepted(policy):
    assert AugmentConfig(auto_augment=policy).auto_augment == policy


def test_settings_cannot_be_changed_behind_the_checks():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DataConfig().fraction = 2.0


def test_every_dataset_can_be_opened():
    for row in DATASETS.values():
        assert callable(pkgutil.resolve_name(f"locality.data.{row['opener']}"))


@pytest.mark.parametrize(
    ("choice", "training", "expected"),
    [
        ("auto", True, "skip"),
        ("auto", False, "error"),
        ("error", True, "error"),
        ("skip", False, "skip"),
    ],
)
def test_bad_images_are_skipped_in_training_and_errors_in_evaluation(choice, training, expected):
    assert DataConfig(on_bad_image=choice).on_bad(training) == expected


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_dataset_is_described(dataset):
    page = (Path(__file__).parents[2] / "docs/images.md").read_text()
    assert dataset in DataConfig.__doc__ and f"`{dataset}`" in page
