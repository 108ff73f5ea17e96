"""A CvT's configuration: values for all stages, for each, and for each block."""

import pytest

from locality.models import build, variant

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
    blocks = build("cvt_13", depth=(1, 1, 5)).stages[2].blocks
    rates = [getattr(block.drop_path, "drop_prob", 0) for block in blocks]
    assert rates == pytest.approx((0, 0.025, 0.05, 0.075, 0.1))


def test_each_model_is_written_in_one_way():
    same = {"kv_stride": [2, [2, 2], [2] * 10], "projection": ["conv"] * 3, "num_heads": [1, 3, 6]}
    assert CVT_13.with_overrides(**same, drop_path_rate=[0, 0, 0.1]) == CVT_13
    assert CVT_13.with_overrides(mlp_ratio=[4] * 13) == CVT_13


def test_each_block_is_built_with_its_own_values():
    own = {"mlp_ratio": (4.0, 4.0, (2.0, 3.0)), "kv_stride": (2, 2, (1, 2))}
    blocks = build("cvt_nano", depth=(1, 1, 2), **own).stages[2].blocks
    assert [block.mlp.fc1.out_features / block.attn.dim for block in blocks] == [2, 3]
    assert [block.attn.k.conv.stride for block in blocks] == [(1, 1), (2, 2)]


def test_values_for_all_stages_for_each_and_for_each_block():
    assert per_stage(CVT_13.with_overrides(kv_stride=1), "kv_stride") == [(1,), (1,) * 2, (1,) * 10]
    assert CVT_13.with_overrides(kv_stride=[1, 2, 1]).stages[1].kv_stride == (2, 2)
    blocks = CVT_13.with_overrides(mlp_ratio=list(range(1, 14))).stages
    assert [stage.mlp_ratio for stage in blocks] == [(1,), (2, 3), tuple(range(4, 14))]
    changed = CVT_13.with_overrides(depth=(2, 1, 2), kv_stride=(1, 1, 2, 1, 2))
    assert per_stage(changed, "kv_stride") == [(1, 1), (2,), (1, 2)]
    kinds = ("conv", "linear", "avg")
    assert tuple(per_stage(CVT_13.with_overrides(projection=kinds), "projection")) == kinds


def test_one_drop_path_rate_is_the_last_stages():
    """As in the authors' configurations; other stages have none."""
    changed = CVT_13.with_overrides(drop_path_rate=0.2)
    assert per_stage(changed, "drop_path_rate") == [0, 0, 0.2]
    each = CVT_13.with_overrides(drop_path_rate=(0.1, 0.2, 0.3))
    assert per_stage(each, "drop_path_rate") == [0.1, 0.2, 0.3]


def test_smallest_image():
    assert CVT_13.minimum_size == 3
    assert CVT_13.with_overrides(embed_kernel=(4, 2, 2), embed_padding=0).minimum_size == 16
    for config in (CVT_13, CVT_13.with_overrides(embed_kernel=(4, 2, 2), embed_padding=0)):
        least = config.minimum_size
        assert min(min(grid) for grid in config.grids((least, least))) == 1
        with pytest.raises(ValueError, match=f"{least}×{least}"):
            config.grids((least - 1, 99))
