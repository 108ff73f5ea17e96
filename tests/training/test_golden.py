"""Ten steps of each family in float64: what every part of training adds up to."""

import pytest
import torch
import torch.nn.functional as F

from locality.models import build
from locality.training import OptimConfig
from locality.training.optim import create_optimizer

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

# Golden on purpose: a change of the arithmetic anywhere in a model, its initialisation, its
# parameter groups or the optimiser moves these, and no theorem says where they should be.
LOSSES = {
    ("convit_nano", "adamw"): [
        2.318187081045,
        2.196711887797,
        2.110715841239,
        1.955513075840,
        1.773941083601,
        1.682111967600,
        1.624336235065,
        1.525416889184,
        1.482517539155,
        1.412333553974,
    ],
    ("convit_nano", "adamuon"): [
        2.318187081045,
        2.270962761402,
        2.233117744564,
        2.199685234960,
        2.166526674581,
        2.128141613879,
        2.077712076586,
        2.009994102735,
        1.922938746791,
        1.822927155909,
    ],
    ("deit_nano", "adamw"): [
        2.317999279033,
        2.227920565897,
        2.181856807253,
        2.077732593797,
        1.994864774020,
        1.888273779471,
        1.731247502359,
        1.685234419174,
        1.567416884603,
        1.520759970711,
    ],
    ("cvt_micro", "adamw"): [
        4.661874465810,
        2.775580655964,
        1.820065218303,
        1.361250967865,
        1.107211470481,
        0.943158889859,
        0.817544798511,
        0.713776343494,
        0.624558371705,
        0.545711497208,
    ],
}


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(TORCH < (2, 14), reason="PyTorch 2.11 draws other initial weights")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("convit_nano", "adamw"),
        ("convit_nano", "adamuon"),
        ("deit_nano", "adamw"),
        pytest.param("cvt_micro", "adamw", marks=pytest.mark.slow),
    ],
)
def test_ten_steps_lose_what_they_did(name, optimizer, float64):
    torch.manual_seed(0)
    model = build(name)
    updates = create_optimizer(model, OptimConfig(optimizer, lr=1e-3, weight_decay=0.05), 16)
    images, labels = torch.randn(16, 3, *model.img_size), torch.arange(16) % 10
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(images), labels)
        updates.zero_grad()
        loss.backward()
        updates.step()
        losses.append(loss.item())
    assert losses == pytest.approx(LOSSES[name, optimizer], rel=0, abs=1e-9)
