"""Each `init` of attention."""

from __future__ import annotations

import pytest
import torch

from locality.errors import UserError
from locality.models import ConvolutionalAttention, SelfAttention, build
from locality.models.initialisations import sinusoidal_positions


def made(name, init, **fields):
    torch.manual_seed(0)
    return build(name, init=init, **fields)


def attentions(model):
    return [m for m in model.modules() if isinstance(m, SelfAttention | ConvolutionalAttention)]


@pytest.mark.parametrize("name", ["deit_tiny", "convit_tiny", "cvt_13"])
@torch.no_grad()
def test_mimetic_products_have_the_published_diagonals(name):
    """The diagonal of W_V W_O is −0.4; of W_Q W_Kᵀ, cut to rank d of C, above 0.7 d/C."""
    for layer in attentions(made(name, "mimetic", num_classes=2))[::5]:
        if isinstance(layer, ConvolutionalAttention):
            queries, keys, values = (part.linear.weight for part in (layer.q, layer.k, layer.v))
        else:
            queries, keys, values = layer.qkv.weight.chunk(3)
        width, rank = layer.dim, layer.dim // layer.num_heads
        product = values.T @ layer.proj.weight.T
        assert product.diagonal().mean() == pytest.approx(-0.4, abs=0.02)
        assert (product - product.diagonal().diag()).std() == pytest.approx(
            0.4 * width**-0.5, rel=0.1
        )
        for q, k in zip(queries.split(rank), keys.split(rank), strict=True):
            assert (q.T @ k).diagonal().mean() > 0.7 * rank / width
            assert torch.linalg.matrix_rank(q.T @ k) == rank


@pytest.mark.parametrize("name", ["deit_small", "convit_small"])
def test_an_impulse_looks_at_one_neighbour(name):
    """The same neighbour for all queries, in a 3×3 window, where it is inside the image.

    As in the model, LayerNorm removes the mean of a token's sinusoids and scales them.
    """
    model, grid = made(name, "impulse", num_classes=2), (14, 14)
    x = sinusoidal_positions(grid, model.embed_dim)[None]
    seen = set()
    for block in model.blocks:
        content = block.attn.attention_maps(block.norm1(x), grid).content[0].unflatten(1, grid)
        for head in content[:, 1:-1, 1:-1].flatten(1, 2):
            target, places = head.argmax(-1).unflatten(0, (12, 12)), torch.arange(1, 13)
            offsets = torch.stack((target // 14 - places[:, None], target % 14 - places))
            (offset,) = offsets.flatten(1).unique(dim=1).T.tolist()
            seen.add(tuple(offset))
    assert len(seen) > 5 and all(abs(i) <= 1 and abs(j) <= 1 for i, j in seen)


@pytest.mark.parametrize("init", ["mimetic", "impulse"])
def test_every_parameter_still_learns(init):
    model = made("convit_nano", init)
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cvt_nano", {"init": "impulse"}),
        ("convit_nano", {"init": "impulse", "use_pos_embed": False}),
        ("convit_nano", {"init": "kaiming"}),
    ],
)
def test_what_makes_no_sense_is_refused(name, fields):
    with pytest.raises(UserError, match="init"):
        build(name, **fields)
