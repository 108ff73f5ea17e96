"""Damaged or changed images before, during and between runs."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from locality.checkpoints.run_state import load_best_state
from locality.data import checking, sources
from locality.errors import UserError
from locality.training import RunConfig, dry_run, loop
from locality.training import train as train_loudly
from locality.training.job import Job

from ..conftest import write_image
from .conftest import assert_same_run, tiny, train

DAMAGED = b"\xff\xd8 no image"
write = partial(write_image, size=(8, 8))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes with 12 training and 4 validation images each, of equal size in bytes."""
    root = tmp_path / "photos"
    for part, count in (("train", 12), ("val", 4)):
        for label, name in enumerate(("ant", "bee", "cat")):
            for number in range(count):
                seed = 1000 * (part == "val") + 100 * label + number
                write(root / part / name / f"{number}.bmp", seed)
    return root


def on(photos: Path, **changes: Any) -> RunConfig:
    settings = {"data__dataset": "folder", "data__root": str(photos), "data__fraction": 1.0}
    return tiny(**settings | changes)


def damage(file: Path) -> None:
    file.write_bytes(DAMAGED)


# -- damaged images --------------------------------------------------------------------------------


@pytest.fixture
def too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceed the in-memory limit, so each image is read when needed."""
    monkeypatch.setattr("locality.data.loader._KEPT_BYTES", 0)


def test_a_damaged_validation_image_is_named_before_the_first_step(photos, tmp_path):
    good = (photos / "val/bee/2.bmp").read_bytes()
    damage(photos / "val/bee/2.bmp")
    with pytest.raises(UserError, match=r"val/bee/2\.bmp"):
        train(on(photos), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # After repair, the same command trains in the same folder.
    (photos / "val/bee/2.bmp").write_bytes(good)
    assert train(on(photos), tmp_path / "run")["val_images"] == 12


def test_many_validation_images_are_decoded_in_part(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checking, "MAX_DECODED", 11)
    train_loudly(on(photos), tmp_path / "run")
    assert "6 of 12 validation images were decoded" in capsys.readouterr().err
    (photos / "val/cat/0.bmp").write_bytes(b"")
    with pytest.raises(UserError, match=r"cat/0\.bmp"):
        train(on(photos), tmp_path / "other")


@pytest.mark.parametrize(
    ("part", "accumulate", "changes"),
    [("val", 1, {}), ("train", 2, {"data__on_bad_image": "error"})],
)
@pytest.mark.usefixtures("too_many")
def test_an_image_that_is_damaged_on_the_way_costs_no_step(
    part, changes, accumulate, photos, tmp_path, before_step
):
    """The image is named and progress is saved; after repair the run ends as undisturbed."""
    config = on(photos, engine__accumulate=accumulate, schedule__save_every=8, **changes)
    train(config, tmp_path / "undisturbed")
    file = photos / part / "ant/3.bmp"
    good, status = file.read_bytes(), file.stat()
    before_step(2, lambda: damage(file))
    with pytest.raises(UserError, match=re.escape(f"{part}/ant/3.bmp")):
        train(config, tmp_path / "run")
    before_step(None)
    reached = load_best_state(tmp_path / "run")["step"]
    assert reached == 3 if part == "val" else reached >= 2
    file.write_bytes(good)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


def test_an_evaluation_that_fails_costs_no_step(photos, tmp_path, monkeypatch):
    """For any reason, with or without a checkpoint due before it."""
    config = on(photos, schedule__save_every=8)
    train(config, tmp_path / "undisturbed")

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "evaluate", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            train(config, tmp_path / "run")
    assert load_best_state(tmp_path / "run")["step"] == 3
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.usefixtures("too_many")
def test_a_damaged_training_image_is_replaced_and_named(
    at_start, photos, tmp_path, before_step, capsys
):
    if at_start:
        damage(photos / "train/cat/7.bmp")
    before_step(2, lambda: damage(photos / "train/cat/7.bmp"))
    result = train_loudly(on(photos), tmp_path / "run")
    assert result["steps"] == 8
    assert "train/cat/7.bmp" in (tmp_path / "run" / "skipped.csv").read_text()
    assert "skipped.csv" in capsys.readouterr().err


# -- images that changed before resuming -----------------------------------------------------------


def overwritten(photos: Path) -> None:
    write(photos / "train/bee/4.bmp", seed=5555)


def swapped(photos: Path) -> None:
    one, other, aside = (photos / f"train/{name}.bmp" for name in ("ant/0", "cat/0", "aside"))
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def renamed(photos: Path) -> None:
    (photos / "train/ant/5.bmp").rename(photos / "train/ant/55.bmp")


def truncated(photos: Path) -> None:
    os.truncate(photos / "val/cat/1.bmp", 100)


def replaced(photos: Path) -> None:
    for number, file in enumerate(sorted((photos / "train").rglob("*.bmp"))):
        write(file, seed=7000 + number)


@pytest.mark.parametrize(
    ("large", "change", "named"),
    [
        (False, overwritten, r"train/bee/4\.bmp"),
        (True, swapped, r"train/ant/0\.bmp.*train/cat/0\.bmp"),
        (False, renamed, r"train/ant/5\.bmp.*train/ant/55\.bmp"),
        (True, truncated, r"val/cat/1\.bmp"),
        (False, replaced, "36 changed"),
    ],
)
def test_a_run_is_not_resumed_on_other_images_unnoticed(
    change, named, large, photos, tmp_path, interrupt, monkeypatch
):
    """Small datasets are compared by content, large ones by size and modification time."""
    if large:
        monkeypatch.setattr(sources, "CONTENT_BYTES", 0)
        for number, file in enumerate(sorted(photos.rglob("*.bmp"))):
            os.utime(file, (10**9 + number, 10**9 + number))
    interrupt(on(photos), tmp_path / "run", 5)
    change(photos)
    with pytest.raises(UserError, match=named):
        train(on(photos), tmp_path / "run")
    if change is not truncated:
        config = on(photos, data__on_changed_images="resume")
        assert train(config, tmp_path / "run")["steps"] == 8


def test_a_run_is_resumed_on_a_copy_of_its_images(photos, tmp_path, interrupt):
    train(on(photos), tmp_path / "undisturbed")
    interrupt(on(photos), tmp_path / "run", 5)
    shutil.copytree(photos, tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(photos)
    train(on(tmp_path / "copy"), tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


# -- implausible datasets and batches --------------------------------------------------------------


@pytest.mark.parametrize("digests", [True, False])
def test_validation_images_that_the_weights_know_are_counted(
    digests, photos, tmp_path, monkeypatch
):
    if not digests:  # sizes and times tell nothing
        monkeypatch.setattr("locality.data.sources.CONTENT_BYTES", 0)
    train(on(photos), tmp_path / "first")
    (photos / "val/ant/0.bmp").write_bytes((photos / "train/ant/3.bmp").read_bytes())
    (photos / "train/ant/3.bmp").unlink()
    for weights in (None, tmp_path / "first"):
        config = on(photos, weights=weights and str(weights))
        said = dry_run(Job(config, tmp_path / "second"))
        known = digests and weights is not None
        assert ("was trained on 1 of these 12 validation images" in said) == known
        assert known or "was trained on" not in said


def test_one_class_is_refused(photos, tmp_path):
    for part in ("train", "val"):
        for name in ("ant", "bee"):
            shutil.rmtree(photos / part / name)
    with pytest.raises(UserError, match="1 class"):
        train(on(photos), tmp_path / "run")


def test_a_class_without_images_and_a_large_batch_are_mentioned(photos, tmp_path, capsys):
    for part in ("train", "val"):
        (photos / part / "dog").mkdir()
    config = on(photos, engine__batch_size=64)
    train_loudly(config, tmp_path / "run")
    said = capsys.readouterr().err
    assert "'dog'" in said and "a batch of 64" in said
    assert "'dog'" in dry_run(Job(config, tmp_path / "other"))


@pytest.mark.parametrize("batch_size", [10**9, 10**12])
def test_a_batch_that_does_not_fit_into_memory_is_refused(batch_size, photos, tmp_path):
    config = on(photos, engine__batch_size=batch_size)
    with pytest.raises(UserError, match="memory"):
        train(config, tmp_path / "run")
    with pytest.raises(UserError, match="memory"):
        dry_run(Job(config, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", [overwritten, renamed, truncated])
def test_a_finished_run_does_not_answer_for_other_images(change, photos, tmp_path):
    found = train(on(photos), tmp_path / "run")
    assert train(on(photos), tmp_path / "run") == found
    change(photos)
    with pytest.raises(UserError, match="other images"):
        train(on(photos), tmp_path / "run")


def test_a_run_is_evaluated_on_its_own_part_of_images_that_have_moved(photos, tmp_path, cli):
    found = train(on(photos / "train"), tmp_path / "run")
    elsewhere = (photos / "train").rename(tmp_path / "elsewhere")
    words = ["eval", tmp_path / "run", elsewhere, "--json"]
    again = json.loads(cli(*words).out)
    assert (again["n"], again["loss"]) == (found["val_images"], pytest.approx(found["val_loss"]))
    write(elsewhere / "ant/new.bmp", 7)
    assert json.loads(cli(*words).out)["n"] == 37


def test_images_added_since_a_split_was_drawn_are_not_taken_for_the_runs(photos, tmp_path, cli):
    train(on(photos / "train"), tmp_path / "run")
    for seed in range(12):  # before the others
        write(photos / "train" / ("ant", "bee", "cat")[seed % 3] / f"0{seed}.bmp", 5000 + seed)
    assert "was trained on" in cli("eval", tmp_path / "run").err
    assert "was trained on" in cli("eval", tmp_path / "run", "--calibrate", code=2).err
    said = cli("report", tmp_path / "run", "--record").err
    assert "12 new" in said and "on the other side of the split" in said and "gone" not in said
    assert not (tmp_path / "run/mistakes.npz").exists()


def test_a_run_that_skipped_a_validation_image_is_shown_without_it(photos, tmp_path, cli):
    damage(photos / "val/ant/0.bmp")
    train(on(photos, data__on_bad_image="skip"), tmp_path / "run")
    for words in (["report", "--record"], ["explore"]):
        cli(*words, tmp_path / "run")
    assert (tmp_path / "run/measures.json").exists() and (tmp_path / "run/explorer.html").exists()
