"""The convolution that replaces attention, and its conversion to a gated layer."""

from __future__ import annotations

import pytest
import torch

from locality.layers import GatedPositionalSelfAttention, LocalConvolution
from locality.models import build


@pytest.mark.parametrize("kernel", [2, 3])
def test_it_is_the_convolution_of_the_token_map(kernel):
    torch.manual_seed(0)
    layer = LocalConvolution(6, kernel)
    image = torch.randn(2, 6, 4, 5)
    tokens = layer(image.flatten(2).transpose(1, 2), (4, 5))
    torch.testing.assert_close(tokens.transpose(1, 2).reshape(2, 6, 4, 5), layer.conv(image))


def test_a_class_token_is_refused():
    with pytest.raises(ValueError, match="21 tokens"):
        LocalConvolution(6, 3)(torch.zeros(1, 21, 6), (4, 5))


def test_a_gated_layer_continues_where_a_convolution_of_its_rank_stopped(truncated_kernel):
    torch.manual_seed(0)
    layer = LocalConvolution(36, 3)
    gated = GatedPositionalSelfAttention(36, 9, 30.0, locality_strength=100.0)
    with torch.no_grad():
        layer.conv.weight.copy_(truncated_kernel(layer.conv.weight, rank=4))
    gated.init_from_conv2d_(layer.conv)
    x = torch.randn(2, 42, 36)
    inside = (slice(None), slice(1, -1), slice(1, -1))
    ours, theirs = (net(x, (6, 7)).unflatten(1, (6, 7))[inside] for net in (gated, layer))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_model_has_it_in_the_place_of_its_positional_layers():
    model = build("convit_nano", embed_dim=36, num_heads=9, positional_attention="conv")
    assert [type(block.attn).__name__ for block in model.blocks] == (
        ["LocalConvolution"] * 3 + ["SelfAttention"]
    )
    assert model.blocks[0].attn.conv.kernel_size == (3, 3)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
