"""CvT's architecture search space (§4.2), the costs of its candidates, and random and evolutionary
search.

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

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from locality.errors import UserError
from locality.models.config import CvTConfig
from locality.training.cost import Cost, cost

OPTIONS = ((1, 2.0), (1, 4.0), (2, 2.0), (2, 4.0))
"""The (stride of keys and values, MLP ratio) of a block."""
Candidate = tuple[int, ...]
"""Index of each block's option, first block first."""
Score = tuple[float, float]
"""(top-1 on held-out images, −loss): higher is better."""
Scores = dict[Candidate, Score]
Counts = npt.NDArray[np.int64]

POPULATION = 25
"""Size of the first generation, and number of best candidates that children are bred from."""
_TOURNAMENT, _GENERATION = 5, 20
# Chunks, and candidates per chunk, sampled before giving up on finding new ones that fit.
_CHUNKS, _CHUNK = 256, 1024


class SearchSpace:
    """All architectures that differ from `base` in the `OPTIONS` of their blocks.

    Args:
        base: the configuration shared by all candidates.
        limits: maximum of "parameters", of "macs".

    Raises:
        UserError: no candidate is within the limits.
    """

    def __init__(self, base: CvTConfig, limits: Mapping[str, float] = {}) -> None:
        self.base = base
        self.blocks = sum(stage.depth for stage in base.stages)
        first = (0,) * self.blocks
        self._fixed = np.array(cost(self.config(first)))
        added: list[npt.NDArray[Any]] = []
        for stage in base.stages:  # blocks of a stage cost the same
            before, after = first[: len(added)], first[len(added) + 1 :]
            costs = [cost(self.config((*before, n, *after))) for n in range(len(OPTIONS))]
            added += [np.array(costs) - self._fixed] * stage.depth
        self._added = np.array(added)  # (blocks, options, 2)
        self._most = [limits.get(name, np.inf) for name in Cost._fields]
        for name, least, most in zip(Cost._fields, self.bounds()[0], self._most, strict=True):
            if least > most:
                raise UserError(f"no candidate has {name} ≤ {most:g}; the minimum is {least:g}")

    def __len__(self) -> int:
        return len(OPTIONS) ** self.blocks

    def config(self, candidate: Candidate) -> CvTConfig:
        """The configuration of a candidate."""
        return self.base.with_overrides(**self.settings(candidate))

    @staticmethod
    def settings(candidate: Candidate) -> dict[str, list[Any]]:
        """The settings of a candidate, one value per block."""
        strides, ratios = zip(*(OPTIONS[option] for option in candidate), strict=True)
        return {"kv_stride": list(strides), "mlp_ratio": list(ratios)}

    def costs(self, candidates: Sequence[Candidate] | Counts) -> Counts:
        """Parameters and MACs of candidates: (n, blocks) → (n, 2)."""
        return self._fixed + self._added[np.arange(self.blocks), candidates].sum(axis=1)

    def cost(self, candidate: Candidate) -> Cost:
        """The cost of a candidate."""
        return Cost(*self.costs([candidate])[0].tolist())

    def bounds(self) -> tuple[Cost, Cost]:
        """The minimum and maximum of each cost over all candidates."""
        least, most = (self._fixed + pick(self._added, 1).sum(0) for pick in (np.min, np.max))
        return Cost(*least.tolist()), Cost(*most.tolist())

    def within(self, candidates: Counts) -> list[Candidate]:
        """The candidates within the limits: (n, blocks) → at most n."""
        inside = (self.costs(candidates) <= self._most).all(axis=1)
        return [tuple(row) for row in candidates[inside].tolist()]

    def random(
        self, generator: np.random.Generator, count: int, known: Collection[Candidate] = ()
    ) -> list[Candidate]:
        """At most `count` distinct candidates within the limits not in `known`, drawn uniformly."""
        drawn: dict[Candidate, None] = {}
        for _ in range(_CHUNKS):
            inside = self.within(self._any(generator, _CHUNK))
            drawn |= dict.fromkeys(new for new in inside if new not in known)
            if len(drawn) >= count:
                break
        return list(drawn)[:count]

    def _any(self, generator: np.random.Generator, count: int) -> Counts:
        blocks = range(self.blocks)
        return np.stack([generator.choice(len(OPTIONS), count) for _ in blocks], axis=1)

    def breed(
        self, generator: np.random.Generator, count: int, ranked: Sequence[Candidate]
    ) -> list[Candidate]:
        """Children of tournament winners: uniform crossover, then mutation of one block on average.

        Args:
            generator: random generator.
            count: number of children; those above the limits are left out.
            ranked: possible parents, best first.
        """
        parents = np.array(ranked)
        one, other = (
            parents[generator.integers(len(parents), size=(count, _TOURNAMENT)).min(axis=1)]
            for _ in range(2)
        )
        crossed = np.where(generator.random(one.shape) < 0.5, one, other)
        mutated = generator.random(one.shape) < 1 / self.blocks
        return self.within(np.where(mutated, self._any(generator, count), crossed))


def evolve(
    space: SearchSpace,
    evaluate: Callable[[Sequence[Candidate]], Scores],
    budget: int,
    generator: np.random.Generator,
    first: Sequence[Candidate],
) -> Scores:
    """Evolutionary search: the scores of `budget` candidates.

    Args:
        space: the allowed candidates.
        evaluate: candidates → scores.
        budget: number of evaluations, including the first generation.
        generator: random generator; results are deterministic given its state and the scores.
        first: the first generation, cut to the population's size.
    """
    scores = dict(evaluate(first[:POPULATION]))
    while (wanted := min(_GENERATION, budget - len(scores))) > 0:
        ranked = sorted(scores, key=lambda candidate: scores[candidate], reverse=True)[:POPULATION]
        children = space.breed(generator, 8 * wanted, ranked)
        new = [child for child in dict.fromkeys(children) if child not in scores][:wanted]
        new += space.random(generator, wanted - len(new), {*scores, *new})
        if not new:
            break
        scores |= evaluate(new)
    return scores
