"""Attention layers against their definitions."""

import pytest
import torch

from locality.layers.position import kernel_offsets, positional_attention
from locality.models import (
    GatedPositionalSelfAttention,
    PositionalSelfAttention,
    SelfAttention,
)

GRID = (5, 7)
LAYERS = [SelfAttention, PositionalSelfAttention, GatedPositionalSelfAttention]


def tokens(width=36, batch=2, grid=GRID, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, grid[0] * grid[1], width, generator=generator, dtype=dtype)


def test_gpsa_mixes_content_and_position_by_the_gate():
    """Eq. 7 as printed."""
    layer = GatedPositionalSelfAttention(36, 9, gating_init=-0.3).double()
    x = tokens(dtype=torch.float64)
    maps = layer.attention_maps(x, GRID)
    gate = layer.gating.detach().sigmoid()[0]
    assert gate == pytest.approx(0.4255575)
    torch.testing.assert_close(maps.mixed, (1 - gate) * maps.content + gate * maps.position)
    torch.testing.assert_close(maps.position, positional_attention(layer.v_pos, GRID))


def test_psa_has_one_softmax_over_the_sum(positional_scores):
    layer = PositionalSelfAttention(36, 9, conv_init=False)
    x = tokens()
    q, k = (
        part.unflatten(2, (9, 4)).transpose(1, 2) for part in layer.qkv(x)[..., :72].split(36, -1)
    )
    scores = q @ k.transpose(-2, -1) / 2 + positional_scores(layer.v_pos, GRID)
    torch.testing.assert_close(layer.attention_maps(x, GRID).mixed, scores.softmax(dim=-1))


def test_psa_starts_as_a_convolution_without_content_and_its_content_gets_no_gradient():
    """W_qry = W_key = 0 (Eq. 5), a saddle: each one's gradient is a multiple of the other."""
    layer, x = PositionalSelfAttention(36, 9), tokens()
    maps = layer.attention_maps(x, GRID)
    torch.testing.assert_close(maps.mixed, maps.position.expand_as(maps.mixed))
    layer(x, GRID).square().sum().backward()
    content, value = layer.qkv.weight.grad.split([72, 36])
    assert torch.count_nonzero(content) == 0 and torch.count_nonzero(value) > 0
    assert torch.count_nonzero(GatedPositionalSelfAttention(36, 9).qkv.weight[:72]) > 0


def test_convolutional_initialisation():
    """v_pos = −α (1, −2Δ), W_val = I, λ = 1; further heads use the default init (Eq. 5)."""
    layer = GatedPositionalSelfAttention(44, 11, locality_strength=0.5)
    offsets = kernel_offsets(3)
    torch.testing.assert_close(layer.v_pos[:9, 0], torch.full((9,), -0.5))
    torch.testing.assert_close(layer.v_pos[:9, 1:], offsets)
    assert layer.v_pos[9:].abs().max() < 0.1
    assert torch.equal(layer.qkv.weight[88:], torch.eye(44))
    assert torch.equal(layer.gating, torch.ones(11))
    plain = GatedPositionalSelfAttention(44, 11, conv_init=False)
    assert plain.v_pos.abs().max() < 0.1
    assert not torch.equal(plain.qkv.weight[88:], torch.eye(44))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=9"):
        SelfAttention(37, 9)


@pytest.mark.parametrize("layer_class", LAYERS[1:])
def test_positional_layers_refuse_a_class_token(layer_class):
    with pytest.raises(ValueError, match="class tokens"):
        layer_class(36, 9)(torch.randn(1, 36, 36), GRID)
