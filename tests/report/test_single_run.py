"""The report of a single run: confusion, calibration, and training images."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from locality.analysis.pictures import load_pictures
from locality.analysis.recording import MISTAKES, record
from locality.analysis.taps import capture
from locality.checkpoints import open_model
from locality.predictions import Predictions
from locality.report import build_report
from locality.runs import Run
from locality.training import evaluate_run, train

from .conftest import text_of


def planted(images=200, first=3, second=8):
    """Labels and logits of a model that mistakes half of one class for another."""
    labels = np.arange(images) % 10
    predicted = labels.copy()
    of_first = np.flatnonzero(labels == first)
    predicted[of_first[: len(of_first) // 2]] = second
    logits = np.random.default_rng(0).normal(size=(images, 10))
    logits[np.arange(images), predicted] = 8 + np.linspace(0, 2, images)
    return labels, logits


@pytest.fixture
def confused(make_run):
    return make_run("convit_nano", predictions=planted(), top1=95.0)


def test_a_planted_confusion_is_in_matrix_table_and_mistakes(confused):
    found = Run(confused).predictions()
    matrix = found.confusion(range(10))
    assert matrix.sum() == 200 and matrix[3, 8] == 10 and matrix[3, 3] == 10
    assert (matrix - np.diag(matrix.diagonal())).sum() == 10
    row = found.per_class()[3]
    assert (row["images"], row["right"], row["confused"], row["times"]) == (20, 10, "8", 10)
    assert found.per_class()[8]["called"] == 30
    wrong = found.mistakes(20)
    assert len(wrong) == 10 and set(found.labels[wrong]) == {3}
    assert (np.diff(found.confidence[wrong]) <= 0).all()


def test_the_page_shows_it(confused, tmp_path):
    page = build_report([confused], tmp_path / "r.html").read_text()
    assert "labelled 3 , predicted 8" in text_of(page)
    # The least accurate class is first.
    assert page.index(">3</bdi></td>") < page.index(">0</bdi></td>")


def test_calibration_against_its_definition():
    confidence = np.array([0.9, 0.9, 0.9, 0.9, 0.5, 0.5])
    right = np.array([1, 1, 1, 0, 1, 0])
    numbers = np.zeros(6, dtype=np.int64)
    found = Predictions(["a", "b"], numbers, [""] * 6, numbers, 1 - right, confidence)
    table, error = found.calibration()
    assert table == pytest.approx(np.array([[0.5, 0.5, 1 / 3], [0.9, 0.75, 2 / 3]]))
    assert error == pytest.approx(2 / 3 * 0.15)


def test_training_keeps_what_its_last_evaluation_said(tiny_config, tmp_path):
    train(tiny_config(), tmp_path / "run", quiet=True)
    run = Run(tmp_path / "run")
    found, result = run.predictions(), run.read_result()
    assert len(found.labels) == result["val_images"]
    assert 100 * found.right.mean() == pytest.approx(result["top1"])
    assert sum(json.loads(run.counts_file.read_text()).values()) == result["train_images"]
    # Runs of older versions without predictions get the same ones.
    kept = run.predictions_file.read_text()
    run.predictions_file.unlink()
    record(run.path, images=4, pictures=1)
    again = run.predictions()
    assert (again.predicted == found.predicted).all() and kept.count("\n") == len(found.labels) + 1
    assert evaluate_run(run.path)["loss"] == pytest.approx(result["val_loss"])
    page = build_report([run.path], tmp_path / "r.html").read_text()
    assert page.count('alt="attention of the last layer"') == 20
    shown = load_pictures(run.path / MISTAKES)
    model = open_model(run.path)
    pixels = model.prepare(Image.fromarray(image) for image in shown.images)
    with capture(model.module()) as views:
        model.logits(pixels)
    token = views[-1].maps.mixed[:, :, 0, 1:].mean(dim=1).view(shown.layers[-1].mixed[:, 0].shape)
    np.testing.assert_allclose(shown.layers[-1].mixed[:, 0], token, atol=1e-6)


def test_a_report_on_photographs_shows_them(tmp_path, tiny_config, class_folders):
    photos = class_folders(tmp_path / "Haustiere", {"cats": 12, "dogs": 12}, size=(40, 40))
    data = {"data__dataset": "folder", "data__root": str(photos)}
    run = tmp_path / "run"
    train(tiny_config(**data, data__val_fraction=0.5), run, quiet=True)
    Run(run).skipped_file.write_text("image,reason\ncats/x.png,it is cut short\n")
    page = build_report([run], tmp_path / "r.html").read_text()
    assert "cats/x.png: it is cut short" in text_of(page)
    mistakes = page[page.index("The most confident mistakes") :]
    names = re.findall(r"<br>([^<]*)</figcaption>", mistakes)
    assert names and len(set(names)) == len(names)
    assert mistakes.count('<img src="data:image/') == len(names)
