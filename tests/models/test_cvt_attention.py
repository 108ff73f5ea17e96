"""Convolutional embedding, projection and attention (CvT section 3)."""

import copy
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from locality.layers.grid import ProjectionName, projected_grid
from locality.models.cvt import (
    ConvolutionalAttention,
    ConvolutionalEmbedding,
    Projection,
    image_to_tokens,
    tokens_to_image,
)

GRIDS = [(6, 6), (5, 8), (1, 7), (1, 1)]


def project(projection, x, grid):
    return projection(x, tokens_to_image(x[:, int(projection.class_token) :], grid))


# The view between tokens and images


def test_tokens_and_images_share_memory():
    tokens = torch.randn(2, 12, 5)
    image = tokens_to_image(tokens, (3, 4))
    assert image.shape == (2, 5, 3, 4)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert image_to_tokens(image).data_ptr() == tokens.data_ptr()
    assert torch.equal(image_to_tokens(image), tokens)
    assert torch.equal(image[1, :, 2, 3], tokens[1, 2 * 4 + 3])


# Token embedding (Eq. 1)


@pytest.mark.parametrize("kernel, stride, padding", [(7, 4, 2), (3, 2, 1), (4, 4, 0), (1, 1, 0)])
@pytest.mark.parametrize("size", [(16, 16), (9, 13)])
def test_embedding_is_a_convolution_and_a_norm(kernel, stride, padding, size):
    embed = ConvolutionalEmbedding(3, 8, kernel, stride, padding)
    x = torch.randn(2, 3, *size)
    convolved = F.conv2d(x, embed.conv.weight, embed.conv.bias, stride, padding)
    assert projected_grid(size, "conv", kernel, stride, padding) == tuple(convolved.shape[2:])
    expected = F.layer_norm(convolved.flatten(2).transpose(1, 2), (8,), eps=1e-5)
    torch.testing.assert_close(embed(x), expected)


# Projection (Eq. 2)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("prefix", [0, 1])
def test_projection_is_a_depthwise_separable_convolution(grid, stride, kernel, prefix, randomise):
    """Depthwise conv → BatchNorm → 1×1 conv; the class token takes only the last step."""
    projection = randomise(Projection(8, "conv", kernel, stride, class_token=bool(prefix)))
    x = torch.randn(2, prefix + grid[0] * grid[1], 8)
    image = x[:, prefix:].transpose(1, 2).reshape(2, 8, *grid)
    mixed = F.conv2d(image, projection.conv.weight, None, stride, kernel // 2, groups=8)
    mixed = projection.norm(mixed)
    weight, bias = projection.linear.weight, projection.linear.bias
    separable = F.conv2d(mixed, weight[:, :, None, None], bias)
    expected = torch.cat((F.linear(x[:, :prefix], weight, bias), separable.flatten(2).mT), dim=1)
    torch.testing.assert_close(project(projection, x, grid), expected)
    assert projection.grid(grid) == tuple(separable.shape[2:])


@pytest.mark.parametrize("stride", [1, 2])
def test_average_of_equal_tokens_is_that_token(stride):
    """Also at the border: padding does not count."""
    projection = Projection(8, "avg", 3, stride)
    token = torch.randn(1, 1, 8)
    out = project(projection, token.expand(2, 15, 8), (3, 5))
    torch.testing.assert_close(out, projection.linear(token).expand_as(out))
    assert out.shape[1] == projection.grid((3, 5))[0] * projection.grid((3, 5))[1]


# Attention


@pytest.fixture
def attention(randomise):
    return lambda **options: randomise(ConvolutionalAttention(16, 4, **options))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("kind", get_args(ProjectionName))
@pytest.mark.parametrize("kv_stride", [1, 2])
def test_forward_is_the_shown_attention_applied_to_the_values(
    attention, grid, prefix, kind, kv_stride
):
    layer = attention(projection=kind, kv_stride=kv_stride, class_token=bool(prefix))
    x = torch.randn(2, prefix + grid[0] * grid[1], 16)
    maps = layer.attention_maps(x, grid)
    values = project(layer.v, x, grid).unflatten(2, (4, 4)).transpose(1, 2)
    expected = layer.proj((maps.mixed @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, grid), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(maps.mixed.sum(-1), torch.ones(2, 4, x.shape[1]))
    assert (maps.query_grid, maps.prefix_tokens) == (grid, prefix)
    assert maps.mixed.shape[-1] == prefix + maps.key_grid[0] * maps.key_grid[1]
    if kind != "linear":
        assert maps.key_grid == tuple(-(-side // kv_stride) for side in grid)


def test_scales(attention):
    """The authors divide by √C, the usual definition by √d."""
    width, head = attention(), attention(scale="head")
    assert width.scale == 16**-0.5 and head.scale == 4**-0.5
    head.load_state_dict(width.state_dict())
    x = torch.randn(1, 6, 16)
    narrow, wide = (a.attention_maps(x, (2, 3)).mixed.log() for a in (width, head))
    # Log-probabilities are scores up to a constant per row, and the scores differ by √h.
    narrow, wide = (scores - scores.mean(-1, keepdim=True) for scores in (narrow, wide))
    torch.testing.assert_close(wide, 2 * narrow, rtol=1e-3, atol=1e-4)


def test_looking_leaves_running_statistics_alone(attention):
    layer = attention().train()
    x = torch.randn(3, 12, 16)
    before = copy.deepcopy(layer.state_dict())
    shown = layer.attention_maps(x, (3, 4)).mixed
    assert all(torch.equal(a, before[name]) for name, a in layer.state_dict().items())
    values = project(layer.v, x, (3, 4)).unflatten(2, (4, 4)).transpose(1, 2)
    expected = layer.proj((shown @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, (3, 4)), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(layer.q.norm.running_mean, before["q.norm.running_mean"])
