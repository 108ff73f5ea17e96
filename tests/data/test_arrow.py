"""Folders of Arrow and Parquet files, as written by `datasets` and others."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from locality.data import (
    AugmentConfig,
    BadImage,
    DataConfig,
    Preprocessing,
    open_data,
    train_loader,
)
from locality.errors import UserError

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
CELL = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def opened(root, **settings):
    return open_data(DataConfig("arrow", str(root), **settings), seed=0)


def png(shade):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, shade, shade)).save(buffer, "PNG")
    return buffer.getvalue()


def rows(count=6, classes=("no", "yes")):
    cells = {
        "image": [{"bytes": png(10 * n), "path": None} for n in range(count)],
        "label": [n % len(classes) for n in range(count)],
    }
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(classes))}
    return datasets.Dataset.from_dict(cells, features=datasets.Features(features))


def write_parts(folder, val=None, **columns):
    """The same rows to train and to evaluate on, unless `val` has others."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, cells in (("train", columns), ("val", val or columns)):
        pq.write_table(pa.table(cells), folder / f"{part}.parquet")
    return folder


def shades(source):
    return [source.read(index).getpixel((0, 0))[0] for index in range(len(source))]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_saved_image_folder_trains_as_the_folder_did(train_val, workers):
    datasets.load_dataset("imagefolder", data_dir=str(train_val)).save_to_disk(train_val / "saved")
    before = open_data(DataConfig("folder", str(train_val)), seed=0)
    after = opened(train_val / "saved")
    assert after.classes == before.classes
    assert np.array_equal(after.train.labels, before.train.labels)
    assert np.array_equal(after.val.labels, before.val.labels)
    for index in (0, 7, 17):
        assert after.train.read_bytes(index) == before.train.read_bytes(index)
    assert after.train.describe(17).endswith("train[17] (005.png)")
    settings = {"batch_size": 6, "seed": 0, "stop_step": 3, "workers": workers}
    for a, b in zip(
        train_loader(before.train, AugmentConfig(), Preprocessing(8), **settings),
        train_loader(after.train, AugmentConfig(), Preprocessing(8), **settings),
        strict=True,
    ):
        assert torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets)
    (file,) = (train_val / "saved").glob("train/*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match="cannot be read"):
        opened(train_val / "saved")


def test_files_of_an_earlier_save_are_left_out(tmp_path):
    rows(6).save_to_disk(tmp_path, num_shards=3)
    rows(4).save_to_disk(tmp_path)
    splits = opened(tmp_path)
    assert sorted(shades(splits.train) + shades(splits.val)) == [0, 10, 20, 30]


def test_parquet_as_on_the_hub(tmp_path):
    (tmp_path / "data").mkdir()
    for part, count in (("train", 6), ("validation", 2), ("test", 4)):
        rows(count).to_parquet(tmp_path / "data" / f"{part}-00000-of-00001.parquet")
    splits = opened(tmp_path)
    assert shades(splits.train) == [0, 10, 20, 30, 40, 50] and shades(splits.val) == [0, 10]
    assert splits.train.labels.tolist() == [0, 1] * 3
    rows(4).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    assert len(opened(tmp_path).train) == 4


@pytest.mark.parametrize(
    ("train", "val", "classes", "labels"),
    [
        (["b", "a", "b"], ["a", "b"], ["a", "b"], ([1, 0, 1], [0, 1])),
        (["b", "a", "b"], ["a", "a"], ["a", "b"], ([1, 0, 1], [0, 0])),
        ([0, 3, 10], [1, 3], [str(n) for n in range(11)], ([0, 3, 10], [1, 3])),
        ([True, False, True], [False, True], ["False", "True"], ([1, 0, 1], [0, 1])),
    ],
)
def test_labels_are_matched_by_name(tmp_path, train, val, classes, labels):
    images = [png(n) for n in range(5)]
    val = {"image": images[3:], "label": val}
    splits = opened(write_parts(tmp_path, val, image=images[:3], label=train))
    assert splits.classes == classes and splits.train.numbered == (classes[0] == "0")
    assert (splits.train.labels.tolist(), splits.val.labels.tolist()) == labels
    assert shades(splits.train) == [0, 1, 2] and shades(splits.val) == [3, 4]


def test_declared_classes_are_matched_and_compared(tmp_path):
    rows(2, ("a", "b")).to_parquet(tmp_path / "train.parquet")
    rows(1, ("b", "a")).to_parquet(tmp_path / "test.parquet")
    splits = opened(tmp_path)
    assert splits.classes == ["a", "b"]
    assert splits.train.labels.tolist() == [0, 1] and splits.val.labels.tolist() == [1]
    rows(2, ("a", "c")).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(UserError, match=r"'b'.*'c'"):
        opened(tmp_path)


def test_rows_without_an_image_or_with_a_files_name(tmp_path, image_file):
    inside = str(image_file(tmp_path / "x.png"))
    outside = str(image_file(tmp_path.parent / f"{tmp_path.name}.png"))
    cells = [None, {"bytes": None, "path": None}]
    cells += [{"bytes": None, "path": path} for path in (inside, outside)]
    root = write_parts(tmp_path, image=pa.array(cells, type=CELL), label=[0, 1, 0, 1])
    train = opened(root).train
    for index, named in enumerate(["no image", "no image", None, "allow_outside"]):
        if named:
            with pytest.raises(BadImage, match=named):
                train.read(index)
    assert train.read(2).size == opened(root, allow_outside=True).train.read(3).size == (10, 12)
    assert opened(write_parts(tmp_path, image=[inside], label=[0])).train.read(0).size == (10, 12)
    assert train.describe(1).endswith("train[1]") and train.describe(2).endswith(f"[2] ({inside})")


ONE = {"image": [b""], "label": [0]}
REFUSED = {
    "no files": (None, None, {}, r"\.arrow or \.parquet"),
    "no column of labels": ({"image": [b""], "x": [0]}, None, {}, "data.label_column"),
    "a missing column": (ONE, ONE, {"image_column": "y"}, "'y'.*data.image_column"),
    "another column in val": (ONE, {"image": [b""], "x": [0]}, {}, "val .*'label'"),
    "another class": ({**ONE, "label": ["a"]}, {**ONE, "label": ["c"]}, {}, "'c'"),
    "another number": (ONE, {**ONE, "label": [2]}, {}, "'2'"),
    "a negative number": ({**ONE, "label": [-1]}, ONE, {}, "from -1 to -1"),
    "a large number": ({**ONE, "label": [2**62]}, ONE, {}, "to 4611686018427387904"),
    "a missing label": ({**ONE, "label": pa.array([None], pa.int64())}, ONE, {}, "1 rows of train"),
    "a fraction": ({**ONE, "label": [0.5]}, ONE, {}, "integers"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_folders_that_are_refused(tmp_path, fault):
    train, val, settings, named = REFUSED[fault]
    if train:
        write_parts(tmp_path, val, **train)
    with pytest.raises(UserError, match=named):
        opened(tmp_path, **settings)


def test_other_refusals(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_bytes(b"this is no such file" * 100)
    with pytest.raises(UserError, match="cannot be read"):
        opened(tmp_path)
    (tmp_path / "train.parquet").unlink()
    rows(2).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(UserError, match="train"):
        opened(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'locality\[arrow\]'"):
        opened(tmp_path)
