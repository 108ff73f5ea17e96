"""A folder's faults are all found and said."""

import contextlib
import os
import signal
import warnings
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from locality.data import DataConfig, check, open_data, validation
from locality.data.classes import imbalance
from locality.data.validation import verify
from locality.errors import ProcessKilled, UserError


def report(folder, **settings):
    return check(folder, progress=False, **({"workers": 1} | settings))


def test_a_good_folder(train_val):
    result = report(train_val)
    assert result.ok and result.images == {"train": 18, "val": 6} and result.classes == 3
    assert result.modes == {"RGB": 24}
    assert result.sizes.width == (10,) * 5 and result.sizes.height == (12,) * 5
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
    (train / "cat" / "again.png").write_bytes((train / "cat" / "002.png").read_bytes())
    (train / "dog").mkdir()
    (train / "ant" / "loop").symlink_to(train)
    (train / "notes.txt").write_text("notes")
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
    assert result.empty_classes == {"train": ["dog"], "val": []}
    assert result.class_difference == "only train has 'dog'"
    assert result.duplicates == [
        (str(train / "cat" / "002.png"), str(val / "cat" / "copy.png")),
    ]
    assert len(result.repeats) == 1
    assert result.ignored == [str(train / "notes.txt")]
    assert result.loops == [str(train / "ant" / "loop")]
    assert result.modes["L"] == 1
    assert result.sizes.width[-1] == 100 and result.sizes.height[-1] == 50

    text = "\n".join(result.lines())
    for words in (
        "4 classes",
        "cannot be decoded (5)",
        "also training images (1)",
        "classes of train without images (1): 'dog'",
        "only train has 'dog'",
        "repeat an earlier one of the same part (1)",
        "ignored (1 .txt)",
        "lead back to a folder above, not followed (1)",
        "this folder needs attention",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ({"a": 100, "b": 90}, []),
        ({"a": 100, "b": 9}, ["b", "9", "class_weights"]),
        ({"a": 8, "b": 9, "c": 0}, []),
        ({"a": 3}, []),
    ],
)
def test_classes_of_very_different_size_are_named(counts, named):
    said = imbalance(counts)
    assert bool(said) == bool(named) and all(word in said for word in named)


def test_long_lists_are_cut(train_val):
    for path in (train_val / "train").rglob("*.png"):
        path.write_bytes(b"x")
    lines = report(train_val).lines(most=4)
    assert "  … and 14 more" in lines


def test_several_processes_find_the_same(train_val, image_file):
    for number in range(100):
        image_file(train_val / "train" / "ant" / f"more{number}.png", seed=10_000 + number)
    (train_val / "train" / "bee" / "000.png").write_bytes(b"")
    expected = report(train_val)
    assert report(train_val, workers=2) == report(train_val, workers=None) == expected


def test_one_folder(tmp_path, class_folders):
    class_folders(tmp_path, {"a": 2, "b": 0})
    result = report(tmp_path)
    assert result.images == {"all": 2} and result.empty_classes == {"all": ["b"]}
    assert not result.ok and result.class_difference == ""


def test_nothing_at_all(tmp_path):
    with pytest.raises(UserError, match="no images in"):
        report(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        report(tmp_path / "nowhere")


def test_progress_is_shown_on_standard_error(train_val, capsys):
    check(train_val, workers=1)
    captured = capsys.readouterr()
    assert "24/24" in captured.err and captured.out == ""


def test_sizes_are_real_images_sizes(tmp_path, image_file):
    for width in range(1, 22):
        image_file(tmp_path / "a" / f"{width}.png", seed=width, size=(30, width))
    sizes = report(tmp_path).sizes
    expected = np.percentile(range(1, 22), (0, 5, 50, 95, 100))
    assert sizes.width == tuple(expected.astype(int)) and sizes.height == (30,) * 5


def test_looking_at_many_images_at_once_leaves_warnings_as_they_were(tmp_path, class_folders):
    class_folders(tmp_path, {"a": 300, "b": 300})
    source = open_data(DataConfig(dataset="folder", root=str(tmp_path), val_fraction=0.5), 0).val
    before = list(warnings.filters)
    for _ in range(5):
        assert verify(source) == "all 300 validation images can be decoded"
    assert list(warnings.filters) == before


def kill_oneself(path, decoding):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_named(train_val, monkeypatch):
    monkeypatch.setattr(validation, "_inspect", kill_oneself)
    monkeypatch.setattr(validation, "_CHUNK", 1)
    with pytest.raises(
        ProcessKilled, match=r"checks images was killed from outside .*starts again"
    ):
        report(train_val, workers=2)


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
    monkeypatch.setattr(validation, "MAX_DECODED", 1)
    if not ok:
        with pytest.raises(UserError, match="nothing can be seen"):
            verify(open_data(data, 0).val)
    read = replace(data, grey_bits=bits)
    assert report(tmp_path, decoding=read.decoding).ok
    assert "grey_bits" not in verify(open_data(read, 0).val)
