"""The convolution that replaces attention."""

from __future__ import annotations

import pytest
import torch

from locality.layers import LocalConvolution


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
