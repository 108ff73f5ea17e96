"""ImageNet's folder, and its first 100 classes."""

import pytest

from locality.data import DataConfig, open_data
from locality.errors import UserError


def opened(dataset, root, **settings):
    return open_data(DataConfig(dataset=dataset, root=str(root), **settings), seed=0)


def test_imagenet_is_a_folder_with_both_parts(train_val):
    splits = opened("imagenet", train_val)
    assert splits.name == "imagenet" and len(splits.classes) == 3
    with pytest.raises(UserError, match="3 classes"):
        opened("imagenet100", train_val)
    (train_val / "val").rename(train_val / "other")
    with pytest.raises(UserError, match="val"):
        opened("imagenet", train_val)


def test_imagenet100_is_the_first_hundred_classes(tmp_path, class_folders):
    wordnet = {f"n{number:08d}": 1 for number in range(103, 0, -1)}
    class_folders(tmp_path / "train", wordnet)
    class_folders(tmp_path / "val", wordnet)
    splits = opened("imagenet100", tmp_path)
    assert splits.name == "imagenet100"
    assert splits.classes == [f"n{number:08d}" for number in range(1, 101)]
    assert len(splits.train) == len(splits.val) == 100 and splits.train.labels.max() == 99
