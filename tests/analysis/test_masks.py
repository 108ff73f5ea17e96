"""Masks do what they say inside their block and leave no trace after it."""

from __future__ import annotations

import pytest
import torch

from locality.analysis.masks import content_off, position_embedding_off, position_off
from locality.errors import UserError
from locality.models import create_model


@pytest.fixture
def images():
    return torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def made(name, **fields):
    torch.manual_seed(0)
    return create_model(name, **fields).eval()


@pytest.mark.parametrize("mask", [position_embedding_off, content_off, position_off])
def test_a_mask_changes_the_output_and_restores_the_model_bit_for_bit(mask, images):
    model = made("convit_nano")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = model(images)
    with mask(model):
        assert not torch.equal(model(images), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(images), before)


def test_a_mask_restores_the_model_after_an_error():
    model = made("convit_nano")
    gate = model.blocks[0].attn.gating.clone()
    with pytest.raises(RuntimeError, match="inside"), content_off(model):
        raise RuntimeError("inside")
    assert torch.equal(model.blocks[0].attn.gating, gate)


def test_without_its_position_embedding_a_model_is_one_built_without(images):
    model = made("convit_nano")
    plain = made("convit_nano", use_pos_embed=False)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k != "pos_embed"})
    with position_embedding_off(model):
        torch.testing.assert_close(model(images), plain(images), atol=1e-6, rtol=0)


def test_without_its_position_embedding_a_deit_is_blind_to_the_order_of_patches(images):
    model = made("deit_nano")
    shuffled = images.unflatten(-1, (4, 2)).flip(-2).flatten(-2)  # whole columns of patches
    assert (model(images) - model(shuffled)).abs().max() > 1e-4
    with position_embedding_off(model):
        torch.testing.assert_close(model(images), model(shuffled), atol=1e-5, rtol=0)


def test_masking_gates_equals_models_whose_gates_are_far_out(images):
    model = made("convit_nano")
    for mask, gating in ((content_off, 40.0), (position_off, -40.0)):
        extreme = made("convit_nano")
        for block in extreme.blocks[:2]:
            torch.nn.init.constant_(block.attn.gating, gating)
        with mask(model, 2):
            torch.testing.assert_close(model(images), extreme(images), atol=1e-6, rtol=0)


def test_what_cannot_be_masked_is_refused():
    with pytest.raises(UserError, match="3 gated layers; 4"), content_off(made("convit_nano"), 4):
        pass
    with pytest.raises(UserError, match="no gated layers"), position_off(made("deit_nano")):
        pass
    plain = made("convit_nano", use_pos_embed=False)
    with pytest.raises(UserError, match="no position embedding"), position_embedding_off(plain):
        pass
