"""Each shortcut computes what it replaces; whole models in tests/models/test_families.py."""

import pytest
import torch

from locality.layers import fast
from locality.layers.fast import attend, linear


@pytest.fixture
def through_convolution(monkeypatch):
    """Use the convolution on any processor and for any size."""
    monkeypatch.setattr(fast, "_USE_ONEDNN", True)
    monkeypatch.setattr(fast, "_MIN_ELEMENTS", 0)


@pytest.mark.parametrize("shape", [(70, 24), (3, 5, 24), (1, 1, 24), (2, 3, 4, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_linear_layer_with_its_gradients(through_convolution, shape, bias):
    layer, x = torch.nn.Linear(24, 10, bias=bias), torch.randn(shape, requires_grad=True)
    out, expected = linear(layer, x), layer(x)
    torch.testing.assert_close(out, expected)
    upstream, given = torch.randn_like(expected), [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(y, given, upstream) for y in (out, expected))
    torch.testing.assert_close(ours, theirs)


def test_takes_the_convolution_only_where_it_pays(monkeypatch):
    """Large fp32 inputs on supported processors; F.linear otherwise."""
    monkeypatch.setattr(fast, "_USE_ONEDNN", True)
    layer = torch.nn.Linear(64, 8)

    def convolves(x):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            linear(layer.to(x.dtype), x)
        return any(event.key == "aten::conv2d" for event in profile.key_averages())

    large, small = torch.randn(2048, 64), torch.randn(16, 64)
    assert convolves(large)
    assert not convolves(small)
    assert not convolves(large.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not convolves(large)
    monkeypatch.setattr(fast, "_USE_ONEDNN", False)
    assert not convolves(large)


def test_an_exported_graph_says_linear_for_any_number_of_images(monkeypatch):
    monkeypatch.setattr(fast, "_USE_ONEDNN", True)
    monkeypatch.setattr(fast, "_MIN_ELEMENTS", 100)  # 25 of the rows below

    class Fast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):
            return linear(self.layer, x)

    axes = ({0: torch.export.Dim("batch", min=1)},)
    graph = torch.export.export(Fast(), (torch.randn(2, 4),), dynamic_shapes=axes).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert targets == ["aten.linear.default"]


def test_content_attention_is_the_same_by_either_way():
    """bf16 without gradients uses plain products; results differ by rounding."""
    q, k, v = torch.randn(3, 2, 4, 30, 16).unbind(0)
    exact = (q @ k.transpose(-2, -1) / 4).softmax(dim=-1) @ v
    torch.testing.assert_close(attend(q, k, v), exact)
    rough = [part.bfloat16() for part in (q, k, v)]
    with torch.no_grad():
        without = attend(*rough)
    assert without.dtype == torch.bfloat16 and without.shape == exact.shape
    torch.testing.assert_close(without.float(), exact, rtol=0.05, atol=0.05)
    torch.testing.assert_close(attend(*rough).float(), exact, rtol=0.05, atol=0.05)
