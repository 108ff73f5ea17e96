"""Folders of Arrow and Parquet files, as written by `datasets` and others."""

import errno
import io
from pathlib import Path

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


def opened(dataset, root, **settings):
    return open_data(DataConfig(dataset=dataset, root=str(root), **settings), seed=0)


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


def write_parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def write_parts(folder, **columns):
    """The same rows to train and to evaluate on."""
    for part in ("train", "val"):
        write_parquet(folder / f"{part}.parquet", **columns)


def shades(source):
    return [source.read(index).getpixel((0, 0))[0] for index in range(len(source))]


def saved(folder):
    """An image folder, saved by `datasets`."""
    datasets.load_dataset("imagefolder", data_dir=str(folder)).save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_saved_image_folder_trains_as_the_folder_did(train_val, workers):
    before, after = opened("folder", train_val), opened("arrow", saved(train_val))
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


def test_files_of_an_earlier_save_are_left_out(tmp_path):
    rows(6).save_to_disk(tmp_path, num_shards=3)
    rows(4).save_to_disk(tmp_path)
    assert len(list(tmp_path.glob("*.arrow"))) == 4
    splits = opened("arrow", tmp_path)
    assert sorted(shades(splits.train) + shades(splits.val)) == [0, 10, 20, 30]


def test_parquet_as_on_the_hub(tmp_path):
    (tmp_path / "data").mkdir()
    rows(6).to_parquet(tmp_path / "data" / "train-00000-of-00001-abc.parquet")
    rows(2).to_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet")
    rows(4).to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    splits = opened("arrow", tmp_path)
    assert shades(splits.train) == [0, 10, 20, 30, 40, 50] and shades(splits.val) == [0, 10]
    assert splits.train.labels.tolist() == [0, 1] * 3


def test_plain_parquet_with_bytes_and_names(tmp_path):
    write_parquet(tmp_path / "train.parquet", img=[png(1), png(2)], cls=["b", "a"])
    write_parquet(tmp_path / "val.parquet", img=[png(3)], cls=["a"])
    splits = opened("arrow", tmp_path)
    assert splits.classes == ["a", "b"]
    assert splits.train.labels.tolist() == [1, 0] and shades(splits.val) == [3]
    assert splits.train.describe(1).endswith("train[1]")


def test_numbers_without_names(tmp_path):
    write_parquet(tmp_path / "train.parquet", image=[png(1), png(2)], label=[0, 3])
    write_parquet(tmp_path / "val.parquet", image=[png(3)], label=[1])
    splits = opened("arrow", tmp_path)
    assert splits.classes == ["0", "1", "2", "3"] and splits.val.labels.tolist() == [1]


def test_a_choice_of_columns(tmp_path):
    columns = {"image": [png(1)] * 2, "label": [0, 1], "labels": [1, 0]}
    write_parts(tmp_path, **columns)
    with pytest.raises(UserError, match="label_column"):
        opened("arrow", tmp_path)
    assert opened("arrow", tmp_path, label_column="labels").val.labels.tolist() == [1, 0]
    with pytest.raises(UserError, match="image column"):
        opened("arrow", tmp_path, image_column="picture", label_column="label")


@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": None}])
def test_a_row_without_an_image(tmp_path, cell):
    cells = pa.array([{"bytes": png(1), "path": None}, cell], type=CELL)
    write_parts(tmp_path, image=cells, label=[0, 1])
    train = opened("arrow", tmp_path).train
    with pytest.raises(BadImage, match="no image"):
        train.read(1)
    assert train.describe(1).endswith("train[1]")


def test_a_row_that_names_a_file(tmp_path, image_file):
    path = str(image_file(tmp_path / "x.png"))
    for images in (pa.array([{"bytes": None, "path": path}], type=CELL), [path]):
        write_parts(tmp_path, image=images, label=[0])
        assert opened("arrow", tmp_path).train.read(0).size == (10, 12)


def test_a_row_that_names_a_file_outside_of_the_folder(tmp_path, image_file, monkeypatch):
    image_file(tmp_path / "x.png")
    monkeypatch.chdir(tmp_path)
    for name, path in (("whole", str(tmp_path / "x.png")), ("relative", "x.png")):
        cells = pa.array([{"bytes": None, "path": path}], type=CELL)
        write_parts(tmp_path / name, image=cells, label=[0])
        with pytest.raises(BadImage, match="allow_outside"):
            opened("arrow", tmp_path / name).train.read(0)
        allowed = opened("arrow", tmp_path / name, allow_outside=True)
        assert allowed.train.read(0).size == (10, 12)


def test_a_copy_of_parquet_files_is_said_and_made_once(tmp_path, caplog):
    write_parquet(tmp_path / "train.parquet", image=[png(n) for n in range(8)], label=[0, 1] * 4)
    opened("arrow", tmp_path)
    (copy,) = Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow")
    assert str(copy) in caplog.text
    caplog.clear()
    assert len(opened("arrow", tmp_path).train) == 6 and not caplog.text
    write_parquet(tmp_path / "train.parquet", image=[png(9)] * 4, label=[0, 1] * 2)
    assert len(opened("arrow", tmp_path, val_fraction=0.5).train) == 2


def repeated(size, count):
    """One value stored once and referenced by `count` rows."""
    value = np.random.default_rng(0).bytes(size)
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))


@pytest.mark.parametrize(
    "image", [pa.array([bytes(20_000_000)] * 20), repeated(200_000, 2_000)], ids=["zeros", "one"]
)
def test_what_files_hold_is_bounded_by_their_size(tmp_path, image):
    path = tmp_path / "train.parquet"
    table = pa.table({"image": image, "label": [0, 1] * (len(image) // 2)})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 500_000 and pq.read_table(path).nbytes >= 400_000_000
    with pytest.raises(UserError, match=r"train\.parquet"):
        opened("arrow", tmp_path)
    assert not any(Path(datasets.config.HF_DATASETS_CACHE).rglob("*.*"))


def test_damaged_files_are_named(train_val):
    (file,) = saved(train_val).glob("train/*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=file.name):
        opened("arrow", train_val / "saved")
    write_parquet(file.parent / "a.parquet", image=[png(1)], label=[0])
    with pytest.raises(UserError, match=r"\.arrow and \.parquet"):
        opened("arrow", train_val / "saved")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, r"\.arrow or \.parquet"),
        ({"val": {"image": [b""], "label": [0]}}, "train"),
        ({"train": {"image": [b""], "label": [0]}, "val": {"image": [b""], "x": [0]}}, "'label'"),
    ],
)
def test_folders_that_lack_something_are_refused(tmp_path, files, named):
    for name, columns in files.items():
        write_parquet(tmp_path / f"{name}.parquet", **columns)
    with pytest.raises(UserError, match=named):
        opened("arrow", tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"this is no such file" * 100)
    with pytest.raises(UserError, match=r"train\.parquet"):
        opened("arrow", tmp_path)


def test_parts_with_different_classes(tmp_path):
    for part, classes in (("train", ("a", "b")), ("test", ("a", "c"))):
        rows(2, classes).to_parquet(tmp_path / f"{part}.parquet")
    with pytest.raises(UserError, match=r"'b'.*'c'"):
        opened("arrow", tmp_path)
    rows(2, ("b", "a")).to_parquet(tmp_path / "test.parquet")
    splits = opened("arrow", tmp_path)
    assert splits.train.labels.tolist() == [0, 1] and splits.val.labels.tolist() == [1, 0]


def test_a_part_without_rows_keeps_its_declared_classes(tmp_path):
    for part, count in (("train", 0), ("test", 2)):
        rows(count, ("b", "a")).to_parquet(tmp_path / f"{part}.parquet")
    assert opened("arrow", tmp_path).classes == ["a", "b"]
    rows(2, ("b", "a")).to_parquet(tmp_path / "train.parquet")
    rows(0, ("a", "c")).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(UserError, match=r"'b'.*'c'"):
        opened("arrow", tmp_path)


def test_booleans_and_integers_are_classes(tmp_path):
    for labels, numbered in (([False, True], False), ([0, 1], True)):
        write_parts(tmp_path, image=["x.png"] * 2, label=labels)
        train = opened("arrow", tmp_path).train
        assert train.labels.tolist() == [0, 1] and train.numbered == numbered
    assert train.describe(0).endswith("train[0] (x.png)")


def test_a_full_disk_is_not_the_files_fault(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_parquet(tmp_path / "train.parquet", image=[png(1)], label=[0])
    monkeypatch.setattr(pa.ipc, "new_stream", full)
    with pytest.raises(OSError, match="No space left"):
        opened("arrow", tmp_path)


@pytest.mark.parametrize(
    ("train", "val", "named"),
    [
        (["a", "b"], ["c"], "'c'"),
        ([0, 1], [2], "from 2 to 2"),
        ([-1, 1], [0], "from -1 to 1"),
        ([0, 2**62], [0], "from 0 to 4611686018427387904"),
        ([0, None], [0], "1 rows of train"),
        ([0.5, 1.0], [0.5], "integers"),
    ],
)
def test_labels_that_are_no_classes(tmp_path, train, val, named):
    for part, labels in (("train", train), ("val", val)):
        write_parquet(tmp_path / f"{part}.parquet", image=[png(1)] * len(labels), label=labels)
    with pytest.raises(UserError, match=named):
        opened("arrow", tmp_path)


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    write_parquet(tmp_path / "train.parquet", image=[png(1)], label=[0])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'locality\[arrow\]'"):
        opened("arrow", tmp_path)
