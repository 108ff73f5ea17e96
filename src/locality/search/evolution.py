"""Choosing among candidates: at random, by evolution, and by dropping options that lose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from locality.benchmark.measure import Work, interleave
from locality.errors import UserError
from locality.models import ImageClassifier, build
from locality.models.base import sides
from locality.search.space import Counts, SearchSpace
from locality.search.supernet import allowed, blocks_of

Score = tuple[float, float]
"""Top-1 on held-out images, then the loss with its sign turned: the higher the better."""
Scores = dict[int, Score]

POPULATION = 25
"""How many the first generation has, and the best so far that the next ones are bred from."""
_TOURNAMENT, _GENERATION = 5, 20
# How many candidates are drawn before it is believed that no new one fits.
_CHUNKS, _CHUNK = 256, 1024


class Candidates:
    """Those candidates of a space that may be chosen.

    Args:
        space: all of them.
        options: which of the space's options each block may take; all unless given.
        limits: the most that a candidate may cost, by the names of the space's tables; one of a
            table that the space does not have yet is no limit.

    Raises:
        UserError: if none fits.
    """

    def __init__(
        self,
        space: SearchSpace,
        options: Sequence[Sequence[int]] | None = None,
        limits: Mapping[str, float] = {},
    ) -> None:
        self.space = space
        self.options = allowed(space, options)
        self.limits = {name: most for name, most in limits.items() if name in space.tables}
        for name, most in self.limits.items():
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
        """Different ones that are not known yet, all alike likely; fewer where there are fewer."""
        found: dict[int, None] = {}
        for _ in range(_CHUNKS):
            for number in self.inside(self._drawn(generator, _CHUNK)):
                if len(found) < count and number not in known:
                    found[number] = None
            if len(found) == count:
                break
        return list(found)

    def _drawn(self, generator: np.random.Generator, count: int) -> Counts:
        return np.stack([generator.choice(row, count) for row in self.options], axis=1)

    def bred(self, generator: np.random.Generator, count: int, ranked: Sequence[int]) -> Counts:
        """Children of tournament winners: uniform crossover, then a block or so drawn anew.

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
        return np.where(mutated, self._drawn(generator, count), crossed)


def evolve(
    candidates: Candidates,
    evaluate: Callable[[Sequence[int]], Scores],
    budget: int,
    generator: np.random.Generator,
    first: Sequence[int],
) -> Scores:
    """The scores of `budget` different candidates, each generation bred from the best so far.

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
        children = candidates.inside(candidates.bred(generator, 8 * wanted, ranked))
        new = [number for number in dict.fromkeys(children) if number not in scores][:wanted]
        new += candidates.random(generator, wanted - len(new), {*scores, *new})
        if not new:
            break
        scores |= evaluate(new)
    return scores


def prune(candidates: Candidates, scores: Scores, count: int) -> list[list[int]]:
    """The options of every block without the `count` that lose most.

    An option is as good as the mean accuracy of the candidates within the limits that take it, and
    loses what it is below its block's best. One that no such candidate took goes first. Every block
    keeps its best option, and the options that remain leave a candidate within the limits.
    """
    digits = candidates.space.digits(np.array(list(scores)))
    top1 = np.array([score[0] for score in scores.values()])
    losses: dict[tuple[int, int], float] = {}
    for block, row in enumerate(candidates.options):
        taken = {option: digits[:, block] == option for option in row}
        means = {o: top1[who].mean() if who.any() else -np.inf for o, who in taken.items()}
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


LATENCY_BATCH = 32
_ROUNDS, _CHECKED = 10, 8


@torch.inference_mode()
def measure_latency(space: SearchSpace, device: torch.device) -> dict[str, Any]:
    """What every block takes with each option, timed here and now.

    Returns:
        milliseconds for a batch: "blocks", (blocks, options), and "fixed", what the whole of a
        model takes beside its blocks; and what the sum of them is off by on whole candidates, as
        fractions: "median_error" and "largest_error".
    """
    size = sides(space.base.img_size)
    images = torch.randn(LATENCY_BATCH, space.base.in_chans, *size, device=device)
    count = len(space.options)
    table, rests = np.empty((space.blocks, count)), []
    for option in range(count):
        model = _model(space, int(space.numbers(np.full((1, space.blocks), option))[0]), device)
        work = {"": partial(model, images)} | _block_calls(model, images)
        milliseconds = _milliseconds(work, device)
        table[:, option] = milliseconds[1:]
        rests.append(milliseconds[0] - sum(milliseconds[1:]))
    fixed = max(0.0, float(np.mean(rests)))
    whole = np.unique(np.random.default_rng(0).integers(0, len(space), _CHECKED))
    calls = {str(n): partial(_model(space, int(n), device), images) for n in whole}
    predicted = fixed + table[np.arange(space.blocks), space.digits(whole)].sum(axis=1)
    errors = np.abs(predicted / np.array(_milliseconds(calls, device)) - 1)
    return {
        "fixed": fixed,
        "blocks": table.tolist(),
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
    }


def _model(space: SearchSpace, number: int, device: torch.device) -> ImageClassifier:
    return build(space[number]).to(device).eval()


def _block_calls(model: ImageClassifier, images: torch.Tensor) -> dict[str, Work]:
    """Each block on what it is given in a forward pass, as a piece of work."""
    given: dict[str, Any] = {}
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs, name=name: given.update({name: inputs}))
        for name, block in blocks_of(model).items()
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    return {name: partial(block, *given[name]) for name, block in blocks_of(model).items()}


def _milliseconds(work: Mapping[str, Work], device: torch.device) -> list[float]:
    """The fastest of a few calls each: everything else is what the machine was doing besides."""
    timing = interleave(dict(work), device, _ROUNDS, warmup=1)
    return [1000 * min(timing.seconds[label]) for label in work]
