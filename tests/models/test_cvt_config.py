"""A CvT's configuration: the paper's ablations by name, and clear refusals."""

import dataclasses
import json

import pytest

from locality.models import CvTConfig, StageConfig, build, variant

CVT_13 = variant("cvt_13").config


def per_stage(config, field):
    return [getattr(stage, field) for stage in config.stages]


def test_table_2():
    assert per_stage(CVT_13, "embed_kernel") == [7, 3, 3]
    assert per_stage(CVT_13, "embed_stride") == [4, 2, 2]
    assert per_stage(CVT_13, "embed_padding") == [2, 1, 1]
    assert per_stage(CVT_13, "drop_path_rate") == [0, 0, 0.1]
    assert CVT_13.grids((224, 224)) == [(56, 56), (28, 28), (14, 14)]
    assert variant("cvt_w24").config.stages[2].drop_path_rate == 0.3


def test_stochastic_depth_rises_over_a_stage():
    rates = StageConfig(64, 1, 5, drop_path_rate=0.1).drop_path_rates
    assert rates == pytest.approx((0, 0.025, 0.05, 0.075, 0.1))
    assert StageConfig(64, 1, 1, drop_path_rate=0.1).drop_path_rates == (0,)


@pytest.mark.parametrize(
    "position, stages",
    [
        ("every", [True, True, True]),
        ("first", [True, False, False]),
        ("last", [False, False, True]),
        ("none", [False, False, False]),
    ],
)
def test_table_5_positions(position, stages):
    assert per_stage(CVT_13.with_overrides(position=position), "use_pos_embed") == stages


def test_table_6_embeddings():
    patches = CVT_13.with_overrides(embedding="patch")
    for field, values in {"kernel": [4, 2, 2], "stride": [4, 2, 2], "padding": [0, 0, 0]}.items():
        assert per_stage(patches, f"embed_{field}") == values
    assert patches.with_overrides(embedding="conv") == CVT_13
    mixed = CVT_13.with_overrides(embedding=("patch", "conv", "conv"))
    assert mixed.stages[0] == patches.stages[0] and mixed.stages[1:] == CVT_13.stages[1:]


def test_embeddings_follow_strides_given_with_them():
    changed = CVT_13.with_overrides(embed_stride=(2, 2, 1), embedding="conv")
    assert per_stage(changed, "embed_kernel") == [3, 3, 3]
    assert per_stage(changed, "embed_padding") == [1, 1, 1]


def test_values_for_all_stages_for_each_and_for_each_block():
    assert per_stage(CVT_13.with_overrides(kv_stride=1), "kv_stride") == [1, 1, 1]
    assert per_stage(CVT_13.with_overrides(kv_stride=[1, 2, 1]), "kv_stride") == [1, 2, 1]
    blocks = CVT_13.with_overrides(mlp_ratio=list(range(1, 14))).stages
    assert [stage.mlp_ratios for stage in blocks] == [(1,), (2, 3), tuple(range(4, 14))]
    kinds = ("conv", "linear", "avg")
    assert tuple(per_stage(CVT_13.with_overrides(projection=kinds), "projection")) == kinds


def test_blocks_are_dealt_to_the_depths_given_with_them():
    changed = CVT_13.with_overrides(depth=(2, 1, 2), kv_stride=(1, 1, 2, 1, 2))
    assert [stage.kv_strides for stage in changed.stages] == [(1, 1), (2,), (1, 2)]


def test_one_drop_path_rate_is_the_last_stages():
    """As in the authors' configurations; other stages have none."""
    changed = CVT_13.with_overrides(drop_path_rate=0.2)
    assert per_stage(changed, "drop_path_rate") == [0, 0, 0.2]
    each = CVT_13.with_overrides(drop_path_rate=(0.1, 0.2, 0.3))
    assert per_stage(each, "drop_path_rate") == [0.1, 0.2, 0.3]


def test_goes_through_json_and_back():
    config = CVT_13.with_overrides(kv_stride=[1, 2] * 6 + [1], position="first", img_size=(96, 64))
    written = json.loads(json.dumps(dataclasses.asdict(config)))
    assert CvTConfig(**written) == config
    assert hash(config) == hash(CvTConfig(**written))


def test_smallest_image():
    assert CVT_13.minimum_size == 3
    assert CVT_13.with_overrides(embedding="patch").minimum_size == 16
    for config in (CVT_13, CVT_13.with_overrides(embedding="patch")):
        least = config.minimum_size
        assert min(min(grid) for grid in config.grids((least, least))) == 1
        with pytest.raises(ValueError, match=f"{least}×{least}"):
            config.grids((least - 1, 99))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"position": "evry"}, "every, first"),
        ({"position": ["every"]}, "position"),
        ({"embedding": "patches"}, "conv, patch"),
        ({"projection": "cnv"}, "avg, conv, linear"),
        ({"projection": ("conv", "linear")}, "projection"),
        ({"activation": "relu"}, "quick_gelu"),
        ({"attention_scale": "depth"}, "head, width"),
        ({"global_pool": "max"}, "avg, token"),
        ({"kv_stride": (1, 2)}, "kv_stride"),
        ({"kv_stride": 0}, "kv_stride is 0"),
        ({"kv_stride": 1.5}, "kv_stride is 1.5"),
        ({"embed_dim": (64, 192, 100)}, "num_heads=6"),
        ({"num_heads": (1, 3)}, "num_heads"),
        ({"depth": (1, 2, 3), "mlp_ratio": [2] * 13}, "mlp_ratio"),
        ({"embed_padding": 3}, "embed_padding"),
        ({"projection_kernel": 4}, "projection_kernel"),
        ({"drop_path_rate": 1.0}, "drop_path_rate"),
        ({"in_chans": 0}, "in_chans"),
        ({"img_size": 2}, "3×3"),
        ({"stages": ()}, "stages"),
        ({"stages": [{"embed_dim": 8, "num_heads": 1}]}, "depth"),
        ({"stages": [{"embed_dims": 8}]}, "stage.embed_dim"),
        ({"kv_strid": 1}, "kv_stride"),
        ({"embedding": "conv", "embed_kernel": 5}, "embed_kernel"),
        ({"patch_size": 16}, "embed_stride"),
    ],
)
def test_refusals_name_the_field(overrides, named):
    with pytest.raises(ValueError, match=named):
        build("cvt_13", **overrides)
    with pytest.raises(ValueError, match="kv_stride"):
        StageConfig(64, 1, 3, kv_stride=(1, 2))
