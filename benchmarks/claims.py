"""How often verdicts on claims are wrong, under the rule by which the study decides them.

    python benchmarks/claims.py --output benchmarks/results/claims.json

True effects lie where it is hardest to be right: none, just the smallest that counts, or as much
with the other sign. Two models answer the same images in all seeds: images differ in how hard they
are, half of that for both models, and seeds in how well training goes. Outcomes are looked at with
5, 8, 20 and 40 seeds, and seeds are added until a first claim is decided: the worst one can do.
Counted are families of claims with a wrong verdict when that ends: "holds" without an effect that
counts, "contradicted" or "not reproduced" with one, "contradicted" without one of the other sign.
Beside the rule: looks that cost nothing, images left out of the interval, and both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from locality.analysis.statistics import estimate
from locality.files import write_atomic
from locality_papers.measures import Term, Values
from locality_papers.records import CONTRADICTED, HOLDS, NOT_REPRODUCED, UNDECIDED, corrected

LOOKS = (5, 8, 20, 40)
IMAGES = 451
LEAST = 0.5  # points, as are:
ACCURACY, SCATTER = 90.0, 0.8
EFFECTS = (LEAST, 0.0, -LEAST)
WRONG = {
    LEAST: {HOLDS, CONTRADICTED, NOT_REPRODUCED},
    0.0: {HOLDS, CONTRADICTED},
    -LEAST: {HOLDS, CONTRADICTED},
}
RULES = {
    "the rule": {"looks": True, "images": True},
    "looks cost nothing": {"looks": False, "images": True},
    "images left out": {"looks": True, "images": False},
    "neither": {"looks": False, "images": False},
}


def accuracies(generator: np.random.Generator, effect: float, anew: bool) -> np.ndarray:
    """Per cent of two models on the same images, (2, seeds); one draw for all seeds, or for each.

    A model is right on an image if a normal variable is below the quantile of its accuracy. Of its
    variance the image has four fifths, half of them for both models, and the seed the rest.
    """
    seeds = max(LOOKS)
    draws = seeds if anew else 1
    both, own = (generator.standard_normal((models, draws, IMAGES)) for models in (1, 2))
    luck = generator.standard_normal((2, seeds, IMAGES))
    hard = np.sqrt(0.4) * (both + own) + np.sqrt(0.2) * luck
    of_seed = generator.normal(ACCURACY, SCATTER, (2, seeds)) + np.array([[effect], [0.0]])
    at = [[NormalDist().inv_cdf(top1 / 100) for top1 in of] for of in of_seed]
    return 100 * (hard < np.array(at)[:, :, None]).mean(axis=2)


def claim(top1: np.ndarray, look: int, anew: bool, rule: dict[str, bool]) -> dict[str, Any]:
    """What a record would hold of a difference at a look."""
    first, second = top1[:, : LOOKS[look]]
    found = estimate((first - second).tolist())
    terms = {
        n: Term(float(of.mean()) / 100, slope, IMAGES)
        for n, (of, slope) in enumerate(((first, 1.0), (second, -1.0)))
    }
    error = Values({}, terms=terms).image_error() if rule["images"] and not anew else 0.0
    part = {"exact": False, "least": LEAST, "images": error} | vars(found)
    return {
        "expects": "above",
        "margin": 0.0,
        "asked": 1,
        "empty": None,
        "parts": [part],
        "look": look + 1 if rule["looks"] else 1,
    }


def wrong_families(
    generator: np.random.Generator, families: int, size: int, anew: bool
) -> Iterator[dict[str, bool]]:
    """For each family whether a verdict is wrong, by rule."""
    for family in range(families):
        effects = [EFFECTS[(family + n) % len(EFFECTS)] for n in range(size)]
        drawn = [accuracies(generator, effect, anew) for effect in effects]
        found = {}
        for name, rule in RULES.items():
            for look in range(len(LOOKS)):
                verdicts = corrected([claim(top1, look, anew, rule) for top1 in drawn])
                if any(verdict != UNDECIDED for verdict in verdicts):
                    break
            pairs = zip(effects, verdicts, strict=True)
            found[name] = any(verdict in WRONG[effect] for effect, verdict in pairs)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", type=int, default=400)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for anew in (False, True):
        for size in (1, 10):
            found = list(wrong_families(np.random.default_rng(0), options.families, size, anew))
            row: dict[str, Any] = {"images": "anew with each seed" if anew else "the same"}
            row |= {"claims": size, "families": len(found)}
            for name in RULES:
                row[name] = round(100 * sum(each[name] for each in found) / len(found), 1)
            rows.append(row)
            print(row, flush=True)
    if options.output is not None:
        write_atomic(options.output, json.dumps({"looks": LOOKS, "wrong_percent": rows}) + "\n")


if __name__ == "__main__":
    main()
