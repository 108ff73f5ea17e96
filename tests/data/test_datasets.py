"""Datasets by name: torchvision's, ImageNet's, and those with shuffled patches."""

import gzip
import os
import pickle
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
from torchvision import datasets
from torchvision.datasets import cifar, flowers102

from locality.data import DataConfig, open_data
from locality.data.datasets import shuffle_patches
from locality.errors import UserError

NAMES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "flowers102": "Flowers-102",
    "pets": "Oxford-IIIT Pets",
}


def opened(dataset, root, **settings):
    return open_data(DataConfig(dataset=dataset, root=str(root), **settings), seed=0)


@pytest.fixture
def unchecked(monkeypatch):
    """torchvision's readers take files of any content."""
    for module in (cifar, flowers102):
        monkeypatch.setattr(module, "check_integrity", lambda path, md5=None: os.path.exists(path))


CIFAR = {
    "cifar10": (datasets.CIFAR10, "labels", "label_names"),
    "cifar100": (datasets.CIFAR100, "fine_labels", "fine_label_names"),
}


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar(name, classes, unchecked, tmp_path):
    rng, (reader, key, names_key) = np.random.default_rng(0), CIFAR[name]
    folder = tmp_path / reader.base_folder
    folder.mkdir()
    for file, _ in (*reader.train_list, *reader.test_list):
        pixels = rng.integers(0, 256, (10, 3072), dtype=np.uint8)
        content = {"data": pixels, key: rng.integers(0, classes, 10).tolist()}
        (folder / file).write_bytes(pickle.dumps(content))
    names = [f"c{number}" for number in range(classes)]
    (folder / reader.meta["filename"]).write_bytes(pickle.dumps({names_key: names}))
    splits = opened(name, tmp_path)
    assert splits.name == name and splits.classes == names
    assert (len(splits.train), len(splits.val)) == (10 * len(reader.train_list), 10)
    image, label = reader(str(tmp_path))[3]
    assert splits.train.read(3).tobytes() == image.tobytes()
    assert splits.train.labels[3] == label


def test_fashion_mnist_is_found_where_debian_puts_it(fashion_mnist):
    splits = open_data(DataConfig("fashion_mnist"), seed=0)
    assert splits.classes[:2] == ["T-shirt/top", "Trouser"] and len(splits.classes) == 10
    assert splits.train.pixels.shape == (600, 3, 28, 28) and len(splits.val) == 40
    assert splits.train.labels[13] == 3 and splits.val.describe(2) == "fashion_mnist test[2]"


def test_fashion_mnist_as_torchvision_downloads_it(fashion_mnist):
    root = fashion_mnist / "elsewhere"
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in fashion_mnist.glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    theirs = datasets.FashionMNIST(str(root))
    splits = opened("fashion_mnist", root, download=True)  # complete: nothing to download
    image, label = theirs[7]
    assert splits.train.read(7).tobytes() == image.convert("RGB").tobytes()
    assert splits.train.labels[7] == label
    packed = opened("fashion_mnist", fashion_mnist)
    assert np.array_equal(packed.val.pixels, splits.val.pixels)


def test_a_missing_or_damaged_fashion_mnist_is_named(fashion_mnist):
    labels = fashion_mnist / "t10k-labels-idx1-ubyte.gz"
    whole = labels.read_bytes()
    for content in (whole[:-9], b"x", gzip.compress(b"\0\0\x0c\1"), gzip.compress(b"\0\0\x08\1")):
        labels.write_bytes(content)
        with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz"):
            opened("fashion_mnist", fashion_mnist)
    labels.unlink()
    with pytest.raises(UserError, match="t10k-labels"):
        opened("fashion_mnist", fashion_mnist)
    with pytest.raises(UserError, match=r"data\.root and data\.download"):
        open_data(DataConfig("fashion_mnist", download=True), seed=0)


@pytest.fixture
def flowers(tmp_path, image_file, unchecked):
    """Six flowers: two train, one val, three test, in MATLAB files."""
    base = tmp_path / "flowers-102"
    for number in range(1, 7):
        image_file(base / "jpg" / f"image_{number:05d}.jpg", seed=number)
    scipy.io.savemat(base / "imagelabels.mat", {"labels": np.array([[5, 1, 102, 5, 1, 2]])})
    parts = {"trnid": [[3, 1]], "valid": [[6, 2]], "tstid": [[4, 5]]}
    scipy.io.savemat(base / "setid.mat", {key: np.array(ids) for key, ids in parts.items()})
    return tmp_path


def test_flowers_train_on_train_and_val_and_are_evaluated_on_test(flowers):
    splits = opened("flowers102", flowers)
    assert len(splits.classes) == 102
    assert splits.train.labels.tolist() == [101, 4, 1, 0]
    assert splits.val.labels.tolist() == [4, 0]
    assert splits.train.describe(0).endswith("flowers-102/jpg/image_00003.jpg")
    assert splits.train.read(0).size == (10, 12)


def test_pets(tmp_path, image_file):
    base = tmp_path / "oxford-iiit-pet"
    (base / "annotations").mkdir(parents=True)
    lists = {
        "trainval": ["Abyssinian_1 1 1 1", "great_pyrenees_7 2 2 1", "Abyssinian_2 1 1 1"],
        "test": ["great_pyrenees_9 2 2 1", "Abyssinian_4 1 1 1"],
    }
    for part, lines in lists.items():
        (base / "annotations" / f"{part}.txt").write_text("\n".join(lines) + "\n")
        for line in lines:
            image_file(base / "images" / f"{line.split()[0]}.jpg")
    splits = opened("pets", tmp_path)
    assert splits.classes == ["Abyssinian", "Great Pyrenees"]
    assert splits.train.labels.tolist() == [0, 1, 0] and splits.val.labels.tolist() == [1, 0]
    assert splits.val.describe(0).endswith("images/great_pyrenees_9.jpg")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_said(tmp_path, name):
    with pytest.raises(UserError, match=NAMES[name]):
        opened(name, tmp_path)
    with pytest.raises(UserError, match=r"data\.root"):
        open_data(DataConfig(dataset=name), seed=0)


def test_a_download_that_fails(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise URLError("Name or service not known")

    monkeypatch.setattr(datasets.CIFAR10, "download", offline)
    with pytest.raises(UserError, match="Name or service not known"):
        opened("cifar10", tmp_path, download=True)


def test_imagenet_is_a_folder_with_both_parts(tmp_path, class_folders):
    class_folders(tmp_path / "train", wordnet := {f"n{n:08d}": 1 for n in range(103, 0, -1)})
    class_folders(tmp_path / "val", wordnet)
    assert len(opened("imagenet", tmp_path).classes) == 103
    splits = opened("imagenet100", tmp_path)
    assert splits.classes == [f"n{number:08d}" for number in range(1, 101)]
    assert len(splits.train) == len(splits.val) == 100 and splits.train.labels.max() == 99
    (tmp_path / "val").rename(tmp_path / "other")
    with pytest.raises(UserError, match="val"):
        opened("imagenet", tmp_path)


def patches(images, size=2):
    n, height, width, _ = images.shape
    cells = images.reshape(n, height // size, size, width // size, size, 3).swapaxes(2, 3)
    return cells.reshape(n, -1, size * size * 3)


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0])
def test_only_the_order_of_patches_changes(share):
    images = np.random.default_rng(1).integers(0, 256, (200, 8, 6, 3), dtype=np.uint8)
    before, after = patches(images), patches(shuffle_patches(images, 2, share))
    # Random patches differ, so each one's new place is known.
    same = (after[:, :, None] == before[:, None]).all(axis=3)
    assert (same.sum(axis=1) == 1).all() and (same.sum(axis=2) == 1).all()
    orders = same.argmax(axis=2)
    moved = (orders != np.arange(12)).any(axis=1).mean()
    if share is None:
        assert moved == 1 and (orders == orders[0]).all()
    else:
        assert abs(moved - share) < 0.1
        assert share == 0 or len({tuple(order) for order in orders}) > 190 * share


def test_a_dataset_by_name_has_the_images_and_labels_of_another():
    plain, first, second = (
        open_data(DataConfig(name), seed)
        for name, seed in (("digits", 0), ("digits_shuffled_100", 0), ("digits_shuffled_100", 1))
    )
    assert first.train.pixels.equal(second.train.pixels)
    assert (first.train.labels == plain.train.labels).all()
    assert (first.train.pixels.sum((1, 2, 3)) == plain.train.pixels.sum((1, 2, 3))).all()
    assert not first.train.pixels.equal(plain.train.pixels)
    with pytest.raises(UserError, match="digits_permuted"):
        open_data(DataConfig("digits_permuted", root="x"), seed=0)


@pytest.fixture
def tiny(tmp_path, image_file):
    """Three classes of Tiny ImageNet, two of which share their first name."""
    root = tmp_path / "tiny-imagenet-200"
    for number, name in enumerate(("n01", "n03", "n02")):
        image_file(root / f"train/{name}/images/{name}_0.JPEG", seed=number)
        (root / f"train/{name}/{name}_boxes.txt").write_text("")
        image_file(root / f"val/images/val_{number}.JPEG", seed=10 + number)
    rows = ("val_0.JPEG\tn03", "val_1.JPEG\tn01", "val_2.JPEG\tn02")
    lines = "".join(f"{row}\t0\t0\t62\t62\n" for row in rows)
    (root / "val/val_annotations.txt").write_text(lines)
    (root / "words.txt").write_text("n02\tcrane\nn00\tentity\nn01\tgoldfish, carp\nn03\tcrane\n")
    return root


@pytest.mark.parametrize("below", [True, False])
def test_tiny_imagenet_as_published(tiny, below):
    splits = opened("tiny_imagenet", tiny if below else tiny.parent)
    assert splits.classes == ["goldfish", "n02", "n03"]
    assert splits.train.labels.tolist() == [0, 1, 2] and splits.val.labels.tolist() == [2, 0, 1]
    assert splits.train.describe(1).endswith("train/n02/images/n02_0.JPEG")
    assert splits.val.describe(0).endswith("val/images/val_0.JPEG")
    (tiny / "words.txt").unlink()
    assert opened("tiny_imagenet", tiny).classes == ["n01", "n02", "n03"]


def test_another_tiny_imagenet_is_refused(tiny):
    table = tiny / "val/val_annotations.txt"
    table.write_text(table.read_text().replace("n03", "n04"))
    with pytest.raises(UserError, match="names classes without a folder in train: 'n04'"):
        opened("tiny_imagenet", tiny)
    table.unlink()
    with pytest.raises(UserError, match="is not Tiny ImageNet as published"):
        opened("tiny_imagenet", tiny)
