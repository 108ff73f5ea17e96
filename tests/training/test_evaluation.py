"""Accuracy and loss against a hand count."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics
from torch import Tensor, nn

from locality.data import ArraySource, Preprocessing, eval_loader
from locality.errors import UserError
from locality.predictions import Predictions
from locality.training import Interrupted, PredictionCollector, calibrate, evaluate

IMAGES, CLASSES = 50, 7
PLAIN = Preprocessing(4, crop_pct=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


class Lookup(nn.Module):
    """Logits by the grey level of an image's first pixel (its index)."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits[(images[:, 0, 0, 0] * 255).round().long()]


@pytest.fixture
def source() -> ArraySource:
    pixels = np.zeros((IMAGES, 4, 4, 3), dtype=np.uint8)
    pixels[:] = np.arange(IMAGES)[:, None, None, None]
    return ArraySource(pixels, np.arange(IMAGES) % CLASSES, "numbers")


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(IMAGES, CLASSES, generator=torch.Generator().manual_seed(0))


def loader(source: ArraySource, rank: int = 0, world_size: int = 1):  # type: ignore[no-untyped-def]
    return eval_loader(source, PLAIN, batch_size=16, rank=rank, world_size=world_size)


def test_the_prediction_of_an_image_is_its_largest_logit(source, logits):
    collector = PredictionCollector(IMAGES)
    for batch in loader(source, rank=1, world_size=2):  # every second image
        collector(batch, logits[batch.indices])
    found = collector.predictions(source, [*"abcdefg"])
    best = logits.softmax(1)[found.indices].max(1)
    assert len(found.indices) == IMAGES // 2
    assert found.predicted.tolist() == best.indices.tolist()
    assert found.labels.tolist() == (found.indices % CLASSES).tolist()
    np.testing.assert_allclose(found.confidence, best.values)


def test_accuracy_and_loss_are_those_counted_by_hand(source, logits):
    found = evaluate(Lookup(logits), loader(source))
    targets = torch.from_numpy(source.labels)
    order = logits.argsort(dim=1, descending=True)
    assert found["n"] == IMAGES
    assert found["top1"] == pytest.approx(100 * (order[:, 0] == targets).float().mean().item())
    in_five = (order[:, :5] == targets[:, None]).any(1).float().mean().item()
    assert found["top5"] == pytest.approx(100 * in_five)
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), abs=1e-6)


def test_a_class_with_images_that_is_never_predicted_is_named():
    labels, predicted = np.array([0, 0, 2, 2]), np.array([0, 1, 0, 1])
    found = Predictions(["a", "b", "c", "d"], labels, [""] * 4, labels, predicted, np.ones(4))
    assert found.never == ["c"]


def test_predictions_of_millions_of_images_are_read(tmp_path):
    numbers, path = np.zeros(200, np.int64), "x" * 100_000
    written = Predictions(["a"], np.arange(200), [path] * 200, numbers, numbers, np.ones(200))
    written.write(tmp_path / "p.csv")
    assert (tmp_path / "p.csv").stat().st_size > 2e7
    assert Predictions.read(tmp_path / "p.csv", ["a"]).paths == written.paths


@pytest.mark.parametrize("counts", [(20, 20, 20), (50, 9, 1), (1, 1, 30, 0)])
def test_means_over_classes_are_scikit_learns(counts):
    rng, n = np.random.default_rng(0), sum(counts)
    labels = np.repeat(np.arange(len(counts)), counts)
    predicted = np.where(rng.random(n) < 0.6, labels, rng.integers(0, len(counts) - 1, n))
    names = [f"class {number}" for number in range(len(counts))]
    found = Predictions(names, np.arange(n), [""] * n, labels, predicted, rng.random(n))
    with warnings.catch_warnings(action="ignore"):
        balanced = metrics.balanced_accuracy_score(labels, predicted)
        macro = metrics.f1_score(labels, predicted, average="macro")
        each = metrics.f1_score(labels, predicted, average=None)
    assert found.macro == pytest.approx(
        {"balanced_accuracy": 100 * balanced, "macro_f1": 100 * macro}
    )
    shown = [row["f1"] for row in found.per_class() if row["f1"] is not None]
    assert shown == pytest.approx(100 * each)
    answered, right = found.answered(0.5)
    assert answered == pytest.approx(100 * (found.confidence >= 0.5).mean()) and right is not None
    assert found.answered(2.0) == (0, None)


def test_a_temperature_calibrates_images_that_it_was_not_fitted_to(tmp_path):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 5, generator=generator)
    labels = logits.softmax(dim=1).multinomial(1, generator=generator)[:, 0]
    (tmp_path / "run").mkdir()
    found, confidence = calibrate(tmp_path / "run", [(4 * logits, labels)])
    assert found == pytest.approx(4, rel=0.1)
    index, predicted = np.arange(4000), logits.argmax(dim=1).numpy()

    def error(sure):
        shown = Predictions([*"abcde"], index, [""] * 4000, labels.numpy(), predicted, sure)
        return shown.calibration()[1]

    before = (4 * logits).softmax(dim=1).amax(dim=1).numpy()
    assert error(before) > 0.2 and error(confidence) < 0.03
    # An image does not change its own half's temperature.
    other = labels.clone()
    other[0] = (labels[0] + 1) % 5
    _, again = calibrate(tmp_path / "run", [(4 * logits, other)])
    unchanged = again == confidence
    assert unchanged[0] and 1900 < unchanged.sum() < 2100


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_processes_count_every_image_once(world_size, source, logits):
    shares: list[Tensor] = []

    def keep(totals: Tensor) -> Tensor:
        shares.append(totals)
        return totals

    for rank in range(world_size):
        evaluate(Lookup(logits), loader(source, rank, world_size), all_reduce=keep, num_batches=9)
    whole = evaluate(Lookup(logits), loader(source), all_reduce=keep)
    torch.testing.assert_close(torch.stack(shares[:world_size]).sum(0), shares[-1])
    assert whole["n"] == IMAGES


def test_an_evaluation_can_be_stopped_between_batches(source, logits):
    calls = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Interrupted(15, 3)

    model = Lookup(logits).train()
    with pytest.raises(Interrupted):
        evaluate(model, loader(source), before_batch=stop)
    assert len(calls) == 2
    assert model.training


def test_without_a_wrong_prediction_no_temperature_is_fitted(tmp_path):
    logits = torch.eye(3)
    with pytest.raises(UserError, match="no prediction of the 3 validation images is wrong"):
        calibrate(tmp_path / "run", [(logits, torch.arange(3))])
    assert not (tmp_path / "run").exists()
