"""What cannot work ends in one clear sentence and code 2, before any training."""

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
    ("arguments", "sentence"),
    [
        (["digitz"], "unknown recipe 'digitz'; did you mean digits?"),
        (["--model", "convit_nan"], "unknown model 'convit_nan'; did you mean convit_nano"),
        (["--optim.lrr=1"], "unknown setting 'optim.lrr'; did you mean --optim.lr"),
        (["--optim.lr=fast"], "optim.lr is"),
        (["--optim.lr=-1"], "optim.lr is"),
        (["--engine.batch_size=0"], "engine.batch_size is"),
        (["--engine.batch_size=15", "--engine.accumulate=4"], "multiple of 4"),
        (["--engine.precision=fp8"], "engine.precision"),
        (["--model.img_size=9"], "9×9 pixels cannot be cut into patches of 2×2"),
        (["--fraction=0.001"], "leaves 10 classes without images"),
        (["--fraction=0"], "fraction is 0"),
        (["--data=digit"], "did you mean digits"),
        (["--data=folder"], "root"),
        (["--data=cifar10", "--data.root=nowhere"], "nowhere"),
        (["--model.overrides.gpsa_layer=2"], "did you mean model.gpsa_layers"),
        (["--schedule.warmup=5000"], "longer than the run"),
        (["--objective.teacher=regnetx_9999"], "regnetx_9999"),
        (["--config=missing.yaml"], "missing.yaml"),
        (["digits", "extra"], "'extra' is one word too many"),
    ],
)
def test_settings(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused(capsys, "train", *arguments, "--output", str(tmp_path / "run"))
    assert sentence in error
    assert not (tmp_path / "run").exists(), "a refused run leaves no folder behind"


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


def test_a_file_in_the_place_of_the_run_folder(tmp_path, capsys):
    (tmp_path / "run").write_text("in the way")
    assert "run" in refused(capsys, "train", "--output", str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["eval"], "model"),
        (["eval", "nowhere"], "nowhere"),
        (["eval", "nowhere.pth"], "nowhere.pth"),
        (["eval", "convit_tiny"], "architecture without weights"),
        (["predict", "nowhere.png", "--model=convit_tiny"], "nowhere.png"),
        (["predict", "x.png"], "model"),
        (["report", "nowhere"], "nowhere"),
        (["convert", "nowhere", "out"], "nowhere"),
        (["export", "nowhere", "out.onnx"], "nowhere"),
        (["data", "chek", "."], "did you mean check"),
        (["data", "check", "nowhere"], "nowhere"),
        (["demo", "--seeds=0"], "seeds is 0"),
    ],
)
def test_other_commands(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *arguments)


def test_converting_a_run_replaces_nothing_unless_told(tmp_path, capsys):
    run, target = tmp_path / "run", tmp_path / "target"
    for folder, name in ((run, "config.yaml"), (target, "README.md")):
        folder.mkdir()
        (folder / name).write_text("precious")
    error = refused(capsys, "convert", str(run), str(target))
    assert "is there already" in error
    assert (target / "README.md").read_text() == "precious"
