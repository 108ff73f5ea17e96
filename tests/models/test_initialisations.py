"""Each `init` of attention."""

from __future__ import annotations

import pytest
import torch

from locality.checkpoints import load_weights, save
from locality.errors import UserError
from locality.layers import ConvolutionalAttention, SelfAttention
from locality.layers.conv_init import init_random_convolution_
from locality.models import build
from locality.models.initialisations import sinusoidal_positions
from locality.training import recipe, replace
from locality.training.model import initialize_model

NANO = {"embed_dim": 72, "num_heads": 9}


def made(name, init, **fields):
    torch.manual_seed(0)
    return build(name, init=init, **fields)


def attentions(model):
    kinds = (SelfAttention, ConvolutionalAttention)
    return [m for m in model.modules() if hasattr(m, "v_pos") or isinstance(m, kinds)]


def test_conv_is_equation_5_whatever_conv_init_says():
    model = made("convit_nano", "conv", conv_init=False)
    for block in model.blocks[:3]:
        v_pos, values = torch.zeros(4, 3), torch.zeros(64, 64)
        init_random_convolution_(v_pos, values, 1.0)
        assert torch.equal(block.attn.v_pos, v_pos)
        assert torch.equal(block.attn.value_weight, values)


@pytest.mark.parametrize("name", ["deit_tiny", "convit_tiny", "cvt_13"])
@torch.no_grad()
def test_mimetic_products_have_the_published_diagonals(name):
    """The diagonal of W_V W_O is −0.4; of W_Q W_Kᵀ, cut to rank d of C, above 0.7 d/C."""
    for layer in attentions(made(name, "mimetic", num_classes=2))[::5]:
        if isinstance(layer, ConvolutionalAttention):
            queries, keys, values = (part.linear.weight for part in (layer.q, layer.k, layer.v))
        else:
            queries, keys, values = layer.qkv.weight.chunk(3)
        width, rank = layer.dim, layer.dim // layer.num_heads
        product = values.T @ layer.proj.weight.T
        assert product.diagonal().mean() == pytest.approx(-0.4, abs=0.02)
        assert (product - product.diagonal().diag()).std() == pytest.approx(
            0.4 * width**-0.5, rel=0.1
        )
        for q, k in zip(queries.split(rank), keys.split(rank), strict=True):
            assert (q.T @ k).diagonal().mean() > 0.7 * rank / width
            assert torch.linalg.matrix_rank(q.T @ k) == rank


@pytest.mark.parametrize("name", ["deit_small", "convit_small"])
def test_an_impulse_looks_at_one_neighbour(name):
    """The same neighbour for all queries, in a 3×3 window, where it is inside the image.

    As in the model, LayerNorm removes the mean of a token's sinusoids and scales them.
    """
    model, grid = made(name, "impulse", num_classes=2), (14, 14)
    x = sinusoidal_positions(grid, model.embed_dim)[None]
    seen = set()
    for block in model.blocks:
        content = block.attn.attention_maps(block.norm1(x), grid).content[0].unflatten(1, grid)
        for head in content[:, 1:-1, 1:-1].flatten(1, 2):
            target, places = head.argmax(-1).unflatten(0, (12, 12)), torch.arange(1, 13)
            offsets = torch.stack((target // 14 - places[:, None], target % 14 - places))
            (offset,) = offsets.flatten(1).unique(dim=1).T.tolist()
            seen.add(tuple(offset))
    assert len(seen) > 5 and all(abs(i) <= 1 and abs(j) <= 1 for i, j in seen)


@pytest.mark.parametrize("init", ["conv", "mimetic", "impulse"])
def test_every_parameter_still_learns(init):
    model = made("convit_nano", init)
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_trained_convolutions_fill_the_gated_layers_alone(tmp_path):
    net = made("convit_nano", "default", positional_attention="conv", **NANO)
    model, fresh = (made("convit_nano", "trained_conv", **NANO) for _ in range(2))
    assert load_weights(model, save(net, tmp_path / "net")) == [
        "the gated layers are initialised from the weights' convolutions"
    ]
    block, conv = model.blocks[0].attn, net.blocks[0].attn.conv
    carried = block.proj.weight.unflatten(1, (9, 8))[:, 4] @ block.value_weight.view(9, 8, 72)[4]
    centre = conv.weight[:, :, 1, 1]
    assert (carried - centre).norm() < centre.norm()
    assert torch.linalg.matrix_rank(carried) == 8
    assert torch.equal(model.head.weight, fresh.head.weight)
    assert torch.equal(model.blocks[0].mlp.fc1.weight, fresh.blocks[0].mlp.fc1.weight)
    # Its own weights load as usual.
    assert load_weights(fresh, save(model, tmp_path / "model")) == []
    assert torch.equal(fresh.blocks[0].attn.qkv.weight, block.qkv.weight)


def test_a_convit_starts_as_the_convolutional_net_where_its_heads_can_carry_it(
    truncated_kernel, tmp_path
):
    net = made("convit_nano", "default", positional_attention="conv", **NANO).eval()
    for block in net.blocks[:3]:
        torch.nn.init.normal_(block.attn.conv.weight, std=0.05)
        block.attn.conv.weight.data = truncated_kernel(block.attn.conv.weight, rank=4)
    weights = save(net, tmp_path / "net")
    for block in net.blocks[:3]:
        block.attn.conv.padding_mode = "replicate"  # as attention does at the border
        block.attn.conv._reversed_padding_repeated_twice = [1, 1, 1, 1]
    near = {"locality_strength": 4.0, "gating_init": 4.0}
    model = made("convit_nano", "default", **NANO, **near, num_classes=5).eval()
    ours = {name: model.state_dict()[name].clone() for name in ("head.weight", "head.bias")}
    images = torch.randn(4, 3, *net.img_size)

    def away():
        return (model.forward_features(images) - net.forward_features(images)).norm()

    before = away()
    assert load_weights(model, weights) == [
        "the gated layers are initialised from the weights' convolutions",
        "the classifier is new and untrained: the weights have 10 classes, the model 5",
    ]
    assert away() < 0.1 * before
    assert model.blocks[0].attn.gating.unique().tolist() == [4.0]
    assert torch.equal(model.head.weight, ours["head.weight"])


def test_trained_convolutions_have_to_fit(tmp_path):
    net = made("convit_nano", "default", positional_attention="conv", gpsa_layers=2, **NANO)
    with pytest.raises(UserError, match=r"3 gated layers.* have 2"):
        load_weights(made("convit_nano", "trained_conv", **NANO), save(net, tmp_path / "net"))
    config = replace(recipe("digits"), {"model.init": "trained_conv"})
    with pytest.raises(UserError, match=r"model\.weights"):
        initialize_model(config, "ab")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deit_nano", {"init": "conv"}),
        ("deit_nano", {"init": "trained_conv"}),
        ("convit_nano", {"init": "trained_conv", "positional_attention": "psa"}),
        ("cvt_nano", {"init": "impulse"}),
        ("convit_nano", {"init": "impulse", "use_pos_embed": False}),
        ("convit_nano", {"init": "kaiming"}),
    ],
)
def test_what_makes_no_sense_is_refused(name, fields):
    with pytest.raises(UserError, match="init"):
        build(name, **fields)
