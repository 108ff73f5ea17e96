"""All faults of a folder are reported."""

import contextlib
import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from locality.data import DataConfig, check, datasets, open_data
from locality.data.datasets import verify
from locality.data.sources import imbalance
from locality.errors import UserError


def report(folder, **settings):
    return check(folder, progress=False, **settings)


def test_a_good_folder(train_val):
    result = report(train_val)
    assert result.ok and result.images == {"train": 18, "val": 6} and result.classes == 3
    assert result.sizes == {"width": [10] * 5, "height": [12] * 5}
    assert result.lines()[-1] == "nothing is wrong"


def test_everything_that_can_be_wrong(train_val, class_folders, image_file):
    train, val = train_val / "train", train_val / "val"
    truncated = train / "ant" / "000.png"
    truncated.write_bytes(truncated.read_bytes()[:60])
    (train / "ant" / "001.png").write_bytes(b"")
    (val / "ant" / "001.png").write_bytes(b"")
    (train / "bee" / "000.png").write_bytes(b"text")
    (train / "bee" / "new.png").symlink_to("gone")
    (val / "cat" / "copy.png").write_bytes((train / "cat" / "002.png").read_bytes())
    (train / "dog").mkdir()
    with pytest.raises(UserError, match="only train has 'dog'"):
        report(train_val)
    (val / "dog").mkdir()
    Image.new("L", (100, 50)).save(train / "bee" / "grey.png")

    result = report(train_val)
    assert not result.ok
    assert {os.path.relpath(path, train_val) for path in result.bad_files} == {
        "train/ant/000.png",
        "train/ant/001.png",
        "val/ant/001.png",
        "train/bee/000.png",
        "train/bee/new.png",
    }
    assert result.bad_files[str(train / "ant" / "001.png")] == "the file is empty"
    assert result.empty_classes == {"train": ["dog"], "val": ["dog"]}
    assert result.duplicates == [
        (str(train / "cat" / "002.png"), str(val / "cat" / "copy.png")),
    ]
    assert result.sizes["width"][-1] == 100 and result.sizes["height"][-1] == 50

    # Each fault is reported, and lists are limited.
    assert len(result.lines(most=2)) < len(result.lines())
    assert not imbalance({"a": 100, "b": 90}) and "9" in imbalance({"a": 100, "b": 9})


def test_copies_in_other_formats_are_listed(train_val):
    with Image.open(train_val / "train/cat/002.png") as image:
        image.save(train_val / "train/cat/again.bmp")
        image.save(train_val / "val/bee/again.tif")
    result = report(train_val)
    assert (len(result.duplicates), result.ok) == (1, False)
    assert report(train_val / "train").ok  # a split keeps copies together


@pytest.mark.parametrize(("size", "said"), [((9, 9), ""), ((9, 3), "67%"), ((2, 12), "83%")])
def test_what_a_crop_drops_is_said(tmp_path, class_folders, size, said):
    class_folders(tmp_path, {"a": 4, "b": 4}, size=size)
    lines = "\n".join(report(tmp_path).lines())
    assert ("crop drops" in lines) == bool(said) and said in lines


def test_images_in_memory_are_checked(fashion_mnist):
    result = report(fashion_mnist, dataset="fashion_mnist")
    assert result.ok and result.images == {"train": 600, "val": 40} and result.classes == 10
    assert result.sizes["width"] == [28] * 5


def test_validation_images_that_cannot_be_read_are_named(tmp_path, class_folders):
    class_folders(tmp_path, {"a": 40, "b": 40})
    data = DataConfig("folder", str(tmp_path), val_fraction=0.5)
    source, before = open_data(data, 0).val, list(warnings.filters)
    assert "all 40 validation" in verify(source)
    assert list(warnings.filters) == before
    for index in (1, 27):
        Path(source.describe(index)).write_bytes(b"")
    name = source.describe(1)
    with pytest.raises(UserError, match=rf"^2 of 40 .*{name}.* \(the file is empty\)"):
        verify(open_data(data, 0).val)


@pytest.mark.parametrize(("most", "ok"), [(200, False), (4000, True), (65535, True)])
def test_unused_bits_are_named(tmp_path, monkeypatch, most, ok):
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, most, (9, 9), dtype=np.uint16)
        path = tmp_path / ("a", "b")[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    data = DataConfig("folder", root=str(tmp_path), val_fraction=0.5)
    found, bits = report(tmp_path), most.bit_length()
    said = "\n".join(found.lines())
    assert found.ok == ok and (f"--data.grey_bits {bits}" in said) == (bits < 16)
    with contextlib.nullcontext() if ok else pytest.raises(UserError, match=r"--data\.grey_bits 8"):
        assert (f"--data.grey_bits {bits}" in verify(open_data(data, 0).val)) == (bits < 16)
    monkeypatch.setattr(datasets, "MAX_DECODED", 1)
    if not ok:
        with pytest.raises(UserError):
            verify(open_data(data, 0).val)
    read = replace(data, grey_bits=bits)
    assert report(tmp_path, grey_bits=bits).ok
    assert "grey_bits" not in verify(open_data(read, 0).val)
