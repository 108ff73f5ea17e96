"""Measures use the real forward pass."""

import json
import math

import pytest
import torch

from locality.analysis import measures
from locality.analysis.measures import measure_model
from locality.analysis.taps import capture
from locality.errors import UserError
from locality.models import ConvolutionalAttention, build


def test_record_is_the_mean_over_images(convit, images):
    record = measure_model(convit.train(), images, batch_size=4)
    assert convit.training
    with pytest.raises(UserError, match="image"):
        measure_model(convit.eval(), images[:0])
    with torch.no_grad(), capture(convit) as views:
        convit(images)
    assert record["images"] == 6
    for view, layer in zip(views, record["layers"], strict=True):
        maps = view.maps
        values = measures.nonlocality(maps.mixed, (4, 4), prefix_tokens=maps.prefix_tokens).double()
        assert layer["nonlocality"]["mean"] == pytest.approx(values.mean(0).tolist(), abs=1e-6)
        assert layer["nonlocality"]["layer_mean"] == pytest.approx(values.mean().item(), abs=1e-6)
    assert [layer["kind"] for layer in record["layers"]] == ["gpsa"] * 3 + ["sa"]


def test_record_survives_json_and_has_no_nan(convit, images):
    with torch.no_grad():
        convit.blocks[0].attn.v_pos[1, 0] = 0.5  # a head without a centre
    record = measure_model(convit, images)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["layers"][0]["centres"][1] == [None, None]
    assert record["layers"][0]["spans"][1] is None


def test_keys_without_padding_are_centred_on_their_windows():
    attention = ConvolutionalAttention(8, 2, kv_padding=0).eval()
    maps = attention.attention_maps(torch.randn(1, 49, 8), (7, 7))
    assert (maps.key_grid, maps.key_stride, maps.key_offset) == ((3, 3), (2, 2), (1, 1))


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
    assert measures.uniform_nonlocality(first) == pytest.approx(away.mean().item())
