"""Settings out of range are refused where they are made."""

from pathlib import Path

import pytest

from locality.data import AugmentConfig, DataConfig, Preprocessing
from locality.data.config import DATASETS
from locality.data.datasets import OPENERS
from locality.errors import UserError

BAD = {
    DataConfig: [
        *({"dataset": "digit"}, {"subset": "random"}, {"workers": -1}, {"workers": True}),
        *({"fraction": value} for value in (0.0, 1.5, float("nan"), "half")),
        *({"split_seed": -1}, {"split_seed": 0.5}),
        *({"train_part": (0.5, 0.5)}, {"fold": (3, 3)}, {"val_part": (0.5, 1)}),
        {"train_part": (0, 0.5), "fold": (0, 2)},
    ],
    AugmentConfig: [
        *({"crop": "resize"}, {"pad": -1}, {"repeats": 0}, {"hflip": 1.1}),
        *({"mixup": float("inf")}, {"affine": 91.0}),
        *({"scale": (0.5, 0.1)}, {"scale": (0.5, 1.1)}, {"ratio": (1.0,)}),
        *({"auto_augment": value} for value in ("random-m9", "rand-9", "rand-m")),
    ],
    Preprocessing: [
        *({"crop_pct": 0.0}, {"mean": (0.5, 0.5)}, {"std": (0.5, 0.0, 0.5)}),
        *({"img_size": value} for value in (0, (8, -8), (8, 8, 8))),
    ],
}


@pytest.mark.parametrize(
    ("kind", "settings"), [(kind, settings) for kind, bad in BAD.items() for settings in bad]
)
def test_what_is_out_of_range_is_named(kind, settings):
    with pytest.raises(UserError, match=next(iter(settings)).replace("val_part", "part")):
        kind(**settings)


@pytest.mark.parametrize(
    "policy",
    ["rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.7", "augmix-m5-w4-d2", "3a", "v0", "original-mstd0.5"],
)
def test_policies_of_timm_are_accepted(policy):
    assert AugmentConfig(auto_augment=policy).auto_augment == policy


def test_bad_images_are_skipped_in_training_and_errors_in_evaluation():
    assert [DataConfig().on_bad(training) for training in (True, False)] == ["skip", "error"]
    assert DataConfig(on_bad_image="error").on_bad(True) == "error"
    assert DataConfig(on_bad_image="skip").on_bad(False) == "skip"


@pytest.mark.parametrize("dataset", [name for name in DATASETS if not DATASETS[name].of])
def test_every_dataset_is_described(dataset):
    assert dataset in OPENERS
    page = (Path(__file__).parents[2] / "docs/images.md").read_text()
    assert dataset in DataConfig.__doc__ and f"`{dataset}`" in page
