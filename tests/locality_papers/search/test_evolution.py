"""Evolution finds known optima; the worst options are dropped."""

import numpy as np
import pytest

from locality.models import variant
from locality_papers.search import SearchSpace
from locality_papers.search.space import POPULATION, Candidates, evolve, prune

SIX = SearchSpace(variant("cvt_pico").config.with_overrides(depth=(1, 2, 3)))


def worth(space, numbers):
    """A known accuracy with a best option per block and interactions between neighbours."""
    values = np.random.default_rng(3).normal(size=(space.blocks, 4))
    pairs = np.random.default_rng(4).normal(size=(space.blocks, 4, 4)) / 2
    digits = space.digits(np.array(numbers))
    blocks = np.arange(space.blocks)
    found = values[blocks, digits].sum(axis=1)
    found += pairs[blocks[:-1], digits[:, :-1], digits[:, 1:]].sum(axis=1)
    return {int(n): (float(top1), 0.0) for n, top1 in zip(numbers, found, strict=True)}


@pytest.mark.parametrize("seed", range(5))
def test_evolution_finds_the_best_hundredth_of_a_space_that_can_be_enumerated(seed):
    limits = {"macs": float(np.median(SIX.total_cost("macs", SIX.digits(np.arange(4096)))))}
    candidates, generator = Candidates(SIX, None, limits), np.random.default_rng(seed)
    everything = worth(SIX, candidates.inside(SIX.digits(np.arange(4096))))
    first = candidates.random(generator, POPULATION)
    scores = evolve(candidates, lambda n: worth(SIX, n), 200, generator, first)
    assert len(scores) == 200 and set(scores) <= set(everything) and set(first) <= set(scores)
    better = sum(score > max(scores.values()) for score in everything.values())
    assert better < len(everything) / 100


def test_the_same_draws_give_the_same_candidates():
    def run(seed):
        generator = np.random.default_rng(seed)
        candidates = Candidates(SIX)
        first = candidates.random(generator, 10)
        return list(evolve(candidates, lambda n: worth(SIX, n), 60, generator, first))

    assert run(1) == run(1) != run(2)


def test_a_small_space_is_searched_to_its_end(space):
    candidates, generator = Candidates(space, [[0, 1], [2], [3, 0]]), np.random.default_rng(0)
    numbers = candidates.random(generator, 100)
    assert sorted(numbers) == sorted(all_of(space))
    scores = evolve(candidates, lambda n: worth(space, n), 100, generator, numbers[:1])
    assert sorted(scores) == sorted(numbers)


def all_of(space):
    rows = np.array([[a, 2, b] for a in (0, 1) for b in (3, 0)])
    return space.numbers(rows).tolist()


def test_options_that_lose_are_dropped(space):
    likes = np.array([[3.0, 0, 0, 1], [0, 0, 5, 0], [1, 2, 0, 0]])
    numbers = range(64)
    digits = space.digits(np.array(numbers))
    scores = {n: (float(likes[[0, 1, 2], row].sum()), 0.0) for n, row in enumerate(digits)}
    assert prune(Candidates(space), scores, 3)[1] == [2]
    assert prune(Candidates(space), scores, 5) == [[0, 3], [2], [0, 1, 2, 3]]
    # Every block keeps its best option, however many are dropped.
    assert prune(Candidates(space), scores, 12) == [[0], [2], [1]]
    # If only the cheapest candidate is within the limit, its options stay too.
    least = float(space.bounds()[0].macs)
    kept = prune(Candidates(space, None, {"macs": least}), scores, 12)
    assert kept == [[0, 2], [2], [1, 2]]


def test_what_fits_nowhere_is_refused(space):
    with pytest.raises(ValueError, match="macs"):
        Candidates(space, None, {"macs": 1})
