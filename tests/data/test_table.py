"""Tables of images: rows that name a file and its class."""

import codecs
import itertools
import os
import random
import time
import unicodedata

import numpy as np
import pytest

from locality.data import DataConfig, check, open_data
from locality.data.table import has_table
from locality.errors import UserError


@pytest.fixture
def cells(tmp_path, image_file):
    """Twelve images of three classes in elpv-dataset's format."""
    lines = []
    for number in range(12):
        image_file(tmp_path / "images" / f"cell{number:02d}.png", seed=number)
        lines.append(f"images/cell{number:02d}.png  {(10, 9, 0.5)[number % 3]:<10} mono")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def opened(root, **settings):
    return open_data(DataConfig("table", str(root), **settings), seed=0)


def test_a_table_without_heading_divided_by_spaces(cells):
    splits = opened(cells)
    assert splits.classes == ["0.5", "10", "9"]
    assert len(splits.train) == 9 and np.bincount(splits.val.labels).tolist() == [1, 1, 1]
    file = splits.train.describe(0)
    assert file == str(cells / "images" / "cell00.png") and splits.train.labels[0] == 1
    same = opened(cells / "labels.csv")
    assert np.array_equal(same.train.labels, splits.train.labels)


def test_columns_are_chosen_by_number_or_name(cells):
    assert opened(cells, label_column="3").classes == ["mono"]
    rows = [line.split() for line in (cells / "labels.csv").read_text().splitlines()]
    text = "\n".join(f'"{kind}",{value},{path}' for path, value, kind in rows)
    (cells / "own.csv").write_text("kind,defect,file\n" + text)
    splits = opened(cells / "own.csv", image_column="file", label_column="defect")
    assert splits.classes == ["0.5", "10", "9"] and len(splits.train) == 9
    with pytest.raises(UserError, match="defects"):
        opened(cells / "own.csv", image_column="file", label_column="defects")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no rows"),
        ("file,class\n", "no image"),
        ("a.png", "single column"),
        ("file,class\nimages/cell00.png,1,\n", "line 2"),
        ("file,class\nimages/cell00.png,1\n,2\n", "line 3"),
        ("file,class\nimages/cell00.png,1\nimages/cell01.png,\n", "line 3"),
        ('file,class\nimages/cell00.png,"1\nimages/cell01.png,2\n', "line 2 .*quotation"),
        ('file,class\nimages/cell00.png,"1\nimages/cell01.png,2"\n', "line 2 .*quotation"),
        ('file,class\nimages/cell00.png,1"\nimages/cell01.png,2\n', "line 2 .*quotation"),
        ("images/cell00.png,1\nimages/cell01.png,b\udcff\n", "line 2 .*UTF-8"),
        ("images/cell00.png,1\nPK\0\n", "not text"),
        ("x" * 200_000, "not text"),
        ('"' + "x,\n" * 200, "line 1"),
        ("file,a,b\nimages/cell00.png,1,1\n", "'a', 'b'"),
        ("file,a,b\nimages/cell00.png,1,0\nimages/cell01.png,0,0\n", "line 3"),
        ("file,age,breed\nimages/cell00.png,1,0\nimages/cell01.png,2,1\n", "label_column"),
        ("file,mask,class\n" + "images/cell00.png,images/cell01.png,1\n", "image_column"),
        ("file,split\nimages/cell00.png,train\nimages/cell01.png,val\n", "classes"),
        ("images/gone.png,1", r"images/gone\.png"),
        ("images/cell00.png,1\nimages/cell01.png", r"images/cell01\.png"),
        ("images/cell00.png,1\nimages/cell00.png,2", r"images/cell00\.png"),
        ("images/cell00.png,1\n./images//cell00.png,2", "line 2 .* so does line 1"),
    ],
)
def test_a_table_that_cannot_be_used(cells, text, named):
    (cells / "labels.csv").write_bytes(os.fsencode(text))
    with pytest.raises(UserError, match=named):
        opened(cells)


def pairs(splits):
    """Images and classes of both parts."""
    return {
        os.path.basename(part.describe(i)): splits.classes[part.labels[i]]
        for part in (splits.train, splits.val)
        for i in range(len(part))
    }


TWELVE = {f"{name}{i}.png": name for name in ("cat", "dog") for i in range(6)}


@pytest.fixture
def twelve(tmp_path, image_file):
    for number, name in enumerate(TWELVE):
        image_file(tmp_path / name, seed=number, size=(4, 4))
    return tmp_path


def dialects():
    """Dialects: separator, encoding, heading, quotes, line ends, padding."""
    marks = [",", ";", "\t", "|", " ", "sep=;"]
    encodings = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"]
    headings = [None, "image{}label", "FILENAME{}Class", " Image {} LABEL "]
    quotes, ends, padding = ["", '"'], ["\n", "\r\n", "\r"], ["", "  "]
    choices = list(itertools.product(marks, encodings, headings, quotes, ends, padding))
    return random.Random(0).sample(choices, 30)


@pytest.mark.parametrize(("mark", "encoding", "heading", "quote", "end", "pad"), dialects())
def test_dialects(twelve, mark, encoding, heading, quote, end, pad, caplog):
    before, mark = ([mark], mark[-1]) if mark.startswith("sep") else ([], mark)
    rows = [] if heading is None else [heading.format(mark)]
    rows += [f"{quote}{name}{quote}{mark}{quote}{label}{quote}" for name, label in TWELVE.items()]
    text = end.join([*before, *(row + pad for row in rows), "", ""])
    data = text.encode(encoding)
    if encoding == "utf-16-le":
        data = codecs.BOM_UTF16_LE + data
    (twelve / "labels.csv").write_bytes(data)
    assert pairs(opened(twelve)) == TWELVE
    names = ["1", "2"] if heading is None else [f"'{name.strip()}'" for name in heading.split("{}")]
    assert all(f"column {name}" in caplog.text for name in names)


@pytest.mark.parametrize(
    ("written", "renamed"),
    [
        (str.upper, None),
        ("./{}".format, None),
        (lambda name: name[:-4], None),
        (" {} ".format, None),
        (lambda name: "cat0.heic" if name == "cat0.png" else name, "cat0.heic"),
        (lambda name: "cat0" if name == "cat0.png" else name, "cat0"),
    ],
)
def test_names_are_matched_to_files(twelve, written, renamed):
    rows = [f"{written(name)},{label}" for name, label in TWELVE.items()]
    if renamed:
        (twelve / "cat0.png").rename(twelve / renamed)
    (twelve / "labels.csv").write_text("\n".join(rows))
    found = pairs(opened(twelve))
    assert len(found) == 12 and {found[name] for name in found if name[:3] == "cat"} == {"cat"}
    assert found.pop(renamed or "cat0.png") == "cat"


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_in_other_forms_of_unicode_and_backslashes(tmp_path, image_file, form):
    names = {f"bär{i}.png": f"Bär{i % 2}" for i in range(4)}
    for name in names:
        image_file(tmp_path / "Töpfe" / unicodedata.normalize("NFC", name))
    rows = [unicodedata.normalize(form, f"töpfe\\{a},{b}") for a, b in names.items()]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    assert pairs(opened(tmp_path, val_fraction=0.5)) == names


@pytest.mark.parametrize("first", ["cat9.png", "cat9.heic", "cat9"])
def test_a_first_row_whose_image_is_missing_is_no_heading(twelve, first):
    rows = [f"{first},cat", *(f"{name},{label}" for name, label in TWELVE.items())]
    (twelve / "labels.csv").write_text("\n".join(rows))
    assert pairs(opened(twelve)) == TWELVE | {first: "cat"}


@pytest.mark.parametrize("numbers", [("0", "1"), ("0.0", "1.0")])
@pytest.mark.parametrize("names", [("cat", "dog", "fox"), ("0", "1", "2")])
def test_a_column_for_each_class(twelve, names, numbers, caplog):
    rows = [
        f"{name},{numbers[label == 'cat']},{numbers[label == 'dog']},{numbers[0]}"
        for name, label in TWELVE.items()
    ]
    (twelve / "labels.csv").write_text("\n".join([",".join(("image", *names)), *rows]))
    called = dict(zip(("cat", "dog"), names, strict=False))
    assert pairs(opened(twelve)) == {name: called[label] for name, label in TWELVE.items()}
    assert repr(names[0]) in caplog.text and repr(names[2]) in caplog.text


@pytest.mark.parametrize("more", ["", ",{}0"])
def test_a_first_class_1_is_no_heading(twelve, more):
    labels = {"x0": "1", **{name: "01"[label == "dog"] for name, label in TWELVE.items()}}
    rows = [
        f"{name.partition('.')[0]},{label}{more.format(name)}" for name, label in labels.items()
    ]
    (twelve / "labels.csv").write_text("\n".join(rows))
    assert sorted(pairs(opened(twelve, label_column="2")).values()) == sorted(labels.values())


@pytest.mark.parametrize("table", ["split before", "split behind", "no heading", "folders"])
def test_a_column_of_parts_splits(twelve, table, caplog):
    parts = {
        name: ("Train", "train", "TRAIN", "val", "test", "train")[int(name[3])] for name in TWELVE
    }
    rows = [f"{name},{parts[name]},{label}" for name, label in TWELVE.items()]
    if table == "split behind":
        rows = ["image,kind,subset"] + [f"{n},{k},{parts[n]}" for n, k in TWELVE.items()]
    elif table == "split before":
        rows.insert(0, "image,split,label")
    elif table == "folders":
        for name, part in parts.items():
            (twelve / part).mkdir(exist_ok=True)
            (twelve / name).rename(twelve / part / name)
        rows = [f"{parts[name]}/{name},{label}" for name, label in TWELVE.items()]
    (twelve / "labels.csv").write_text("\n".join(rows))
    splits = opened(twelve)
    assert {name[3] for name in pairs(splits)} == {"0", "1", "2", "3", "5"}
    assert len(splits.train) == 8 and len(splits.val) == 2
    assert "2 of test" in caplog.text


def test_a_column_of_parts_without_train_is_not_used_and_named(twelve, caplog):
    rows = [f"{name},{('val', 'test')[n % 2]},{TWELVE[name]}" for n, name in enumerate(TWELVE)]
    (twelve / "labels.csv").write_text("\n".join(["image,split,label", *rows]))
    assert len(pairs(opened(twelve))) == 12
    assert "; not used: column 'split'" in caplog.text and "are split by" not in caplog.text


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("id,name\n0,a\n1,b\n", False),
        ('id,name\n0,a\n1,"b"c\n', False),
        ("id,name\n0,a\n" + '1,"x\ny"\n' * 60 + "2,\0\n", False),
        ("".join(f"a/{n:03d}.png,c{n}\nb/{n:03d}.png,d{n}\n" for n in range(4)), True),
    ],
)
def test_a_table_that_names_no_image_is_passed_over(tmp_path, class_folders, text, used, caplog):
    class_folders(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "labels.csv").write_text(text)
    assert has_table(tmp_path) == used
    assert ("is not used" in caplog.text) == (not used)


def test_a_table_of_missing_images_is_refused_at_once(twelve):
    with open(twelve / "labels.csv", "w") as table:
        table.writelines(f"images/a{number}.png,{number % 7}\n" for number in range(300_000))
    began = time.process_time()
    with pytest.raises(UserError, match=r"images/a0\.png"):
        opened(twelve)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("/dev/zero", "allow_outside"),
        ("images/../../x", "allow_outside"),
        ("images", "images"),
        ("pipe.png", "pipe.png"),
        ("zero.png", "zero.png"),
    ],
)
def test_what_is_outside_of_the_folder_or_no_file_is_refused(cells, name, named):
    os.mkfifo(cells / "pipe.png")
    (cells / "zero.png").symlink_to("/dev/zero")
    with open(cells / "labels.csv", "a") as table:
        table.write(f"{name} 9\n")
    for look in (opened, lambda root: check(root, dataset="table", workers=1, progress=False)):
        with pytest.raises(UserError, match=named):
            look(cells)


def test_images_outside_of_the_folder_may_be_allowed(cells, image_file):
    outside = image_file(cells.parent / f"{cells.name}-outside.png", seed=99)
    inside = cells / "images" / "cell00.png"
    text = (cells / "labels.csv").read_text().replace("images/cell00.png", str(inside))
    (cells / "labels.csv").write_text(text)
    assert len(opened(cells).train) == 9
    (cells / "labels.csv").write_text(f"{text}{outside} 9\n")
    assert len(opened(cells, allow_outside=True).train) == 10
    report = check(cells, dataset="table", allow_outside=True, workers=1, progress=False)
    assert report.ok and sum(report.images.values()) == 13


def test_names_may_hold_line_breaks(cells, image_file):
    names = ["a\nb.png", "c\u2028d.png", "e\r\nf.png", "g\x0ch.png"]
    for number, name in enumerate(names):
        image_file(cells / name, seed=number)
    rows = [f'"{name}",{number % 2}' for number, name in enumerate(names)]
    (cells / "own.csv").write_text("\n\nfile,class\n\n" + "\n".join(rows), newline="")
    splits = opened(cells / "own.csv", val_fraction=0.5)
    found = [each.describe(i) for each in (splits.train, splits.val) for i in range(2)]
    assert sorted(found) == sorted(str(cells / name) for name in names)
    (cells / names[0]).write_bytes(b"none")
    report = check(cells / "own.csv", dataset="table", workers=1, progress=False)
    assert list(report.bad_files) == [str(cells / names[0])]


def test_its_images_are_checked(cells):
    report = check(cells, dataset="table", workers=1, progress=False)
    assert report.ok and report.images == {"train": 9, "val": 3} and report.classes == 3
    (cells / "images" / "cell05.png").write_bytes(b"none")
    (cells / "images" / "cell06.png").write_bytes((cells / "images" / "cell07.png").read_bytes())
    report = check(cells, dataset="table", workers=1, progress=False)
    assert list(report.bad_files) == [str(cells / "images" / "cell05.png")]
    assert len(report.repeats) + len(report.duplicates) == 1


def test_images_in_memory_are_checked(fashion_mnist):
    report = check(fashion_mnist, dataset="fashion_mnist", progress=False)
    assert report.ok and report.images == {"train": 600, "val": 40} and report.classes == 10
    assert report.sizes["width"] == [28] * 5
    labels = fashion_mnist / "train-images-idx3-ubyte.gz"
    (fashion_mnist / "t10k-images-idx3-ubyte.gz").write_bytes(labels.read_bytes())
    with pytest.raises(UserError, match="40 labels"):
        check(fashion_mnist, dataset="fashion_mnist", progress=False)
