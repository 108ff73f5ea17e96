"""The search space of CvT §4.2: costs, limits and the published candidate."""

import itertools

import numpy as np
import torch

from locality.models import build, variant
from locality_papers.search.space import Cost, SearchSpace, cost

CVT_13 = variant("cvt_13").config


def test_a_whole_small_space():
    """Enumerated: all distinct, costs equal alone and in batches."""
    space = SearchSpace(CVT_13.with_overrides(depth=(1, 1, 2), img_size=32))
    candidates = list(itertools.product(range(4), repeat=4))
    configs = [space.config(candidate) for candidate in candidates]
    assert len(configs) == len(set(configs)) == len(space)
    costs = space.costs(candidates)
    assert [Cost(*row) for row in costs.tolist()] == [cost(config) for config in configs]
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
    built = build("cvt_13_nas", num_classes=3, img_size=32)
    assert built(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
