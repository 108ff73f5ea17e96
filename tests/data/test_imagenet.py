"""ImageNet's folder, its first 100 classes, ImageNet-V2 and ReaL."""

import json

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


@pytest.mark.parametrize("nested", [False, True])
def test_imagenet_v2_is_numbered_not_sorted(tmp_path, class_folders, nested):
    inside = tmp_path / "imagenetv2-matched-frequency-format-val" if nested else tmp_path
    class_folders(inside, {"0": 1, "10": 2, "2": 1, "999": 1})
    splits = opened("imagenet_v2", tmp_path)
    assert len(splits.classes) == 1000 and splits.classes[10] == "10"
    assert splits.val.labels.tolist() == [0, 2, 10, 10, 999]
    assert "/10/" in splits.val.describe(2)


@pytest.mark.parametrize("name", ["n01440764", "1000", "-1", "²"])
def test_not_imagenet_v2(tmp_path, class_folders, name):
    class_folders(tmp_path, {"0": 1, name: 1})
    with pytest.raises(UserError, match=f"'{name}'"):
        opened("imagenet_v2", tmp_path)


@pytest.fixture
def real(tmp_path, image_file):
    """Four validation images in three classes, with labels."""
    places = {1: "n1", 2: "n2", 3: "n0", 4: "n2"}
    for number, name in places.items():
        path = tmp_path / "val" / name / f"ILSVRC2012_val_{number:08d}.JPEG"
        image_file(path.with_suffix(".jpeg"), seed=number).rename(path)
    labels = tmp_path / "real.json"
    labels.write_text(json.dumps([[1, 2], [2], [], [0]]))
    return tmp_path, labels


def test_real_labels_follow_the_files_numbers(real):
    root, labels = real
    source = opened("imagenet_real", root, real_labels=str(labels)).val
    # In the folder's order n0/3, n1/1, n2/2, n2/4; image 3 has no valid label.
    assert [source.describe(index)[-15:] for index in range(3)] == [
        f"val_0000000{number}.JPEG"[-15:] for number in (1, 2, 4)
    ]
    assert source.label_sets == [(1, 2), (2,), (0,)]
    assert source.labels.tolist() == [1, 2, 0]
    assert source.subset([2, 0]).label_sets == [(0,), (1, 2)]
    assert source.read(0).mode == "RGB"
    direct = opened("imagenet_real", root / "val", real_labels=str(labels)).val
    assert direct.label_sets == source.label_sets


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[[1], [2]", "real.json"),
        ('{"1": [2]}', "real.json"),
        ("[1, 2, 3, 4]", "real.json"),
        ("[[1.5], [], [], []]", "real.json"),
        ("[[1], [2]]", "2 images"),
        ("[[7], [], [], []]", "class 7"),
    ],
)
def test_labels_that_do_not_fit(real, content, named):
    root, labels = real
    labels.write_text(content)
    with pytest.raises(UserError, match=named):
        opened("imagenet_real", root, real_labels=str(labels))


def test_labels_that_are_missing_and_images_without_a_number(real, image_file):
    root, labels = real
    for given in (None, str(labels) + "x"):
        with pytest.raises(UserError, match="real"):
            opened("imagenet_real", root, real_labels=given)
    image_file(root / "val" / "n0" / "cat.jpeg")
    with pytest.raises(UserError, match="not named like"):
        opened("imagenet_real", root, real_labels=str(labels))
