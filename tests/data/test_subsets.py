"""Fractions are balanced, nested and seeded; splits are stratified."""

import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from locality.data import DataConfig, open_data
from locality.data.datasets import open_digits
from locality.data.sampling import class_fraction, class_slice, stratified_split
from locality.errors import UserError

# Sizes of the paper's Table 2, on unbalanced, unordered classes.
FRACTIONS = (0.05, 0.1, 0.3, 0.5, 1.0)
LABELS = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 5], [40, 73, 20, 111]))


LABELLED = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array)
FRACTION = st.floats(0.0, 1.0, exclude_min=True)
SEEDS = st.integers(0, 2**63 - 1)


@given(LABELLED, st.lists(FRACTION, min_size=2, max_size=4), SEEDS)
def test_a_smaller_fraction_lies_within_a_larger_one(labels, fractions, seed):
    subsets = [set(range(len(labels)))]
    for fraction in sorted(fractions, reverse=True):
        try:
            subset = class_fraction(labels, fraction, seed)
        except UserError:  # a class would be empty, as with any smaller fraction
            break
        assert set(subset.tolist()) <= subsets[-1]
        subsets.append(set(subset.tolist()))


@given(LABELLED, FRACTION, SEEDS)
def test_every_class_keeps_its_fraction(labels, fraction, seed):
    counts = np.bincount(labels)
    wanted = np.floor(counts * fraction + 0.5)
    if (wanted[counts > 0] == 0).any():
        with pytest.raises(UserError, match="without images"):
            class_fraction(labels, fraction, seed)
    else:
        kept = labels[class_fraction(labels, fraction, seed)]
        assert np.array_equal(np.bincount(kept, minlength=len(counts)), wanted)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_sorted_takes_the_first_of_each_class_as_the_released_code_does(fraction):
    expected = []
    for label in sorted(set(LABELS.tolist())):
        members = np.flatnonzero(label == LABELS)
        expected += members[: int(len(members) * fraction)].tolist()
    assert class_fraction(LABELS, fraction, None).tolist() == sorted(expected)


@pytest.mark.parametrize("seed", [0, None])
def test_a_fraction_that_empties_a_class_is_refused(seed):
    with pytest.raises(UserError, match=r"0\.01 .*one has 40"):
        class_fraction(LABELS, 0.01, seed)


def test_classes_that_were_empty_already_do_not_matter():
    # 3 and 4 have no images; class numbers are kept.
    assert set(LABELS[class_fraction(LABELS, 0.1, 0)].tolist()) == {0, 1, 2, 5}
    assert len(class_fraction([], 0.5, 0)) == 0


@given(LABELLED, st.floats(0.01, 0.99), SEEDS)
def test_a_split_divides_every_class_alike(labels, fraction, seed):
    train, val = stratified_split(labels, fraction, seed)
    assert sorted([*train, *val]) == list(range(len(labels)))
    counts = np.bincount(labels)
    held_out = np.bincount(labels[val], minlength=len(counts))
    # Both sides get one of two images; a single image is for training.
    several = counts > 1
    least, most = several.astype(int), np.where(several, counts - 1, 0)
    assert np.array_equal(held_out, np.clip(np.floor(counts * fraction + 0.5), least, most))


def test_parts_share_no_image_and_leave_none_out():
    parts = [class_slice(LABELS, part, 0) for part in ((0.0, 0.2), (0.2, 0.75), (0.75, 1.0))]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    assert [np.sum(LABELS[part] == 5) for part in parts] == [22, 61, 28]
    assert not np.array_equal(parts[0], class_slice(LABELS, (0.0, 0.2), 1))


def pictures_of(source):
    return {source.read(index).tobytes() for index in range(len(source))}


def test_students_teacher_and_pilot_see_each_their_own_digits_and_none_those_of_the_test():
    student = open_data(DataConfig(train_part=(0, 0.5), fraction=0.5), seed=3)
    teacher = open_data(DataConfig(train_part=(0.5, 1)), seed=0)
    pilot = open_data(DataConfig(train_part=(0, 0.5), val_part=(0.5, 1)), seed=0)
    seen = [pictures_of(part) for part in (student.train, teacher.train, student.val)]
    assert sum(map(len, seen)) == len(set.union(*seen)) > 1450
    assert pictures_of(pilot.val) == seen[1] and pictures_of(teacher.val) == seen[2]


def test_every_digit_is_evaluated_in_one_fold_and_trained_on_in_the_others():
    folds = [open_data(DataConfig(fold=(number, 3)), seed=0) for number in range(3)]
    held = [pictures_of(fold.val) for fold in folds]
    assert sum(map(len, held)) == len(set.union(*held)) > 1750
    for fold, evaluated in zip(folds, held, strict=True):
        assert len(fold.train) + len(fold.val) == 1797
        assert not pictures_of(fold.train) & evaluated


def test_digits():
    splits = open_data(DataConfig(), seed=0)
    assert len(splits.train) + len(splits.val) == 1797
    assert splits.classes == list("0123456789")
    assert abs(len(splits.val) - 1797 / 4) < 5
    image = splits.train.read(0)
    assert image.mode == "RGB" and image.size == (8, 8)
    assert splits.train.pixels.min() == 0 and splits.train.pixels.max() == 255
    assert splits.train.describe(3).startswith("digits[")
    with pytest.raises(UserError, match="photos"):
        open_data(DataConfig(root="photos"), seed=0)


def test_the_digits_are_those_of_scikit_learn():
    _, source, _ = open_digits(DataConfig())
    theirs = load_digits()
    assert np.array_equal(source.pixels[:, 0], np.rint(theirs.images * (255 / 16)))
    assert np.array_equal(source.labels, theirs.target)


def test_the_validation_images_do_not_depend_on_the_runs_seed_or_fraction():
    one = open_data(DataConfig(), seed=0)
    other = open_data(DataConfig(fraction=0.05), seed=7)
    assert np.array_equal(one.val.indices, other.val.indices)
    assert not set(other.train.indices) & set(one.val.indices)
    assert set(np.bincount(other.train.labels)) <= {6, 7}
    moved = open_data(DataConfig(split_seed=1), seed=0)
    assert not np.array_equal(one.val.indices, moved.val.indices)


def test_a_subset_of_a_subset_reads_the_source_itself():
    train = open_data(DataConfig(), seed=0).train
    inner = train.subset([5, 9, 2]).subset([2, 0])
    assert inner.source is train.source
    assert np.array_equal(inner.labels, train.labels[[2, 5]])
    assert inner.describe(1) == train.describe(5)
    assert inner.read(0).tobytes() == train.read(2).tobytes()
    assert np.array_equal(inner.pixels, train.pixels[[2, 5]])


def plant(folder, image_file, seed):
    """40 images of two classes; some are copies: renamed, of another class, in other formats."""
    random = np.random.default_rng(seed)
    for number in range(40):
        target = folder / ("cat", "dog")[random.integers(2)] / f"{number:02}.png"
        earlier = sorted(folder.glob("*/*.*"))
        kind = (None, None, ".png", ".bmp", ".tif", "less")[random.integers(6)] if earlier else None
        target.parent.mkdir(exist_ok=True)
        if kind is None:
            image_file(target, seed=100 * seed + number, size=(4, 5))
        elif kind == ".png":
            target.write_bytes(earlier[random.integers(len(earlier))].read_bytes())
        else:
            image = Image.open(earlier[random.integers(len(earlier))])
            image.save(target.with_suffix(kind) if "." in kind else target, compress_level=0)


@pytest.mark.parametrize("seed", range(20))
def test_copies_stay_on_one_side_of_a_split(tmp_path, image_file, seed):
    plant(tmp_path, image_file, seed)
    for settings in ({}, {"fold": (1, 3)}, {"train_part": (0, 0.5), "val_part": (0.5, 1)}):
        splits = open_data(DataConfig("folder", str(tmp_path), **settings), seed=0)
        train, val = pictures_of(splits.train), pictures_of(splits.val)
        assert train and val and not train & val
        assert settings or len(splits.train) + len(splits.val) == 40


def subjects_on_both_sides(splits, pattern):
    ours, theirs = (
        {re.search(pattern, os.path.basename(source.describe(index)))[1] for index in range(n)}
        for source, n in ((splits.train, len(splits.train)), (splits.val, len(splits.val)))
    )
    assert ours and theirs
    return ours & theirs


@pytest.mark.parametrize("settings", [{}, {"fold": (1, 3)}, {"split_seed": 7}])
@pytest.mark.parametrize("kind", ["folder", "table"])
def test_a_group_stays_on_one_side_of_a_split(kind, settings, tmp_path, image_file):
    rows = ["image,label,person"]
    for seed in range(60):
        name = f"{'ab'[seed % 2]}/p{seed // 4}_{seed}.png"
        image_file(tmp_path / name, seed=seed)
        rows.append(f"{name},{name[0]},number {seed // 4}")
    shutil.copy(tmp_path / "a/p0_0.png", tmp_path / "a/p9_copy.png")  # joins two groups
    rows.append("a/p9_copy.png,a,number 9")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    pattern, root = "^(p[0-9]+)_", str(tmp_path)
    data = DataConfig(kind, root, **{"val_fraction": 0.3, **settings})
    assert len(subjects_on_both_sides(open_data(data, 0), pattern)) > 5
    group = {"group_by": pattern} if kind == "folder" else {"group_column": "Person"}
    splits = open_data(replace(data, **group), 0)
    assert not subjects_on_both_sides(splits, pattern)
    assert splits.val.groups is not None and not {*splits.val.groups} & {*splits.train.groups}
    parts = (open_data(replace(data, **group, part=p), 0, whole=True) for p in ((0, 0.3), (0.3, 1)))
    assert set.isdisjoint(*({*part.train.groups} for part in parts))
    if kind == "table":
        group = {"group_column": "person", "group_by": "number ([0-9])"}
        assert not subjects_on_both_sides(open_data(replace(data, **group), 0), "^p([0-9])")
        with pytest.raises(UserError, match="no column 'colour'"):
            open_data(replace(data, group_column="colour"), 0)
    else:
        with pytest.raises(UserError, match="is not in any name, such as p"):
            open_data(replace(data, group_by="person"), 0)
        with pytest.raises(UserError, match=r"no columns; give data\.group_by"):
            open_data(replace(data, group_column="person"), 0)
    with pytest.raises(UserError, match="not a regular expression"):
        replace(data, group_by="(")


def test_images_without_a_group_stand_alone(tmp_path, image_file, caplog):
    names = [f"{kind}{seed % 5}_{seed}.png" for seed in range(10) for kind in ("dog", "cat", "x")]
    rows = ["image,label,person"]
    for seed, name in enumerate(names):
        path = image_file(tmp_path / "ab"[seed % 2] / name, seed=seed)
        rows.append(f"{path.relative_to(tmp_path)},{'ab'[seed % 2]},{'' if seed > 9 else 'one'}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    data = DataConfig("table", str(tmp_path), val_fraction=0.4, group_column="person")
    assert len(np.unique(open_data(data, 0, whole=True).train.groups)) == 21
    data = DataConfig("folder", str(tmp_path), val_fraction=0.4, group_by="(dog.)_|(cat.)_")
    assert len(np.unique(open_data(data, 0, whole=True).train.groups)) == 20
    for part in ("train", "val"):
        shutil.copytree(tmp_path / "a", tmp_path / "split" / part / "a")
        shutil.copytree(tmp_path / "b", tmp_path / "split" / part / "b")
    open_data(DataConfig("folder", str(tmp_path / "split"), group_by="(dog4)"), 0)
    assert "1 groups have images both in training and in validation" in caplog.text


def test_copies_among_many_files_are_found_by_their_bytes(
    tmp_path, class_folders, monkeypatch, caplog
):
    monkeypatch.setattr("locality.data.sources.COMPARED_BYTES", 0)
    class_folders(tmp_path, {"cat": 20, "dog": 20})
    for path in sorted(tmp_path.glob("*/*.png"))[::2]:
        path.with_stem(f"{path.stem} copy").write_bytes(path.read_bytes())
    splits = open_data(DataConfig("folder", str(tmp_path)), seed=0)
    assert not pictures_of(splits.train) & pictures_of(splits.val)
    assert len(splits.train) + len(splits.val) == 60
    assert "20 of 60 images are copies" in caplog.text


def test_without_copies_the_split_is_that_of_all_images(tmp_path, class_folders):
    class_folders(tmp_path, {"cat": 20, "dog": 11})
    splits = open_data(DataConfig("folder", str(tmp_path), split_seed=3), seed=0)
    train, val = stratified_split(np.repeat([0, 1], [20, 11]), 0.25, 3)
    assert np.array_equal(splits.train.indices, train) and np.array_equal(splits.val.indices, val)
