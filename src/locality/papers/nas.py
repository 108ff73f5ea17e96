"""CvT's architecture search (§4.2) at laptop scale: does it find anything, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from locality.analysis.statistics import kendall
from locality.files import read_json
from locality.papers.measures import (
    PARAMETERS,
    TOP1,
    Failures,
    Measure,
    Quantity,
    Values,
    absent,
    combined,
    measured,
    of_result,
)
from locality.papers.specs import Row, Scale, Table, experiment
from locality.runner.runs import Run
from locality.search.config import named, read_search
from locality.search.run import Search, default_index, space_of
from locality.search.space import Candidates
from locality.training import RunConfig, replace, train

SEARCHED = {"digits": "digits", "fashion": "fashion_mnist", "imagenet": "imagenet_nas"}
"""Scale → its search."""

RANKED = 20
"""Candidates that are trained from scratch to see whether the supernet ranks them right."""

_TASK = "locality.papers.nas:"


def search_below_default(config: RunConfig, folder: Path | str) -> dict[str, Any]:
    """Search for a candidate that costs no more than the CvT the search starts from.

    Args:
        config: of the supernet; the search is the one whose recipe it has.
        folder: of the search.
    """
    known = next(each for each in map(named, SEARCHED.values()) if each.run.recipe == config.recipe)
    search = dataclasses.replace(known, run=config, parameters=None)
    space = space_of(search)
    macs = space.cost(default_index(search, space)).macs
    return Search(dataclasses.replace(search, macs=macs), folder, quiet=True).run()


def train_found(config: RunConfig, folder: Path | str) -> dict[str, Any]:
    """Train what a search has found, from scratch.

    Args:
        config: of the CvT it started from; `model.weights` is the folder of the search.
        folder: of the run.
    """
    found = read_json(Path(str(config.model.weights)) / "result.json")
    chosen = {f"model.overrides.{name}": found[name] for name in ("kv_stride", "mlp_ratio")}
    return train(replace(config, chosen | {"model.weights": None}), folder)


def _supernet_top1(numbers: tuple[int, ...]) -> Measure:
    """Held-out accuracies of candidates with the weights of a search's supernet."""

    def read(run: Run) -> list[float]:
        config = read_search(run.folder)
        search = Search(config, run.folder, quiet=True)
        search.begin()
        search.load_supernet(len(config.rounds()) - 1)
        return [search.score(number)[0] for number in numbers]

    return Measure(f"supernet top1 of {numbers}", read)


def _between_seeds(candidates: Sequence[Quantity]) -> Quantity:
    """Kendall's τ between the accuracies that each seed and the next one give candidates."""

    def evaluate(failures: Failures) -> Values:
        found = [each.evaluate(failures).by_seed for each in candidates]
        seeds = sorted(set.intersection(*map(set, found)))
        orders = [[each[seed] for each in found] for seed in seeds]
        pairs = zip(seeds, orders, orders[1:] + orders[:1], strict=True)
        return Values({seed: kendall(one, other) for seed, one, other in pairs})

    return Quantity(evaluate, "", tuple(taken for each in candidates for taken in each.measures))


@experiment("cvt/nas")
def nas(s: Scale) -> Table:
    """From scratch, at no more multiply-accumulates than the default; a search for every seed."""
    values = {"ranked": RANKED}
    if s.name not in SEARCHED:
        empty = absent(f"scale '{s.name}' has no search")
        return Table((Row("default", {"top1": empty}),), values=values)
    search = named(SEARCHED[s.name])
    space = space_of(search)
    default = default_index(search, space)
    most, generator = space.cost(default).macs, np.random.default_rng(0)
    drawn = Candidates(space, None, {"macs": most}).random(generator, 1000)
    alike = [number for number in drawn if space.cost(number).macs > 0.95 * most]
    ranked = tuple(Candidates(space).random(generator, RANKED))

    def scratch(number: int, seed: int) -> Run:
        base, model = s.base("CvT-13", search.run.model.name), space.settings(number)
        config = replace(dataclasses.replace(base, seed=seed, model=search.run.model), model)
        return s.run(config, f"candidate {number} seed {seed}")

    searches, found = [], []
    for seed in s.seeds:
        config = dataclasses.replace(search.run, seed=seed)
        searches.append(s.run(config, f"search seed {seed}", (), f"{_TASK}search_below_default"))
        start = {"model.weights": str(searches[-1].folder)}
        config = replace(scratch(default, seed).config, start)
        found.append(s.run(config, f"found seed {seed}", (searches[-1],), f"{_TASK}train_found"))
    chance = zip(alike[: len(s.seeds)], s.seeds, strict=True)
    groups = {
        "default": [scratch(default, seed) for seed in s.seeds],
        "found": found,
        "random, same cost": [scratch(*each) for each in chance],
    }
    taken = {"parameters": PARAMETERS, "flops": of_result("macs", per=1e9), "top1": TOP1}
    rows = [
        Row(label, {name: measured(runs, measure) for name, measure in taken.items()})
        for label, runs in groups.items()
    ]
    for way in ("evolution", "random"):
        best = measured(searches, of_result("best", way))
        rows.append(Row(f"best by {way}", {"held_out": best}))
    candidates = [
        measured((scratch(number, seed) for seed in s.few_seeds), TOP1) for number in ranked
    ]
    inside = measured(searches[: len(s.few_seeds)], _supernet_top1(ranked))
    agreement = combined(lambda one, *others: kendall(one, others), inside, *candidates, unit="")
    rows.append(Row("supernet and from scratch", {"tau": agreement}))
    rows.append(Row("two seeds from scratch", {"tau": _between_seeds(candidates)}))
    return Table(tuple(rows), values=values)
