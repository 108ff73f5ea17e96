"""Classes are matched by name, so their order does not change the results."""

import random
from dataclasses import replace as changed

import numpy as np
import pytest
import torch
from PIL import Image

from locality.checkpoints import open_model, save
from locality.data import DataConfig, open_data
from locality.errors import UserError
from locality.training import evaluate_opened, evaluate_run
from locality.training.model import initialize_model

from .conftest import tiny, train

datasets = pytest.importorskip("datasets")

NAMES = ["1", "2", "10", "b", "B", "ä"]
ORDERS = [random.Random(seed).sample(NAMES, len(NAMES)) for seed in range(2)]
KINDS = ["folder", "table", "arrow"]


def write(root, kind, names=NAMES, per_class=8, order=None):
    """The same images for every kind; `order` numbers Arrow's classes."""
    root.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in sorted(names):
        for number in range(per_class):
            rng = np.random.default_rng([NAMES.index(name), number])
            pixels = rng.integers(0, 100, (8, 8, 3), dtype=np.uint8)
            pixels[..., NAMES.index(name) % 3] += np.uint8(40 * (1 + NAMES.index(name) // 3))
            path = root / (name if kind == "folder" else "images") / f"{name}-{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(path)
            rows.append((path, name))
    if kind == "table":
        lines = [f"{path.relative_to(root)},{name}" for path, name in rows]
        (root / "labels.csv").write_text("\n".join(["image,label", *lines]), encoding="utf-8")
    if kind == "arrow":
        order = order or sorted(names)
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=order)}
        cells = {
            "image": [{"bytes": path.read_bytes(), "path": None} for path, _ in rows],
            "label": [order.index(name) for _, name in rows],
        }
        table = datasets.Dataset.from_dict(cells, features=datasets.Features(features))
        table.save_to_disk(root / "arrow")
        return root / "arrow"
    return root


def config(kind, root, **more):
    return tiny(
        data__dataset=kind,
        data__root=str(root),
        data__fraction=1.0,
        schedule__steps=4,
        schedule__warmup=0,
        **more,
    )


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a folder, and the folder."""
    root = tmp_path_factory.mktemp("run")
    train(config("folder", write(root / "photos", "folder")), root / "run")
    return root / "run"


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    """The run's model with its classes in another order."""
    return permuted(run, ORDERS[0], tmp_path_factory.mktemp("saved"))


def permuted(run, order, folder):
    opened = open_model(run)
    model, places = opened.model, [opened.classes.index(name) for name in order]
    with torch.no_grad():
        model.head.weight.copy_(model.head.weight[places])
        model.head.bias.copy_(model.head.bias[places])
    return save(model, folder, preprocessing=opened.preprocessing, classes=order)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_and_evaluation(run, saved, tmp_path, kind):
    root = write(tmp_path / "test", kind, order=ORDERS[1])
    data = DataConfig(kind, str(root))
    before, after = open_model(run), open_model(saved)
    expected = evaluate_opened(before, DataConfig("folder", str(run.parent / "photos")))
    found = evaluate_opened(after, data)
    for name in ("top1", "top5", "loss", "n"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert evaluate_run(run, data)["loss"] == pytest.approx(expected["loss"])
    image = Image.open(run.parent / "photos" / "10" / "10-0.png")
    first, second = (each.top_classes(each([image])[0], 6) for each in (before, after))
    assert list(first) == list(second) and first == pytest.approx(second)


@pytest.mark.parametrize("kind", ["folder", "arrow"])
def test_training_and_fine_tuning(run, saved, tmp_path, kind):
    place = tmp_path / "data"
    results = []
    for order, weights in ((None, run), (ORDERS[0], saved)):
        for start in (None, str(weights)):
            chosen = config(kind, write(place, kind, order=order), weights=start)
            folder = tmp_path / f"{start is None}-{len(results)}"
            train(chosen, folder)
            results.append((folder / "metrics.csv").read_text())
            if start is not None:
                assert "new" not in "".join(initialize_model(chosen, sorted(NAMES))[1])
    assert results[0] == results[2] and results[1] == results[3] != results[0]


@pytest.mark.parametrize("kind", KINDS)
def test_some_of_the_classes(run, tmp_path, kind, caplog):
    root = write(tmp_path / "some", kind, names=["10", "ä"])
    found = evaluate_run(run, DataConfig(kind, str(root), val_fraction=0.5))
    assert found["n"] == 8 and "'1', '2', 'B', 'b'" in caplog.text
    opened = open_model(run)
    splits = open_data(DataConfig(kind, str(root), val_fraction=0.5), 0)
    images = [splits.val.read(index) for index in range(8)]
    right = [
        opened.label(int(row.argmax())) == splits.classes[label]
        for row, label in zip(opened(images), splits.val.labels, strict=True)
    ]
    assert found["top1"] == 100 * sum(right) / 8


def test_other_classes_are_named(run, tmp_path, cli):
    root = write(tmp_path / "more", "folder", names=["1", "2"])
    (root / "2").rename(root / "zwei")
    error = cli("eval", run, "--data.root", root, code=2).err
    assert "'zwei'" in error and "'10', '2'" in error


def test_without_names_classes_are_matched_by_number_or_order(run, tmp_path, caplog):
    opened = changed(open_model(run), classes=None)
    data = DataConfig("folder", str(run.parent / "photos"))
    expected = evaluate_run(run, data)["loss"]
    assert evaluate_opened(opened, data)["loss"] == expected
    assert "matched by their order" in caplog.text and "1 is '10'" in caplog.text
    numbers = tmp_path / "numbers"
    for number, name in enumerate(sorted(NAMES)):
        (numbers / str(number)).mkdir(parents=True)
        for file in (run.parent / "photos" / name).iterdir():
            (numbers / str(number) / file.name).symlink_to(file)
    assert evaluate_opened(opened, DataConfig("folder", str(numbers)))["loss"] == expected
    with pytest.raises(UserError, match="'0', '3', '4', '5'"):
        evaluate_run(run, DataConfig("folder", str(numbers)))


def test_fine_tuning_on_other_names_begins_with_a_new_classifier(run):
    others = [*sorted(NAMES)[:5], "new"]
    _, (note,) = initialize_model(tiny(weights=str(run)), others)
    assert "'ä'" in note and "'new'" in note
