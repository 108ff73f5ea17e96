import pytest
import torch

from locality.models import create_model


@pytest.fixture
def convit(shaken):
    return shaken(create_model("convit_nano"))


@pytest.fixture
def deit(shaken):
    return shaken(create_model("deit_nano"))


@pytest.fixture
def images():
    torch.manual_seed(1)
    return torch.randn(6, 3, 8, 8)
