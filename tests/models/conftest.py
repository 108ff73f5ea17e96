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
