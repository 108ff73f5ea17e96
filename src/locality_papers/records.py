"""An experiment's outcome as plain values, and whether its claims hold.

There is one rule for all claims, and a correction for how many of them are asked. A record keeps of
a claim what it `expects` ("above" or "equal"), its `margin`, how many numbers are `asked` of it and
those that were measured, its `parts`. Of each: `mean`, `half_width` over seeds, `n`, the values
`by_seed`, `exact` where it needs no run, `images`, the standard error that the evaluated images
leave, and `paper` and `least`, the size that the paper gives it and the smallest that counts.
Verdicts are computed from these when they are shown. No eye decides.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from locality import __version__
from locality.analysis.runs import RecordedRun
from locality.analysis.statistics import (
    Estimate,
    holm_levels,
    mean_curve,
    two_sided_p,
    two_sided_t,
)
from locality.runner.runs import Run
from locality_papers import published
from locality_papers.measures import Empty, Failures, Quantity, Untestable, Values, why_missing
from locality_papers.scales import Scale
from locality_papers.specs import Claim, Experiment, Figure, Panel, Series, Spec, Table

Record = dict[str, Any]

HOLDS = "holds"
CONTRADICTED = "contradicted"
NOT_REPRODUCED = "not reproduced"
UNDECIDED = "not decided"
NOT_RUN = "not run"
UNTESTABLE = "not testable at this scale"
MARKS = {
    HOLDS: "✓",
    CONTRADICTED: "✗",
    NOT_REPRODUCED: "≈",
    UNDECIDED: "?",
    NOT_RUN: "–",
    UNTESTABLE: "∅",
}
"""Every verdict, and how a page marks it."""

LEAST_SEEDS = 3
LEVEL = 0.05
SHARE = 0.1
"""The smallest effect that counts, of the paper's own."""
FIRST_LOOK = 0.8
"""Of the level, what the number of seeds that was fixed beforehand is judged at."""


def make_record(
    item: Experiment,
    spec: Spec,
    scale: Scale,
    failures: Failures,
    looks: Sequence[int] = (),
) -> Record:
    """Evaluate a spec on the runs that are finished.

    Args:
        item: the experiment.
        spec: what it asks for at `scale`.
        scale: where.
        failures: why runs failed, by folder.
        looks: with how many seeds it was recorded before.

    Returns:
        plain values: `columns` and `rows` of a table or `panels` of a figure, `claims` with what
        decides them, `looks`, and `provenance`.
    """
    record: Record = {
        "name": item.name,
        "title": item.title,
        "kind": "table" if isinstance(spec, Table) else "figure",
        "scale": scale.name,
        "scale_about": scale.about,
        "comparable": scale.comparable,
        "about": spec.about,
    }
    if isinstance(spec, Table):
        record["columns"] = [vars(column) for column in spec.columns.values()]
        record["rows"] = [
            {
                "label": row.label,
                "cells": [
                    _cell(row.cells.get(metric), (item.name, row.printed_row, metric), failures)
                    for metric in spec.columns
                ],
            }
            for row in spec.rows
        ]
    elif isinstance(spec, Figure):
        record["panels"] = [_panel(panel, failures) for panel in spec.panels]
        record["empty"] = _why_not_drawn(spec, failures)
    record["claims"] = [asked(claim, failures) for claim in spec.claims]
    record["provenance"] = made = provenance(spec.runs)
    seeds = len(made["seeds"])
    # As long as runs are missing nobody has seen the outcome.
    seen = made["runs"] and made["finished"] == made["runs"] and seeds not in looks
    record["looks"] = [*looks, seeds] if seen else [*looks]
    return record


def _cell(
    quantity: Quantity | None, place: tuple[str, str, str], failures: Failures
) -> Record | None:
    if quantity is None:
        return None
    printed = published.find(*place)
    if printed is None and quantity.paper is not None:
        printed = published.as_computed(place[0], quantity.paper)
    names = ("value", "protocol", "note")
    paper = None if printed is None else {name: getattr(printed, name) for name in names}
    return {"paper": paper} | _evaluated(quantity, failures, _measured)


def _evaluated(quantity: Quantity, failures: Failures, shown: Callable[[Values], Record]) -> Record:
    """What a record shows of a quantity's values, or why there are none."""
    try:
        values = quantity.evaluate(failures)
    except Empty as error:
        return {"empty": str(error)}
    return shown(values) | {"problems": list(values.problems), "empty": None}


def _panel(panel: Panel, failures: Failures) -> Record:
    axes = {name: value for name, value in vars(panel).items() if name != "series"}
    return axes | {"series": [_series(series, failures) for series in panel.series]}


def _series(series: Series, failures: Failures) -> Record:
    line = {name: value for name, value in vars(series).items() if name != "quantity"}
    return line | _evaluated(
        series.quantity,
        failures,
        lambda values: mean_curve(list(values.by_seed.values()), partial=True),
    )


def _why_not_drawn(spec: Figure, failures: Failures) -> str | None:
    """For a drawing: what is missing for it."""
    for run in spec.drawn:
        if reason := why_missing(run, failures):
            return f"{run.name}: {reason}"
    return None


def claims_of(record: Record) -> list[Record]:
    """A record's claims, each knowing how often the record was looked at."""
    return [claim | {"look": len(record.get("looks", ()))} for claim in record["claims"]]


def asked(claim: Claim, failures: Failures) -> Record:
    """A claim with all that it rests on, seed by seed."""
    content: Record = {
        "text": claim.text,
        "where": claim.where,
        "expects": "above" if claim.within is None else "equal",
        "margin": claim.within or 0.0,
        "unit": next(iter(claim.parts.values())).unit,
        "asked": len(claim.parts),
        "testable": True,
        "empty": None,
    }
    try:
        parts = [_part(name, each, claim, failures) for name, each in claim.parts.items()]
    except Empty as error:
        testable = not isinstance(error, Untestable)
        return content | {"testable": testable, "empty": str(error), "parts": []}
    return content | {"parts": parts}


def _part(name: str, quantity: Quantity, claim: Claim, failures: Failures) -> Record:
    values = quantity.evaluate(failures)
    paper = None if quantity.paper is None else round(quantity.paper, 6)
    least = max(0.0, SHARE * (paper or 0.0)) if claim.least is None else claim.least
    return (
        {"part": name, "exact": not quantity.runs}
        | _measured(values)
        | {"images": values.image_error(), "paper": paper, "least": round(least, 6)}
    )


def _measured(values: Values) -> Record:
    """Mean and interval, and the values they come from."""
    found = values.estimate()
    by_seed = {str(seed): value for seed, value in values.by_seed.items()}
    return {"mean": found.mean, "half_width": found.half_width, "n": found.n, "by_seed": by_seed}


def provenance(runs: Sequence[Run]) -> Record:
    """With what, where and when some runs were computed, from what they left in their folders."""
    finished = [run for run in runs if run.is_finished()]
    environments = [RecordedRun(run.folder, {}).environment for run in finished]
    results = [run.result() or {} for run in finished]
    times = [start["time"] for each in environments for start in each.get("starts", [])]

    def distinct(key: str) -> list[Any]:
        found = [each[key] for each in environments if each.get(key) is not None]
        return list({json.dumps(value): value for value in found}.values())

    return {
        "locality": __version__,
        "runs": len(runs),
        "finished": len(finished),
        "seeds": sorted({run.config.seed for run in finished}),
        "training_seconds": round(sum(result.get("seconds") or 0.0 for result in results), 1),
        "commits": distinct("commit"),
        "packages": distinct("packages"),
        "python": distinct("python"),
        "processors": distinct("processor"),
        "gpus": [gpus for gpus in distinct("gpus") if gpus],
        "threads": distinct("threads"),
        "first": min(times, default=None),
        "last": max(times, default=None),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def judge(claim: Record, level: float = LEVEL) -> str:
    """The verdict on a claim taken alone.

    A claim is about one number: a difference that should be above 0, or one that should be within
    ± a margin of it. Of a claim that names a value ("less than 10 points", "63% fewer") the number
    is how far it is from there. The smallest effect that counts is a tenth of the paper's own, in
    the same unit, where the paper prints it or its text says it, and 0 where neither does or the
    claim names a value; of claims about gates, which have no size in the text, it is a tenth of
    the way from σ(1) = 0.73 to the 0 that the paper's reach. "Above 0" holds if the number is
    significantly above the smallest effect. It is contradicted if it is significantly below minus
    the smallest effect: the other sign, and of a size that counts. It is not reproduced if it is
    significantly below the smallest effect without that: nothing, or next to nothing, of it is
    there. "Within the margin" holds if the number is significantly inside and is
    contradicted if it is significantly outside. Everything else is not decided, and neither is
    anything of fewer than three seeds. What is counted on the models needs no seeds.

    Significant is Student's t over seeds, differences taken seed by seed, and once more with the
    variance that the evaluated images leave added: the larger p-value counts, and the wider 95%
    interval is shown. Where all seeds are evaluated on the same images their scatter does not show
    that variance. Single answers of the models are not kept, so it is bounded by their accuracies:
    p (1 − p) / N of an accuracy p on N images; of a difference p − q at most
    (p (1 − p) + q (1 − q)) / N, as if each model had images of its own, which is too much unless
    what is hard for one is easy for the other; of other numbers the same by their slopes, with
    accuracies that are added up taken to rise and fall together. Where evaluated images are drawn
    anew with each seed, its scatter shows them. Gates and nonlocality (on 256 images, always the
    same) have no such part.

    A claim about several numbers (every layer, say) holds if each of them does; it is contradicted
    or not reproduced if one of them is at a p-value that is multiplied by their number. The number
    shown is the one that decides: the surest of those against the claim or, if there is none, the
    least sure.

    The number of seeds is that of `scales.yaml`, fixed before the first run. Some of the older
    experiments were given more after a look at them. Each record says with how many seeds it was
    looked at (`looks`), from the history of the repository. Their level is spent over the looks:
    four fifths on the first, the last fifth over all others, 1 / (k (k − 1)) of it on the k-th, so
    that it is never overspent, however often and for whatever reason seeds are added. P-values are
    multiplied by that: by 1.25, 10, 30, 60, 100.
    """
    if claim["empty"] is not None:
        return NOT_RUN if claim["testable"] else UNTESTABLE
    part = deciding(claim)
    if p_value(claim) >= level:
        return UNDECIDED
    if _agrees(claim, part):
        return HOLDS
    if claim["expects"] == "equal":
        return CONTRADICTED
    other = part["mean"] < -part["least"] and _against(claim, part, -part["least"]) < level
    return CONTRADICTED if other else NOT_REPRODUCED


def deciding(claim: Record) -> Record:
    """Of a measured claim's parts the surest against it or, if there is none, the least sure."""
    against = [part for part in claim["parts"] if not _agrees(claim, part)]

    def by_p(part: Record) -> float:
        return _p_of(part, _bound(claim, part))

    return min(against, key=by_p) if against else max(claim["parts"], key=by_p)


def p_value(claim: Record) -> float:
    """How likely the number that decides is to be as far on its side of the bound by chance.

    Corrected for the claim's numbers, if it speaks against it, and for looks.
    """
    part = deciding(claim)
    bound = _bound(claim, part)
    if _agrees(claim, part):
        return min(1.0, _spent(claim) * _p_of(part, bound))
    return _against(claim, part, bound)


def _against(claim: Record, part: Record, bound: float) -> float:
    return min(1.0, claim["asked"] * _spent(claim) * _p_of(part, bound))


def _spent(claim: Record) -> float:
    """What a p-value is multiplied by: 1 / the share of the level that this look may take."""
    look = claim.get("look", 1)
    return 1 / (FIRST_LOOK if look <= 1 else (1 - FIRST_LOOK) / (look * (look - 1)))


def _agrees(claim: Record, part: Record) -> bool:
    """Whether the mean is where the claim has it, however sure that is."""
    mean = part["mean"]
    if claim["expects"] == "equal":
        return abs(mean) < claim["margin"]
    return mean > part["least"]


def _bound(claim: Record, part: Record) -> float:
    """What the mean has to be told apart from: the smallest effect, or the margin's nearer end."""
    if claim["expects"] == "equal":
        return math.copysign(claim["margin"], part["mean"])
    return part["least"]


def _p_of(part: Record, at: float) -> float:
    """The two-sided p-value of "the number is `at`", over seeds and images."""
    if part["exact"]:
        return 0.0
    if part["n"] < LEAST_SEEDS:
        return 1.0
    over_seeds = Estimate(part["mean"], part["half_width"], part["n"]).p_value(at)
    if not part["images"]:
        return over_seeds
    error, freedom = _error(part)
    return max(over_seeds, two_sided_p((part["mean"] - at) / error, freedom))


def interval(part: Record) -> float | None:
    """Half of the 95% interval over seeds and images; None where one seed says nothing of it."""
    half: float | None = part["half_width"]
    if half is None or not part["images"]:
        return half
    error, freedom = _error(part)
    return max(half, two_sided_t(freedom) * error)


_LARGE = 1000.0  # degrees of freedom from which on t is as good as normal


def _error(part: Record) -> tuple[float, float]:
    """The standard error over seeds and images, and its degrees of freedom (Satterthwaite's).

    Images bring freedom with them, so where they say little their p-value can be below the seeds'.
    """
    freedom = part["n"] - 1
    of_seeds = (part["half_width"] / two_sided_t(freedom)) ** 2
    whole = of_seeds + part["images"] ** 2
    combined = freedom * (whole / of_seeds) ** 2 if of_seeds else _LARGE
    return math.sqrt(whole), min(combined, max(freedom, _LARGE))


def corrected(claims: Sequence[Record]) -> list[str]:
    """Verdicts on measured claims taken together: Holm's correction at the same level.

    In order of their p-values, the k-th of m claims is decided if it and all before it have
    p < 0.05 / (m − k + 1). The chance that even one of the verdicts is wrong is then below 5%. The
    m are one paper's claims at one scale, or our own questions at it; claims that need no seeds
    are not among them.
    """
    tested = [claim for claim in claims if not is_exact(claim)]
    levels = iter(holm_levels([p_value(claim) for claim in tested], LEVEL))
    return [judge(claim, LEVEL if is_exact(claim) else next(levels)) for claim in claims]


def is_exact(claim: Record) -> bool:
    """Whether a measured claim is counted on the models and needs no run."""
    return all(part["exact"] for part in claim["parts"])
