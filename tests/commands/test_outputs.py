"""Existing output paths: nothing is overwritten; devices and pipes are written to."""

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

TRAINED = ["train", "digits", "--record", "--schedule.snapshot_every=1", "--output", "run"]
# Command line, and the file it writes.
COMMANDS = {
    "report run --output {}": "out.html",
    "explore run --count 1 --output {}": "out.html",
    "explore run --count 1 --live --output {}": "out.html",
    "predict photo.png --model saved --output {}": "out.csv",
    "eval run --predictions {}": "out.csv",
    "figure gates run --output {}": "out.png",
}
# Outputs that are never replaced.
WEIGHTS = {
    "convert saved {} --to convit": "out.pth",
    "convert saved  {}": "out.safetensors",
    "export saved {} --format torch-export": "out.pt2",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a run, a saved model and a photograph."""
    folder = tmp_path_factory.mktemp("outputs")
    os.chdir(folder)
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


@pytest.mark.parametrize(("command", "name"), (COMMANDS | WEIGHTS).items())
def test_what_is_not_ours_stays_unless_overwritten(command, name, root, place, capsys):
    path = place / name
    path.mkdir()
    assert wrote(command, path) == 2
    path.rmdir()
    capsys.readouterr()
    photograph = (root / "photo.png").read_bytes()
    path.write_bytes(photograph)
    assert wrote(command, path) == 2
    error = capsys.readouterr().err
    assert str(path) in error and "--overwrite" in error and error.count("\n") == 1
    assert [file.name for file in place.iterdir()] == [name]
    assert path.read_bytes() == photograph
    assert wrote(command + " --overwrite", path) == 0
    assert path.read_bytes() != photograph
    if command in COMMANDS:
        path.touch()
        assert wrote(command, path) == 0, "its own file is replaced"
    else:
        assert wrote(command, path) == 2


# All are written by the same function.
@pytest.mark.parametrize("command", [*list(COMMANDS)[::3], *list(WEIGHTS)[:1]])
def test_links_are_followed_and_pipes_written(command, place, capsys):
    name = (COMMANDS | WEIGHTS)[command]
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


def test_a_device_stays_one(place):
    device = place / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        device.symlink_to("/dev/null")
    assert wrote("report run --output {}", device) == 0
    assert stat.S_ISCHR(device.stat().st_mode)


def test_tables_and_pages_of_other_commands_stay(place):
    table, page = place / "table.csv", place / "page.html"
    assert wrote("predict photo.png --model saved --output {}", table) == 0
    assert wrote("eval run --predictions {}", table) == 2
    assert wrote("report run --output {}", table) == 2
    assert wrote("report run --output {}", page) == 0
    assert wrote("benchmark convit_nano --output {}", page) == 2


@pytest.mark.parametrize("command", ["transform timm/resnet18 {} --random", "convert saved {}"])
def test_a_folder_that_holds_something_gets_no_model(command, place, capsys):
    (place / "config.json").write_text("{}")
    assert wrote(command, place) == 2
    assert str(place) in capsys.readouterr().err
    assert (place / "config.json").read_text() == "{}"


def test_pages_with_fixed_names_are_checked_before_the_work(place, capsys):
    (place / "report.html").write_text("mine")
    assert wrote("demo --output {}", place) == 2
    (place / "digits").mkdir()
    (place / "digits" / "convit-table-2.json").write_text("{}")
    assert wrote("reproduce convit/table-2 --output {}", place) == 2
    assert "convit-table-2.json" in capsys.readouterr().err


def test_measurements_replace_measurements_alone(place, monkeypatch):
    from locality import benchmark

    measured = {"model": "", "machine": {}, "rows": []}
    monkeypatch.setattr(benchmark, "run_benchmark", lambda *_, **__: measured)
    monkeypatch.setattr(benchmark, "to_table", lambda rows: (["", "ours"], [["inference", "1"]]))
    monkeypatch.setattr("locality.commands.models._describe", str)
    command, path = "benchmark convit_nano --output {}", place / "speed.json"
    for code, before in ((0, ""), (0, '[\n  {\n    "model": "deit_nano"'), (2, '[{"a": 1}]')):
        path.write_text(before)
        assert wrote(command, path) == code
        assert ("convit_nano" in path.read_text()) == (code == 0)
