"""Masks have the exact effect and restore the parameters."""

import pytest
import timm
import torch
from torch import nn

from locality.analysis.taps import content_off, position_embedding_off, position_off
from locality.errors import UserError
from locality.layers.position import Separable
from locality.models import build


class Positional(nn.Module):
    """Positional attention only, built from a gated layer's weights."""

    def __init__(self, gated):
        super().__init__()
        self.v_pos, self.heads = gated.v_pos, gated.num_heads
        self.value, self.project = gated.qkv.weight[2 * gated.dim :], gated.proj

    def forward(self, x, grid, part=None, first=False):
        values = nn.functional.linear(x, self.value).unflatten(2, (self.heads, -1)).transpose(1, 2)
        position = Separable.of(self.v_pos, grid, values.dtype).attend(values)
        return self.project(position.transpose(1, 2).flatten(2))


class Content(nn.Module):
    """Ordinary self-attention, built from a gated layer's weights."""

    def __init__(self, gated):
        super().__init__()
        self.qkv, self.project, self.heads = gated.qkv, gated.proj, gated.num_heads

    def forward(self, x, grid, part=None, first=False):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.project(heads.transpose(1, 2).flatten(2))


@torch.no_grad()
@pytest.mark.parametrize("layers", [None, 0, 1, 2])
@pytest.mark.parametrize(("mask", "part"), [(content_off, Positional), (position_off, Content)])
def test_a_masked_model_is_the_model_built_without_that_part(mask, part, layers, convit, images):
    convit, images = convit.double(), images.double()
    with mask(convit, layers):
        masked = convit(images)
    for block in convit.blocks[: 3 if layers is None else layers]:
        block.attn = part(block.attn)
    assert torch.allclose(masked, convit(images), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("mask", [position_embedding_off, content_off, position_off])
def test_everything_is_restored_bit_for_bit(mask, convit, images):
    before = {name: value.clone() for name, value in convit.state_dict().items()}
    owners = dict(convit.named_parameters())
    logits = convit(images)
    with mask(convit):
        assert not torch.equal(convit(images), logits)
    assert torch.equal(convit(images), logits)
    assert all(torch.equal(value, before[name]) for name, value in convit.state_dict().items())
    with pytest.raises(KeyError), mask(convit):
        raise KeyError
    # The same parameter objects, so an existing optimiser still owns them.
    assert all(parameter is owners[name] for name, parameter in convit.named_parameters())


@torch.no_grad()
def test_without_its_position_embedding_a_model_is_one_built_without(convit, images):
    plain = build("convit_nano", use_pos_embed=False).eval()
    plain.load_state_dict({k: v for k, v in convit.state_dict().items() if k != "pos_embed"})
    with position_embedding_off(convit):
        assert torch.equal(convit(images), plain(images))


@torch.no_grad()
def test_timms_models_are_masked_too(shaken):
    model = timm.create_model("convit_tiny", img_size=64, depth=3, local_up_to_layer=2)
    model, images = shaken(model, scale=0.1), torch.randn(2, 3, 64, 64)
    logits = model(images)
    for mask in (content_off, position_off, position_embedding_off):
        with mask(model):
            assert not torch.equal(model(images), logits)
        assert torch.equal(model(images), logits)


def test_what_is_not_there_cannot_be_masked(deit, convit):
    with pytest.raises(UserError, match="deit_nano"), content_off(deit):
        pass
    with pytest.raises(UserError, match="3 gated"), position_off(convit, 4):
        pass
    bare = build("deit_nano", use_pos_embed=False, embed_class_token=False)
    with pytest.raises(UserError, match="position"), position_embedding_off(bare):
        pass
