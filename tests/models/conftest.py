"""Random images, and checks of compiled models."""

import pytest
import torch
from torch._dynamo.utils import counters


def images(model, batch=2, size=None):
    """Random images for a model, by default of its own size."""
    height, width = size or model.img_size
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, model.in_chans, height, width, generator=generator)


@pytest.fixture
def agrees_when_compiled():
    """check(model, images): one graph without breaks or recompilation, with equal logits.

    Uses CUDA graphs if there is a GPU.
    """

    def check(model, images):
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for number in range(10):
            torch.manual_seed(number)
            batch = torch.randn_like(images(model))
            with torch.no_grad():
                torch.testing.assert_close(compiled(batch), model(batch), rtol=1e-4, atol=1e-5)
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"] and not counters["recompiles"]

    return check


@pytest.fixture
def compiles_once_a_size():
    """check(model, images): one graph per size without breaks, in inference and training.

    Ten batches of two sizes in turn, with equal logits and gradients.
    """

    def check(model, images):
        sizes = [tuple(scale * side for side in model.img_size) for scale in (1, 2)]
        for training in (False, True):
            model.train(training)
            torch.compiler.reset()
            counters.clear()
            # A dynamic-shape graph has no backward pass for the resampled position embedding.
            compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
            for number in range(10):
                torch.manual_seed(number)
                batch = torch.randn_like(images(model, size=sizes[number % 2]))
                found = []
                for each in (compiled, model):
                    with torch.set_grad_enabled(training):
                        logits = each(batch)
                    model.zero_grad()
                    if training:
                        logits.square().sum().backward()
                    gradients = [p.grad for p in model.parameters() if p.grad is not None]
                    found.append([logits.detach(), *gradients])
                for ours, theirs in zip(*found, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            assert counters["stats"]["unique_graphs"] == 2
            assert not counters["graph_break"]
            assert sum(counters["recompiles"].values()) <= 1

    return check
