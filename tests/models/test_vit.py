"""DeiT and ConViT: blocks, class token, position embeddings."""

import pytest
import timm
import torch

from locality.models import (
    VARIANTS,
    GatedPositionalSelfAttention,
    PositionalSelfAttention,
    SelfAttention,
    build,
    variant,
)

from .conftest import images


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


@pytest.mark.parametrize("name", ["convit_nano", "deit_nano"])
def test_an_image_that_does_not_fit_the_patch_is_refused(name):
    model = build(name)
    with pytest.raises(ValueError, match="multiples of 2"):
        model(torch.randn(1, 3, 9, 8))
    with pytest.raises(ValueError, match="multiples of 3"):
        build(name, patch_size=3)


UNPLACED = {"use_pos_embed": False}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("convit_nano", {}),
        ("deit_nano", {}),
        ("convit_nano", UNPLACED),
        ("convit_nano", UNPLACED | {"positional_attention": "psa"}),
    ],
)
def test_weights_fit_another_size_if_position_embeddings_are_resampled(name, fields):
    """Positional attention has no parameter that depends on the grid."""
    model, larger = (build(name, img_size=size, **fields).eval() for size in (8, (12, 20)))
    state, prefix = model.state_dict(), int(model.config.embed_class_token)
    for key in {"pos_embed"} & state.keys():
        state[key] = timm.layers.resample_abs_pos_embed(
            state[key], new_size=[6, 10], old_size=[4, 4], num_prefix_tokens=prefix
        )
    larger.load_state_dict(state)
    x = images(larger)
    torch.testing.assert_close(model(x), larger(x))
