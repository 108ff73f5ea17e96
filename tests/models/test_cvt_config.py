"""A CvT's configuration: values for all stages, for each, and for each block."""

import pytest

from locality.models import build, variant

CVT_13 = variant("cvt_13").config


KINDS = ("conv", "linear", "avg")
VALUES = [
    ({}, "embed_kernel", (7, 3, 3)),  # Table 2
    ({}, "embed_stride", (4, 2, 2)),
    ({}, "embed_padding", (2, 1, 1)),
    ({"kv_stride": 1}, "kv_stride", ((1,), (1, 1), (1,) * 10)),
    ({"kv_stride": [1, 2, 1]}, "kv_stride", ((1,), (2, 2), (1,) * 10)),
    ({"mlp_ratio": list(range(1, 14))}, "mlp_ratio", ((1,), (2, 3), tuple(range(4, 14)))),
    ({"depth": (2, 1, 2), "kv_stride": (1, 1, 2, 1, 2)}, "kv_stride", ((1, 1), (2,), (1, 2))),
    ({"projection": KINDS}, "projection", KINDS),
    # As in the authors' configurations, one rate is the last stage's; others have none.
    ({}, "drop_path_rate", (0, 0, 0.1)),
    ({"drop_path_rate": 0.2}, "drop_path_rate", (0, 0, 0.2)),
    ({"drop_path_rate": (0.1, 0.2, 0.3)}, "drop_path_rate", (0.1, 0.2, 0.3)),
]


@pytest.mark.parametrize(("fields", "name", "values"), VALUES)
def test_values_for_all_stages_for_each_and_for_each_block(fields, name, values):
    stages = CVT_13.with_overrides(**fields).stages
    assert tuple(getattr(stage, name) for stage in stages) == values


def test_each_model_is_written_in_one_way():
    same = {"kv_stride": [2, [2, 2], [2] * 10], "projection": ["conv"] * 3, "num_heads": [1, 3, 6]}
    assert CVT_13.with_overrides(**same, drop_path_rate=[0, 0, 0.1]) == CVT_13
    assert CVT_13.with_overrides(mlp_ratio=[4] * 13) == CVT_13


def test_each_block_is_built_with_its_own_values():
    own = {"mlp_ratio": (4.0, 4.0, (2.0, 3.0)), "kv_stride": (2, 2, (1, 2))}
    blocks = build("cvt_nano", depth=(1, 1, 2), **own).stages[2].blocks
    assert [block.mlp.fc1.out_features / block.attn.dim for block in blocks] == [2, 3]
    assert [block.attn.k.conv.stride for block in blocks] == [(1, 1), (2, 2)]


def test_grids_down_to_the_smallest_image():
    assert CVT_13.grids((224, 224)) == [(56, 56), (28, 28), (14, 14)]
    patches = CVT_13.with_overrides(embed_kernel=(4, 2, 2), embed_padding=0)
    for config, least in ((CVT_13, 3), (patches, 16)):
        assert config.minimum_size == least
        assert min(min(grid) for grid in config.grids((least, least))) == 1
        with pytest.raises(ValueError, match=f"{least}×{least}"):
            config.grids((least - 1, 99))
