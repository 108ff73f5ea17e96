"""The search space of CvT §4.2: costs against the closed form, and its numbering."""

import itertools
import math

import numpy as np
import pytest
import torch

from locality.layers.grid import hidden_width, projected_grid
from locality.models import build, list_models, variant
from locality.models.config import to_2tuple
from locality_papers.search.space import Cost, SearchSpace, cost

CVT_13 = variant("cvt_13").config


def closed_form(config):
    """Parameters and multiply-accumulates of a CvT, computed from its configuration."""
    width = config.stages[-1].embed_dim
    parameters = 2 * width + width * config.has_class_token
    macs = 0
    if config.num_classes:
        parameters += (width + 1) * config.num_classes
        macs += width * config.num_classes
    channels, last = config.in_chans, config.stages[-1]
    for stage, grid in zip(config.stages, config.grids(to_2tuple(config.img_size)), strict=True):
        patches = math.prod(grid)
        kernel = stage.embed_kernel**2 * channels * stage.embed_dim
        parameters += kernel + 3 * stage.embed_dim  # with the convolution's bias and LayerNorm
        if stage.use_pos_embed:
            parameters += patches * stage.embed_dim
        macs += kernel * patches
        channels = stage.embed_dim
        tokens = patches + (config.has_class_token and stage is last)
        for stride, ratio in zip(stage.kv_stride, stage.mlp_ratio, strict=True):
            window = (stage.projection_kernel, stride, stage.kv_padding)
            keys = math.prod(projected_grid(grid, stage.projection, *window))
            block = block_cost(stage, patches, tokens, keys, hidden_width(channels, ratio))
            parameters, macs = parameters + block[0], macs + block[1]
    return Cost(parameters, macs)


def block_cost(stage, patches, tokens, keys, hidden):
    """One block: three projections, attention, the output projection and the MLP."""
    width = stage.embed_dim
    convolved = stage.projection_kernel**2 * width if stage.projection == "conv" else 0
    all_keys = keys + tokens - patches

    parameters = 4 * width  # both LayerNorms
    parameters += 3 * (convolved + (2 * width if convolved else 0))  # with BatchNorm
    parameters += 4 * width**2 + (3 * stage.qkv_bias + 1) * width
    parameters += 2 * width * hidden + hidden + width

    macs = convolved * (patches + 2 * keys)
    macs += width**2 * (2 * tokens + 2 * all_keys)
    macs += 2 * tokens * all_keys * width  # QKᵀ and its product with V, all heads
    macs += 2 * width * hidden * tokens
    return parameters, macs


@pytest.mark.parametrize("name", list_models(family="cvt"))
def test_cost_is_that_of_the_closed_form(name):
    config = variant(name).config
    assert cost(config) == closed_form(config)


@pytest.mark.parametrize(
    "overrides",
    [
        {"kv_stride": 1, "use_pos_embed": True},
        {"projection": ("conv", "linear", "avg"), "qkv_bias": False},
        {"projection": ("conv", "avg", "conv"), "kv_padding": 0},
        {
            "embed_kernel": (4, 2, 2),
            "embed_padding": 0,
            "global_pool": "avg",
            "num_classes": 0,
            "in_chans": 1,
        },
        {"projection_kernel": 5, "mlp_ratio": (1.3, 2, 0.7), "kv_stride": 3},
        {"img_size": 384},
    ],
)
def test_cost_knows_every_field(overrides):
    config = CVT_13.with_overrides(**{"img_size": (97, 160)} | overrides)
    assert cost(config) == closed_form(config)


def test_a_whole_small_space():
    """Enumerated: all distinct, costs equal alone and in batches."""
    space = SearchSpace(CVT_13.with_overrides(depth=(1, 1, 2), img_size=32))
    candidates = list(itertools.product(range(4), repeat=4))
    configs = [space.config(candidate) for candidate in candidates]
    assert len(configs) == len(set(configs)) == len(space)
    costs = space.costs(candidates)
    assert [Cost(*row) for row in costs.tolist()] == [closed_form(config) for config in configs]
    assert [list(bound) for bound in space.bounds()] == [[*costs.min(0)], [*costs.max(0)]]
    limits = dict(zip(Cost._fields, np.median(costs, axis=0), strict=True))
    inside = SearchSpace(space.base, limits).within(np.array(candidates))
    fit = (costs <= np.median(costs, axis=0)).all(axis=1)
    assert inside == [c for c, fits in zip(candidates, fit, strict=True) if fits]


def test_the_named_reconstruction_is_the_bottleneck_the_paper_describes():
    config = variant("cvt_13_nas").config
    found = cost(config)
    assert found.parameters <= 18.0e6 and found.macs <= 4.1e9
    strides = [s for stage in config.stages for s in stage.kv_stride]
    ratios = [r for stage in config.stages for r in stage.mlp_ratio]
    assert (strides[0], ratios[0]) == (strides[-1], ratios[-1]) == (2, 2.0)
    middle = [i for i, ratio in enumerate(ratios) if ratio == 4.0]
    assert middle == list(range(middle[0], middle[-1] + 1))
    assert sum(strides[i] == 1 for i in middle) > len(middle) / 2
    assert all(strides[i] == 2 for i in range(13) if i not in middle)
    assert build("cvt_13_nas", num_classes=3, img_size=32)(torch.zeros(2, 3, 32, 32)).shape
