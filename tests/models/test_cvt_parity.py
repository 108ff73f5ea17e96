"""CvT against transformers' port, with equal random weights and running statistics."""

import pytest
import torch
import torch.nn.functional as F
from peers import peers, randomise

from locality.checkpoints.formats import TRANSFORMERS
from locality.models import build


def pair(name, **overrides):
    """Both models with equal weights; transformers' port uses the exact GELU."""
    torch.manual_seed(0)
    ours = build(name, activation="gelu", drop_path_rate=0.0, **overrides)
    randomise(ours)
    theirs = peers(ours, "transformers")["transformers"]
    return ours.eval(), theirs.eval()


SMALL = {"embed_dim": (8, 16, 24), "num_heads": (1, 2, 3), "depth": (1, 2, 3), "num_classes": 5}

MODELS = [
    pytest.param("cvt_13", SMALL, id="small"),
    pytest.param("cvt_13", SMALL | {"kv_stride": 1, "mlp_ratio": 2.0}, id="small unsqueezed"),
    pytest.param(
        "cvt_13",
        SMALL | {"embed_kernel": (4, 2, 2), "embed_padding": 0, "qkv_bias": False},
        id="small patches",
    ),
    pytest.param("cvt_13", {}, id="cvt_13", marks=pytest.mark.slow),
    pytest.param("cvt_21", {}, id="cvt_21", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, overrides", MODELS)
@pytest.mark.parametrize("size", [(224, 224), (192, 256)])
def test_logits_are_theirs(name, overrides, size):
    ours, theirs = pair(name, **overrides)
    x = torch.randn(1, 3, *size)
    with torch.no_grad():
        expected = theirs(x)
        assert expected.abs().mean() > 0.05
        assert (ours(x) - expected).abs().max() <= 1e-5
        assert (ours.fuse()(x) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name, overrides", MODELS)
def test_gradients_and_statistics_in_training_are_theirs(name, overrides):
    """Batch statistics, no stochastic depth; relative error of every parameter's gradient.

    In double precision, since BatchNorm removes the mean that LayerNorm's bias adds, so in single
    precision that bias' gradient is mostly rounding in both.
    """
    ours, theirs = pair(name, **overrides)
    ours.double().train()
    theirs.double().train()
    x, targets = torch.randn(2, 3, 96, 128, dtype=torch.float64), torch.tensor([1, 2])
    F.cross_entropy(ours(x), targets).backward()
    F.cross_entropy(theirs(x), targets).backward()

    state = ours.state_dict() | {key: p.grad for key, p in ours.named_parameters()}
    gradients = TRANSFORMERS.from_native(state, ours.config)
    expected = {key: p.grad for key, p in theirs.named_parameters()}
    total = sum(g.square().sum() for g in expected.values()).sqrt()
    silent = 0
    for key, theirs_grad in expected.items():
        if theirs_grad.norm() < 1e-14 * total:
            # Zero in exact arithmetic (a bias on all keys, unused queries): rounding only.
            assert gradients[key].norm() < 1e-14 * total, key
            silent += 1
        else:
            error = (gradients[key] - theirs_grad).norm() / theirs_grad.norm()
            assert error <= 1e-6, f"{key}: {error:.1e}"
    assert silent < len(expected) / 8
    for key, buffer in theirs.named_buffers():
        torch.testing.assert_close(gradients[key], buffer, rtol=1e-9, atol=1e-9, msg=key)
