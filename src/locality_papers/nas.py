"""CvT's architecture search (§4.2) at laptop scale: whether it finds better models, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import combinations, starmap
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from locality.errors import UserError
from locality.files import read_json
from locality.runner.runs import Run
from locality.training import RunConfig, replace, train
from locality.training.resolved_run import meta_model
from locality_papers.measures import (
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
from locality_papers.scales import Scale
from locality_papers.search.config import SearchConfig, named, read_search
from locality_papers.search.run import Search, shape, space_of
from locality_papers.search.space import OPTIONS, Candidate, SearchSpace
from locality_papers.specs import Cells, Column, Table, experiment, standard_columns

SEARCHED = {"digits": "digits", "fashion": "fashion_mnist", "imagenet": "imagenet_nas"}
"""Scale → search."""

RANKED = 20
"""Number of candidates trained from scratch to check the supernet's ranking."""

_TASK = "locality_papers.nas:"


def default_candidate(config: SearchConfig, space: SearchSpace) -> Candidate:
    """The CvT that the search starts from."""
    return space.candidate(meta_model(config.run, space.base.num_classes).config)


def search_below_default(config: RunConfig, folder: Path | str) -> dict[str, Any]:
    """Search for a candidate that costs no more than the default CvT.

    Args:
        config: configuration of the supernet; its recipe identifies the search.
        folder: folder of the search.
    """
    known = next(each for each in map(named, SEARCHED.values()) if each.run.recipe == config.recipe)
    search = dataclasses.replace(known, run=config, parameters=None)
    space = space_of(search)
    macs = space.cost(default_candidate(search, space)).macs
    return Search(dataclasses.replace(search, macs=macs), folder, quiet=True).run()


def train_found(config: RunConfig, folder: Path | str) -> dict[str, Any]:
    """Train the candidate found by a search from scratch.

    Args:
        config: configuration of the default CvT; `model.weights` is the folder of the search.
        folder: the run folder.
    """
    found = read_json(Path(str(config.model.weights)) / "result.json")
    chosen = {f"model.{name}": found[name] for name in ("kv_stride", "mlp_ratio")}
    return train(replace(config, chosen | {"model.weights": None}), folder)


def _supernet_top1(candidates: tuple[Candidate, ...]) -> Measure:
    """Held-out accuracies of candidates with the weights of a search's supernet."""
    space_size = len(candidates[0]) * [len(OPTIONS)]
    numbers = tuple(int(np.ravel_multi_index(each, space_size)) for each in candidates)

    def read(run: Run) -> list[float]:
        search = Search(read_search(run.folder), run.folder, quiet=True)
        search.load_supernet()
        return [top1 for top1, _ in search.scores(candidates).values()]

    return Measure(f"supernet top1 of {numbers}", read)


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's rank correlation τ_b: 1 for the same order, −1 for the opposite one.

    Ties count as in τ_b. 0 if all values of one are equal.
    """
    return float(np.nan_to_num(kendalltau(first, second).statistic))


def between_seeds(candidates: Sequence[Quantity]) -> Quantity:
    """Kendall's τ between the candidates' accuracies with two seeds, mean over pairs of seeds.

    Without an interval: pairs share seeds, so they are not independent.
    """

    def evaluate(failures: Failures) -> Values:
        found = [each.evaluate(failures).by_seed for each in candidates]
        seeds = sorted(set.intersection(*map(set, found)))
        if len(seeds) < 2:
            raise UserError("needs two seeds")
        orders = [[each[seed] for each in found] for seed in seeds]
        return Values({0: fmean(starmap(kendall, combinations(orders, 2)))})

    return Quantity(evaluate, "", tuple(pair for each in candidates for pair in each.measures))


@experiment("cvt/nas", "Architecture search: found, default and random candidates")
def nas(s: Scale) -> Table:
    """One search per seed, with no more multiply-accumulates than the default CvT."""
    about = (
        f"The candidate found with no more multiply-accumulates than CvT's default (stride 2, "
        f"ratio 4), and random candidates of at least 95% of its cost, trained from scratch. Held "
        f"out: the best candidate's accuracy in the supernet, on held-out training images. τ: rank "
        f"correlation of two accuracies over {RANKED} random candidates."
    )
    columns = {
        **standard_columns("parameters", "flops", "top1"),
        "held_out": Column("top-1, held out"),
        "tau": Column("Kendall τ", "", 2),
    }
    if s.name not in SEARCHED:
        empty = absent(f"scale '{s.name}' has no search")
        return Table({"default": {"top1": empty}}, columns, about=about)
    search = named(SEARCHED[s.name])
    space = SearchSpace(space_of(search).base)
    default = default_candidate(search, space)
    most, generator = space.cost(default).macs, np.random.default_rng(0)
    drawn = SearchSpace(space.base, {"macs": most}).random(generator, 1000)
    alike = [candidate for candidate in drawn if space.cost(candidate).macs > 0.95 * most]
    ranked = tuple(space.random(generator, RANKED))

    def scratch(candidate: Candidate, seed: int) -> Run:
        base = s.base("CvT-13", search.run.model.name)
        model = {f"model.{name}": value for name, value in space.settings(candidate).items()}
        config = replace(dataclasses.replace(base, seed=seed, model=search.run.model), model)
        return s.run(config, f"candidate {shape(candidate)} seed {seed}")

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
    picked = {
        "parameters": of_result("parameters", per=1e6, unit="M"),
        "flops": of_result("macs", per=1e9),
        "top1": TOP1,
    }
    cells: Cells = {
        label: {name: measured(runs, measure) for name, measure in picked.items()}
        for label, runs in groups.items()
    }
    evolution, random = (
        measured(searches, of_result("best", way)) for way in ("evolution", "random")
    )
    top1_of_ranked = of_result("top1")  # only the order counts, so without an error over images
    candidates = [
        measured((scratch(candidate, seed) for seed in s.few_seeds), top1_of_ranked)
        for candidate in ranked
    ]
    inside = measured(searches[: len(s.few_seeds)], _supernet_top1(ranked))
    agreement = combined(lambda one, *others: kendall(one, others), inside, *candidates, unit="")
    top1 = {label: of["top1"] for label, of in cells.items()}
    asked = {
        "Does the search find better than the default?": top1["found"] - top1["default"],
        "Does it find better than random candidates of its cost?": top1["found"]
        - top1["random, same cost"],
        "Does the supernet rank candidates as training from scratch does?": agreement,
        "Does evolution find better candidates than as many drawn at random?": evolution - random,
    }
    cells |= {
        "best by evolution": {"held_out": evolution},
        "best by random": {"held_out": random},
        "supernet and from scratch": {"tau": agreement},
        "two seeds from scratch": {"tau": between_seeds(candidates)},
    }
    return Table(cells, columns, about=about, questions={"": asked})
