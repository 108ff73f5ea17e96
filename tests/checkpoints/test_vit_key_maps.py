"""ConViT and DeiT weights: timm's and the authors' formats, both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from locality.checkpoints.foreign import CONVIT, DEIT
from locality.errors import UserError
from locality.models import VARIANTS, build, variant

SMALL = {"img_size": 64, "num_classes": 10}


def timm_convit(randomise) -> nn.Module:
    return randomise(
        timm.create_model("convit_tiny", img_size=64, num_classes=10, depth=4, local_up_to_layer=3)
    )


def timm_deit(randomise) -> nn.Module:
    return randomise(timm.create_model("deit_tiny_patch16_224", depth=3, **SMALL))


def test_convit_from_timm_gives_the_same_logits(randomise):
    reference = timm_convit(randomise)
    config = replace(variant("convit_tiny").config, depth=4, gpsa_layers=3, **SMALL)
    ours = build(config).eval()
    ours.load_state_dict(CONVIT.to_native(reference.state_dict(), config))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), reference(images), atol=1e-5, rtol=0)


def test_deit_from_timm_gives_the_same_logits(randomise):
    reference = timm_deit(randomise)
    config = replace(variant("deit_tiny").config, depth=3, **SMALL)
    ours = build(config).eval()
    ours.load_state_dict(DEIT.to_native(reference.state_dict(), config))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), reference(images), atol=1e-5, rtol=0)


def test_convit_to_timm_loads_strictly_and_gives_the_same_logits(randomise):
    config = replace(variant("convit_tiny").config, depth=4, gpsa_layers=3, **SMALL)
    ours = randomise(build(config))
    reference = timm_convit(randomise)
    reference.load_state_dict(CONVIT.from_native(ours.state_dict(), config), strict=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(reference(images), ours(images), atol=1e-5, rtol=0)


def named(family: str) -> list:
    """Every variant of a family up to the base size; the large ones take seconds."""
    small = ("nano", "micro", "mini", "tiny")
    return [
        name if name.endswith(small) else pytest.param(name, marks=pytest.mark.slow)
        for name, row in VARIANTS.items()
        if row.family == family and name != f"{family}_base_plus"
    ]


@pytest.mark.parametrize("name", named("convit"))
def test_convit_there_and_back_is_bitwise_equal(name, randomise, assert_bitwise):
    ours = randomise(build(name))
    state = ours.state_dict()
    assert_bitwise(CONVIT.to_native(CONVIT.from_native(state, ours.config), ours.config), state)


@pytest.mark.parametrize("name", named("deit"))
def test_deit_there_and_back_is_bitwise_equal(name, randomise, assert_bitwise):
    ours = randomise(build(name))
    state = ours.state_dict()
    assert_bitwise(DEIT.to_native(DEIT.from_native(state, ours.config), ours.config), state)


def test_timm_there_and_back_loses_only_what_the_softmax_cancels(randomise, assert_bitwise):
    reference = timm_convit(randomise).state_dict()
    config = CONVIT.infer(reference, {})
    back = CONVIT.from_native(CONVIT.to_native(reference, config), config)
    biases = list(CONVIT.dropped(config))
    assert biases == [f"blocks.{index}.attn.pos_proj.bias" for index in range(3)]
    assert all(reference[name].abs().sum() > 0 and back[name].abs().sum() == 0 for name in biases)
    for name in biases:
        back[name] = reference[name]
    assert_bitwise(back, reference)


@pytest.mark.parametrize("name", ["convit_tiny", "convit_nano", "deit_tiny", "deit_tiny_plus"])
def test_the_architecture_is_read_from_the_shapes(name):
    row = variant(name)
    model = build(name)
    key_map = CONVIT if row.family == "convit" else DEIT
    state = key_map.from_native(model.state_dict(), model.config)
    assert key_map.infer(state, {}) == row.config


@pytest.mark.parametrize("bias", [False, True])
def test_projection_biases_of_the_gated_layers_are_kept(bias, randomise, assert_bitwise):
    ours = randomise(build("convit_nano", qkv_bias=bias))
    theirs = CONVIT.from_native(ours.state_dict(), ours.config)
    assert ("blocks.0.attn.qk.bias" in theirs) is bias
    assert CONVIT.infer(theirs, {}).qkv_bias is bias
    assert_bitwise(CONVIT.to_native(theirs, ours.config), ours.state_dict())


def test_missing_unknown_and_misshapen_tensors_are_named_on_both_sides():
    ours = build("convit_nano")
    theirs = CONVIT.from_native(ours.state_dict(), ours.config)
    del theirs["blocks.1.attn.gating_param"]
    theirs["blocks.1.attn.gate"] = torch.zeros(4)
    theirs["head.bias"] = torch.zeros(3)
    with pytest.raises(UserError) as caught:
        CONVIT.to_native(theirs, ours.config)
    message = str(caught.value)
    assert "missing: blocks.1.attn.gating_param" in message
    assert "unknown: blocks.1.attn.gate" in message
    assert "head.bias is (3,) instead of (10,)" in message


def test_a_distilled_deit_is_refused_by_its_extra_tensors():
    ours = build("deit_nano")
    theirs = DEIT.from_native(ours.state_dict(), ours.config) | {
        "dist_token": torch.zeros(1, 1, 64)
    }
    with pytest.raises(UserError, match="unknown: dist_token"):
        DEIT.to_native(theirs, ours.config)


def test_a_layout_refuses_the_other_family():
    convit, deit = build("convit_nano"), build("deit_nano")
    with pytest.raises(UserError, match="this model has embed_class_token=True"):
        CONVIT.from_native(deit.state_dict(), deit.config)
    with pytest.raises(UserError, match="this model has gpsa_layers=3"):
        DEIT.from_native(convit.state_dict(), convit.config)
    psa = build("convit_nano", positional_attention="psa")
    with pytest.raises(UserError, match="'psa'"):
        CONVIT.from_native(psa.state_dict(), psa.config)
