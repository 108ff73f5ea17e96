"""CvT: the paper's sizes, its surface, and its fused form."""

import copy

import pytest
import timm
import torch
from timm.models import group_parameters
from torch import nn

from locality.layers import AttentionMaps
from locality.models import build, count_macs, count_parameters, list_models, variant
from locality.models.cvt import QuickGELU

# As built here: parameters exactly, 10⁹ multiply-accumulates at 224 and 384 pixels.
SIZES = {
    "cvt_13": (19_997_480, 4.57, 16.27),
    "cvt_21": (31_622_696, 7.18, 24.85),
    "cvt_w24": (277_196_392, 60.9, 194.2),
}

# Every cell of the paper's ablations: what changes, and the millions of parameters it reports.
ABLATIONS = {
    "T5 every": ({"position": "every"}, 20),
    "T5 first": ({"position": "first"}, 20),
    "T5 last": ({"position": "last"}, 20),
    "T5 none": ({"position": "none"}, 20),
    "T6 a": ({"embedding": "patch"}, 19.5),
    "T6 b": ({"embedding": "patch", "position": "every"}, 19.9),
    "T6 c": ({"position": "every"}, 20.3),
    "T6 d": ({}, 20.0),
    "T7 a": ({"kv_stride": 1}, 20),
    "T7 b": ({"kv_stride": 2}, 20),
    "T8 a": ({"projection": "linear"}, None),
    "T8 b": ({"projection": ("conv", "linear", "linear")}, None),
    "T8 c": ({"projection": ("conv", "conv", "linear")}, None),
    "T8 d": ({"projection": "conv"}, None),
}


def small(**overrides):
    """A CvT of three stages, small enough for anything."""
    sizes = {"embed_dim": (8, 16, 24), "num_heads": (1, 2, 3), "depth": (1, 1, 2)}
    others = {"num_classes": 5, "img_size": 32, "drop_path_rate": 0.0}
    return build("cvt_13", **(sizes | others | overrides))


def images(model, batch=2, size=None):
    height, width = size or model.img_size
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, model.in_chans, height, width, generator=generator)


def randomised(model, seed=0):
    """Weights and running statistics that all matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return model


# Sizes


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_table_2(name):
    with torch.device("meta"):
        model = build(name)
    parameters, macs, macs_384 = SIZES[name]
    assert count_parameters(model) == parameters
    assert count_macs(model) / 1e9 == pytest.approx(macs, rel=0.01)
    assert count_macs(model, 384) / 1e9 == pytest.approx(macs_384, rel=0.01)


def test_squeezing_saves_what_table_7_says():
    with torch.device("meta"):
        full, squeezed = (count_macs(build("cvt_13", kv_stride=s)) / 1e9 for s in (1, 2))
    assert full == pytest.approx(6.64, rel=0.01)
    assert squeezed == pytest.approx(4.57, rel=0.01)


@pytest.mark.parametrize("cell", ABLATIONS)
def test_every_ablation_has_the_papers_size(cell):
    overrides, millions = ABLATIONS[cell]
    with torch.device("meta"):
        parameters = count_parameters(build("cvt_13", **overrides)) / 1e6
    if isinstance(millions, int):  # printed to the million
        assert round(parameters) == millions
    elif millions is not None:
        assert parameters == pytest.approx(millions, abs=0.2)
    if cell.startswith("T8"):
        # What the paper does not print: nine weights and two of BatchNorm per channel and part.
        stages = variant("cvt_13").config.with_overrides(**overrides).stages
        dropped = sum(3 * 11 * s.embed_dim * s.depth for s in stages if s.projection == "linear")
        assert parameters * 1e6 == 19_997_480 - dropped


@pytest.mark.slow
@pytest.mark.parametrize("cell", ABLATIONS)
def test_every_ablation_takes_a_training_step(cell):
    """The paper's own size, on images of 96 pixels to be quick."""
    overrides = {"img_size": 96, "num_classes": 10, "drop_path_rate": 0.0} | ABLATIONS[cell][0]
    model = build("cvt_13", **overrides)
    x, targets = images(model), torch.tensor([1, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = nn.functional.cross_entropy(model(x), targets)
    loss.backward()
    for name, parameter in model.named_parameters():
        if name not in model.unused_parameters():
            assert torch.isfinite(parameter.grad).all() and parameter.grad.any(), name
    optimizer.step()
    assert nn.functional.cross_entropy(model(x), targets) < loss


OPTIONS = [
    *(fields for fields, _ in ABLATIONS.values()),
    {"projection": "avg"},
    {"activation": "gelu"},
    {"attention_scale": "head"},
    {"qkv_bias": False},
    {"projection_kernel": 5},
    {"mlp_ratio": 2.0},
]


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("fields", OPTIONS, ids=str)
def test_every_architecture_sees_its_images_and_learns_everywhere(fields, pool):
    model = randomised(small(**fields, global_pool=pool, img_size=64)).double()
    logits = model(images(model).double())
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    logits.square().sum().backward()
    total = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    for name, parameter in model.named_parameters():
        fraction = parameter.grad.norm() / total  # even the idle ones have one, for DDP
        assert (fraction < 1e-12) == (name in model.unused_parameters()), name


def test_the_class_token_stays_when_patches_are_pooled_and_may_be_left_out():
    model = small(class_token=True, global_pool="avg")
    assert model.num_prefix_tokens == 1
    features = model.eval().forward_features(images(model))
    assert torch.equal(model(images(model)), model.head(features[:, 1:].mean(dim=1)))
    assert "stages.2.blocks.1.attn.q.conv.weight" not in model.unused_parameters()
    assert small(class_token=False).stages[2].cls_token is None


def test_small_models_are_about_as_large_as_their_convit_and_end_on_its_grid():
    for name in list_models(family="cvt"):
        row = variant(name)
        if row.baseline is None:
            continue
        with torch.device("meta"):
            ours, theirs = build(name), build(row.baseline)
        close = 0.02 if name == "cvt_nano" else 0.15
        assert count_parameters(ours) == pytest.approx(count_parameters(theirs), rel=close)
        assert ours.img_size == theirs.img_size and ours.num_classes == theirs.num_classes
        side = theirs.config.img_size // theirs.config.patch_size
        assert ours.config.grids(ours.img_size)[-1] == (side, side)


# Behaviour


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("training", [False, True])
def test_class_token_alone_gives_the_logits_of_all_tokens(pool, training):
    """`forward` computes one token in the last block; the long way round has to agree."""
    model = randomised(small(global_pool=pool)).train(training)
    copied = copy.deepcopy(model)
    x = images(model)
    torch.testing.assert_close(model(x), copied.forward_head(copied.forward_features(x)))
    for (name, ours), theirs in zip(model.named_buffers(), copied.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize("overrides", [{}, {"position": "every"}, {"projection": "linear"}])
@pytest.mark.parametrize("size", [(32, 32), (17, 45), (3, 3), (3, 40)])
def test_any_size_works(overrides, size):
    model = small(**overrides).eval()
    x = images(model, size=size)
    logits, tokens = model(x), model.forward_features(x)
    assert logits.shape == (2, 5) and torch.isfinite(logits).all()
    height, width = model.config.grids(size)[-1]
    assert tokens.shape == (2, 1 + height * width, 24)
    torch.testing.assert_close(model(x[:1]), logits[:1])


def test_position_embeddings_make_the_order_of_patches_matter():
    """Without them and with linear projections and patches, attention does not see places."""
    overrides = {"projection": "linear", "embedding": "patch", "depth": 1}
    x = images(small())
    moved = x.roll(16, dims=3)  # whole patches of the last stage
    blind = randomised(small(**overrides)).eval()
    torch.testing.assert_close(blind(moved), blind(x))
    placed = randomised(small(position="last", **overrides)).eval()
    assert (placed(moved) - placed(x)).abs().max() > 1e-3


def test_too_small_an_image_is_refused():
    with pytest.raises(ValueError, match=r"2×9 pixels is too small .* smallest is 3×3"):
        small()(torch.zeros(1, 3, 2, 9))


def test_a_batch_of_one_trains_unless_a_projection_is_one_value():
    model = small()
    model(images(model, batch=1, size=(64, 64))).sum().backward()
    with pytest.raises(ValueError, match="batch of 1"):
        model(images(model, batch=1, size=(16, 16)))


def test_quick_gelu():
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(QuickGELU()(x), x * torch.sigmoid(1.702 * x))
    default, exact = small().eval(), small(activation="gelu").eval()
    exact.load_state_dict(default.state_dict())
    assert isinstance(default.stages[0].blocks[0].mlp.act, QuickGELU)
    assert not torch.equal(default(images(default)), exact(images(exact)))


def test_attention_layers_show_coarser_keys():
    attention = small().eval().stages[2].blocks[0].attn
    maps = attention.attention_maps(torch.randn(1, 1 + 6, 24), (2, 3))
    assert isinstance(maps, AttentionMaps)
    assert (maps.query_grid, maps.key_grid, maps.prefix_tokens) == ((2, 3), (1, 2), 1)


# timm's surface


def test_feature_maps_of_every_stage():
    model = randomised(small()).eval()
    x = images(model, size=(64, 48))
    features, maps = model.forward_intermediates(x)
    assert [m.shape[1:] for m in maps] == [(8, 16, 12), (16, 8, 6), (24, 4, 3)]
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16]
    torch.testing.assert_close(features, model.forward_features(x))
    *_, tokens = model.forward_intermediates(x, [2], norm=True, output_fmt="NLC")[1]
    torch.testing.assert_close(tokens, features[:, 1:])
    first = model.forward_intermediates(x, [0], intermediates_only=True, stop_early=True)
    assert len(first) == 1 and torch.equal(first[0], maps[0])


def test_recomputing_blocks_changes_no_gradient():
    model = randomised(small()).eval()
    copied = copy.deepcopy(model)
    copied.set_grad_checkpointing()
    for net in (model, copied):
        net(images(net)).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_decay_and_groups_cover_every_parameter():
    model = small(position="first")
    assert model.no_weight_decay() == {"stages.0.pos_embed", "stages.2.cls_token"}
    names = {name for name, _ in model.named_parameters()}
    for coarse, groups in ((True, 1 + 3 + 1), (False, 1 + 2 + 4 + 1)):
        layers = group_parameters(model, model.group_matcher(coarse=coarse))
        grouped = [name for members in layers.values() for name in members]
        assert sorted(grouped) == sorted(names)
        assert len(layers) <= groups


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_classifier_can_be_replaced(pool):
    model = small(global_pool=pool).eval()
    assert model.num_prefix_tokens == (pool == "token")
    model.reset_classifier(7)
    assert model(images(model)).shape == (2, 7) and model.num_classes == 7
    model.reset_classifier(0, pool)
    features = model.forward_features(images(model))
    torch.testing.assert_close(model(images(model)), model.forward_head(features, pre_logits=True))
    # Pooling in another way leaves the blocks as they are, class token included.
    model.reset_classifier(0, "avg")
    expected = features[:, model.num_prefix_tokens :].mean(dim=1)
    torch.testing.assert_close(model(images(model)), expected)
    assert model.config.has_class_token == (pool == "token")
    if pool == "avg":
        with pytest.raises(ValueError, match="needs a class token"):
            model.reset_classifier(3, "token")


# Fused


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"activation": "gelu", "kv_stride": 1},
        {"projection": ("conv", "avg", "linear"), "position": "every"},
        {"global_pool": "avg"},
    ],
)
def test_fused_logits_are_the_same(overrides):
    model = randomised(small(**overrides)).eval()
    before = copy.deepcopy(model.state_dict())
    fused = model.fuse()
    assert not any(isinstance(m, nn.BatchNorm2d | QuickGELU) for m in fused.modules())
    assert not any(p.requires_grad for p in fused.parameters())
    x = images(model, size=(40, 56))
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.fuse()(x), fused(x))
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_fusing_a_model_in_training_leaves_it_training():
    model = randomised(small())
    fused = model.fuse()
    assert model.training and not fused.training
    torch.testing.assert_close(
        fused(images(model)), model.eval()(images(model)), rtol=1e-5, atol=1e-5
    )


def test_a_fused_model_refuses_to_train():
    fused = small().fuse()
    fused.eval()
    with pytest.raises(ValueError, match=r"fused model cannot train.*was fused from"):
        fused.train()


# Compilers, exporters, number formats


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [False, True])
def test_one_graph_holds_all_of_it(fuse):
    model = randomised(small()).eval()
    model = model.fuse() if fuse else model
    x = images(model)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_one_graph_holds_training_too():
    model = randomised(small())
    copied = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(images(model)).square().sum().backward()
    copied(images(copied)).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3, msg=name)
    for (name, ours), theirs in zip(model.named_buffers(), copied.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.slow
def test_ten_batches_of_one_compiled_graph_agree(agrees_when_compiled):
    # Two stages: the compiler's time grows with every kernel it writes.
    first = {"embed_dim": 8, "num_heads": 1, "depth": 1, "embed_kernel": 7, "embed_stride": 4}
    stages = [first | {"embed_padding": 2}, {"embed_dim": 16, "num_heads": 2, "depth": 1}]
    model = build("cvt_13", stages=stages, num_classes=5, img_size=32)
    agrees_when_compiled(randomised(model).eval().fuse(), images)


@pytest.mark.slow
def test_a_graph_for_each_size(compiles_once_a_size):
    compiles_once_a_size(randomised(small()), images)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"position": "every"}])
def test_exports_with_any_batch_and_size(overrides):
    model = randomised(small(img_size=64, **overrides)).eval()
    # Sizes that leave a single key are a case of their own to the exporter.
    batch, height, width = (torch.export.Dim(n, min=m) for n, m in (("b", 2), ("h", 48), ("w", 48)))
    sizes = {0: batch} if overrides else {0: batch, 2: height, 3: width}
    program = torch.export.export(model, (images(model, 4),), dynamic_shapes=(sizes,))
    shapes = [(5, (64, 64))] if overrides else [(5, (64, 64)), (3, (50, 77))]
    for count, size in shapes:
        x = images(model, count, size)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_autocast_stays_close():
    model = randomised(small()).eval()
    x = images(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = model(x)
    assert lowered.dtype == torch.bfloat16
    scale = model(x).abs().max()
    assert (lowered.float() - model(x)).abs().max() < 0.05 * scale


def test_channels_last_is_the_same():
    model = randomised(small()).eval()
    x = images(model)
    expected = model(x)
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(last), expected)
    torch.testing.assert_close(model.to(memory_format=torch.channels_last)(last), expected)


def test_families_share_a_surface_with_timm():
    assert set(list_models(family="cvt")) >= set(SIZES)
    theirs = timm.create_model("vit_tiny_patch16_224", pretrained=False)
    for name in ("forward_features", "forward_head", "get_classifier", "set_grad_checkpointing"):
        assert callable(getattr(small(), name)) and callable(getattr(theirs, name))
