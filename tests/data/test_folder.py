"""Image folders: class numbers, ignored files, and errors that name files."""

import os
import shutil
import unicodedata

import numpy as np
import pytest

from locality.data import BadImage, DataConfig, check, open_data
from locality.data.folder import image_files, list_folder, part_of
from locality.errors import UserError


def folder(root, **settings):
    return open_data(DataConfig(dataset="folder", root=str(root), **settings), seed=0)


def names(source):
    return [os.path.relpath(source.describe(i), source.root) for i in range(len(source))]


def test_train_and_val(train_val):
    splits = folder(train_val)
    assert splits.classes == ["ant", "bee", "cat"]
    assert splits.train.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert splits.val.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert names(splits.train) == [f"{c}/00{n}.png" for c in splits.classes for n in range(6)]
    assert splits.train.read(0).size == (10, 12)


@pytest.mark.parametrize(
    ("train", "val"),
    [
        *[("train", name) for name in ("validation", "valid", "dev", "VAL")],
        ("TRAIN", "test_images"),
        ("Training Set", "Development"),
        ("images-train", "images-val"),
        ("trainset", "testset"),
        ("train2017", "val2017"),
    ],
)
def test_other_names_of_parts(train_val, train, val):
    (train_val / "train").rename(train_val / train)
    (train_val / "val").rename(train_val / val)
    splits = folder(train_val)
    assert splits.classes == ["ant", "bee", "cat"]
    assert (len(splits.train), len(splits.val)) == (18, 6)


def test_names_that_speak_of_no_part():
    assert not any(map(part_of, ("trainer", "evaluation", "testament", "valley", "devil", "tra")))


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"Train/a": 2, "train/a": 2, "val/a": 1}, "'Train', 'train'"),
        ({"train/a": 2, "val/a": 1, "valid/a": 1}, "'val', 'valid'"),
        ({"val/a": 2, "test/a": 1}, "train"),
        ({"train/a": 2, "other/a": 1}, "val"),
        ({"training": 2, "validation": 1}, "training'"),
        ({".": 1}, "one folder per class"),
        ({"train/a": 0, "val/a": 1}, "no images in .*train"),
        ({"train/a": 1, "val/a": 0}, "no images in .*val"),
        ({"a": 1, "b": 1}, r"\(2\)"),
        ({"train/b": 1, "train/c": 1, "val/c": 1, "val/d": 1}, "'b'.*'d'"),
        ({f"train/x{n}": 1 for n in range(8)} | {"val/a": 1}, "'x4' and 3 more"),
        ({"cat/train": 2, "cat/val": 1, "dog/train": 2}, "inside of classes.*train/cat"),
        ({"cat/train": 2, "dog/train": 2}, "inside of classes"),
        ({"cat/images/Training": 2, "cat/images/test": 2, "dog": 2}, "inside of classes"),
        ({"train/a/val": 2, "train/b/val": 2, "val/a": 1, "val/b": 1}, "inside of classes"),
        ({"photos/cat": 2, "photos/dog": 2}, "give '.*/photos', or --data.label parent"),
        ({"photos/train/cat": 2, "photos/val/cat": 2}, "inside of classes.*give '.*/photos'"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_layouts_that_are_refused(tmp_path, class_folders, layout, named):
    class_folders(tmp_path, layout)
    with pytest.raises(UserError, match=named):
        folder(tmp_path)


@pytest.mark.parametrize(
    ("label", "classes", "counts"),
    [
        ("top", ["a", "b", "c"], [3, 2, 2]),
        ("parent", ["alley", "attic", "b", "c"], [3, 1, 2, 1]),
        ("path", ["a/alley", "a/attic", "b", "c", "c/alley"], [2, 1, 2, 1, 1]),
    ],
)
def test_the_folder_that_is_the_class_is_chosen(
    label, classes, counts, tmp_path, class_folders, caplog
):
    class_folders(tmp_path, {"a/alley": 2, "a/attic": 1, "b": 2, "c": 1, "c/alley": 1})
    splits = open_data(DataConfig("folder", str(tmp_path), label=label), 0, whole=True)
    assert splits.classes == classes and np.bincount(splits.train.labels).tolist() == counts
    assert ("a/alley" in caplog.text and "--data.label parent" in caplog.text) == (label == "top")


def test_names_and_folders_that_are_confused_are_named(tmp_path, class_folders, caplog):
    class_folders(tmp_path, {"cat": 2, "cat ": 2, "Dog": 2, "dog\u200b": 2, "rat": 2})
    (tmp_path / "mouse").symlink_to("rat")
    folder(tmp_path)
    for alike in ("'cat', 'cat '", r"'Dog', 'dog\u200b'"):
        assert f"look alike: {alike}" in caplog.text
    assert "mouse'" in caplog.text and "the same, through a link" in caplog.text
    (tmp_path / unicodedata.normalize("NFC", "\u00e9")).mkdir()
    (tmp_path / unicodedata.normalize("NFD", "\u00e9")).mkdir()
    with pytest.raises(UserError, match=r"look alike .*xe9.*keep one|look alike .*u0301.*keep one"):
        folder(tmp_path)


def test_a_part_that_links_to_the_other_is_named(train_val, caplog):
    shutil.rmtree(train_val / "val")
    (train_val / "val").symlink_to("train")
    folder(train_val)
    assert "the same, through a link" in caplog.text


def test_folders_without_end_are_one_sentence(tmp_path, cli, monkeypatch):
    (tmp_path / "cat").mkdir()
    monkeypatch.chdir(tmp_path / "cat")
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    try:
        for words in (["train", "--quiet"], ["data", "check"]):
            said = cli(*words, tmp_path, code=2).err
            assert said.count("\n") == 1 and "levels deep" in said
        with pytest.raises(UserError, match="levels deep"):
            list(image_files([str(tmp_path)]))
    finally:
        for _ in range(1500):
            os.chdir("..")
            os.rmdir("d")


def test_tables_of_images_are_pointed_to_their_dataset(tmp_path):
    (tmp_path / "train-0.parquet").touch()
    with pytest.raises(UserError, match="arrow"):
        folder(tmp_path)


def test_an_empty_class_keeps_its_number(train_val):
    (train_val / "train" / "bat").mkdir()
    (train_val / "val" / "bat").mkdir()
    splits = folder(train_val)
    assert splits.classes == ["ant", "bat", "bee", "cat"]
    assert set(splits.train.labels) == set(splits.val.labels) == {0, 2, 3}


JUNK = (
    *("Thumbs.db", "thumbs.db", "desktop.ini", ".DS_Store", "._a.png", ".cache/a.png"),
    *("@eaDir/a.png", "#recycle/a.png", "__MACOSX/a.png", ".ipynb_checkpoints/a.png"),
)


def test_what_systems_leave_is_passed_over(train_val, image_file):
    for place in ("train", "train/ant", "."):
        for name in JUNK:
            (train_val / place / name).parent.mkdir(exist_ok=True)
            image_file(train_val / "a.png").rename(train_val / place / name)
    splits = folder(train_val)
    assert (splits.classes, len(splits.train)) == (["ant", "bee", "cat"], 18)
    (train_val / "empty").mkdir()
    places = [str(train_val / "empty"), str(train_val / "train" / "ant")]
    assert len(list(image_files(places))) == 6  # and a warning
    (train_val / "empty").rmdir()
    # Images in the folder hide none of those below it.
    image_file(train_val / "cover.png")
    assert len(list(image_files([str(train_val)]))) == 25


def test_files_that_are_not_read_are_counted_for_predictions_too(train_val, caplog):
    for name in ("a.jxl", "b.dng", "noext"):
        (train_val / "train" / "ant" / name).write_bytes(b"x")
    assert len(list(image_files([str(train_val / "train")]))) == 18
    assert "3 of 21 files are left out" in caplog.text
    assert "convert .jxl, .dng to .jpg or .png" in caplog.text


def test_folds_are_of_the_training_images(train_val, caplog):
    splits = folder(train_val, fold=(0, 3))
    assert (len(splits.train), len(splits.val)) == (12, 6)
    assert "6 others are not used" in caplog.text


def test_files_left_out_are_counted_by_suffix(train_val, image_file, caplog):
    for number in range(12):
        (train_val / "train" / "ant" / f"{number}.HEIC").write_bytes(b"heic")
    (train_val / "train" / "bee" / "notes.txt").write_text("x")
    image_file(train_val / "train" / "beside.png")
    assert len(folder(train_val).train) == 18
    assert "12 .heic, 1 .png, 1 .txt" in caplog.text and "locality[heif]" in caplog.text
    assert "'beside.png'" in caplog.text


def test_images_of_unread_formats_alone_are_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.heic").write_bytes(b"heic")
    for look in (folder, lambda root: list(image_files([str(root)]))):
        with pytest.raises(UserError, match=r"locality\[heif\]"):
            look(tmp_path)


def test_archives_are_not_read(train_val, tmp_path_factory):
    place = tmp_path_factory.mktemp("archive") / "my photos"
    for kind, dataset in (("zip", "folder"), ("gztar", "table")):
        with pytest.raises(UserError, match="archive"):
            open_data(DataConfig(dataset, shutil.make_archive(str(place), kind, train_val)), 0)


def test_class_names_in_other_forms_of_unicode_are_the_same(train_val):
    for part, form in (("train", "NFC"), ("val", "NFD")):
        (train_val / part / "ant").rename(train_val / part / unicodedata.normalize(form, "äffin"))
    splits = folder(train_val)
    assert splits.classes == ["bee", "cat", "äffin"] and splits.val.labels.tolist().count(2) == 2
    assert splits.val.read(5).mode == "RGB"
    assert check(train_val, progress=False).ok
    (train_val / "train" / unicodedata.normalize("NFD", "äffin")).mkdir()
    with pytest.raises(UserError, match="äffin"):
        folder(train_val)


def test_capital_suffixes_and_nested_folders(train_val, image_file):
    lower = image_file(train_val / "train" / "ant" / "deeper" / "a.jpeg")
    lower.rename(lower.with_suffix(".JPEG"))
    assert "ant/deeper/a.JPEG" in names(folder(train_val).train)


def test_links_are_followed_but_not_in_circles(train_val, class_folders, caplog):
    outside = class_folders(train_val / "elsewhere", {"dog": 2})
    (train_val / "train/ant/again").symlink_to(train_val / "train")
    (train_val / "train/bee/more").symlink_to(outside / "dog")
    for place in ("train/ant/self", "train/self"):
        (train_val / place).symlink_to("self")
    listing = list_folder(train_val / "train")
    assert {name: len(files) for name, files in listing.files.items()} == {
        "ant": 6, "bee": 8, "cat": 6,
    }  # fmt: skip
    assert listing.ignored == ["self", "ant/self", "ant/again"]
    assert len(folder(train_val).train) == 20 and "3 of 23 files are left out" in caplog.text


@pytest.mark.parametrize("target", ["gone.png", "000.png"])
def test_a_link_to_nothing_is_a_bad_image(train_val, target):
    (train_val / "train" / "ant" / "000.png").unlink()
    (train_val / "train" / "ant" / "000.png").symlink_to(target)
    source = folder(train_val).train
    assert len(source) == 18
    with pytest.raises(BadImage, match=r"No such file|symbolic links"):
        source.read(0)


def test_what_is_no_file_is_a_bad_image(train_val):
    # Opening a pipe would wait for ever.
    os.mkfifo(train_val / "train" / "ant" / "pipe.png")
    (train_val / "train" / "ant" / "zero.png").symlink_to("/dev/zero")
    bad = check(train_val, progress=False).bad_files
    assert [os.path.basename(path) for path in bad] == ["pipe.png", "zero.png"]


def test_names_that_are_not_text(tmp_path, image_file):
    for name in ("ä.png", "日本.png", os.fsdecode(b"\xff\xfe.png")):
        image_file(tmp_path / "a" / "plain.png").rename(tmp_path / "a" / name)
    source = list_folder(tmp_path).source(["a"], DataConfig().decoding)
    assert [source.read(index).mode for index in range(len(source))] == ["RGB"] * 3
    (tmp_path / "a").rename(tmp_path / os.fsdecode(b"\xff"))
    with pytest.raises(UserError, match="not UTF-8"):
        folder(tmp_path)


@pytest.mark.parametrize(
    "words", [["data", "check"], ["train"], ["train", "--data.dataset=folder", "--data.root"]]
)
def test_a_remote_address_is_one(words, cli):
    assert "s3://bucket/x is a remote" in cli(*words, "s3://bucket/x", code=2).err


def test_control_characters_in_names_are_escaped(tmp_path, class_folders, cli, caplog):
    class_folders(tmp_path, {"a\x1b[31m": 20, "b\x07/c\x1b": 1, "b\x07/d": 1})
    (tmp_path / "a\x1b[31m/bad.png").write_bytes(b"no image")
    printed = cli("data", "check", tmp_path, code=1)
    assert r"a\x1b[31m/bad.png" in printed.out and r"b\x07/c\x1b" in caplog.text
    assert not {"\x1b", "\x07"} & {*printed.out, *printed.err, *caplog.text}


def test_runs_in_the_images_folder_are_no_class(tmp_path, class_folders):
    class_folders(tmp_path, {"ant": 4, "bee": 4, "mine": 1, "runs/images/x": 2})
    for run in ("mine", "runs/photos/one"):
        for name in ("config.yaml", "environment.json"):
            (tmp_path / run).mkdir(parents=True, exist_ok=True)
            (tmp_path / run / name).touch()
    assert folder(tmp_path).classes == ["ant", "bee"]
    class_folders(tmp_path / "sport", {"runs": 4, "walks": 4})
    assert folder(tmp_path / "sport").classes == ["runs", "walks"]
