"""Ten steps of each family in float64, with recorded losses."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from locality.models import build
from locality.training import OptimConfig
from locality.training.optim import create_optimizer

# Losses of three steps. Golden values: any change to the arithmetic of a model, its parameter
# groups or the optimiser shifts them. Weights and images come from NumPy, which is stable across
# versions.
LOSSES = {
    ("convit_nano", "adamw"): (2.296639158388, 2.264323223529, 2.249768110045),
    ("convit_nano", "adamuon"): (2.296639158388, 2.283891365811, 2.273672226266),
    ("deit_nano", "adamw"): (2.331459534009, 2.282069881537, 2.266933074213),
    ("cvt_micro", "adamw"): (4.620787518966, 3.889110750829, 3.570785459298),
}


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(shape, seed):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


SLOW = ("cvt_micro", "adamw")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [pytest.param(*each, marks=pytest.mark.slow if each == SLOW else ()) for each in LOSSES],
)
def test_ten_steps_lose_what_they_did(name, optimizer, float64):
    model = build(name, drop_path_rate=0.0)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.add_(-parameter + 0.1 * drawn(parameter.shape, seed))
    updates = create_optimizer(model, OptimConfig(optimizer, lr=1e-3, weight_decay=0.05), 16)
    images, labels = drawn((16, 3, *model.img_size), 1000), torch.arange(16) % 10
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(images), labels)
        updates.zero_grad()
        loss.backward()
        updates.step()
        losses.append(loss.item())
    assert losses[::4] == pytest.approx(LOSSES[name, optimizer], rel=0, abs=1e-9)
