"""Tables of images: rows that name a file and its class."""

import os

import numpy as np
import pytest

from locality.data import DataConfig, check, open_data
from locality.errors import UserError


@pytest.fixture
def cells(tmp_path, image_file):
    """Twelve images of three classes, listed as elpv-dataset lists its photographs."""
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
    assert splits.classes == ["0.5", "9", "10"]
    assert len(splits.train) == 9 and np.bincount(splits.val.labels).tolist() == [1, 1, 1]
    file = splits.train.describe(0)
    assert file == str(cells / "images" / "cell00.png") and splits.train.labels[0] == 2
    same = opened(cells / "labels.csv")
    assert np.array_equal(same.train.labels, splits.train.labels)


def test_columns_are_chosen_by_number_or_name(cells):
    assert opened(cells, label_column="3").classes == ["mono"]
    rows = [line.split() for line in (cells / "labels.csv").read_text().splitlines()]
    text = "\n".join(f'"{kind}",{value},{path}' for path, value, kind in rows)
    (cells / "own.csv").write_text("kind,defect,file\n" + text)
    splits = opened(cells / "own.csv", image_column="file", label_column="defect")
    assert splits.classes == ["0.5", "9", "10"] and len(splits.train) == 9
    with pytest.raises(UserError, match=r"unknown column of .*'defects'; did you mean defect"):
        opened(cells / "own.csv", image_column="file", label_column="defects")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ("file,class\n", "names no image"),
        ("a.png", "unknown column of .* '2'"),
        ("images/gone.png,1", "names 'images/gone.png', which is not in"),
        ("images/cell00.png,1\nimages/cell01.png", "too few columns: 'images/cell01.png'"),
        ("images/cell00.png,1\nimages/cell00.png,2", "names 'images/cell00.png' more than once"),
    ],
)
def test_a_table_that_cannot_be_used(cells, text, said):
    (cells / "labels.csv").write_text(text)
    with pytest.raises(UserError, match=said):
        opened(cells)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"there is no table of images '.*labels\.csv'"):
        opened(tmp_path)
    with pytest.raises(UserError, match=r"needs a file or folder; give it as data\.root"):
        open_data(DataConfig("table"), seed=0)


@pytest.mark.parametrize("name", ["/etc/passwd", "/dev/zero", "../other.png", "images/../../x"])
def test_images_outside_of_the_folder_are_refused_unless_allowed(cells, name):
    with open(cells / "labels.csv", "a") as table:
        table.write(f"{name} 9\n")
    for look in (opened, lambda root: check(root, dataset="table", workers=1, progress=False)):
        with pytest.raises(UserError, match=f"names '{name}', outside of .* data.allow_outside"):
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


@pytest.mark.parametrize("name", ["images", "pipe.png", "zero.png"])
def test_what_is_no_file_is_refused(cells, name):
    os.mkfifo(cells / "pipe.png")
    (cells / "zero.png").symlink_to("/dev/zero")
    with open(cells / "labels.csv", "a") as table:
        table.write(f"{name} 9\n")
    for look in (opened, lambda root: check(root, dataset="table", workers=1, progress=False)):
        with pytest.raises(UserError, match=f"names '{name}', no file but a folder, device or"):
            look(cells)


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
    assert any("a\\nb.png: the file is not an image" in line for line in report.lines())


def test_its_images_are_checked(cells):
    report = check(cells, dataset="table", workers=1, progress=False)
    assert report.ok and report.images == {"train": 9, "val": 3} and report.classes == 3
    (cells / "images" / "cell05.png").write_bytes(b"none")
    (cells / "images" / "cell06.png").write_bytes((cells / "images" / "cell07.png").read_bytes())
    report = check(cells, dataset="table", workers=1, progress=False)
    assert list(report.bad_files) == [str(cells / "images" / "cell05.png")]
    assert report.repeated + len(report.duplicates) == 1


def test_images_in_memory_are_checked(fashion_mnist):
    report = check(fashion_mnist, dataset="fashion_mnist", progress=False)
    assert report.ok and report.images == {"train": 600, "val": 40} and report.classes == 10
    assert report.sizes.width == (28,) * 5
    labels = fashion_mnist / "train-images-idx3-ubyte.gz"
    (fashion_mnist / "t10k-images-idx3-ubyte.gz").write_bytes(labels.read_bytes())
    with pytest.raises(UserError, match="600 images but 40 labels"):
        check(fashion_mnist, dataset="fashion_mnist", progress=False)
