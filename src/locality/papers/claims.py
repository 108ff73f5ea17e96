"""Whether a claim of a paper holds here: by a rule, not by eye.

A claim is about one number: a difference that should be above 0, or one that should be within
± a margin of it. The number has a mean and a 95% interval over seeds, differences taken seed by
seed. "Above 0" holds if the whole interval is above 0 and does not hold if the whole interval is
below; "within the margin" holds if the whole interval is inside and does not hold if the whole
interval is outside. Everything else cannot be told at this scale, and neither can anything from
fewer than three seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locality.analysis.statistics import Estimate
from locality.papers.quantities import Empty
from locality.papers.specs import Claim

HOLDS = "holds"
FAILS = "does not hold"
UNDECIDED = "cannot tell at this scale"
NOT_RUN = "not run"
LEAST_SEEDS = 3


def judged(claim: Claim, failures: Mapping[Path, str]) -> dict[str, Any]:
    """A claim with its verdict and the number it rests on, as plain values."""
    content: dict[str, Any] = {
        "text": claim.text,
        "expects": claim.expects,
        "margin": claim.margin,
        "unit": claim.unit,
    }
    try:
        values = claim.quantity.evaluate(failures)
    except Empty as error:
        return content | {"verdict": NOT_RUN, "empty": str(error)}
    found = values.estimate()
    return content | {
        "verdict": verdict(claim, found),
        "mean": found.mean,
        "half_width": found.half_width,
        "n": found.n,
        "empty": None,
    }


def verdict(claim: Claim, found: Estimate) -> str:
    """The rule of this module."""
    low, high = found.low, found.high
    if low is None or high is None or found.n < LEAST_SEEDS:
        return UNDECIDED
    if claim.expects == "above":
        return HOLDS if low > 0 else FAILS if high < 0 else UNDECIDED
    if -claim.margin <= low and high <= claim.margin:
        return HOLDS
    return FAILS if low > claim.margin or high < -claim.margin else UNDECIDED
