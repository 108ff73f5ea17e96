"""Labels and outputs are joined by the names of classes, whatever their order on either side."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from locality.checkpoints import load, open_model, save
from locality.cli import main
from locality.data import DataConfig
from locality.errors import UserError
from locality.training.evaluation import evaluate_opened, open_for
from locality.training.model import initialize_model

from .conftest import tiny, train

NAMES = ("1", "2", "10", "9")


def photograph(label: int, number: int) -> Image.Image:
    pixels = np.random.default_rng(100 * label + number).integers(0, 256, (8, 8, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes of six images."""
    root = tmp_path_factory.mktemp("images") / "photos"
    for label, name in enumerate(NAMES):
        (root / name).mkdir(parents=True)
        for number in range(6):
            photograph(label, number).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    config = tiny(data__dataset="folder", data__root=str(folder), data__fraction=1.0)
    train(config, folder.parent / "run")
    return folder.parent / "run"


def evaluated(model: Path, data: DataConfig) -> tuple[float, float]:
    opened = open_model(model)
    found = evaluate_opened(opened, data, splits=open_for(opened, data, whole=True))
    return found["n"], found["loss"]


def as_table(folder: Path, order: list[str]) -> DataConfig:
    rows = [f"{name}/{number}.png,{name}" for name in order for number in range(6)]
    file = folder / f"{'-'.join(order)}.csv"
    file.write_text("image,label\n" + "\n".join(rows) + "\n")
    return DataConfig("table", str(file))


def as_arrow(folder: Path, order: list[str], root: Path) -> DataConfig:
    hf = pytest.importorskip("datasets")
    labels = [order.index(name) for name in NAMES for _ in range(6)]
    paths = [str(folder / name / f"{number}.png") for name in NAMES for number in range(6)]
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=order)})
    root.mkdir()
    table = hf.Dataset.from_dict({"image": paths, "label": labels}, features=features)
    table.to_parquet(str(root / "train.parquet"))
    return DataConfig("arrow", str(root), allow_outside=True)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_classes_changes_no_evaluation(
    seed: int, folder: Path, run: Path, tmp_path: Path
) -> None:
    order = random.Random(seed).sample(NAMES, len(NAMES))
    expected = evaluated(run, DataConfig("folder", str(folder)))
    assert expected[0] == 24
    opened = open_model(run)
    permuted = load(run)
    places = [list(opened.classes or ()).index(name) for name in order]
    with torch.no_grad():
        for tensor in permuted.head.parameters():
            tensor.copy_(tensor[places])
    saved = save(permuted, tmp_path / "saved", classes=order, preprocessing=opened.preprocessing)
    for model in (run, saved):
        for data in (
            DataConfig("folder", str(folder)),
            as_table(folder, order),
            as_arrow(folder, order, tmp_path / f"arrow-{model.name}"),
        ):
            assert evaluated(model, data) == pytest.approx(expected), (model.name, data.dataset)


def test_starting_weights_are_joined_by_name(run: Path, folder: Path) -> None:
    config = tiny(model__weights=str(run))
    classes = list(open_model(run).classes or ())
    order = classes[::-1]
    model, notes = initialize_model(config, order)
    assert torch.equal(model.head.weight, load(run).head.weight[[3, 2, 1, 0]]) and notes
    other, notes = initialize_model(config, ["a", "b", "c", "d"])
    assert not torch.equal(other.head.weight, load(run).head.weight)
    assert any("new and untrained" in note for note in notes)


def test_a_part_of_the_classes_can_be_evaluated_and_others_are_refused(
    run: Path, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name in NAMES[:2]:
        (tmp_path / "some" / name).mkdir(parents=True)
        for number in range(6):
            photograph(NAMES.index(name), number).save(tmp_path / "some" / name / f"{number}.png")
    assert main(["eval", str(run), str(tmp_path / "some")]) == 0
    assert "12 images" in capsys.readouterr().out and "'10', '9'" in caplog.text
    (tmp_path / "some" / "1").rename(tmp_path / "some" / "else")
    with pytest.raises(UserError, match=r"only run has .*only the data has 'else'"):
        evaluated(run, DataConfig("folder", str(tmp_path / "some")))


def test_the_order_is_the_same_for_every_hash_seed() -> None:
    code = "from locality.data.classes import sort_classes; print(sort_classes({'1', '01', '1.0'}))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1
