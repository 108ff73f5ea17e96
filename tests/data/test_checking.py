"""All faults of a folder are reported."""

import contextlib
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

from locality.data import DataConfig, check, checking, open_data
from locality.data.checking import verify
from locality.data.sources import imbalance
from locality.errors import UserError


def report(folder, **settings):
    return check(folder, progress=False, **settings)


def test_a_good_folder(train_val):
    result = report(train_val)
    assert result.ok and result.images == {"train": 18, "val": 6} and result.classes == 3
    assert result.sizes == {"width": [10] * 5, "height": [12] * 5}
    assert result.lines()[-1].startswith("no faults: all images can be decoded")


def test_everything_that_can_be_wrong(train_val):
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
    assert (len(result.conflicts), len(result.copies), result.ok) == (1, 1, False)
    assert "002.png (cat) = " in str(result.lines()) and "again.tif (bee)" in str(result.lines())
    assert report(train_val / "train").ok  # a split keeps copies together


def near(image, path, crop=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    box = (crop, crop, image.width - crop, image.height - crop)
    image.crop(box).resize((80, 60)).save(path, quality=60)


def test_near_copies_on_both_sides_of_a_split_are_counted(tmp_path):
    for seed in range(8):
        noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((160, 120), Image.Resampling.BICUBIC)
        for part, count in (("train", 8), ("val", 3)):
            if seed < count:
                near(image, tmp_path / part / "ab"[seed % 2] / f"{seed}.jpg", crop=len(part) - 3)
    said = "\n".join(report(tmp_path).lines())
    assert "3 of 3 validation images nearly equal" in said and "--data.group_by" in said
    grouped = check(tmp_path, progress=False, group_by="(.)")
    assert "nearly" not in "\n".join(grouped.lines())
    shutil.rmtree(tmp_path / "val")
    image_folder = tmp_path / "train"
    assert "nearly" not in "\n".join(report(image_folder).lines())


@pytest.mark.parametrize("settings", [{"on_bad_image": "error"}, {"max_bad_images": 1}, {}])
def test_a_dry_run_finds_training_images_that_would_end_the_run(
    settings, tmp_path, class_folders, cli
):
    class_folders(tmp_path / "photos", {"a": 20, "b": 20})
    bad = open_data(DataConfig("folder", str(tmp_path / "photos"), val_fraction=0.1), 0).train
    for index in (1, 27):
        Path(bad.describe(index)).write_bytes(b"")
    words = [f"--data.{name}={value}" for name, value in settings.items()]
    given = ("--dry_run", "--from", "scratch", *words)
    printed = cli("train", tmp_path / "photos", *given, code=2 if words else 0)
    said = printed.err + printed.out
    assert f"2 of 36 training images cannot be read: '{bad.describe(1)}'" in said
    assert ("they are left out" in said) == (not words)


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
    assert verify(source)[0] == ["all 40 validation images can be decoded"]
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
        assert (f"--data.grey_bits {bits}" in str(verify(open_data(data, 0).val)[0])) == (bits < 16)
    monkeypatch.setattr(checking, "MAX_DECODED", 1)
    if not ok:
        with pytest.raises(UserError):
            verify(open_data(data, 0).val)
    read = replace(data, grey_bits=bits)
    assert report(tmp_path, grey_bits=bits).ok
    assert "grey_bits" not in str(verify(open_data(read, 0).val)[0])


def arrow(path, seed, way):
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(90, 150, (32, 32, 3)).astype(np.uint8))
    (x, y), draw = rng.integers(13, 19, 2).tolist(), ImageDraw.Draw(image)
    draw.polygon([(x - 8, y - 8), (x - 8, y + 8), (x + 8, y)], fill=(220, 220, 220))
    path.parent.mkdir(parents=True, exist_ok=True)
    turned = {"right": image, "left": ImageOps.mirror(image), "up": image.rotate(90)}
    turned[way].save(path)


def test_classes_that_are_mirror_images_are_named(tmp_path, cli):
    for seed in range(90):
        way = ("left", "right", "up")[seed % 3]
        arrow(tmp_path / way / f"{seed}.png", seed, way)
    words = ("train", tmp_path, "--dry_run", "--steps=2", "--model=deit_nano")
    printed = cli(*words, "--model.patch_size=8")
    assert "these classes look alike: 'left and right'; train with --augment.hflip 0" in printed.out
    assert "flipped left to right" in printed.out
    printed = cli(*words, "--model.patch_size=8", "--augment.hflip=0")
    assert "look alike" not in printed.out and "flipped" not in printed.out
