"""Baselines on pixels: sampled, recorded and deterministic."""

import json

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from locality.analysis import baselines
from locality.analysis.baselines import (
    below,
    pixel_baselines,
    read_baselines,
    record_baselines,
)
from locality.data import Preprocessing, open_data
from locality.data.config import DataConfig
from locality.data.sources import ArraySource, DataSplits
from locality.errors import UserError
from locality.training import train

DIGITS = Preprocessing(8, crop_pct=1.0)


@pytest.fixture(scope="module")
def splits():
    return open_data(DataConfig("digits", fraction=0.1), seed=0)


def test_baselines_of_a_run(splits):
    found = pixel_baselines(splits, DIGITS)
    assert found["train_images"] == found["all_train_images"] == len(splits.train)
    assert 5 < found["top1"]["chance"] < 15
    pixels = [source.pixels[:, 0].flatten(1) / 255 for source in (splits.train, splits.val)]
    for name, theirs in (
        ("nearest neighbour", KNeighborsClassifier(1)),
        ("logistic regression", LogisticRegression(max_iter=1000, tol=1e-6)),
    ):
        top1 = 100 * theirs.fit(pixels[0], splits.train.labels).score(pixels[1], splits.val.labels)
        assert found["top1"][name] == pytest.approx(top1, abs=0.5) and top1 > 85
    assert pixel_baselines(splits, DIGITS) == found


def test_one_class_has_baselines(splits):
    ones = splits.val.subset(np.flatnonzero(splits.val.labels == 1))
    splits = DataSplits("ones", ["one", "two"], ones, ones)
    assert set(pixel_baselines(splits, DIGITS)["top1"].values()) == {100}


def test_a_larger_set_is_sampled_with_all_its_classes(splits):
    found = pixel_baselines(splits, DIGITS, most=50)
    assert (found["train_images"], found["all_train_images"]) == (50, len(splits.train))
    counts = np.bincount(baselines.split_pixels(splits, DIGITS, most=50)[3])
    assert 4 <= counts.min() <= counts.max() <= 6
    assert found["top1"]["nearest neighbour"] > 60


def test_large_images_are_made_small():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 96, 64, 3), dtype=np.uint8)
    images[::2] //= 4
    source = ArraySource(images, np.arange(12) % 2, "noise")
    splits = DataSplits("noise", ["dark", "light"], source, source)
    found = pixel_baselines(splits, Preprocessing((96, 64), crop_pct=1.0))
    assert found["top1"]["logistic regression"] == found["top1"]["nearest neighbour"] == 100


def test_a_run_s_folder_keeps_its_baselines(tiny_run, tmp_path, monkeypatch):
    runs = [tiny_run(tmp_path, model) for model in ("convit_nano", "deit_nano")]
    for run in runs:
        train(run.config, run.folder, quiet=True)
    computed = []
    monkeypatch.setattr(
        baselines,
        "pixel_baselines",
        lambda *given: computed.append(given) or pixel_baselines(*given),
    )
    record_baselines(run.folder for run in runs)
    record_baselines(run.folder for run in runs)
    assert len(computed) == 1  # computed once for the same images
    config = runs[0].config
    found = pixel_baselines(open_data(config.data, config.seed), DIGITS)
    assert [read_baselines(run.folder) for run in runs] == [found["top1"]] * 2


def test_baselines_of_a_part_say_of_how_many_images(tmp_path):
    record = {"top1": {"chance": 10.0, "nearest neighbour": 80.0}}
    content = json.dumps(record | {"train_images": 20_000, "all_train_images": 60_000})
    (tmp_path / "baselines.json").write_text(content)
    assert list(read_baselines(tmp_path)) == ["chance", "nearest neighbour of 20,000 images"]
    (tmp_path / "baselines.json").write_text('{"top1": {"chance": "x"}}')
    with pytest.raises(UserError, match=r"baselines\.json"):
        read_baselines(tmp_path)
    assert read_baselines(tmp_path / "none") == {}


def test_a_model_below_a_baseline_is_named():
    found = {"chance": 10.0, "nearest neighbour": 90.0, "logistic regression": 88.0}
    assert below("ConViT", 89.96, found) == ""  # prints as 90.0, too
    assert "nearest neighbour" in below("ConViT", 87.5, found)
    for top1 in (87.5, 99.0):
        assert "saw each image 2.5 times" in below("ConViT", top1, found, passes=2.5)
