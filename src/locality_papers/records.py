"""An experiment's outcome as plain values, and whether its claims hold.

There is one rule for all claims, and a correction for how many of them are asked. A claim is given
as what a record keeps of it: `expects` ("above" or "equal"), `margin`, and, if it was measured,
`mean`, `half_width`, `n`, `exact` where it needs no run, and which of how many `parts` this is. No
eye decides.
"""

from __future__ import annotations

import bisect
import datetime
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from locality import __version__
from locality.analysis.runs import RecordedRun
from locality.analysis.statistics import Estimate, holm, mean_curve, two_sided_t
from locality.runner.runs import Run
from locality_papers import published
from locality_papers.measures import Empty, Failures, Quantity, Untestable, Values, why_missing
from locality_papers.published import Published
from locality_papers.scales import Scale
from locality_papers.specs import Claim, Experiment, Figure, Panel, Series, Spec, Table

Record = dict[str, Any]

HOLDS = "holds"
FAILS = "does not hold"
UNDECIDED = "cannot tell"
NOT_RUN = "not run"
UNTESTABLE = "not testable at this scale"
MARKS = {HOLDS: "✓", FAILS: "✗", UNDECIDED: "?", NOT_RUN: "–", UNTESTABLE: "∅"}
"""Every verdict, and how a page marks it."""

LEAST_SEEDS = 3
LEVEL = 0.05
MOST_SEEDS = 200


def make_record(item: Experiment, spec: Spec, scale: Scale, failures: Failures) -> Record:
    """Evaluate a spec on the runs that are finished.

    Args:
        item: the experiment.
        spec: what it asks for at `scale`.
        scale: where.
        failures: why runs failed, by folder.

    Returns:
        plain values: `columns` and `rows` of a table or `panels` of a figure, `claims` with their
        verdicts, and `provenance`.
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
                    _cell(
                        row.cells.get(metric),
                        published.find(item.name, row.printed_row, metric),
                        failures,
                    )
                    for metric in spec.columns
                ],
            }
            for row in spec.rows
        ]
    elif isinstance(spec, Figure):
        record["panels"] = [_panel(panel, failures) for panel in spec.panels]
        record["empty"] = _why_not_drawn(spec, failures)
    record["claims"] = [decided(claim, failures) for claim in spec.claims]
    record["provenance"] = provenance(spec.runs)
    return record


def _cell(
    quantity: Quantity | None, printed: Published | None, failures: Failures
) -> Record | None:
    if quantity is None:
        return None
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
        series.quantity, failures, lambda values: mean_curve(list(values.by_seed.values()))
    )


def _why_not_drawn(spec: Figure, failures: Failures) -> str | None:
    """For a drawing: what is missing for it."""
    for run in spec.drawn:
        if reason := why_missing(run, failures):
            return f"{run.name}: {reason}"
    return None


def decided(claim: Claim, failures: Failures) -> Record:
    """A claim with what it rests on, seed by seed, and its verdict taken alone.

    Of several parts that is the one that decides: the surest of those that speak against the claim
    or, if none does, the least sure.
    """
    content: Record = {
        "text": claim.text,
        "where": claim.where,
        "expects": "above" if claim.within is None else "equal",
        "margin": claim.within or 0.0,
        "unit": next(iter(claim.parts.values())).unit,
    }
    try:
        parts = [
            {"part": name, "exact": not quantity.runs} | _measured(quantity.evaluate(failures))
            for name, quantity in claim.parts.items()
        ]
    except Empty as error:
        verdict = UNTESTABLE if isinstance(error, Untestable) else NOT_RUN
        return content | {"verdict": verdict, "empty": str(error)}
    full = [content | part for part in parts]
    against = [part for part in full if not _agrees(part)]
    deciding = min(against, key=_p_value) if against else max(full, key=_p_value)
    content = deciding | {"parts": len(parts), "empty": None}
    return content | {"verdict": judge(content)[0]}


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


def judge(claim: Record) -> tuple[str, float]:
    """The verdict on a measured claim taken alone, and the p-value of what it rests on.

    A claim is about one number: a difference that should be above 0, or one that should be within
    ± a margin of it. Of a claim that names a value ("less than 10 points", "63% fewer") the number
    is how far it is from there. The number has a mean and a 95% interval over seeds (Student's t),
    differences taken seed by seed. "Above 0" holds if the whole interval is above 0 and does not
    hold if the whole interval is below; "within the margin" holds if the whole interval is inside
    and does not hold if the whole interval is outside. Everything else cannot be told, and neither
    can anything from fewer than three seeds. What is computed without training (a count of
    parameters, say) needs no seeds.

    A claim about several numbers (every layer, say) holds if each of them does, and does not hold
    if one of them does not at a p-value that is multiplied by their number. The number shown is
    the one that decides: the surest of those against the claim or, if there is none, the least
    sure.
    """
    verdict, p = HOLDS if _agrees(claim) else FAILS, _p_value(claim)
    if verdict == FAILS:
        p = min(1.0, p * claim.get("parts", 1))
    return (verdict if p < LEVEL else UNDECIDED), p


def _agrees(claim: Record) -> bool:
    """Whether the mean is where the claim has it, however sure that is."""
    mean = claim["mean"]
    return mean > 0 if claim["expects"] == "above" else abs(mean) < claim["margin"]


def _p_value(claim: Record) -> float:
    """How surely the mean is on its side of the bound."""
    if claim.get("exact"):
        return 0.0
    if claim["n"] < LEAST_SEEDS:
        return 1.0
    return Estimate(claim["mean"], claim["half_width"], claim["n"]).p_value(_bound(claim))


def _bound(claim: Record) -> float:
    """What the mean has to be told apart from: 0, or the nearer end of the margin."""
    return 0.0 if claim["expects"] == "above" else math.copysign(claim["margin"], claim["mean"])


def corrected(claims: Sequence[Record]) -> list[str]:
    """Verdicts on measured claims taken together: Holm's correction at the same level.

    In order of their p-values, the k-th of a paper's m claims is decided if it and all before it
    have p < 0.05 / (m − k + 1). The chance that even one of the verdicts on this paper is wrong is
    then below 5%. Claims that need no seeds are not among the m. This takes the number of seeds as
    fixed beforehand: experiments given more after a first look, all their cells alike (from 8
    to as many as 60 on digits, from 3 or 5 to as many as 53 on photographs), are somewhat likelier
    to be decided than that.
    """
    alone = [judge(claim) for claim in claims]
    tested = [i for i, claim in enumerate(claims) if not claim.get("exact")]
    verdicts = [verdict for verdict, _ in alone]
    rejected = holm([alone[index][1] for index in tested], LEVEL)
    for index, sure in zip(tested, rejected, strict=True):
        verdicts[index] = verdicts[index] if sure else UNDECIDED
    return verdicts


def seeds_needed(claim: Record) -> int | None:
    """How many seeds would decide a claim alone, if its mean and its scatter stayed as they are.

    None if there is no scatter to judge by, or it would take more than `MOST_SEEDS`.
    """
    if claim["half_width"] is None:
        return None
    deviation = claim["half_width"] / two_sided_t(claim["n"] - 1) * math.sqrt(claim["n"])

    def would_decide(seeds: int) -> bool:
        half_width = two_sided_t(seeds - 1) * deviation / math.sqrt(seeds)
        return judge(claim | {"n": seeds, "half_width": half_width})[0] != UNDECIDED

    seeds = range(LEAST_SEEDS, MOST_SEEDS + 1)
    found = bisect.bisect_left(seeds, True, key=would_decide)
    return seeds[found] if found < len(seeds) else None
