"""A candidate inside the supernet equals the standalone model."""

import itertools

import pytest
import torch

from locality.data import AugmentConfig, DataConfig, Preprocessing, eval_loader, open_data
from locality.errors import UserError
from locality.models import build, count_macs, count_parameters
from locality.training import ObjectiveConfig
from locality_papers.search.space import Cost, SearchSpace
from locality_papers.search.supernet import (
    Sandwich,
    Supernet,
    calibrate,
    extract,
)


@pytest.fixture
def images():
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_candidate_is_extracted_exactly(model, space, images, mode):
    supernet, images = Supernet(model.double(), space), images.double()
    getattr(model, mode)()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for candidate in itertools.product(range(4), repeat=3):
        model.load_state_dict(state)  # training mode updates running statistics
        small = extract(model, space, candidate)
        assert small.config == space.config(candidate) and small.training == (mode == "train")
        torch.manual_seed(7)
        inside = supernet.run(candidate, images)
        torch.manual_seed(7)
        assert (small(images) - inside).abs().max() <= 1e-10
        assert Cost(count_parameters(small), count_macs(small.float())) == space.cost(candidate)


def test_the_model_itself_is_left_as_it_is(model, space, images):
    before = model(images)
    Supernet(model, space).run((2, 2, 2), images)
    assert torch.equal(model(images), before)
    with pytest.raises(UserError):
        Supernet(model, space).run((2, 2, 2), images[:, :2])
    assert torch.equal(model(images), before)


def test_every_parameter_learns_from_the_largest_the_smallest_and_random_ones(model, space, images):
    supernet = Supernet(model.train(), space)
    largest, smallest, *drawn = supernet.sandwich()
    assert (largest, smallest, len(drawn)) == ((1, 1, 1), (2, 2, 2), 2)
    supernet(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_candidates_learn_from_the_largest(images):
    objective = Sandwich(ObjectiveConfig(), AugmentConfig(), 10)
    logits = torch.randn(3, 6, 10, requires_grad=True)
    labels = torch.arange(6)
    objective.loss(logits, labels, images).backward()
    correct = objective.batch_metrics(logits.sum(), logits, labels)[1]
    assert correct == (logits[0].argmax(dim=1) == labels).sum()
    gradient = logits.grad * 3
    # Gradient: probability − target, which is the label for the largest, its output for others.
    found, hard = logits.softmax(dim=2), torch.nn.functional.one_hot(labels, 10)
    torch.testing.assert_close(gradient[0], (found[0] - hard) / 6)
    torch.testing.assert_close(gradient[1:], (found[1:] - found[:1]) / 6)


def test_calibrated_statistics_are_those_of_the_images(model, space):
    splits = open_data(DataConfig("digits"), 0)
    loader = eval_loader(splits.train.subset(range(256)), Preprocessing(8), batch_size=64)
    batches = [batch.images for batch in loader]
    small = extract(model, space, (2, 1, 1))
    calibrate(small, batches)
    assert not small.training
    again = extract(model, space, (2, 1, 1))
    calibrate(again, batches)
    for name, buffer in small.named_buffers():
        assert torch.equal(buffer, dict(again.named_buffers())[name])
    first = small.stages[0]
    tokens = [first.blocks[0].norm1(first.embed(batch)) for batch in batches]
    convolved = [
        first.blocks[0].attn.k.conv(t.transpose(1, 2).unflatten(2, (4, 4))) for t in tokens
    ]
    expected = torch.stack([each.mean(dim=(0, 2, 3)) for each in convolved]).mean(dim=0)
    torch.testing.assert_close(first.blocks[0].attn.k.norm.running_mean, expected)


def test_what_cannot_be_shared_is_refused(base, space, model):
    linear = base.with_overrides(projection="linear")
    with pytest.raises(ValueError, match="convolutional"):
        Supernet(build(linear), SearchSpace(linear))
    model.set_grad_checkpointing()
    with pytest.raises(ValueError, match="grad_checkpointing"):
        Supernet(model, space)
