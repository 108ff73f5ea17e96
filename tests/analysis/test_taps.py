"""Captured attention is the forward pass's; logits are unchanged."""

import pytest
import timm
import torch

from locality.analysis.measures import measure_model
from locality.analysis.taps import attention_layers, capture
from locality.errors import UserError
from locality.models import ConvolutionalAttention, build

TIMM = {
    "vit_tiny_patch16_224": {},
    "vit_wee_patch16_reg1_gap_256.sbb_in1k": {},
    "convit_tiny": {"local_up_to_layer": 2},
}
SMALL = {"img_size": 64, "depth": 3, "num_classes": 5}


@pytest.fixture
def timm_model(shaken):
    def make(name, **overrides):
        settings = {**SMALL, **TIMM[name], **overrides}
        return shaken(timm.create_model(name, **settings), scale=0.1)

    return make


@pytest.fixture(params=["convit_nano", "deit_nano", "psa", "cvt_nano", *TIMM])
def any_model(request, shaken, timm_model):
    if request.param in TIMM:
        return timm_model(request.param), torch.randn(2, 3, 64, 64)
    name, overrides = request.param, {}
    if name == "psa":
        name, overrides = "convit_nano", {"positional_attention": "psa"}
    return shaken(build(name, **overrides)), torch.randn(2, 3, 8, 12)


@torch.no_grad()
def test_logits_are_the_same_bit_for_bit(any_model):
    model, images = any_model
    without = model(images)
    model.shortcuts = True  # off within the block
    with capture(model) as views:
        logits = model(images)
    assert torch.equal(logits, without)
    assert [view.name for view in views] == [name for name, _ in attention_layers(model)]
    assert model.shortcuts
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_rows_sum_to_one_and_mixed_is_the_gated_sum(any_model):
    model, images = any_model
    with capture(model) as views:
        model(images)
    for view in views:
        maps = view.maps
        for part in (maps.content, maps.position, maps.mixed):
            if part is not None:
                assert torch.allclose(part.sum(-1), torch.ones(()), rtol=0, atol=1e-6)
        queries = maps.prefix_tokens + maps.query_grid[0] * maps.query_grid[1]
        assert maps.mixed.shape[-2] == queries
        if maps.gate is not None:
            gate = maps.gate[:, None, None]
            gated = (1 - gate) * maps.content + gate * maps.position
            assert torch.allclose(maps.mixed, gated, rtol=0, atol=1e-6)


@torch.no_grad()
def test_captured_attention_is_what_the_module_computes_with(any_model):
    """mixed · V, projected, equals the module's output."""
    model, images = any_model[0].double(), any_model[1].double()
    outputs = []
    for _, module in attention_layers(model):
        module.register_forward_hook(lambda _, __, output: outputs.append(output))
    with capture(model) as views:
        model(images)
    for view, output in zip(views, outputs, strict=True):
        module, x = view.module, view.input
        heads = view.maps.mixed.shape[1]
        if hasattr(module, "qkv"):
            v = module.qkv(x).chunk(3, dim=-1)[2]
        elif isinstance(module, ConvolutionalAttention):
            v = module.v(x, module.image(x, view.maps.query_grid))
        else:
            v = module.v(x)
        v = v.unflatten(-1, (heads, -1)).transpose(1, 2)
        expected = module.proj((view.maps.mixed @ v).transpose(1, 2).flatten(2))
        assert torch.allclose(expected, output, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "img_size", "prefix"),
    [
        ("deit3_small_patch16_224", (64, 96), 1),
        ("deit_tiny_distilled_patch16_224", 64, 2),
        ("vit_small_patch14_reg4_dinov2", (70, 56), 5),
        ("vit_base_patch16_siglip_gap_224", 64, 0),
        ("vit_small_patch16_dinov3", (64, 96), 5),  # rotated queries and keys
        ("eva02_tiny_patch14_224", 70, 1),
    ],
)
@torch.no_grad()
def test_maps_are_those_of_timms_own_softmax(shaken, name, img_size, prefix):
    model = shaken(build(f"timm/{name}", img_size=img_size, depth=3), scale=0.05)
    images, true = torch.randn(2, 3, *model.img_size), []
    for _, module in attention_layers(model):
        module.fused_attn = False
        # timm's attention dropout sees its attention.
        module.attn_drop.register_forward_hook(lambda _, args, __: true.append(args[0]))
    with capture(model) as views:
        model(images)
    for view, own in zip(views, true, strict=True):
        assert view.maps.prefix_tokens == prefix
        assert not view.module.fused_attn
        assert torch.allclose(view.maps.mixed, own, rtol=0, atol=1e-5)
        assert own[:, :, :, 0].std() > 1e-3  # neither uniform nor the same for all queries


def test_chosen_layers_only(convit, images):
    with torch.no_grad(), capture(convit, layers=[-1, 1]) as views:
        convit(images)
    assert [view.index for view in views] == [1, 3]
    with pytest.raises(UserError, match="layer 4 is out"), capture(convit, layers=[4]):
        pass


def test_gradients_pass_as_without_taps(convit, images):
    def gradients():
        convit.zero_grad()
        convit(images).square().sum().backward()
        return [parameter.grad.clone() for parameter in convit.parameters()]

    without = gradients()
    with capture(convit) as views:
        with_taps = gradients()
    assert all(torch.equal(a, b) for a, b in zip(without, with_taps, strict=True))
    assert not any(view.maps.mixed.requires_grad or view.input.requires_grad for view in views)
    convit.set_grad_checkpointing()  # recomputed blocks are captured once
    with capture(convit) as views:
        gradients()
    assert [view.index for view in views] == [0, 1, 2, 3]
    with pytest.raises(KeyError), capture(convit):
        raise KeyError
    assert not any(module._forward_pre_hooks for module in convit.modules())


def test_what_cannot_be_observed_is_said(timm_model):
    with pytest.raises(UserError, match="no attention layer"), capture(torch.nn.Linear(2, 2)):
        pass
    unlike = ("resnet10t", "swin_tiny_patch4_window7_224", "beit_base_patch16_224")
    for name in (*unlike, "mobilevit_xxs"):
        with torch.device("meta"):
            model = build(f"timm/{name}")
        with pytest.raises(UserError, match=f"timm/{name}"), capture(model):
            pass
    dropped = timm_model("vit_tiny_patch16_224", patch_drop_rate=0.5).train()
    with pytest.raises(UserError, match="4×4"), capture(dropped):
        dropped(torch.randn(1, 3, 64, 64))
    compiled = torch.compile(build("deit_nano"))
    with pytest.raises(UserError, match="compiled"), capture(compiled):
        pass
    masked = timm_model("vit_tiny_patch16_224")
    with pytest.raises(UserError, match="mask"), torch.no_grad(), capture(masked):
        masked.forward_features(torch.randn(1, 3, 64, 64), is_causal=True)


def test_frozen_layers_stay_in_evaluation_mode():
    model = build("cvt_pico").train()
    norms = [part for part in model.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.eval()
    measure_model(model, torch.zeros(2, 3, *model.img_size))
    assert norms and model.training and not any(norm.training for norm in norms)
