"""CvT's architecture search space (§4.2), the cost of every candidate, and ways to choose among
them: at random, by evolution, and by dropping options that lose.

Each block chooses the stride of its keys and values, 1 or 2, and the ratio of its MLP, 2 or 4: 4¹³
candidates for CvT-13. Costs are sums over blocks: those of ten models are counted, and a million
candidates are weighed in a second.

The paper gives its candidates 13.66 to 19.88 M parameters and 2.59 to 4.03 G multiply-accumulates.
These two choices alone span 13.78 to 20.00 M and 3.12 to 6.64 G: its lower bounds, and its upper
bound on the arithmetic, must come from something else that the paper does not name.

Nor did the authors publish what their search found, CvT-13-NAS, beyond its shape and size: 18 M and
4.1 G, stride 2 and ratio 2 at both ends, stride 1 and ratio 4 at most of the middle. The model
`cvt_13_nas` is a reconstruction, 17.3 M and 4.09 G: of all candidates of that shape within 4.1 G,
none has more parameters.
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
"""Top-1 on held-out images, then the loss with its sign turned: the higher the better."""
Scores = dict[int, Score]

POPULATION = 25
"""How many the first generation has, and the best so far that the next ones are bred from."""
_TOURNAMENT, _GENERATION = 5, 20
# How many candidates are sampled before giving up on finding a new one that fits.
_CHUNKS, _CHUNK = 256, 1024


class Cost(NamedTuple):
    """The cost of an architecture.

    Attributes:
        parameters: how many it learns.
        macs: multiply-accumulates of one image, counted as `count_macs` counts them.
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

    A candidate is a number below `len(space)`. Written in base `len(options)` with the first block
    first, its digits are the options the blocks take. Nothing is stored per candidate.

    Attributes:
        options: the (stride, ratio) pairs that a block chooses from.
        tables: of "parameters" and "macs", the cost of the candidate whose blocks all take the
            first option, and what each block adds to it with each option, (blocks, options).

    Args:
        base: what all candidates share.
        kv_strides, mlp_ratios: what each block chooses from (§4.2's unless given).

    Raises:
        UserError: for a stride or ratio that no block can have.
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
        for stage in base.stages:  # the blocks of a stage cost alike
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
        """The candidate with this number."""
        return _with_choices(self.base, self.choices(index))

    def choices(self, index: int) -> list[tuple[int, float]]:
        """The stride and the ratio of every block of the candidate with this number."""
        return [self.options[digit] for digit in self._digits_of(index)[0]]

    def settings(self, index: int) -> dict[str, list[Any]]:
        """The settings of a run that select a candidate, by dotted name, one value per block."""
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
            raise UserError("this configuration differs from the search space's base elsewhere")
        digits = [self.options.index(choice) for choice in choices]
        return int(self.numbers(np.array([digits]))[0])

    def cost(self, index: int) -> Cost:
        """The cost of the candidate with this number."""
        digits = self._digits_of(index)
        return Cost(*(int(self.total_cost(name, digits)[0]) for name in Cost._fields))

    def total_cost(self, name: str, digits: Counts) -> npt.NDArray[Any]:
        """The cost of candidates by one of the tables: (n, blocks) → (n,)."""
        fixed, table = self.tables[name]
        return fixed + table[np.arange(self.blocks), digits].sum(axis=1)

    def fits(self, digits: Counts, limits: Mapping[str, float]) -> npt.NDArray[np.bool_]:
        """Which candidates cost no more than `limits` allow, by the names of tables: → (n,)."""
        inside = np.ones(len(digits), dtype=bool)
        for name, most in limits.items():
            inside &= self.total_cost(name, digits) <= most
        return inside

    def bounds(self) -> tuple[Cost, Cost]:
        """The least and the most that candidates cost, in each count by itself."""
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
        """The option of every block: (n,) → (n, blocks)."""
        return np.asarray(indices)[:, None] // self._place_values % len(self.options)

    def numbers(self, digits: Counts) -> Counts:
        """The candidates whose blocks take these options: (n, blocks) → (n,)."""
        return (digits * self._place_values).sum(axis=1)

    @property
    def _place_values(self) -> Counts:
        return len(self.options) ** np.arange(self.blocks - 1, -1, -1, dtype=np.int64)

    def all_options(self) -> list[list[int]]:
        """The numbers of the options that each block may take: all."""
        return [list(range(len(self.options)))] * self.blocks


def _with_choices(config: CvTConfig, choices: list[tuple[int, float]]) -> CvTConfig:
    """A configuration whose blocks take these strides and ratios, one after the other."""
    strides, ratios = zip(*choices, strict=True)
    return config.with_overrides(kv_stride=strides, mlp_ratio=ratios)


class Candidates:
    """The candidates of a space with allowed options and within limits.

    Args:
        space: all of them.
        options: which of the space's options each block may take; all unless given.
        limits: the most that a candidate may cost, by the names of the space's tables.
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
                raise UserError(
                    f"no candidate has {name} of {most:g} or less; the least is {least:g}"
                )

    def inside(self, digits: Counts) -> list[int]:
        """The numbers of those that fit: (n, blocks) → at most n."""
        return self.space.numbers(digits[self.space.fits(digits, self.limits)]).tolist()

    def random(
        self, generator: np.random.Generator, count: int, known: Collection[int] = ()
    ) -> list[int]:
        """Distinct candidates that are not in `known`, uniformly; fewer if there are fewer."""
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
            generator: draws.
            count: of children.
            ranked: the numbers of their possible parents, the best first.
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
        candidates: what may be chosen.
        evaluate: numbers → scores.
        budget: how many to evaluate in all, the first ones included.
        generator: draws; the same one and the same scores give the same candidates.
        first: the first generation; as many of them as a population has.
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
    """The options of every block without the `count` that lose most.

    An option's score is the mean accuracy of the candidates that use it, and its loss is the
    difference to the best option of its block. Options without a candidate go first. Every block
    keeps its best option, and some candidate stays within the limits.
    """
    digits = candidates.space.digits(np.array(list(scores)))
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
