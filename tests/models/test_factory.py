"""Models by name, and the name and settings of a configuration."""

from __future__ import annotations

import dataclasses

import pytest

from locality.models.config import CvTConfig, TimmConfig
from locality.models.variants import VARIANTS, named, nearest, variant
from locality.settings import to_dict

STAGES = {"embed_dim": (8, 16), "num_heads": (1, 2), "depth": 1, "mlp_ratio": 2.0}
CONFIGS = {
    **{name: row.config for name, row in VARIANTS.items()},
    "deeper": variant("convit_nano").config.with_overrides(depth=5, gpsa_layers=2, img_size=16),
    "pooled": variant("deit_nano").config.with_overrides(global_pool="avg", num_classes=3),
    "patches": variant("convit_micro").config.with_overrides(patch_size=8, drop_path_rate=0.1),
    "two stages": CvTConfig(**STAGES, img_size=(16, 32), activation="gelu"),
    "timm's": TimmConfig.named("timm/test_vit").with_overrides(global_pool="avg", num_classes=2),
}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_configuration_is_made_from_its_name_and_settings(key):
    config = CONFIGS[key]
    values = to_dict(config) | {"name": config.name or nearest(config)}
    ends = {end: getattr(config, end) for end in ("in_chans", "num_classes")}
    assert named(**values, **ends) == config


def test_the_nearest_model_is_the_one_with_the_fewest_differences():
    assert nearest(CONFIGS["deeper"]) == "convit_nano"
    assert nearest(dataclasses.replace(CONFIGS["two stages"])).startswith("cvt_")
