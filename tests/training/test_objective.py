"""Losses, mixing and teachers against their formulas."""

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import locality
from locality.checkpoints import loading
from locality.data import AugmentConfig, Preprocessing
from locality.data.sampling import seed_generators
from locality.errors import UserError
from locality.models import build
from locality.training import ObjectiveConfig
from locality.training.folder_checks import check_places
from locality.training.objective import (
    Objective,
    Teacher,
    class_weights,
    load_teacher,
)

from .conftest import tiny, train

CLASSES = 7
HALF = (0.5, 0.5, 0.5)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    images, labels = torch.rand(8, 3, 6, 6), torch.arange(8) % CLASSES
    return images, labels, torch.randn(8, CLASSES)


def test_class_weights_make_every_class_count_alike(batch):
    images, _, logits = batch
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
    weights = class_weights(labels.numpy(), CLASSES)
    assert weights[labels].mean() == 1
    objective = Objective(ObjectiveConfig(), AugmentConfig(), CLASSES, class_weights=weights)
    losses = F.cross_entropy(logits, labels, reduction="none")
    by_class = torch.stack([losses[labels == label].mean() for label in range(3)])
    torch.testing.assert_close(objective.loss(logits, labels, images), by_class.mean())
    # The loss does not depend on how a batch is divided.
    single = [
        objective.loss(*one) for one in zip(logits[:, None], labels[:, None], images, strict=True)
    ]
    torch.testing.assert_close(torch.stack(single).mean(), by_class.mean())


@pytest.mark.parametrize("mixup_prob", [0.0, 1e-9])
def test_class_weights_weigh_the_smoothed_loss_of_an_image(batch, mixup_prob):
    images, labels, logits = batch
    weights = torch.logspace(0, 3, CLASSES)
    config = ObjectiveConfig(label_smoothing=0.3, class_weights=True)
    augment = AugmentConfig(mixup=1.0, mixup_prob=mixup_prob)
    objective = Objective(config, augment, CLASSES, class_weights=weights)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.3)
    # Mixup that mixes nothing still gives probabilities.
    targets = objective.mix(images, labels)[1]
    torch.testing.assert_close(
        objective.loss(logits, targets, images), (weights[labels] * losses).mean()
    )


def test_mixed_targets_are_smoothed_probabilities(batch):
    images, labels, logits = batch
    augment = AugmentConfig(mixup=0.8, cutmix=1.0)
    objective = Objective(ObjectiveConfig(label_smoothing=0.1), augment, CLASSES)
    seed_generators(1 << 40)
    mixed, targets = objective.mix(images.clone(), labels)
    assert not torch.equal(mixed, images)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    assert targets.min() >= 0.1 / CLASSES - 1e-6
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(objective.loss(logits, targets, mixed), expected)


def test_of_an_odd_batch_the_first_image_stays_as_it_is(batch):
    images, labels, _ = batch
    objective = Objective(ObjectiveConfig(label_smoothing=0.1), AugmentConfig(mixup=0.8), CLASSES)
    seed_generators(3)
    pairs, pair_targets = objective.mix(images[1:5].clone(), labels[1:5])
    seed_generators(3)
    mixed, targets = objective.mix(images[:5].clone(), labels[:5])
    assert torch.equal(mixed[0], images[0]) and torch.equal(mixed[1:], pairs)
    assert torch.equal(targets[1:], pair_targets)
    torch.testing.assert_close(targets[0], 0.9 * F.one_hot(labels[0], CLASSES) + 0.1 / CLASSES)


class Fixed(nn.Module):
    """A model with constant logits that records its inputs."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        self.seen = images
        return self.logits * self.scale


def teacher(logits: Tensor, mean: tuple[float, ...] = HALF, size: int = 6) -> Teacher:
    return Teacher(Fixed(logits), Preprocessing(size, mean, HALF), Preprocessing(6, HALF, HALF))


def test_hard_distillation_is_half_label_and_half_teacher(batch):
    images, labels, logits = batch
    taught = torch.randn(8, CLASSES)
    objective = Objective(ObjectiveConfig(teacher="t"), AugmentConfig(), CLASSES, teacher(taught))
    expected = 0.5 * F.cross_entropy(logits, labels) + 0.5 * F.cross_entropy(
        logits, taught.argmax(1)
    )
    torch.testing.assert_close(objective.loss(logits, labels, images), expected)


def test_soft_distillation_vanishes_where_student_and_teacher_agree(batch):
    images, labels, logits = batch
    config = ObjectiveConfig(teacher="t", distillation="soft", teacher_share=1.0)
    agreeing = Objective(config, AugmentConfig(), CLASSES, teacher(logits))
    assert agreeing.loss(logits, labels, images).item() == pytest.approx(0, abs=1e-6)
    other = Objective(config, AugmentConfig(), CLASSES, teacher(logits.flip(0)))
    assert other.loss(logits, labels, images) > 0.1


def test_a_teacher_sees_images_at_its_own_normalisation_and_size(batch):
    pixels = batch[0]
    student = (pixels - 0.5) / 0.5
    taught = teacher(batch[2], mean=(0.1, 0.2, 0.3))
    taught(student)
    expected = (pixels - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / 0.5
    torch.testing.assert_close(taught.model.seen, expected)
    assert not taught.train().training and not taught(student).requires_grad
    enlarged = teacher(batch[2], size=12)
    enlarged(student)
    assert enlarged.model.seen.shape == (8, 3, 12, 12)


def test_public_weights_can_be_the_teacher(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "snapshot_download", lambda repo, **_: tmp_path)
    model = timm.create_model("deit_tiny_patch16_224")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    check_places(tiny(objective__teacher="deit_tiny.fb_in1k"), tmp_path / "run")
    loaded, (note,) = load_teacher("deit_tiny.fb_in1k", Preprocessing(), range(1000))
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), model.eval()(images))
    assert "no class names" in note


def test_a_run_can_be_the_teacher(tmp_path):
    train(tiny(schedule__steps=2), tmp_path / "run")
    images, run = torch.randn(2, 3, 8, 8), str(tmp_path / "run")
    whole, _ = load_teacher(run, tiny().input, "0123456789")
    some, notes = load_teacher(run, tiny().input, "719")
    assert torch.equal(some(images), whole(images)[:, [7, 1, 9]]) and not notes
    with pytest.raises(UserError, match="'ten'"):
        load_teacher(run, tiny().input, ["0", "ten"])


def test_teachers_that_are_refused(tmp_path):
    for teacher, named in {"convit_tiny": "weights", str(tmp_path / "none"): "none"}.items():
        with pytest.raises(UserError, match=rf"objective\.teacher.*{named}"):
            check_places(tiny(objective__teacher=teacher), tmp_path / "run")
    for settings, named in (({"in_chans": 1}, "1 channel"), ({}, "1000 classes")):
        saved = locality.save(build("timm/test_vit", **settings), tmp_path / named)
        with pytest.raises(UserError, match=named):
            load_teacher(str(saved), Preprocessing(), "0123456789")
