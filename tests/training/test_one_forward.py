"""A layer computes its own `mix`, whatever computes the model."""

import copy

import pytest
import torch

from locality.analysis import capture
from locality.checkpoints import load
from locality.models import convit, cvt
from locality.training import replace, train

KINDS = {
    "SelfAttention": (convit, "deit_nano", {}),
    "PositionalSelfAttention": (convit, "convit_nano", {"model.positional_attention": "psa"}),
    "GatedPositionalSelfAttention": (convit, "convit_nano", {}),
    "ConvolutionalAttention": (cvt, "cvt_nano", {"model.drop_path_rate": 0.0}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_overridden_formula_is_what_trains_and_what_every_way_computes(
    kind, tiny_config, tmp_path, monkeypatch
):
    module, name, settings = KINDS[kind]
    called = []

    def mix(self, q, k, v, grid, part=None):
        """Sharper attention, in part the mean over all queries."""
        called.append(self.training)
        heads = super(own, self).mix(3 * q, k, v, grid, part)
        return 0.5 * (heads + heads.mean(dim=2, keepdim=True))

    own = type("Sharper", (getattr(module, kind),), {"mix": mix})
    monkeypatch.setattr(module, kind, own)
    config = replace(tiny_config(name), settings | {"schedule.steps": 20})
    train(config, tmp_path / "run", quiet=True)
    layers = sum(type(part) is own for part in load(tmp_path / "run").modules())
    assert called.count(True) == 20 * layers > 0
    model = load(tmp_path / "run").double()
    images = torch.randn(3, model.in_chans, *model.img_size, dtype=torch.float64)

    def same(found, expected):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

    for training in (True, False):
        model.train(training)
        expected, shortcuts = model(images), copy.deepcopy(model)
        shortcuts.shortcuts = True
        same(shortcuts(images), expected)
    with torch.no_grad():
        same(model.fuse()(images), expected)
        same(torch.export.export(model, (images,)).module()(images), expected)
    outputs = []
    attention = [part for part in model.modules() if hasattr(part, "attention_maps")]
    for layer in attention:
        layer.proj.register_forward_hook(lambda _, args, output: outputs.append(output))
    with torch.no_grad(), capture(model) as views:
        same(model(images), expected)
    for view, output in zip(views, [*outputs], strict=True):
        heads = view.maps.mixed @ view.maps.value
        same(view.module.proj(heads.transpose(1, 2).flatten(2)), output)
