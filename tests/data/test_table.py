"""Tables of images: rows that name a file and its class."""

import json
import os

import numpy as np
import pytest

from locality.commands import images_at
from locality.data import DataConfig, check, open_data
from locality.data.tables import has_table, open_table
from locality.errors import UserError

TWELVE = {f"{name}{i}.png": name for name in ("cat", "dog") for i in range(6)}
ROWS = [f"{name},{label}" for name, label in TWELVE.items()]


@pytest.fixture
def twelve(tmp_path, image_file):
    for number, name in enumerate(TWELVE):
        image_file(tmp_path / name, seed=number, size=(4, 4))
    return tmp_path


def write(root, *rows, name="labels.csv", encoding="utf-8", end="\n"):
    (root / name).write_bytes(end.join([*rows, ""]).encode(encoding, "surrogateescape"))
    return root / name


def opened(root, **settings):
    return open_data(DataConfig("table", str(root), **settings), seed=0)


def pairs(splits):
    """Images and classes of both parts."""
    return {
        name: splits.classes[label]
        for part in (splits.train, splits.val)
        for (name, _), label in zip(part.files(np.arange(len(part))), part.labels, strict=True)
    }


@pytest.mark.parametrize("mark", [",", ";", "\t", " ", "   "])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(("quote", "end"), [("", "\n"), ('"', "\r\n"), ('"', "\r")])
def test_the_documented_form(twelve, mark, encoding, quote, end):
    rows = [f"Label{mark}note{mark}{quote}image{quote}"]
    rows += [f"{label}{mark}-{mark}{quote}{name}{quote}" for name, label in TWELVE.items()]
    table = write(twelve, *rows, encoding=encoding, end=end)
    splits = opened(twelve)
    assert splits.classes == ["cat", "dog"] and pairs(splits) == TWELVE
    assert np.bincount(splits.train.labels).tolist() == [4, 4]
    assert np.array_equal(opened(table).train.labels, splits.train.labels)


def test_other_columns_by_name_or_number(twelve):
    named = write(twelve, "file,kind,image", *(f"{row},x" for row in ROWS), name="named.csv")
    assert pairs(opened(named, image_column="file", label_column="Kind")) == TWELVE
    bare = write(twelve, *ROWS, name="bare.csv")
    assert pairs(opened(bare, image_column="1", label_column="2")) == TWELVE
    report = check(bare, dataset="table", image_column="1", label_column="2", progress=False)
    assert report.ok and report.images == {"all": 12}
    with pytest.raises(UserError, match=r"data\.label_column is for tables"):
        open_data(DataConfig("folder", str(twelve), label_column="kind"), 0)


REFUSED = {
    "empty": ([], "empty"),
    "heading alone": (["image,label"], "image,label"),
    "one column": (["image", "cat0.png"], "'label'"),
    "no heading": (ROWS, "line 1 .*image,label.*--data.image_column"),
    "a column per class": (["image,cat,dog", "cat0.png,1,0"], "'label'"),
    "two columns of one name": (["image,label,label", "cat0.png,a,b"], "'label'"),
    "too many cells": (["image,label", "cat0.png,1,"], "line 2 .*3"),
    "too few": (["image,label", "cat0.png,1", "cat1.png"], "line 3 .*1"),
    "no image": (["image,label", ",2"], "line 2 .*names no image"),
    "no class": (["image,label", "cat0.png,"], "line 2"),
    "an open quotation mark": (["image,label", 'cat0.png,"1', "cat1.png,2"], "line 2 .*quot"),
    "marks around two lines": (["image,label", 'cat0.png,"1', 'cat1.png,2"'], "line 2 .*cat1"),
    "not UTF-8": (["image,label", "cat0.png,b\udcff"], "UTF-8"),
    "an image twice": (["image,label", "cat0.png,1", "./cat0.png,2"], "line 3 .*line 2"),
    "a missing image": (["image,label", *ROWS, "gone.png,1"], r"line 14 .*gone\.png"),
    "another spelling": (["image,label", "CAT0.png,cat"], r"line 2 .*CAT0\.png"),
    "a backslash": (["image,label", "x\\cat0.png,cat"], "line 2"),
    "a folder": (["image,label", "folder,1"], "line 2 .*not a file"),
    "a pipe": (["image,label", "pipe.png,1"], "line 2 .*not a file"),
    "a device": (["image,label", "zero.png,1"], "line 2 .*not a file"),
    "outside": (["image,label", "/dev/zero,1"], "line 2 .*allow_outside"),
    "outside by dots": (["image,label", "folder/../../x,1"], "line 2 .*allow_outside"),
    "several classes": (
        ["image,label", "cat0.png,a;b", "cat1.png,b", "cat2.png,a"],
        "several classes, 'a;b'; models are trained on one class an image",
    ),
    "an unknown split": (["image,label,split", "cat0.png,1,a"], "line 2 .*'a'"),
    "no validation": (["image,label,split", "cat0.png,1,train"], "train and val"),
    "no training": (["image,label,split", "cat0.png,1,val", "cat1.png,1,test"], "train and val"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_other_forms_are_refused(twelve, fault):
    rows, named = REFUSED[fault]
    (twelve / "folder").mkdir()
    os.mkfifo(twelve / "pipe.png")
    (twelve / "zero.png").symlink_to("/dev/zero")
    write(twelve, *rows)
    with pytest.raises(UserError, match=named):
        opened(twelve)


def test_a_name_with_a_comma_is_one_class(twelve):
    names = ["tench, Tinca tinca", "king penguin, Aptenodytes patagonica", "red;round", "blue"]
    write(twelve, "image\tlabel", *(f"cat{n}.png\t{name}" for n, name in enumerate(names)))
    assert open_table(DataConfig("table", str(twelve)))[0] == sorted(names)


@pytest.mark.parametrize("column", ["image,split,label", "split,image,label"])
def test_a_column_of_parts_splits(twelve, column, caplog):
    parts = ("Train", "train", "TRAIN", "val", "test", "train")
    cells = [(name, parts[int(name[3])], label) for name, label in TWELVE.items()]
    if column.startswith("split"):
        cells = [(part, name, label) for name, part, label in cells]
    write(twelve, column, *map(",".join, cells))
    splits = opened(twelve)
    assert {name[3] for name in pairs(splits)} == {"0", "1", "2", "3", "5"}
    assert pairs(splits).items() <= TWELVE.items()
    assert splits.train.labels.tolist() == [0] * 4 + [1] * 4
    assert splits.val.labels.tolist() == [0, 1]
    assert "2 of test" in caplog.text


def test_images_in_folders_outside_and_with_odd_names(twelve, image_file):
    outside = image_file(twelve.parent / f"{twelve.name}-outside.png", seed=99)
    names = ["a\nb.png", "deep/ä,.png", '"q".png', "=1.png"]
    for number, name in enumerate(names):
        image_file(twelve / name, seed=50 + number)
    names.append(str(twelve / "cat0.png"))
    cells = [*names[:2], '""q"".png', "'=1.png", names[-1]]
    rows = [f'"{name}",{label}' for name, label in zip(cells, "ababa", strict=True)]
    write(twelve, "image,label", *rows)
    wanted = dict(zip(names, "ababa", strict=True))
    assert pairs(opened(twelve)) == wanted
    write(twelve, "image,label", *rows, f"{outside},b")
    assert len(pairs(opened(twelve, allow_outside=True))) == 6
    assert check(twelve, dataset="table", allow_outside=True, progress=False).ok


@pytest.mark.parametrize(
    ("rows", "folders", "used"),
    [
        (["id,name", "0,a", "1,b"], {"a": 4, "b": 4}, False),
        (["image,label", "train/a/000.png,c"], {"train/a": 4, "val/a": 4}, False),
        (["id,name"], {"images": 4}, True),
    ],
)
def test_a_table_beside_class_folders(tmp_path, class_folders, rows, folders, used, caplog):
    class_folders(tmp_path, folders)
    write(tmp_path, *rows)
    assert has_table(tmp_path) == used
    assert ("is not used" in caplog.text) == (not used)


def metadata(folder, kind, names, **columns):
    """A table as Hugging Face's ImageFolder reads it; classes are the first letters."""
    rows = [{"file_name": name, "label": name.split("/")[-1][0], **columns} for name in names]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "csv":
        text = "\n".join([",".join(rows[0]), *(",".join(map(str, r.values())) for r in rows)])
    (folder / f"metadata.{kind}").write_text(text)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("place", ["here", "splits", "above"])
def test_tables_of_hugging_face_are_read(kind, place, tmp_path, image_file):
    names = ["a1.png", "b1.png", "deep/a2.png", "deep/b2.png"]
    folders = ["."] if place == "here" else ["train", "test"]
    for number, part in enumerate(folders):
        for seed, name in enumerate(names):
            image_file(tmp_path / part / name, seed=10 * number + seed)
        if place != "above":
            metadata(tmp_path / part, kind, names, caption=7)
    if place == "above":
        metadata(tmp_path, kind, [f"{part}/{name}" for part in folders for name in names])
    assert has_table(tmp_path) and images_at(str(tmp_path))["data.dataset"] == "table"
    splits = opened(tmp_path, val_fraction=0.5)
    assert {name[-6:]: label for name, label in pairs(splits).items()} == {
        name[-6:]: name.split("/")[-1][0] for name in names
    }
    assert (len(splits.train), len(splits.val)) == ((2, 2) if place == "here" else (4, 4))
    assert place == "here" or "/test/" in splits.val.describe(0)
    with pytest.raises(UserError, match="names no column 'kind'"):
        opened(tmp_path, label_column="kind")


def test_images_beside_splits_are_refused(tmp_path, image_file):
    names = [f"{part}/{name}.png" for part in ("train", "test", "extra") for name in "ab"]
    for seed, name in enumerate(names):
        image_file(tmp_path / name, seed=seed)
    metadata(tmp_path, "csv", names)
    with pytest.raises(UserError, match=r"2 images of .* are in no split, others in 'train'"):
        opened(tmp_path)


def test_a_damaged_line_of_json_is_named(twelve):
    (twelve / "metadata.jsonl").write_text('{"file_name": "cat0.png", "label": "a"}\n[1]\n')
    with pytest.raises(UserError, match=r"line 2 of '.*metadata\.jsonl'"):
        opened(twelve)
    row = '{"file_name": "cat%d.png", "label": %s}\n'
    lines = [row % pair for pair in enumerate(("[1]", "[2]", "[1, 2]"))]
    (twelve / "metadata.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match="several classes, '1;2'"):
        opened(twelve)
    (twelve / "metadata.jsonl").write_text("".join([row % (0, "null"), *lines[1:2]]))
    with pytest.raises(UserError, match="line 1"):
        opened(twelve)
    (twelve / "metadata.jsonl").write_text("".join(lines[:2]))
    assert open_table(DataConfig("table", str(twelve)))[0] == ["1", "2"]
    (twelve / "metadata.jsonl").write_text('{"file_name": "cat0.png", "label": "a"}\n{\n')
    with pytest.raises(UserError, match=r"line 2 of '.*metadata\.jsonl' is not JSON"):
        opened(twelve)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_of_hugging_face_beside_class_folders(kind, tmp_path, class_folders):
    class_folders(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 2, "val/b": 2})
    metadata(tmp_path, kind, ["train/a/000.png"])
    assert not has_table(tmp_path)
