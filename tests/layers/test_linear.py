"""The linear layer that may take a convolution's way: the same numbers either way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from locality.layers import linear
from locality.layers.linear import Linear, fast_linear, use_fast_linears


@pytest.fixture
def through_convolution(monkeypatch):
    """Take the convolution's way whatever the processor, and whatever the size."""
    monkeypatch.setattr(linear, "_MKL_FALLS_SHORT", True)
    monkeypatch.setattr(linear, "_WORTHWHILE", 0)


@pytest.mark.parametrize("shape", [(70, 24), (3, 5, 24), (1, 1, 24), (2, 3, 4, 24)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_f_linear_with_its_gradients(through_convolution, shape, with_bias):
    weight = torch.randn(10, 24)
    bias = torch.randn(10) if with_bias else None
    given = [torch.randn(shape), weight, *([bias] if with_bias else [])]
    ours = [tensor.clone().requires_grad_() for tensor in given]
    theirs = [tensor.clone().requires_grad_() for tensor in given]
    out, expected = fast_linear(*ours), F.linear(*theirs)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(expected)
    out.backward(upstream)
    expected.backward(upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_takes_the_convolution_only_where_it_pays(monkeypatch):
    """Large fp32 inputs on the processors it is meant for; everything else is F.linear."""
    monkeypatch.setattr(linear, "_MKL_FALLS_SHORT", True)
    weight = torch.randn(8, 64)

    def convolves(x):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            fast_linear(x, weight.to(x.dtype))
        return any(event.key == "aten::conv2d" for event in profile.key_averages())

    large, small = torch.randn(2048, 64), torch.randn(16, 64)
    assert convolves(large)
    assert not convolves(small)
    assert not convolves(large.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not convolves(large)
    monkeypatch.setattr(linear, "_MKL_FALLS_SHORT", False)
    assert not convolves(large)


def test_an_exported_graph_says_linear(through_convolution):
    graph = torch.export.export(Linear(4, 3), (torch.randn(2, 4),)).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert targets == ["aten.linear.default"]


def test_replacing_keeps_parameters_names_and_mode():
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2, bias=False))).eval()
    before, parameters = net(torch.ones(1, 3)), dict(net.named_parameters())
    use_fast_linears(net)
    assert isinstance(net[0], Linear) and isinstance(net[1][0], Linear)
    after = dict(net.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert not net[0].training and (net[0].in_features, net[1][0].out_features) == (3, 2)
    torch.testing.assert_close(net(torch.ones(1, 3)), before)
