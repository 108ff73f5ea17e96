"""CvT's architecture search (§4.2) at laptop scale: whether it finds better models, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from locality.files import read_json
from locality.runner.runs import Run
from locality.training import RunConfig, replace, train
from locality.training.resolved_run import meta_model
from locality_papers.experiment import STANDARD, Column, Experiment, experiment, minus
from locality_papers.measures import TOP1, of_result
from locality_papers.runs import Scale
from locality_papers.search.config import SearchConfig, named, read_search
from locality_papers.search.run import Search, shape, space_of
from locality_papers.search.space import OPTIONS, Candidate, SearchSpace
from locality_papers.table import Measure

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

    def take(run: Run) -> list[float]:
        search = Search(read_search(run.folder), run.folder, quiet=True)
        search.load_supernet()
        return [top1 for top1, _ in search.scores(candidates).values()]

    return Measure(f"supernet top1 of {numbers}", take=take)


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's rank correlation τ_b; 0 if all values of one are equal."""
    return float(np.nan_to_num(kendalltau(first, second).statistic))


@experiment("cvt/nas", "Architecture search: found, default and random candidates")
def nas(t: Experiment, s: Scale) -> None:
    """One search per seed, with no more multiply-accumulates than the default CvT."""
    t.about = (
        f"The candidate found with no more multiply-accumulates than CvT's default (stride 2, "
        f"ratio 4), and random candidates of at least 95% of its cost, trained from scratch. Held "
        f"out: the best candidate's accuracy in the supernet, on held-out training images. τ: rank "
        f"correlation of accuracies in the supernet and from scratch over {RANKED} candidates."
    )
    t.columns = STANDARD | {
        "held_out": Column("top-1, held out"),
        "tau": Column("Kendall τ", "", 2),
    }
    if s.name not in SEARCHED:
        t.missing("default", "top1", f"scale '{s.name}' has no search")
        return
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
    groups = {
        "default": [scratch(default, seed) for seed in s.seeds],
        "found": found,
        "random, same cost": list(map(scratch, alike[: len(s.seeds)], s.seeds)),
    }
    for label, runs in groups.items():
        t.add(label, "parameters", of_result("parameters", per=1e6), runs)
        t.add(label, "flops", of_result("macs", per=1e9), runs)
        t.add(label, "top1", TOP1, runs)
    ways = [
        t.add(f"best by {way}", "held_out", of_result("best", way), searches)
        for way in ("evolution", "random")
    ]
    few = searches[: len(s.few_seeds)]
    inside = t.add("supernet", "top1 of candidates", _supernet_top1(ranked), few)
    # Only their order counts, so without an error over images.
    keys = [
        t.add(shape(each), "ranked", of_result("top1"), (scratch(each, x) for x in s.few_seeds))
        for each in ranked
    ]

    def agreement(v: Any) -> Any:
        table = pd.concat([v[key] for key in (inside, *keys)], axis=1).dropna()
        return table.apply(lambda row: kendall(row.iloc[0], row.iloc[1:].tolist()), axis=1)

    t.derive("supernet and from scratch", "tau", agreement)
    top1 = {label: (label, "top1") for label in groups}
    asked = {
        "Does the search find better than the default?": minus(top1["found"], top1["default"]),
        "Does it find better than random candidates of its cost?": minus(
            top1["found"], top1["random, same cost"]
        ),
        "Does evolution find better candidates than as many drawn at random?": minus(*ways),
    }
    for text, effect in asked.items():
        t.ask("", text, effect)
    text = "Does the supernet rank candidates as training from scratch does?"
    t.ask("", text, agreement, unit="")
