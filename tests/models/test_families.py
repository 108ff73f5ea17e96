"""Every family: equal results however computed, and timm's interface."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from locality.models import build, count_macs, count_parameters
from locality.models.cvt import QuickGELU

from .conftest import images

SMALL_CVT = {"embed_dim": (8, 16, 24), "num_heads": (1, 2, 3), "depth": (1, 1, 2), "img_size": 32}
KINDS = {
    "convit_nano": {},
    "convit_nano, psa": {"positional_attention": "psa"},
    "convit_nano, all gated": {"gpsa_layers": 4, "global_pool": "avg"},
    "deit_nano": {},
    "cvt_13": SMALL_CVT,
    "cvt_13, avg": SMALL_CVT | {"global_pool": "avg"},
    "cvt_13, stem": SMALL_CVT
    | {"depth": (0, 1, 1), "projection": ("conv", "avg", "linear"), "use_pos_embed": True},
}

# ConViT Table 1 and CvT Table 2: exact parameters, and GMACs at 224 and 384 pixels.
SIZES = {
    "convit_tiny": (5_710_472, 1.26, None),
    "convit_tiny_plus": (9_972_872, 2.14, None),
    "convit_small": (27_777_232, 5.76, None),
    "convit_small_plus": (48_979_792, 10.02, None),
    "convit_base": (86_539_880, 17.53, None),
    "convit_base_plus": (153_134_696, 30.78, None),
    "deit_tiny": (5_717_416, 1.25, None),
    "deit_tiny_plus": (9_982_184, 2.14, None),
    "deit_small": (22_050_664, 4.60, None),
    "deit_small_plus": (49_000_744, 10.04, None),
    "deit_base": (86_567_656, 17.56, None),
    "deit_base_plus": (153_171_944, 30.85, None),
    "cvt_13": (19_997_480, 4.57, 16.27),
    "cvt_21": (31_622_696, 7.18, 24.85),
    "cvt_w24": (277_196_392, 60.9, 194.2),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_the_papers_tables(name):
    with torch.device("meta"):
        model = build(name)
    parameters, *macs = SIZES[name]
    assert count_parameters(model) == parameters
    for size, billions in zip((224, 384), macs, strict=True):
        if billions is not None:
            assert count_macs(model, size) / 1e9 == pytest.approx(billions, rel=5e-3)


CONVIT = [
    *({"gpsa_layers": n, "global_pool": pool} for n in (0, 3) for pool in ("token", "avg")),
    {"gpsa_layers": 4, "global_pool": "avg"},
    {"gpsa_layers": 4, "class_token": False},  # the first patch, as in the authors' code
    {"conv_init": False, "qkv_bias": True},
    {"gating_init": 0.0, "freeze_gating": True},
    {"freeze_gpsa": True},
    {"use_pos_embed": False, "locality_strength": 0.1},
    {"class_token": False, "global_pool": "avg"},
    {"num_heads": 9, "embed_dim": 54},
]
DEIT = [
    {"global_pool": "avg"},
    {"use_pos_embed": False},
    {"class_token": False, "embed_class_token": False, "global_pool": "avg"},
]
CVT = [
    {"use_pos_embed": True, "embed_kernel": (4, 2, 2), "embed_padding": 0},
    {"use_pos_embed": (True, False, False), "kv_stride": 1, "activation": "gelu"},
    {"projection": "linear", "attention_scale": "head"},
    {"projection": ("conv", "linear", "avg"), "qkv_bias": False},
    {"projection_kernel": 5, "mlp_ratio": 2.0},
    {"depth": (0, 0, 1)},
    {"embed_pool": (False, True, True)},
]
ARCHITECTURES = [
    *(
        ("convit_nano", {"positional_attention": kind} | fields)
        for kind in ("gpsa", "psa")
        for fields in CONVIT
    ),
    *(("deit_nano", fields) for fields in DEIT),
    *(
        ("cvt_13", SMALL_CVT | {"img_size": 64, "global_pool": pool} | fields)
        for pool in ("token", "avg")
        for fields in CVT
    ),
]


@pytest.mark.parametrize(("name", "fields"), ARCHITECTURES, ids=str)
def test_every_architecture_sees_its_images_and_learns_everywhere(name, fields, randomise):
    fields = {"num_classes": 10, "drop_path_rate": 0.0} | fields
    model = randomise(build(name, **fields)).train().double()
    logits = model(images(model).double())
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    logits.square().sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = sum(p.grad.square().sum() for p in trained.values()).sqrt()
    for name, parameter in trained.items():
        fraction = parameter.grad.norm() / total  # DDP needs a gradient for unused parameters, too
        assert (fraction < 1e-12) == (name in model.unused_parameters()), name


@pytest.fixture(params=KINDS)
def model(request, randomise):
    fields = {"num_classes": 10, "drop_path_rate": 0.0} | KINDS[request.param]
    return randomise(build(request.param.partition(",")[0], **fields))


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_shortcuts_change_neither_logits_nor_gradients_nor_statistics(model, training):
    plain, x = copy.deepcopy(model.train(training)), images(model)
    model.shortcuts = True
    logits, expected = model(x), plain(x)
    assert_near(logits, expected)
    for each in (logits, expected):
        each.square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        ours.grad = torch.zeros_like(ours) if ours.grad is None else ours.grad
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3, msg=name)
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_fused_copy_has_the_same_logits_and_cannot_train(model):
    before, x = copy.deepcopy(model.state_dict()), images(model, size=(40, 56))
    fused = model.fuse()
    assert not any(isinstance(m, nn.BatchNorm2d | QuickGELU) for m in fused.modules())
    assert not any(p.requires_grad for p in fused.parameters())
    assert_near(fused(x), model(x))
    assert_near(fused.fuse()(x), fused(x))
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    assert model.train().fuse().training is False and model.training
    with pytest.raises(ValueError, match="fused"):
        fused.train()
    with pytest.raises(ValueError, match="fused"):
        fused.load_state_dict(before)


def test_fusing_keeps_layers_that_have_hooks():
    model = build("cvt_nano").eval()
    (block,), x = model.stages[0].blocks, images(model)
    for layer in (block.attn.k.norm, block.mlp.act):
        layer.register_forward_hook(lambda _, args, output: 2 * output)
        assert_near(model.fuse()(x), model(x))


@pytest.mark.parametrize(
    ("name", "fields", "last"),
    [("convit_nano", {"drop_path_rate": 0.4}, 0.4), ("cvt_13", {"depth": (1, 1, 5)}, 0.1)],
)
def test_stochastic_depth_rises_linearly(name, fields, last):
    model = build(name, **fields)
    blocks = (model.stages[-1] if hasattr(model, "stages") else model).blocks
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in blocks]
    assert rates == pytest.approx([last * i / (len(blocks) - 1) for i in range(len(blocks))])


@pytest.mark.parametrize("kind", KINDS)
def test_attention_dropout_acts_on_the_matrix(kind, randomise):
    fields = {"num_classes": 10, "attn_drop_rate": 0.5} | KINDS[kind]
    model = randomise(build(kind.partition(",")[0], **fields))
    for layer in [part for part in model.modules() if hasattr(part, "attention_maps")]:
        x = torch.randn(2, 12 + int(getattr(layer, "class_token", False)), layer.dim)
        for rate in (0.5, 0):
            layer.train(rate > 0)
            maps = layer.attention_maps(x, (3, 4))
            torch.manual_seed(0)
            heads = nn.functional.dropout(maps.mixed, rate) @ maps.value
            torch.manual_seed(0)
            assert_near(layer(x, (3, 4)), layer.proj(heads.transpose(1, 2).flatten(2)))


def test_any_size_and_any_batch_works(model):
    cvt = model.config.family == "cvt"
    for size in [(17, 45), (3, 3), (3, 40)] if cvt else [(12, 6), (2, 18)]:
        x = images(model, size=size)
        logits = model(x)
        assert logits.shape == (2, 10) and torch.isfinite(logits).all()
        assert_near(model(x[:1]), logits[:1])


def test_images_of_other_channels_are_refused(model):
    with pytest.raises(ValueError, match="in_chans=1"):
        model(torch.zeros(1, 1, *model.img_size))


@pytest.mark.parametrize("shortcuts", [False, True])
def test_recomputing_blocks_changes_nothing(model, shortcuts):
    model = copy.deepcopy(model).train()
    model.shortcuts = shortcuts
    copied = copy.deepcopy(model)
    copied.set_grad_checkpointing()
    for each in (model, copied):
        each(images(model)).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        torch.testing.assert_close(theirs.grad, ours.grad, msg=name)
    # BatchNorm's statistics are updated once.
    for (name, ours), theirs in zip(model.named_buffers(), copied.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_channels_last_and_bf16_are_near(model):
    x = images(model)
    expected = model(x)
    assert_near(model(x.contiguous(memory_format=torch.channels_last)), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(x)
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_per_image_by_vmap(model):
    model, x = model.eval(), images(model)
    parameters, state = dict(model.named_parameters()), dict(model.named_buffers())

    def loss(parameters, image):
        logits = torch.func.functional_call(model, (parameters, state), image[None])
        return logits.square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for place, image in enumerate(x):
        alone = torch.func.grad(loss)(parameters, image)
        for name, gradient in alone.items():
            torch.testing.assert_close(found[name][place], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_intermediates_are_the_maps_of_the_blocks(model):
    x = images(model, size=[2 * model.img_size[0], model.img_size[1]])
    features, maps = model.forward_intermediates(x)
    torch.testing.assert_close(features, model.forward_features(x))
    for info, tensor in zip(model.feature_info, maps, strict=True):
        side = info["reduction"]
        assert tensor.shape == (2, info["num_chs"], x.shape[2] // side, x.shape[3] // side)
    last = {"norm": True, "output_fmt": "NLC", "intermediates_only": True}
    (tokens,) = model.forward_intermediates(x, [len(maps) - 1], **last)
    torch.testing.assert_close(tokens, features[:, model.num_prefix_tokens :])
    (first,) = model.forward_intermediates(x, [0], intermediates_only=True, stop_early=True)
    assert torch.equal(first, maps[0])
    with pytest.raises(ValueError, match="NHWC"):
        model.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.slow
@pytest.mark.parametrize("shortcuts", [False, True])
@pytest.mark.parametrize(("training", "gradients"), [(False, False), (False, True), (True, True)])
def test_one_graph_without_breaks_for_each_size(model, training, gradients, shortcuts):
    """Ten batches of two sizes in turn have equal logits, gradients and statistics."""
    model.shortcuts = shortcuts
    copied = copy.deepcopy(model.train(training))
    torch.compiler.reset()
    counters.clear()
    # A dynamic-shape graph has no backward pass for the resampled position embedding.
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    for number in range(10):
        batch = torch.randn(2, 3, *((1 + number % 2) * side for side in model.img_size))
        found = []
        for each in (compiled, copied):
            each.zero_grad()
            with torch.set_grad_enabled(gradients):
                logits = each(batch)
            if gradients:
                logits.square().sum().backward()
            learning = [p.grad for p in each.parameters() if p.grad is not None]
            found.append([logits, *learning])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        for (name, ours), theirs in zip(model.named_buffers(), copied.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert sum(counters["recompiles"].values()) <= 1


@pytest.mark.slow
def test_ten_batches_of_one_compiled_graph_agree(agrees_when_compiled, randomise):
    # One layer of each kind, two stages: compile time grows with the number of kernels.
    agrees_when_compiled(build("convit_nano", depth=2, gpsa_layers=1).eval(), images)
    sizes = {"embed_dim": (8, 16), "num_heads": (1, 2), "depth": 1, "img_size": 32}
    convolutions = {"embed_kernel": (7, 3), "embed_stride": (4, 2), "embed_padding": (2, 1)}
    agrees_when_compiled(randomise(build("cvt_13", **sizes, **convolutions)).fuse(), images)
