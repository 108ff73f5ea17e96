import pytest
import torch

from locality.models import create_model


@torch.no_grad()
def _shaken(model, seed=0, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


@pytest.fixture(scope="session")
def shaken():
    """Moves every parameter at random, so that nothing is equal, zero or symmetric by accident."""
    return _shaken


@pytest.fixture
def convit():
    return _shaken(create_model("convit_nano"))


@pytest.fixture
def deit():
    return _shaken(create_model("deit_nano"))


@pytest.fixture
def images():
    torch.manual_seed(1)
    return torch.randn(6, 3, 8, 8)
