"""Models by name, and the name and settings of a configuration."""

from __future__ import annotations

import dataclasses

import pytest

from locality.models.config import CvTConfig
from locality.models.factory import TimmConfig, describe, named
from locality.models.variants import VARIANTS, variant

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
def test_a_configuration_is_made_from_its_description(key):
    config = CONFIGS[key]
    name, fields = describe(config)
    ends = ("img_size", "in_chans", "num_classes")
    made = named(name, fields | {end: getattr(config, end) for end in ends})
    assert dataclasses.asdict(made) == dataclasses.asdict(config)
    assert key not in VARIANTS or (name == key and not fields) or config == variant(name).config


def test_the_nearest_model_is_the_one_with_the_fewest_differences():
    assert describe(CONFIGS["deeper"]) == ("convit_nano", {"depth": 5, "gpsa_layers": 2})
    assert describe(CONFIGS["deeper"], "convit_tiny")[0] == "convit_tiny"
