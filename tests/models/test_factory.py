"""Models by name, the settings of a configuration, and refusals."""

import pytest

from locality.models import build
from locality.models.config import CvTConfig, TimmConfig
from locality.models.variants import VARIANTS, list_models, named, nearest, variant
from locality.settings import to_dict

STAGES = {"embed_dim": (8, 16), "num_heads": (1, 2), "depth": 1, "mlp_ratio": 2.0}
CONFIGS = {
    **{name: row.config for name, row in VARIANTS.items()},
    "deeper": variant("convit_nano").config.with_overrides(depth=5, gpsa_layers=2, img_size=16),
    "pooled": variant("deit_nano").config.with_overrides(global_pool="avg", num_classes=3),
    "patches": variant("convit_micro").config.with_overrides(patch_size=8, drop_path_rate=0.1),
    "two stages": CvTConfig(**STAGES, img_size=(16, 32), activation="gelu"),
    "strides": variant("cvt_13").config.with_overrides(
        kv_stride=[1, 2] * 6 + [1], use_pos_embed=[True, False, False], img_size=(96, 64)
    ),
    "timm's": TimmConfig.named("timm/test_vit").with_overrides(global_pool="avg", num_classes=2),
}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_configuration_is_made_from_its_name_and_settings(key):
    config = CONFIGS[key]
    values = to_dict(config) | {"name": config.name or nearest(config)}
    ends = {end: getattr(config, end) for end in ("in_chans", "num_classes")}
    again = named(**values, **ends)
    assert again == config and hash(again) == hash(config)


def test_the_nearest_model_is_the_one_with_the_fewest_differences():
    assert nearest(CONFIGS["deeper"]) == "convit_nano"
    assert nearest(CONFIGS["two stages"]).startswith("cvt_")


REFUSALS = {
    "convit_nano": [
        ({"gpsa_layers": 5}, "gpsa_layers"),
        ({"gpsa_layers": 4}, "global_pool"),
        ({"gpsa_layers": 4, "global_pool": "avg", "class_token": True}, "class_token"),
        ({"embed_dim": 66, "num_heads": 4}, "multiple"),
        ({"depth": 2.5}, "depth"),
        ({"positional_attention": "psi"}, "gpsa, psa"),
        ({"locality_strength": float("nan")}, "locality_strength"),
        ({"drop_path_rate": 1.0}, "drop_path_rate"),
        ({"embed_class_token": True}, "gpsa_layers=0"),
        ({"gpsa_layer": 2}, "gpsa_layers"),
    ],
    "cvt_13": [
        ({"projection": "cnv"}, "avg, conv, linear"),
        ({"projection": ("conv", "linear")}, "projection"),
        ({"attention_scale": "depth"}, "head, width"),
        ({"kv_stride": (1, 2)}, "kv_stride"),
        ({"kv_stride": 0}, "kv_stride is 0"),
        ({"embed_dim": (64, 192, 100)}, "num_heads=6"),
        ({"depth": (1, 2, 3), "mlp_ratio": [2] * 13}, "mlp_ratio"),
        ({"embed_padding": 3}, "embed_padding"),
        ({"embed_padding": 2, "embed_pool": (False, True, True)}, "embed_padding is 2"),
        ({"embed_kernel": 4, "embed_pool": True}, "odd embed_kernel"),
        ({"projection_kernel": 4}, "projection_kernel"),
        ({"drop_path_rate": 1.0}, "drop_path_rate"),
        ({"img_size": 2}, "3×3"),
        ({"embed_dim": ()}, "embed_dim"),
        ({"kv_strid": 1}, "kv_stride"),
        ({"kv_stride": (1, 2, (1, 2))}, "kv_stride"),
    ],
    "timm/test_vit": [({"drop_rate": 10**400}, "drop_rate"), ({"depth": 513}, "depth is 513")],
}


@pytest.mark.parametrize(
    ("model", "fields", "named"), [(m, *row) for m, rows in REFUSALS.items() for row in rows]
)
def test_refusals_name_the_field(model, fields, named):
    with pytest.raises(ValueError, match=named):
        build(model, **fields)


def test_an_unknown_family_is_refused():
    assert set(list_models("nano", "cvt")) == {"cvt_nano"}
    with pytest.raises(ValueError, match="vit"):
        list_models(family="vit")
