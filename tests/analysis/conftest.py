import pytest
import torch

from locality.models import create_model


@pytest.fixture
def convit():
    """A small ConViT whose weights are away from their initial values."""
    return shaken(create_model("convit_nano"))


@pytest.fixture
def deit():
    return shaken(create_model("deit_nano"))


@pytest.fixture
def images():
    torch.manual_seed(1)
    return torch.randn(6, 3, 8, 8)


@torch.no_grad()
def shaken(model, seed=0, scale=0.3):
    """Every parameter moved at random, so that nothing is equal, zero or symmetric by accident."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()
