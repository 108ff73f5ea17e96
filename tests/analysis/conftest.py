import pytest
import torch

from locality.models import build


@pytest.fixture
def convit(shaken):
    return shaken(build("convit_nano"))


@pytest.fixture
def deit(shaken):
    return shaken(build("deit_nano"))


@pytest.fixture
def images():
    torch.manual_seed(1)
    return torch.randn(6, 3, 8, 8)
