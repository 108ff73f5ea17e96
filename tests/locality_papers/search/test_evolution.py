"""Evolution finds known optima."""

import itertools

import numpy as np
import pytest

from locality.models import variant
from locality_papers.search.space import POPULATION, SearchSpace, evolve

BASE = variant("cvt_pico").config.with_overrides(depth=(1, 2, 3))
SIX = np.array(list(itertools.product(range(4), repeat=6)))


def worth(candidates):
    """A known accuracy with a best option per block and interactions between neighbours."""
    values = np.random.default_rng(3).normal(size=(6, 4))
    pairs = np.random.default_rng(4).normal(size=(6, 4, 4)) / 2
    digits, blocks = np.array(candidates), np.arange(6)
    accuracy = values[blocks, digits].sum(axis=1)
    accuracy += pairs[blocks[:-1], digits[:, :-1], digits[:, 1:]].sum(axis=1)
    return {
        candidate: (float(top1), 0.0) for candidate, top1 in zip(candidates, accuracy, strict=True)
    }


@pytest.mark.parametrize("seed", range(5))
def test_evolution_finds_the_best_hundredth_of_a_space_that_can_be_enumerated(seed):
    most = float(np.median(SearchSpace(BASE).costs(SIX)[:, 1]))
    space, generator = SearchSpace(BASE, {"macs": most}), np.random.default_rng(seed)
    everything = worth(space.within(SIX))
    first = space.random(generator, POPULATION)
    scores = evolve(space, worth, 200, generator, first)
    assert len(scores) == 200 and set(scores) <= set(everything) and set(first) <= set(scores)
    better = sum(score > max(scores.values()) for score in everything.values())
    assert better < len(everything) / 100


def test_the_same_draws_give_the_same_candidates():
    def run(seed):
        generator, space = np.random.default_rng(seed), SearchSpace(BASE)
        return list(evolve(space, worth, 60, generator, space.random(generator, 10)))

    assert run(1) == run(1) != run(2)


def test_a_small_space_is_searched_to_its_end():
    space, generator = SearchSpace(BASE.with_overrides(depth=(1, 1, 1))), np.random.default_rng(0)
    candidates = space.random(generator, 100)
    assert len(candidates) == len(space) == 64
    scores = evolve(space, lambda new: dict.fromkeys(new, (0, 0)), 100, generator, candidates[:1])
    assert set(scores) == set(candidates)
