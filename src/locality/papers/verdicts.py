"""Whether claims hold: one rule, and a correction for how many of them are asked.

A claim is given as what a record keeps of it: `expects` ("above" or "equal"), `margin`, and, if it
was measured, `mean`, `half_width`, `n`, and `exact` where it needs no run. No eye decides.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from locality.analysis.statistics import Estimate, holm, two_sided_t

HOLDS = "holds"
FAILS = "does not hold"
UNDECIDED = "cannot tell"
NOT_RUN = "not run"
UNTESTABLE = "not testable at this scale"
VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN, UNTESTABLE)

LEAST_SEEDS = 3
LEVEL = 0.05
MOST_SEEDS = 200

Claimed = Mapping[str, Any]


def judge(claim: Claimed) -> tuple[str, float]:
    """The verdict on a measured claim taken alone, and the p-value of what it rests on.

    A claim is about one number: a difference that should be above 0, or one that should be within
    ± a margin of it. The number has a mean and a 95% interval over seeds (Student's t), differences
    taken seed by seed. "Above 0" holds if the whole interval is above 0 and does not hold if the
    whole interval is below; "within the margin" holds if the whole interval is inside and does not
    hold if the whole interval is outside. Everything else cannot be told, and neither can anything
    from fewer than three seeds. What is computed without training (a count of parameters, say)
    needs no seeds.
    """
    mean, bound = claim["mean"], _bound(claim)
    holds = mean > 0 if claim["expects"] == "above" else abs(mean) < abs(bound)
    verdict = HOLDS if holds else FAILS
    if claim.get("exact"):
        return verdict, 0.0
    if claim["n"] < LEAST_SEEDS:
        return UNDECIDED, 1.0
    p = Estimate(mean, claim["half_width"], claim["n"]).p_value(bound)
    return (verdict if p < LEVEL else UNDECIDED), p


def _bound(claim: Claimed) -> float:
    """What the mean has to be told apart from: 0, or the nearer end of the margin."""
    return 0.0 if claim["expects"] == "above" else math.copysign(claim["margin"], claim["mean"])


def corrected(claims: Sequence[Claimed]) -> list[str]:
    """Verdicts on measured claims taken together: Holm's correction at the same level.

    In order of their p-values, the k-th of m claims is decided if it and all before it have
    p < 0.05 / (m − k + 1). The chance that even one verdict among them is wrong is then below 5%.
    Claims that need no seeds are not among the m.
    """
    alone = [judge(claim) for claim in claims]
    tested = [i for i, claim in enumerate(claims) if not claim.get("exact")]
    verdicts = [verdict for verdict, _ in alone]
    decided = holm([alone[index][1] for index in tested], LEVEL)
    for index in itertools.compress(tested, map(operator.not_, decided)):
        verdicts[index] = UNDECIDED
    return verdicts


def seeds_needed(claim: Claimed) -> int | None:
    """How many seeds would decide a claim alone, if its mean and its scatter stayed as they are.

    None if there is no scatter to judge by, or it would take more than `MOST_SEEDS`.
    """
    if claim["half_width"] is None:
        return None
    root = math.sqrt(claim["n"])
    deviation = claim["half_width"] / two_sided_t(claim["n"] - 1, 0.95) * root
    away = abs(claim["mean"] - _bound(claim))
    for seeds in range(LEAST_SEEDS, MOST_SEEDS + 1):
        if two_sided_t(seeds - 1, 0.95) * deviation / math.sqrt(seeds) < away:
            return seeds
    return None
