"""CvT: the paper's ablations, and timm's groups of parameters."""

import pytest
import torch
import torch.nn.functional as F
from timm.models import group_parameters

from locality.models import build, count_parameters, variant
from locality.models.cvt import QuickGELU

from .conftest import images

# The paper's ablations: overrides, and millions of parameters reported.
PATCHES = {"embed_kernel": (4, 2, 2), "embed_padding": 0}
ABLATIONS = {
    "T5 every": ({"use_pos_embed": True}, 20),
    "T5 first": ({"use_pos_embed": (True, False, False)}, 20),
    "T5 last": ({"use_pos_embed": (False, False, True)}, 20),
    "T6 a": (PATCHES, 19.5),
    "T6 b": (PATCHES | {"use_pos_embed": True}, 19.9),
    "T6 c": ({"use_pos_embed": True}, 20.3),
    "T6 d": ({}, 20.0),
    "T7 a": ({"kv_stride": 1}, 20),
    "T7 b": ({"kv_stride": 2}, 20),
    "T8 a": ({"projection": "linear"}, None),
    "T8 b": ({"projection": ("conv", "linear", "linear")}, None),
    "T8 c": ({"projection": ("conv", "conv", "linear")}, None),
    "T8 d": ({"projection": "conv"}, None),
}


def small(**overrides):
    """A small CvT of three stages."""
    sizes = {"embed_dim": (8, 16, 24), "num_heads": (1, 2, 3), "depth": (1, 1, 2)}
    others = {"num_classes": 5, "img_size": 32, "drop_path_rate": 0.0}
    return build("cvt_13", **(sizes | others | overrides))


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
        # Not printed in the paper: nine weights and two BatchNorm parameters per channel and part.
        stages = variant("cvt_13").config.with_overrides(**overrides).stages
        dropped = sum(3 * 11 * s.embed_dim * s.depth for s in stages if s.projection == "linear")
        assert parameters * 1e6 == 19_997_480 - dropped


def test_a_pooled_embedding_convolves_the_largest_of_each_window():
    model = small(embed_pool=(False, True, True)).eval()
    stage, tokens = model.stages[1].embed, torch.randn(2, 8, 9, 7)
    windows = F.pad(tokens, (1, 1, 1, 1), value=-9.0).unfold(2, 3, 2).unfold(3, 3, 2)
    largest = windows.amax((4, 5))
    convolved = F.conv2d(largest, stage.conv.weight, stage.conv.bias, padding=1)
    torch.testing.assert_close(
        stage(tokens), stage.norm(convolved.permute(0, 2, 3, 1).flatten(1, 2))
    )
    assert model.config.native_grids == small().config.native_grids


def test_the_class_token_stays_when_patches_are_pooled_and_may_be_left_out():
    model = small(class_token=True, global_pool="avg")
    assert model.num_prefix_tokens == 1
    features = model.eval().forward_features(images(model))
    assert torch.equal(model(images(model)), model.head(features[:, 1:].mean(dim=1)))
    assert "stages.2.blocks.1.attn.q.conv.weight" not in model.unused_parameters()
    assert small(class_token=False).stages[2].cls_token is None


# Behaviour


def test_position_embeddings_make_the_order_of_patches_matter(randomise):
    """Without them, and with linear projections and patches, attention ignores positions."""
    overrides = {"projection": "linear", "depth": 1} | PATCHES
    x = images(small())
    moved = x.roll(16, dims=3)  # whole patches of the last stage
    blind = randomise(small(**overrides))
    torch.testing.assert_close(blind(moved), blind(x))
    placed = randomise(small(use_pos_embed=(False, False, True), **overrides))
    assert (placed(moved) - placed(x)).abs().max() > 1e-3


def test_a_stage_without_blocks_is_a_layer_of_a_stem():
    model = small(depth=(0, 1, 2))
    stem, x = model.stages[0], images(model)
    tokens = F.gelu(stem.embed(x))
    assert torch.equal(stem(x, stem.native_grid), tokens) and (tokens < 0).any()
    with pytest.raises(ValueError, match="depth"):
        small(depth=(1, 1, 0))


def test_too_small_an_image_is_refused():
    with pytest.raises(ValueError, match="3×3"):
        small()(torch.zeros(1, 3, 2, 9))


def test_quick_gelu():
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(QuickGELU()(x), x * torch.sigmoid(1.702 * x))
    default, exact = small().eval(), small(activation="gelu").eval()
    exact.load_state_dict(default.state_dict())
    assert isinstance(default.stages[0].blocks[0].mlp.act, QuickGELU)
    assert not torch.equal(default(images(default)), exact(images(exact)))


# timm's interface


def test_decay_and_groups_cover_every_parameter():
    model = small(use_pos_embed=(True, False, False))
    assert model.no_weight_decay() == {"stages.0.pos_embed", "stages.2.cls_token"}
    names = {name for name, _ in model.named_parameters()}
    for coarse, groups in ((True, 1 + 3 + 1), (False, 1 + 2 + 4 + 1)):
        layers = group_parameters(model, model.group_matcher(coarse=coarse))
        grouped = [name for members in layers.values() for name in members]
        assert sorted(grouped) == sorted(names)
        assert len(layers) <= groups
