"""Bad input ends with one sentence and code 2, before training."""

import os

import pytest
from PIL import Image

from locality.cli import main


def image_folder(root, classes, part=None):
    for label in classes:
        folder = root / (part or "") / label
        folder.mkdir(parents=True)
        Image.new("RGB", (32, 32), (len(label) * 40 % 256, 3, 7)).save(folder / "one.png")
        Image.new("RGB", (32, 32), (len(label) * 30 % 256, 9, 7)).save(folder / "two.png")


def refused(capsys, *arguments):
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("locality: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--engine.batch_size=15", "--engine.accumulate=4"], "multiple of 4"),
        (["--fraction=0.001"], "without images"),
        (["--data=cifar10", "--data.root=nowhere"], "nowhere"),
        (["--model.overrides.gpsa_layer=2"], "model.gpsa_layers"),
        (["--schedule.warmup=5000"], "warmup"),
        (["--objective.teacher=regnetx_9999"], "regnetx_9999"),
    ],
)
def test_a_refused_run_leaves_no_folder_behind(arguments, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named in refused(capsys, "train", *arguments, "--output", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_folder_without_images(tmp_path, capsys):
    (tmp_path / "data" / "cat").mkdir(parents=True)
    error = refused(
        capsys, "train", "--data=folder", f"--data.root={tmp_path / 'data'}",
        "--output", str(tmp_path / "run"),
    )  # fmt: skip
    assert str(tmp_path / "data") in error


def test_train_and_val_with_different_classes(tmp_path, capsys):
    image_folder(tmp_path / "data", ["cat", "dog"], "train")
    image_folder(tmp_path / "data", ["cat", "wolf"], "val")
    error = refused(
        capsys, "train", "--data=folder", f"--data.root={tmp_path / 'data'}",
        "--output", str(tmp_path / "run"),
    )  # fmt: skip
    assert "wolf" in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission_to_write(tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert str(tmp_path) in refused(capsys, "train", "--output", str(tmp_path / "run"))


def test_converting_a_run_replaces_nothing_unless_told(tmp_path, capsys):
    run, target = tmp_path / "run", tmp_path / "target"
    for folder, name in ((run, "config.yaml"), (target, "README.md")):
        folder.mkdir()
        (folder / name).write_text("precious")
    assert str(target) in refused(capsys, "convert", str(run), str(target))
    assert (target / "README.md").read_text() == "precious"
