"""Existing output paths: nothing is overwritten; devices and pipes are written to."""

import contextlib
import os
import shlex
import stat
import threading

import pytest
import torch
from PIL import Image

import locality
from locality.cli import main

from ..conftest import SHORT_WORDS

TRAINED = ["train", "digits", "--schedule.snapshot_every=1", "--output", "run"]
# Command line, and the file it writes.
COMMANDS = {
    "report run --output {}": "out.html",
    "explore run --count 1 --output {}": "out.html",
    "explore run --count 1 --npz --output {}": "out.npz",
    "predict photo.png --model saved --output {}": "out.csv",
    "eval run --predictions {}": "out.csv",
    "convert saved {} --to timm": "out.pth",
    "convert saved  {}": "out.safetensors",
    "export saved {}": "out.onnx",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a run, a saved model and a photograph."""
    folder = tmp_path_factory.mktemp("outputs")
    with contextlib.chdir(folder):
        assert main([*TRAINED, *SHORT_WORDS]) == 0
        torch.manual_seed(0)
        locality.save(locality.create_model("convit_nano"), "saved")
        Image.effect_noise((8, 8), 50).convert("RGB").save("photo.png")
    return folder


@pytest.fixture
def place(root, tmp_path, monkeypatch):
    """An empty folder; the working directory is `root`."""
    monkeypatch.chdir(root)
    return tmp_path


def wrote(command, path):
    return main(shlex.split(command.format(path)))


# Exporting is slow.
SLOW = {command: pytest.mark.slow for command in COMMANDS if command.startswith("export")}


@pytest.mark.parametrize(
    ("command", "name"),
    [pytest.param(*row, marks=SLOW.get(row[0], ())) for row in COMMANDS.items()],
)
def test_what_exists_stays_unless_overwritten(command, name, root, place, capsys):
    path = place / name
    path.mkdir()
    assert wrote(command, path) == 2
    path.rmdir()
    path.touch()
    assert wrote(command, path) == 0, "an empty file is replaced"
    capsys.readouterr()
    path.write_bytes(b"mine")
    assert wrote(command, path) == 2
    error = capsys.readouterr().err
    assert str(path) in error and "--overwrite" in error and error.count("\n") == 1
    assert path.read_bytes() == b"mine"
    assert wrote(command + " --overwrite", path) == 0
    assert path.read_bytes() != b"mine"


def test_pages_in_a_run_are_its_own(root, place):
    for command in ("report run", "explore run --count 1"):
        assert main(command.split()) == main(command.split()) == 0


# All are written by the same function.
@pytest.mark.parametrize("command", [*COMMANDS][:4:3])
def test_links_are_followed_and_pipes_written(command, place, capsys):
    name = COMMANDS[command]
    (place / name).symlink_to(place / name)
    assert wrote(command, place / name) == 2 and (place / name).is_symlink()
    (place / name).unlink()
    (place / name).symlink_to(place / "target")
    (place / "target").write_bytes(b"precious")
    assert wrote(command, place / name) == 2
    assert (place / "target").read_bytes() == b"precious"
    (place / "target").unlink()
    assert wrote(command, place / name) == 0
    assert (place / name).is_symlink() and (place / "target").stat().st_size > 8
    (place / name).unlink()
    os.mkfifo(place / name)
    read = []
    reader = threading.Thread(target=lambda: read.append((place / name).read_bytes()))
    reader.start()
    assert wrote(command, place / name) == 0
    reader.join()
    assert read[0] and stat.S_ISFIFO((place / name).stat().st_mode)


@pytest.mark.parametrize("command", ["convert saved {}", "convert saved {}/x/y"])
def test_a_folder_that_holds_something_gets_no_model(command, place, capsys):
    (place / "config.json").write_text("{}")
    assert wrote(command, place) == 2
    assert str(place) in capsys.readouterr().err
    assert (place / "config.json").read_text() == "{}"


def test_the_page_of_an_experiment_is_checked_before_the_work(place, capsys):
    (place / "digits").mkdir()
    (place / "digits" / "convit-table-2.md").write_text("mine")
    assert wrote("reproduce convit/table-2 --output {}", place) == 2
    assert "convit-table-2.md" in capsys.readouterr().err


MANY = {
    "compare photos --output {}",
    "compare photos --output {}/new",
    "reproduce convit/table-2 --output {}",
    "demo --output {}",
    "search --output {}",
    "train digits --output {}/new",
}


@pytest.mark.parametrize("command", sorted(MANY))
def test_a_run_holds_no_others(command, root, capsys):
    (root / "photos").mkdir(exist_ok=True)
    before = sorted(root.rglob("*"))
    assert wrote(command, root / "run") == 2
    error = capsys.readouterr().err
    assert f"{root / 'run'} is the folder of a run" in error and error.count("\n") == 1
    assert sorted(root.rglob("*")) == before
