"""Measures are those of the real forward pass; the released variant is what the script measures."""

import json
import math

import pytest
import timm
import torch

from locality.analysis import measures
from locality.analysis.measures import measure_model, released_nonlocality
from locality.analysis.taps import capture
from locality.errors import UserError
from locality.models import build


def test_record_is_the_mean_and_deviation_over_images(convit, images):
    record = measure_model(convit, images, batch_size=4)
    with torch.no_grad(), capture(convit) as views:
        convit(images)
    assert record["images"] == 6
    for view, layer in zip(views, record["layers"], strict=True):
        maps = view.maps
        values = measures.nonlocality(maps.mixed, (4, 4), prefix_tokens=maps.prefix_tokens).double()
        assert layer["nonlocality"]["mean"] == pytest.approx(values.mean(0).tolist(), abs=1e-6)
        deviation = values.std(0, unbiased=False)
        assert layer["nonlocality"]["std"] == pytest.approx(deviation.tolist(), abs=1e-6)
        assert layer["nonlocality"]["layer_mean"] == pytest.approx(values.mean().item(), abs=1e-6)
        spread = values.mean(1).std(unbiased=False).item()
        assert layer["nonlocality"]["layer_std"] == pytest.approx(spread, abs=1e-6)
    assert [layer["kind"] for layer in record["layers"]] == ["gpsa"] * 3 + ["sa"]
    assert record["layers"][3]["class_token_share"] is not None
    assert record["layers"][0]["class_token_share"] is None


def test_record_survives_json_and_has_no_nan(convit, images):
    with torch.no_grad():
        convit.blocks[0].attn.v_pos[1, 0] = 0.5  # a head without a centre
    record = measure_model(convit, images)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["layers"][0]["centres"][1] == [None, None]
    assert record["layers"][0]["spans"][1] is None


def test_batches_change_nothing(deit, images):
    one, all_at_once = (measure_model(deit, images, batch_size=size) for size in (1, 6))
    for a, b in zip(one["layers"], all_at_once["layers"], strict=True):
        assert a["nonlocality"]["mean"] == pytest.approx(b["nonlocality"]["mean"], abs=1e-6)


def test_model_is_left_in_its_mode(convit, images):
    convit.train()
    measure_model(convit, images)
    assert convit.training


def test_no_images_is_refused(convit, images):
    with pytest.raises(UserError, match="no image"):
        measure_model(convit, images[:0])


@pytest.mark.parametrize("size", [64, 96])
def test_released_variant_equals_the_script_on_timms_weights(size, shaken):
    """timm's module keeps the released `get_attention_map`; the script feeds it `patch_embed`."""
    model = timm.create_model("convit_tiny", img_size=size, depth=4, local_up_to_layer=3)
    model = shaken(model, scale=0.2)
    images = torch.randn(3, 3, size, size)
    with torch.no_grad():
        model(images)  # timm makes its relative encodings in the first forward pass
        tokens = model.patch_embed(images)
        theirs = [block.attn.get_attention_map(tokens) for block in model.blocks]
    ours = released_nonlocality(model, images)
    assert torch.allclose(torch.tensor(ours), torch.stack(theirs), rtol=0, atol=1e-5)
    real = measure_model(model, images)["layers"]
    assert ours[2] != pytest.approx(real[2]["nonlocality"]["mean"], abs=1e-3)


def test_released_variant_of_our_model_equals_timms_with_the_same_weights(shaken):
    theirs = timm.create_model("convit_tiny", img_size=64, depth=3, local_up_to_layer=2)
    ours = build("convit_tiny", img_size=64, depth=3, gpsa_layers=2)
    shaken(theirs, scale=0.2)
    with torch.no_grad():
        ours.patch_embed.load_state_dict(theirs.patch_embed.proj.state_dict())
        for mine, block in zip(ours.blocks, theirs.blocks, strict=True):
            if hasattr(block.attn, "qk"):
                mine.attn.qkv.weight.copy_(torch.cat((block.attn.qk.weight, block.attn.v.weight)))
                mine.attn.v_pos.copy_(block.attn.pos_proj.weight[:, [2, 1, 0]])
                mine.attn.gating.copy_(block.attn.gating_param)
            else:
                mine.attn.qkv.weight.copy_(block.attn.qkv.weight)
    images = torch.randn(2, 3, 64, 64)
    expected = torch.tensor(released_nonlocality(theirs, images))
    assert torch.allclose(
        torch.tensor(released_nonlocality(ours, images)), expected, rtol=0, atol=1e-5
    )


def test_released_variant_needs_one_patch_embedding(images):
    model = torch.nn.Sequential(build("deit_nano").blocks[0])
    with pytest.raises(UserError, match="patch embedding"):
        released_nonlocality(model, images)


def test_cvt_is_measured_with_its_key_strides(shaken):
    model, images = shaken(build("cvt_nano")), torch.randn(2, 3, 7, 10)
    record = measure_model(model, images)
    with torch.no_grad(), capture(model) as views:
        model(images)
    assert [tuple(layer["grid"]) for layer in record["layers"]] == [
        view.maps.query_grid for view in views
    ]
    first = record["layers"][0]
    assert (first["grid"], first["key_grid"]) == ([7, 10], [4, 5])
    # By hand: key (a, b) lies on query (2a, 2b).
    attention = views[0].maps.mixed.double()
    away = torch.tensor(
        [
            [math.hypot(i - 2 * a, j - 2 * b) for a in range(4) for b in range(5)]
            for i in range(7)
            for j in range(10)
        ],
        dtype=torch.float64,
    )
    expected = (attention * away).sum(-1).mean((0, 2))
    assert first["nonlocality"]["mean"] == pytest.approx(expected.tolist(), rel=1e-5)
    last = record["layers"][-1]
    assert last["class_token_share"] is not None and last["grid"] == [4, 5]


def test_cvt_has_no_single_patch_embedding():
    with pytest.raises(UserError, match="patch embedding"):
        released_nonlocality(build("cvt_nano"), torch.randn(1, 3, 8, 8))
