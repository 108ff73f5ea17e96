"""The linear layer gives the same numbers through a convolution."""

import pytest
import torch
import torch.nn.functional as F

from locality.layers import cpu
from locality.layers.cpu import Linear, attend, linear


@pytest.fixture
def through_convolution(monkeypatch):
    """Use the convolution on any processor and for any size."""
    monkeypatch.setattr(cpu, "_USE_ONEDNN", True)
    monkeypatch.setattr(cpu, "_MIN_ELEMENTS", 0)


@pytest.mark.parametrize("shape", [(70, 24), (3, 5, 24), (1, 1, 24), (2, 3, 4, 24)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_f_linear_with_its_gradients(through_convolution, shape, with_bias):
    weight = torch.randn(10, 24)
    bias = torch.randn(10) if with_bias else None
    given = [torch.randn(shape), weight, *([bias] if with_bias else [])]
    ours = [tensor.clone().requires_grad_() for tensor in given]
    theirs = [tensor.clone().requires_grad_() for tensor in given]
    out, expected = linear(*ours), F.linear(*theirs)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(expected)
    out.backward(upstream)
    expected.backward(upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_takes_the_convolution_only_where_it_pays(monkeypatch):
    """Large fp32 inputs on supported processors; F.linear otherwise."""
    monkeypatch.setattr(cpu, "_USE_ONEDNN", True)
    weight = torch.randn(8, 64)

    def convolves(x):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            linear(x, weight.to(x.dtype))
        return any(event.key == "aten::conv2d" for event in profile.key_averages())

    large, small = torch.randn(2048, 64), torch.randn(16, 64)
    assert convolves(large)
    assert not convolves(small)
    assert not convolves(large.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not convolves(large)
    monkeypatch.setattr(cpu, "_USE_ONEDNN", False)
    assert not convolves(large)


def test_an_exported_graph_says_linear(through_convolution):
    graph = torch.export.export(Linear(4, 3), (torch.randn(2, 4),)).graph
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
