"""DeiT and ConViT: blocks, class token, position embeddings."""

from typing import get_args

import pytest
import timm
import torch

from locality.models import (
    VARIANTS,
    GatedPositionalSelfAttention,
    PositionalSelfAttention,
    SelfAttention,
    build,
    list_models,
    variant,
)
from locality.models.config import PositionalAttention

from .conftest import images

SMALL = [name for name in list_models() if variant(name).family != "cvt" and name.endswith("nano")]


def test_every_baseline_has_the_size_of_its_model():
    for row in VARIANTS.values():
        if row.family != "convit":
            continue
        baseline = variant(row.baseline)
        assert baseline.family == "deit"
        for field in ("embed_dim", "num_heads", "depth", "patch_size", "img_size"):
            assert getattr(baseline.config, field) == getattr(row.config, field)


@pytest.mark.parametrize(
    ("kind", "layer"), [("gpsa", GatedPositionalSelfAttention), ("psa", PositionalSelfAttention)]
)
def test_first_blocks_are_positional_the_rest_plain(kind, layer):
    model = build("convit_nano", positional_attention=kind)
    assert [type(block.attn) for block in model.blocks] == [layer] * 3 + [SelfAttention]


ATTENTION = [{"positional_attention": name} for name in get_args(PositionalAttention)]
LAYERS = [
    {"gpsa_layers": 0},
    {"gpsa_layers": 3},
    {"gpsa_layers": 4, "global_pool": "avg"},
    {"gpsa_layers": 4, "class_token": False},  # the first patch, as in the authors' code
]
OTHERS = [
    {"conv_init": False},
    {"gating_init": 0.0, "freeze_gating": True},
    {"freeze_gpsa": True},
    {"use_pos_embed": False},
    {"qkv_bias": True},
    {"locality_strength": 0.1},
    {"class_token": False, "global_pool": "avg"},
    {"num_heads": 9, "embed_dim": 54},
]
ARCHITECTURES = [
    *(
        ("convit_nano", attention | layers | {"global_pool": pool} | layers)
        for attention in ATTENTION
        for layers in LAYERS
        for pool in ("token", "avg")
    ),
    *(("convit_nano", attention | other) for attention in ATTENTION for other in OTHERS),
    *(("deit_nano", {"global_pool": pool}) for pool in ("token", "avg")),
    ("deit_nano", {"use_pos_embed": False}),
    ("deit_nano", {"class_token": False, "embed_class_token": False, "global_pool": "avg"}),
]


@pytest.mark.parametrize(("name", "fields"), ARCHITECTURES, ids=str)
def test_every_architecture_sees_its_images_and_learns_everywhere(name, fields):
    torch.manual_seed(0)
    model = build(name, **fields)
    logits = model(images(model))
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2])).backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, key


def test_a_model_of_positional_layers_alone_reads_the_first_patch_as_the_authors_does():
    """If all blocks are local, no class token joins; their classifier reads token 0."""
    model = build("convit_nano", gpsa_layers=4, class_token=False).eval()
    assert model.cls_token is None and model.num_prefix_tokens == 0
    features = model.forward_features(images(model))
    assert features.shape == (2, 16, 64)
    torch.testing.assert_close(model(images(model)), model.head(features[:, 0]))
    with pytest.raises(ValueError, match="needs a class token"):
        build("convit_nano", gpsa_layers=4, global_pool="avg").reset_classifier(3, "token")


def test_frozen_parts_get_none():
    """Table 3: b freezes the gates; f and g freeze whole positional layers."""
    gates = build("convit_nano", gating_init=0.0, freeze_gating=True)
    frozen = {key for key, p in gates.named_parameters() if not p.requires_grad}
    assert frozen == {f"blocks.{i}.attn.gating" for i in range(3)}
    assert all(float(gates.blocks[i].attn.gating.abs().max()) == 0 for i in range(3))

    layers = build("convit_nano", freeze_gpsa=True)
    frozen = {key for key, p in layers.named_parameters() if not p.requires_grad}
    assert frozen == {
        f"blocks.{i}.attn.{part}"
        for i in range(3)
        for part in ("qkv.weight", "proj.weight", "proj.bias", "v_pos", "gating")
    }


@pytest.mark.parametrize("name", SMALL)
def test_an_image_that_does_not_fit_the_patch_is_refused(name):
    model = build(name)
    with pytest.raises(ValueError, match="multiples of 2"):
        model(torch.randn(1, 3, 9, 8))
    with pytest.raises(ValueError, match="multiples of 3"):
        build(name, patch_size=3)


@pytest.mark.parametrize("name", SMALL)
def test_a_resampled_position_embedding_is_that_of_a_model_made_for_the_size(name):
    model = build(name).eval()
    larger = build(name, img_size=(12, 20)).eval()
    prefix = int(model.config.embed_class_token)
    resampled = timm.layers.resample_abs_pos_embed(
        model.pos_embed, new_size=[6, 10], old_size=[4, 4], num_prefix_tokens=prefix
    )
    larger.load_state_dict(model.state_dict() | {"pos_embed": resampled})
    x = images(larger)
    torch.testing.assert_close(model(x), larger(x))


@pytest.mark.parametrize("kind", ["gpsa", "psa"])
def test_without_position_embedding_the_encodings_need_no_resampling(kind):
    """No parameter depends on the grid, so weights fit a model of any size."""
    fields = {"use_pos_embed": False, "positional_attention": kind}
    model = build("convit_nano", **fields).eval()
    larger = build("convit_nano", img_size=(20, 8), **fields).eval()
    larger.load_state_dict(model.state_dict())
    x = images(larger)
    assert model.pos_embed is None
    assert torch.equal(model(x), larger(x))


def test_drop_path_grows_linearly():
    model = build("convit_nano", drop_path_rate=0.3)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
