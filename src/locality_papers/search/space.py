"""CvT's architecture search space (§4.2), the costs of its candidates, and search methods: random,
evolution, and pruning of options.

Each block chooses the stride of its keys and values, 1 or 2, and the ratio of its MLP, 2 or 4: 4¹³
candidates for CvT-13. Costs are sums over blocks, so counting ten models is enough to compute the
costs of a million candidates in a second.

The paper's candidates have 13.66 to 19.88 M parameters and 2.59 to 4.03 G multiply-accumulates.
These two choices alone span 13.78 to 20.00 M and 3.12 to 6.64 G: its lower bounds, and its upper
bound on multiply-accumulates, must come from something that the paper does not mention.

The authors published only the size and shape of CvT-13-NAS, the result of their search: 18 M and
4.1 G, stride 2 and ratio 2 at both ends, stride 1 and ratio 4 in most of the middle. The model
`cvt_13_nas` is a reconstruction with 17.3 M and 4.09 G, the most parameters of all candidates of
that shape within 4.1 G.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from locality.errors import UserError
from locality.models import build, count_macs, count_parameters
from locality.models.config import CvTConfig

Counts = npt.NDArray[np.int64]
Score = tuple[float, float]
"""(top-1 on held-out images, −loss): higher is better."""
Scores = dict[int, Score]

POPULATION = 25
"""Size of the first generation, and number of best candidates that children are bred from."""
_TOURNAMENT, _GENERATION = 5, 20
# Chunks, and candidates per chunk, sampled before giving up on finding new ones that fit.
_CHUNKS, _CHUNK = 256, 1024


class Cost(NamedTuple):
    """The cost of an architecture.

    Attributes:
        parameters: number of parameters.
        macs: multiply-accumulates of one image; see `count_macs`.
    """

    parameters: int
    macs: int


@cache
def cost(config: CvTConfig) -> Cost:
    """Parameters and multiply-accumulates of a CvT, counted on the meta device."""
    with torch.device("meta"):
        model = build(config)
    return Cost(count_parameters(model), count_macs(model))


class SearchSpace:
    """All architectures that differ from `base` in each block's key-value stride and MLP ratio.

    A candidate is a number below `len(space)`. Its digits in base `len(options)`, first block
    first, are the blocks' options. Nothing is stored per candidate.

    Attributes:
        options: the (stride, ratio) pairs of a block.
        tables: for "parameters" and "macs", the cost of the candidate with the first option in all
            blocks, and the cost added by each block and option, (blocks, options).

    Args:
        base: the configuration shared by all candidates.
        kv_strides, mlp_ratios: choices of each block; §4.2's by default.

    Raises:
        UserError: an invalid stride or ratio.
    """

    def __init__(
        self,
        base: CvTConfig,
        kv_strides: tuple[int, ...] = (1, 2),
        mlp_ratios: tuple[float, ...] = (2.0, 4.0),
    ) -> None:
        self.base = base
        self.options = list(itertools.product(kv_strides, mlp_ratios))
        self.blocks = sum(stage.depth for stage in base.stages)
        first = [self.options[0]] * self.blocks
        fixed = cost(_with_choices(base, first))
        added: list[npt.NDArray[Any]] = []
        for stage in base.stages:  # blocks of a stage cost the same
            place = len(added)
            changed = [[*first[:place], option, *first[place + 1 :]] for option in self.options]
            costs = [cost(_with_choices(base, choices)) for choices in changed]
            added += [np.subtract(costs, fixed)] * stage.depth
        table = np.array(added)
        self.tables: dict[str, tuple[float, npt.NDArray[Any]]] = {
            name: (fixed[n], table[..., n]) for n, name in enumerate(Cost._fields)
        }

    def __len__(self) -> int:
        return len(self.options) ** self.blocks

    def __getitem__(self, index: int) -> CvTConfig:
        """The configuration of candidate `index`."""
        return _with_choices(self.base, self.choices(index))

    def choices(self, index: int) -> list[tuple[int, float]]:
        """Stride and ratio of each block of candidate `index`."""
        return [self.options[digit] for digit in self._digits_of(index)[0]]

    def settings(self, index: int) -> dict[str, list[Any]]:
        """The run settings of a candidate by dotted name, one value per block."""
        strides, ratios = zip(*self.choices(index), strict=True)
        return {"model.kv_stride": list(strides), "model.mlp_ratio": list(ratios)}

    def index(self, config: CvTConfig) -> int:
        """The number of a candidate."""
        choices = [
            choice
            for stage in config.stages
            for choice in zip(stage.kv_strides, stage.mlp_ratios, strict=True)
        ]
        outside = [choice for choice in choices if choice not in self.options]
        if outside:
            raise UserError(
                f"a block with (kv_stride, mlp_ratio) = {outside[0]} is not in this search space; "
                f"its options are {self.options}"
            )
        if len(choices) != self.blocks or (
            _with_choices(config, choices) != _with_choices(self.base, choices)
        ):
            raise UserError("this configuration differs from the search space's base model")
        digits = [self.options.index(choice) for choice in choices]
        return int(self.numbers(np.array([digits]))[0])

    def cost(self, index: int) -> Cost:
        """The cost of candidate `index`."""
        digits = self._digits_of(index)
        return Cost(*(int(self.total_cost(name, digits)[0]) for name in Cost._fields))

    def total_cost(self, name: str, digits: Counts) -> npt.NDArray[Any]:
        """Parameters or MACs of candidates: (n, blocks) → (n,)."""
        fixed, table = self.tables[name]
        return fixed + table[np.arange(self.blocks), digits].sum(axis=1)

    def fits(self, digits: Counts, limits: Mapping[str, float]) -> npt.NDArray[np.bool_]:
        """Which candidates are within `limits` (table → maximum): (n, blocks) → (n,)."""
        inside = np.ones(len(digits), dtype=bool)
        for name, most in limits.items():
            inside &= self.total_cost(name, digits) <= most
        return inside

    def bounds(self) -> tuple[Cost, Cost]:
        """The minimum and maximum of each cost over all candidates."""
        counted = [self.tables[name] for name in Cost._fields]
        least, most = (
            Cost(*(int(fixed + pick(table, axis=1).sum()) for fixed, table in counted))
            for pick in (np.min, np.max)
        )
        return least, most

    def _digits_of(self, index: int) -> Counts:
        if not 0 <= index < len(self):
            raise IndexError(f"candidate {index} does not exist; the space has {len(self)}")
        return self.digits(np.array([index]))

    def digits(self, indices: Counts) -> Counts:
        """Options of each block: (n,) → (n, blocks)."""
        return np.stack(np.unravel_index(indices, [len(self.options)] * self.blocks), axis=1)

    def numbers(self, digits: Counts) -> Counts:
        """Candidates with these options: (n, blocks) → (n,)."""
        return np.ravel_multi_index(tuple(digits.T), [len(self.options)] * self.blocks)

    def all_options(self) -> list[list[int]]:
        """Indices of all options, for each block."""
        return [list(range(len(self.options)))] * self.blocks


def _with_choices(config: CvTConfig, choices: list[tuple[int, float]]) -> CvTConfig:
    """A configuration with these (stride, ratio) pairs, block by block."""
    strides, ratios = zip(*choices, strict=True)
    return config.with_overrides(kv_stride=strides, mlp_ratio=ratios)


class Candidates:
    """The candidates of a space with allowed options and within limits.

    Args:
        space: the search space.
        options: indices of the options allowed for each block; all by default.
        limits: maximum costs by name of the space's tables.
    """

    def __init__(
        self,
        space: SearchSpace,
        options: Sequence[Sequence[int]] | None = None,
        limits: Mapping[str, float] = {},
    ) -> None:
        self.space, self.options = space, options or space.all_options()
        self.limits = limits
        for name, most in limits.items():
            fixed, table = space.tables[name]
            least = fixed + sum(table[b, row].min() for b, row in enumerate(self.options))
            if least > most:
                raise UserError(f"no candidate has {name} ≤ {most:g}; the minimum is {least:g}")

    def inside(self, digits: Counts) -> list[int]:
        """The candidates within the limits: (n, blocks) → at most n."""
        return self.space.numbers(digits[self.space.fits(digits, self.limits)]).tolist()

    def random(
        self, generator: np.random.Generator, count: int, known: Collection[int] = ()
    ) -> list[int]:
        """At most `count` distinct candidates not in `known`, drawn uniformly."""
        found: dict[int, None] = {}
        for _ in range(_CHUNKS):
            for number in self.inside(self._sample_options(generator, _CHUNK)):
                if len(found) < count and number not in known:
                    found[number] = None
            if len(found) == count:
                break
        return list(found)

    def _sample_options(self, generator: np.random.Generator, count: int) -> Counts:
        return np.stack([generator.choice(row, count) for row in self.options], axis=1)

    def breed(self, generator: np.random.Generator, count: int, ranked: Sequence[int]) -> Counts:
        """Children of tournament winners: uniform crossover, then mutation of one block on average.

        Args:
            generator: random generator.
            count: number of children.
            ranked: possible parents, best first.
        """
        parents = self.space.digits(np.array(ranked))
        one, other = (
            parents[generator.integers(len(parents), size=(count, _TOURNAMENT)).min(axis=1)]
            for _ in range(2)
        )
        crossed = np.where(generator.random(one.shape) < 0.5, one, other)
        mutated = generator.random(one.shape) < 1 / self.space.blocks
        return np.where(mutated, self._sample_options(generator, count), crossed)


def evolve(
    candidates: Candidates,
    evaluate: Callable[[Sequence[int]], Scores],
    budget: int,
    generator: np.random.Generator,
    first: Sequence[int],
) -> Scores:
    """Evolutionary search: the scores of `budget` candidates.

    Args:
        candidates: the allowed candidates.
        evaluate: candidates → scores.
        budget: number of evaluations, including the first generation.
        generator: random generator; results are deterministic given its state and the scores.
        first: the first generation, cut to the population's size.
    """
    scores = dict(evaluate(first[:POPULATION]))
    while (wanted := min(_GENERATION, budget - len(scores))) > 0:
        ranked = sorted(scores, key=lambda number: scores[number], reverse=True)[:POPULATION]
        children = candidates.inside(candidates.breed(generator, 8 * wanted, ranked))
        new = [number for number in dict.fromkeys(children) if number not in scores][:wanted]
        new += candidates.random(generator, wanted - len(new), {*scores, *new})
        if not new:
            break
        scores |= evaluate(new)
    return scores


def prune(candidates: Candidates, scores: Scores, count: int) -> list[list[int]]:
    """Drop the `count` worst options; returns the remaining ones of each block.

    An option's score is the mean accuracy of the candidates that use it; its loss is the difference
    to the best option of its block. Options without a candidate are dropped first. Each block keeps
    its best option, and at least one candidate remains within the limits.
    """
    digits = candidates.space.digits(np.array([*scores], dtype=np.int64))
    top1 = np.array([score[0] for score in scores.values()])
    losses: dict[tuple[int, int], float] = {}
    for block, row in enumerate(candidates.options):
        users = {option: digits[:, block] == option for option in row}
        means = {o: top1[who].mean() if who.any() else -np.inf for o, who in users.items()}
        losses |= {(block, option): max(means.values()) - mean for option, mean in means.items()}
    remaining = [list(row) for row in candidates.options]
    for block, option in sorted(losses, key=lambda at: losses[at], reverse=True):
        without = [row.copy() for row in remaining]
        without[block].remove(option)
        if (
            count
            and losses[block, option] > 0
            and without[block]
            and _feasible(candidates, without)
        ):
            remaining, count = without, count - 1
    return remaining


def _feasible(candidates: Candidates, options: Sequence[Sequence[int]]) -> bool:
    try:
        left = Candidates(candidates.space, options, candidates.limits)
    except UserError:
        return False
    return bool(left.random(np.random.default_rng(0), 1))
