"""A search space of 4³ candidates, and runs of a few steps over it."""

import pytest
import torch

from locality.models import build, variant
from locality_papers.search.space import SearchSpace

OVERRIDES = {
    "embed_dim": (8, 12),
    "num_heads": (1, 2),
    "depth": (1, 2),
    "embed_kernel": 3,
    "embed_stride": (2, 1),
    "embed_padding": 1,
    "drop_path_rate": 0.2,
}


@pytest.fixture(scope="session")
def base():
    """Two stages of one and two blocks on digits, at stride 1 and ratio 4."""
    fields = OVERRIDES | {"img_size": 8, "num_classes": 10, "kv_stride": 1, "mlp_ratio": 4.0}
    return variant("cvt_13").config.with_overrides(**fields)


@pytest.fixture
def space(base):
    return SearchSpace(base)


@pytest.fixture
def model(base, randomise):
    torch.manual_seed(0)
    return randomise(build(base))
