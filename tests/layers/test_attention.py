"""Attention layers against their definitions and convolutions."""

import copy
import math

import pytest
import torch
from torch import nn

from locality.layers import (
    GatedPositionalSelfAttention,
    PositionalSelfAttention,
    SelfAttention,
)
from locality.layers.attention import _GatedSum, gated_sum
from locality.layers.conv_init import kernel_offsets
from locality.layers.position import positional_attention, positional_scores

GRID = (5, 7)
LAYERS = [SelfAttention, PositionalSelfAttention, GatedPositionalSelfAttention]


def tokens(width=36, batch=2, grid=GRID, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, grid[0] * grid[1], width, generator=generator, dtype=dtype)


def to_map(x, grid=GRID):
    return x.transpose(1, 2).unflatten(2, grid)


@pytest.mark.parametrize("layer_class", LAYERS)
def test_forward_is_its_attention_maps_times_values(layer_class):
    layer = layer_class(36, 9, qkv_bias=True).double()
    x = tokens(dtype=torch.float64)
    maps = layer.attention_maps(x, GRID)
    values = layer.qkv(x)[..., 72:].unflatten(2, (9, 4)).transpose(1, 2)
    expected = layer.proj((maps.mixed @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, GRID), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        maps.mixed.sum(dim=-1), torch.ones(2, 9, 35, dtype=torch.float64), rtol=0, atol=1e-10
    )


def test_gpsa_mixes_content_and_position_by_the_gate():
    """Eq. 7 as printed."""
    layer = GatedPositionalSelfAttention(36, 9, gating_init=-0.3).double()
    x = tokens(dtype=torch.float64)
    maps = layer.attention_maps(x, GRID)
    gate = layer.gating.detach().sigmoid()[0]
    assert gate == pytest.approx(0.4255575)
    torch.testing.assert_close(maps.mixed, (1 - gate) * maps.content + gate * maps.position)
    torch.testing.assert_close(maps.position, positional_attention(layer.v_pos, GRID))


def test_closed_gate_is_self_attention():
    """λ → −∞ leaves plain self-attention with the same weights."""
    gated = GatedPositionalSelfAttention(36, 9, gating_init=float("-inf"))
    plain = SelfAttention(36, 9)
    shared = {k: v for k, v in gated.state_dict().items() if k not in ("v_pos", "gating")}
    plain.load_state_dict(shared)
    torch.testing.assert_close(gated(tokens(), GRID), plain(tokens(), GRID))


def test_psa_has_one_softmax_over_the_sum():
    layer = PositionalSelfAttention(36, 9, conv_init=False)
    x = tokens()
    q, k = (
        part.unflatten(2, (9, 4)).transpose(1, 2) for part in layer.qkv(x)[..., :72].split(36, -1)
    )
    scores = q @ k.transpose(-2, -1) / 2 + positional_scores(layer.v_pos, GRID)
    torch.testing.assert_close(layer.attention_maps(x, GRID).mixed, scores.softmax(dim=-1))


@pytest.mark.parametrize("grid", [(1, 1), (5, 7), (14, 14)])
@pytest.mark.parametrize("strength", [0.5, 100.0])
def test_psa_is_its_definition_in_half_precision_too(grid, strength):
    """One SDPA call on concatenated content and position, without an N×N mask."""
    torch.manual_seed(0)
    layer = PositionalSelfAttention(36, 9, locality_strength=strength)
    nn.init.normal_(layer.qkv.weight[:72].data, std=0.1)
    x = tokens(grid=grid)
    values = layer.double()._queries_keys_values(x.double())[2]
    expected = layer._project(layer.attention_maps(x.double(), grid).mixed @ values)
    torch.testing.assert_close(layer.float()(x, grid).double(), expected, rtol=0, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = layer(x, grid)
    assert (rough - expected).std() <= 0.01 * expected.std()


def test_the_gated_sum_has_the_gradients_of_its_formula():
    parts = [torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    gate = torch.rand(3, 1, 1, dtype=torch.float64, requires_grad=True)
    for function in (gated_sum, _GatedSum.apply):
        assert torch.autograd.gradcheck(function, (*parts, gate))
        assert torch.autograd.gradgradcheck(function, (*parts, gate))


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
    assert torch.equal(layer.value_weight, torch.eye(44))
    assert torch.equal(layer.gating, torch.ones(11))
    plain = GatedPositionalSelfAttention(44, 11, conv_init=False)
    assert plain.v_pos.abs().max() < 0.1
    assert not torch.equal(plain.value_weight, torch.eye(44))


CONVOLUTIONS = {
    "1×1": nn.Conv2d(6, 10, 1),
    "3×3": nn.Conv2d(6, 10, 3, padding=1),
    "more in than out": nn.Conv2d(10, 6, 3, padding=1, bias=False),
    "5×5, same": nn.Conv2d(6, 10, 5, padding="same"),
    "even": nn.Conv2d(6, 10, 4, padding="same"),
    "stride 2": nn.Conv2d(6, 10, 3, stride=2, padding=1),
    "stem": nn.Conv2d(3, 8, 7, stride=2, padding=3),
    "stride 3, little padding": nn.Conv2d(6, 10, 5, stride=3, padding=1),
    "no padding": nn.Conv2d(6, 10, 3),
    "groups": nn.Conv2d(6, 9, 3, padding=1, groups=3),
    "depthwise": nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6),
}


@pytest.mark.parametrize("gating", [0.5, 1.0, 30.0])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@torch.no_grad()
def test_from_conv2d_is_the_convolution(kind, gating):
    """With zero padding and stride, for any gate, on grids of any shape."""
    conv = copy.deepcopy(CONVOLUTIONS[kind]).double()
    layer = GatedPositionalSelfAttention.from_conv2d(conv, 40.0, gating)
    for grid in ((9, 11), (8, 7)):
        x = tokens(conv.in_channels, grid=grid).double()
        expected = conv(to_map(x, grid))
        assert layer.window.grid(grid) == expected.shape[2:]
        ours = to_map(layer(x, grid), layer.window.grid(grid))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_the_convolution_is_off_by_little_where_alpha_is_finite_and_everything_learns():
    """Error and v_pos's gradient fall like e^−α; other gradients do not."""
    torch.manual_seed(0)
    conv = nn.Conv2d(12, 12, 3, padding=1).double()
    x = tokens(12).double()
    expected = conv(to_map(x))
    errors, gradients = [], []
    for strength in (5.0, 6.0):
        layer = GatedPositionalSelfAttention.from_conv2d(conv, strength, gating=1.0)
        ours = to_map(layer(x, GRID))
        errors.append(((ours - expected).norm() / expected.norm()).item())
        (ours * to_map(tokens(12).double())).sum().backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())
        gradients.append(layer.v_pos.grad[:9].norm().item())
    assert 0.01 < errors[0] < 0.05
    assert errors[1] / errors[0] == pytest.approx(math.exp(-1), rel=0.1)
    assert gradients[1] / gradients[0] == pytest.approx(math.exp(-1), rel=0.1)


def test_a_layer_in_a_convolutions_place_shows_what_it_uses():
    """Attention maps times values are the layer's output; padding takes a share."""
    torch.manual_seed(0)
    layer = GatedPositionalSelfAttention.from_conv2d(CONVOLUTIONS["stride 2"], 3.0, 1.0)
    x = tokens(6)
    maps = layer.attention_maps(x, GRID)
    values = layer._queries_keys_values(x)[2]
    torch.testing.assert_close(layer._project(maps.mixed @ values), layer(x, GRID))
    assert maps.mixed.shape[-2:] == (math.prod(maps.query_grid), math.prod(GRID))
    torch.testing.assert_close(maps.content.sum(-1), torch.ones(maps.content.shape[:-1]))
    corner = maps.position.sum(-1)[0, 0]  # head (−1, −1) of query 0 attends beyond the border
    assert corner < 0.01
    torch.testing.assert_close(
        maps.position.sum(-1)[4], torch.ones(maps.position.shape[1]), atol=0.1, rtol=0
    )


@pytest.mark.parametrize("heads", [9, 12])
def test_init_from_conv2d_is_the_convolution_of_the_truncated_kernel(heads, truncated_kernel):
    torch.manual_seed(heads)
    width = 4 * heads
    conv = nn.Conv2d(width, width, 3, padding=1, padding_mode="replicate")
    layer = GatedPositionalSelfAttention(width, heads, 30.0, locality_strength=100.0)
    layer.init_from_conv2d_(conv)

    kernel = conv.weight.detach().clone()
    conv.weight.data = truncated_kernel(kernel, rank=4)
    x = tokens(width)
    torch.testing.assert_close(to_map(layer(x, GRID)), conv(to_map(x)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("conv", "gating", "complaint"),
    [
        (nn.Conv2d(36, 36, 3, padding=2, dilation=2), 1.0, "dilation"),
        (nn.Conv2d(36, 36, 4, padding=2), 1.0, "padding"),
        (nn.Conv2d(36, 36, 3, padding=(1, 0)), 1.0, "padding"),
        (nn.Conv2d(36, 36, (3, 5), padding="same"), 1.0, "square"),
        (nn.Conv2d(36, 36, 3, stride=(1, 2)), 1.0, "square"),
        (nn.Conv2d(36, 36, 3, padding=1), -1.0, "above 0"),  # negative gating
    ],
)
def test_other_convolutions_are_refused(conv, gating, complaint):
    with pytest.raises(ValueError, match=complaint):
        GatedPositionalSelfAttention.from_conv2d(conv, 40.0, gating)


def test_a_kernel_or_width_that_does_not_fit_is_refused():
    layer = GatedPositionalSelfAttention(36, 9)
    with pytest.raises(ValueError, match="needs 25 heads"):
        layer.init_from_conv2d_(nn.Conv2d(36, 36, 5, padding=2))
    with pytest.raises(ValueError, match=r"Conv2d\(36, 24"):
        layer.init_from_conv2d_(nn.Conv2d(36, 24, 3, padding=1))
    with pytest.raises(ValueError, match="stride 1"):
        layer.init_from_conv2d_(nn.Conv2d(36, 36, 3, padding=1, stride=2))
    with pytest.raises(ValueError, match="num_heads=9"):
        SelfAttention(37, 9)


@pytest.mark.parametrize("layer_class", LAYERS[1:])
def test_positional_layers_refuse_a_class_token(layer_class):
    with pytest.raises(ValueError, match="class tokens"):
        layer_class(36, 9)(torch.randn(1, 36, 36), GRID)
