"""Shards in folders and in object storage, as litdata writes them; skipped without litdata."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from locality import errors
from locality.checkpoints.run_state import load_best_state
from locality.data import DataConfig, check, open_data
from locality.data import streaming as module
from locality.data.sources import ImageFingerprint
from locality.data.validation import verify
from locality.errors import UserError

from ..training.conftest import assert_same

DOCS = Path(__file__).parents[2] / "docs" / "images.md"


def test_without_litdata_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs litdata: pip install 'locality\[streaming\]'"):
        opened(tmp_path)


def test_object_storage_is_no_folder():
    with pytest.raises(UserError, match=r"'s3://b/photos' is no folder .*data\.dataset=streaming"):
        open_data(DataConfig("folder", "s3://b/photos"), seed=0)


def opened(root, **settings):
    return open_data(DataConfig("streaming", str(root), **settings), seed=0)


def documented_lines():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return next(block for block in blocks if "litdata.optimize" in block)


def write_shards(folder, target, monkeypatch, shard_bytes=1500):
    """The lines on the page, with small shards."""
    litdata = pytest.importorskip("litdata")
    optimize = litdata.optimize

    def small(*given, **settings):
        optimize(*given, **settings | {"chunk_bytes": shard_bytes}, num_workers=2, verbose=False)

    target.mkdir(exist_ok=True)
    (target / "photos").symlink_to(folder)
    with monkeypatch.context() as patch:
        patch.chdir(target)
        patch.setattr(litdata, "optimize", small)
        exec(compile(documented_lines(), "images.md", "exec"), {})
    return target / "shards"


@pytest.fixture
def shards(train_val, tmp_path, monkeypatch):
    """The shards of `train_val`."""
    return write_shards(train_val, tmp_path / "written", monkeypatch)


@pytest.fixture
def storage(shards, tmp_path, monkeypatch):
    """The same in what stands for object storage, and what was fetched from there."""
    downloader = pytest.importorskip("litdata.streaming.downloader")
    fetched = []

    def local(address):
        return address.replace("stand-in://bucket", str(shards))

    class StandIn(downloader.LocalDownloader):
        def download_file(self, remote, path):
            assert os.path.exists(path), "small files are fetched into memory"

        def download_fileobj(self, remote, file):
            file.write(Path(local(remote)).read_bytes())

        def download_bytes(self, remote, offset, length, path):
            fetched.append(int(length))
            with open(local(remote), "rb") as file:
                file.seek(offset)
                return file.read(length)

    monkeypatch.setitem(downloader._DOWNLOADERS, "stand-in://", StandIn)
    monkeypatch.setattr(
        "litdata.utilities.dataset_utilities._LITDATA_CACHE_DIR", str(tmp_path / "cache")
    )
    module._open.cache_clear()
    return fetched


def assert_same_images(one, other):
    assert one.classes == other.classes
    for part in ("train", "val"):
        a, b = getattr(one, part), getattr(other, part)
        assert np.array_equal(a.labels, b.labels)
        order = np.random.default_rng(0).permutation(len(a)).tolist()
        assert all(a.read(index).tobytes() == b.read(index).tobytes() for index in order)


def test_shards_are_the_folder(train_val, shards):
    folder = open_data(DataConfig("folder", str(train_val)), seed=0)
    images = opened(shards)
    assert len(list((shards / "train").glob("*.bin"))) > 3
    assert_same_images(images, folder)
    assert images.train.read_bytes(7) == folder.train.read_bytes(7)
    assert images.train.describe(7) == f"{shards}/train[7]"
    assert images.file_bytes() > sum(p.stat().st_size for p in shards.rglob("*.bin"))
    assert "can be decoded" in verify(images.val)
    assert check(shards, dataset="streaming", progress=False).ok


def test_without_validation_images_a_part_is_set_aside(train_val, tmp_path, monkeypatch):
    images = opened(write_shards(train_val / "train", tmp_path / "one", monkeypatch))
    folder = open_data(DataConfig("folder", str(train_val / "train")), seed=0)
    assert len(images.val) == len(folder.val) > 0
    assert_same_images(images, folder)


@pytest.mark.parametrize("cache_gb", [0, 8e-6, 1])
def test_object_storage_is_fetched_once_or_image_by_image(
    cache_gb, train_val, shards, storage, tmp_path
):
    folder = open_data(DataConfig("folder", str(train_val)), seed=0)
    images = opened("stand-in://bucket", cache_gb=cache_gb)
    sizes = {path: path.stat().st_size for path in shards.rglob("*.bin")}
    assert abs(images.file_bytes() - sum(sizes.values())) < 4000  # and the indices
    assert_same_images(images, folder)
    shards_fetched = [size for size in storage if size in sizes.values()]
    storage.clear()
    assert_same_images(images, folder)
    cached = {path: path.stat().st_size for path in (tmp_path / "cache").rglob("*.bin")}
    assert sum(cached.values()) <= cache_gb * 1e9
    assert sorted(shards_fetched) == sorted(cached.values())  # each once
    if cache_gb == 0:
        assert not cached and len(storage) == 2 * (len(images.train) + len(images.val))
    elif cache_gb == 1:
        assert len(cached) == len(sizes) and not storage
    else:
        assert cached and 0 < len(storage) < 2 * len(images.train)


def test_a_cache_that_the_disk_cannot_hold_is_refused(storage, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"data\.cache_gb is 10 .* has 0\.0 GB left"):
        opened("stand-in://bucket")
    opened("stand-in://bucket", cache_gb=0)


def test_changed_shards_are_noticed(train_val, shards, storage, tmp_path, monkeypatch):
    local, remote = (ImageFingerprint.of(opened(root)) for root in (shards, "stand-in://bucket"))
    assert ImageFingerprint.of(opened(shards)) == local
    assert ImageFingerprint.of(opened("stand-in://bucket")) == remote
    one = next((shards / "train").glob("*.bin"))
    content = bytearray(one.read_bytes())
    content[-1] ^= 1
    one.write_bytes(content)
    (tmp_path / "before").write_bytes(local.table)
    changed = ImageFingerprint.of(opened(shards)).differences(tmp_path / "before")
    assert changed == f"1 changed: 'train/{one.name}'"
    shutil.rmtree(shards)
    write_shards(train_val, shards.parent / "again", monkeypatch)
    shutil.move(shards.parent / "again" / "shards", shards)
    assert ImageFingerprint.of(opened("stand-in://bucket")) != remote


def edited(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def add(place, **values):
    return lambda content: content[place].update(values)


MISTAKES = [
    ("classes.json", None, r"classes\.json in '.*' cannot be read"),
    ("classes.json", lambda c: c.pop("train"), "train"),
    ("classes.json", add("train", ant=-1), r"train: ant is -1"),
    (
        "classes.json",
        add("train", ant=7),
        r"train/index\.json' has 18 images, and classes\.json 19",
    ),
    ("classes.json", add("val", dog=0), r"different classes for train and val"),
    ("train/index.json", None, r"index\.json in '.*/train' cannot be read"),
    ("train/index.json", lambda c: c.pop("chunks"), "chunks"),
    ("train/index.json", add("config", data_format=["pickle"]), r"has the fields 'pickle'; write"),
    ("train/index.json", add("config", data_format=["jpeg", "int"]), r"the fields 'jpeg', 'int'"),
    ("train/index.json", add("config", data_spec="{}"), r"a tuple of an image file's bytes and"),
    ("train/index.json", add("config", compression="zstd"), r"are compressed or encrypted"),
    (
        "train/index.json",
        lambda c: c["chunks"][0].update(filename="../a.bin"),
        r"impossible .*a\.b",
    ),
    ("train/index.json", lambda c: c["chunks"][0].update(chunk_size=0), r"impossible names"),
    ("train/index.json", lambda c: c["chunks"][0].update(chunk_bytes=999), r"of another size than"),
    ("train/chunk-0-0.bin", None, r"'chunk-0-0\.bin' in '.*/train': missing, or of another size"),
]


@pytest.mark.parametrize(("name", "change", "said"), MISTAKES)
def test_what_is_wrong_is_said_before_training(name, change, said, shards):
    if change is None:
        (shards / name).unlink()
    else:
        edited(shards / name, change)
    with pytest.raises(UserError, match=said) as caught:
        opened(shards)
    assert "\n" not in str(caught.value)


def test_object_storage_without_shards_is_refused_in_a_sentence(storage):
    with pytest.raises(UserError, match=r"classes\.json in 'stand-in://bucket/no' cannot be read"):
        opened("stand-in://bucket/no")


def test_an_image_of_another_class_is_refused(shards):
    edited(shards / "classes.json", add("train", ant=5, bee=7))
    images = opened(shards)
    images.train.read(0)
    with pytest.raises(UserError, match=r"train\[5\] is of class number 0, and by classes\.json"):
        images.train.read(5)


def test_a_damaged_shard_is_named(shards):
    shard = shards / "train" / "chunk-0-0.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    images = opened(shards)
    with pytest.raises(UserError, match=r"train\[0\] cannot be read"):
        images.train.read(0)


def test_damaged_images_are_dealt_with_as_from_a_folder(train_val, tmp_path, monkeypatch):
    (train_val / "train" / "ant" / "001.png").write_bytes(b"no image")
    images = opened(write_shards(train_val, tmp_path / "written", monkeypatch))
    report = check(tmp_path / "written" / "shards", dataset="streaming", progress=False)
    assert list(report.bad_files) == [images.train.describe(1)]
    with pytest.raises(UserError, match=r"train\[1\] cannot be read: the file is not an image"):
        images.train.read_or_raise(1)


# The command line, killed from outside at a step, or never for -1. Of two processes the second is.
TRAIN = """
import os, signal, sys
from locality.cli import main
from locality.training.loop import Loop

step = Loop.train_step
def train_step(self, batches):
    last = self.fabric.global_rank == self.fabric.world_size - 1
    if last and self.state.step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batches)

Loop.train_step = train_step
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
"""
TINY = {"depth": 2, "gpsa_layers": 1, "embed_dim": 16, "drop_path_rate": 0.2}


def train(dataset, root, output, ranks, workers, kill_at=-1):
    settings = {f"model.{name}": value for name, value in TINY.items()}
    settings |= {"data.dataset": dataset, "data.root": root, "data.workers": workers}
    settings |= {"schedule.steps": 40, "schedule.warmup": 4, "schedule.eval_every": 10}
    settings |= {"engine.batch_size": 80, "engine.devices": ranks, "engine.accelerator": "cpu"}
    settings |= {"engine.tensorboard": "false", "augment.crop": "resized"}
    options = [f"--{name}={value}" for name, value in settings.items()]
    script = output.with_suffix(".py")  # a file, since further ranks start it again
    script.write_text(TRAIN)
    command = [sys.executable, str(script), str(kill_at), "train", "digits", *options]
    command += [f"--output={output}", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_on_shards_ends_as_one_on_the_folder(
    ranks, tmp_path, class_folders, monkeypatch
):
    folder = tmp_path / "images"
    class_folders(folder / "train", {f"class {n}": 200 for n in range(10)})
    class_folders(folder / "val", {f"class {n}": 10 for n in range(10)}, seed=50_000)
    shards = write_shards(folder, tmp_path / "written", monkeypatch, shard_bytes=50_000)
    assert len(list((shards / "train").glob("*.bin"))) > 10
    whole, run = tmp_path / "whole", tmp_path / "run"
    straight = train("folder", folder, whole, ranks, workers=0)
    assert straight.returncode == 0, straight.stderr
    killed = train("streaming", shards, run, ranks, workers=3, kill_at=23)
    assert killed.returncode in (137, -signal.SIGKILL), killed.stderr
    assert not (run / "result.json").exists()
    resumed = train("streaming", shards, run, ranks, workers=1)
    assert resumed.returncode == 0, resumed.stderr
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 20]
    ended, expected = load_best_state(run), load_best_state(whole)
    for other in ("config", "data"):  # other files, with the same images
        assert ended.pop(other) != expected.pop(other)
    assert ended["step"] == 40
    assert_same(ended, expected)
    assert (run / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
