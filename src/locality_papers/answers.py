"""The rule that answers each question from the recorded runs.

**yes**: the effect is significantly above 0, or on the asked side of the question's threshold.
**no**: significantly on the other side. **less**: neither, and significantly smaller than the
paper's effect, or than one point of accuracy if the paper gives none. **cannot tell**: the rest,
and any effect with fewer than three seeds.

Tests are by Student's t at 5%, of differences paired by seed. Holm's correction covers the
questions of a table or figure at a scale, the papers' and our own apart: first for a difference
from 0 or the threshold, then, among the rest, for "less". With a protocol, all questions
that it lists count, and all are "cannot tell" until the last has all its seeds; others are marked
*asked later* and corrected apart. Without one, those with runs count.

The error of an effect on `digits` is over seeds, widened by √(1 + n/3) (Nadeau and Bengio, 2003),
as every seed divides the same images again. That of accuracies elsewhere is over seeds and images,
both as samples, models compared image by image. *Unpaired*: which images were right was not
recorded; they count as independent, so the interval is an upper bound, and that over seeds alone
follows. Nonlocality and gates: over seeds, on the same 256
images. Quantities computed from the models alone need no seeds.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from locality.analysis.statistics import Estimate, estimate, holm
from locality.files import csv_text, read_yaml, write_atomic
from locality_papers.experiment import A_POINT, Evaluated, Experiment, Question, Results

YES, NO, LESS, CANNOT_TELL = "yes", "no", "less", "cannot tell"
COLUMNS = (
    *("question", "where", "experiment", "scale", "unit", "n", "planned", "effect", "low", "high"),
    *("threshold", "start", "over_seeds", "p", "images", "paper", "answer", "task"),
    *("protocol", "says"),
)
LEAST_SEEDS = 3
PLANNED, LATER = "planned", "asked later"

Answer = dict[str, Any]
"""A question's `COLUMNS`: `n` of the `planned` seeds, `effect` with its 95% interval, the
`threshold` that it is compared with, the effect before training (`start`), the half width of an
unpaired interval `over_seeds` alone, the p-value of "it is at the threshold", how `images` count
(see `Evaluated`), the paper's effect, why the `task` cannot show it, whether the `protocol` lists
it ("" without one), and what the paper `says`."""

_PROTOCOLS: dict[str, Any] = read_yaml(Path(__file__).with_name("protocol.yaml"))
_NOTHING = Estimate(0.0, None, 0)


class Protocol(NamedTuple):
    """What was decided of an experiment before its first run."""

    fixed: str
    seeds: tuple[int, ...]
    questions: tuple[str, ...]

    def has_seeds(self, effect: Evaluated) -> bool:
        """Whether an effect has exactly the planned seeds, or needs none."""
        return effect.exact or set(effect.by_seed) == set(self.seeds)


def protocol(of: Experiment) -> Protocol | None:
    """The protocol of an experiment; None if it had its first run without one."""
    scale = _PROTOCOLS.get(of.scale.name)
    if scale is None or ("older" in scale and of.name not in scale["families"]):
        return None
    return Protocol(scale["fixed"], tuple(scale["seeds"]), scale["families"].get(of.name, ()))


class _Tested(NamedTuple):
    """An answer with the distance of its effect from the threshold, and that to test against."""

    answer: Answer
    distance: Estimate
    exact: bool
    bound: float | None


def answers(results: Iterable[Results]) -> list[Answer]:
    """Answers to all measured questions, in the order of the experiments."""
    found: list[Answer] = []
    families: dict[tuple[Any, ...], list[_Tested]] = {}
    for of in results:
        plan = protocol(of.experiment)
        asked = [(question, of.effect(question.effect)) for question in of.experiment.questions]
        # Nothing is looked at before the last planned run of an experiment is there.
        complete = plan is None or all(
            plan.has_seeds(effect) for question, effect in asked if question.text in plan.questions
        )
        for question, evaluated in asked:
            tested = _unanswered(of, question, evaluated, plan, complete)
            if evaluated.estimate is not None:
                found.append(tested.answer)
            elif tested.answer["protocol"] != PLANNED:
                continue
            family: tuple[Any, ...] = (of.experiment.scale.name, of.experiment.name)
            family += bool(question.where), tested.answer["protocol"]
            if plan is not None and evaluated.exact:  # needs no correction
                family = (question.text, *family)
            families.setdefault(family, []).append(tested)
    for of_family in families.values():
        _answer(of_family)
    return found


def _unanswered(
    of: Results, question: Question, evaluated: Evaluated, plan: Protocol | None, complete: bool
) -> _Tested:
    effect, exact = evaluated.estimate or _NOTHING, evaluated.exact
    paper = of.paper(question.effect) if question.paper is None else question.paper
    unpaired = evaluated.images == "unpaired"
    over_seeds = estimate([*evaluated.by_seed.values()]).half_width if unpaired else None
    listed = plan is not None and question.text in plan.questions
    distance = replace(effect, mean=question.side * (effect.mean - question.threshold))
    complete = complete and (plan is None or plan.has_seeds(evaluated))
    tested = distance if exact or complete else _NOTHING
    answer = {
        "question": question.text,
        "where": question.where,
        "experiment": of.experiment.name,
        "scale": of.experiment.scale.name,
        "unit": question.unit,
        "n": None if exact else effect.n,
        "planned": None if exact else evaluated.planned if plan is None else len(plan.seeds),
        "effect": effect.mean,
        "low": effect.low,
        "high": effect.high,
        "threshold": question.threshold or None,
        "start": None if exact or evaluated.estimate is None else of.start(question.effect),
        "over_seeds": over_seeds,
        "p": p_value(tested, 0.0, exact),
        "images": evaluated.images,
        "paper": None if paper is None else round(paper, 6),
        "answer": CANNOT_TELL,
        "task": question.task,
        "protocol": "" if plan is None or exact else PLANNED if listed else LATER,
        "says": question.says,
    }
    bound = A_POINT if question.unit == "points" else None
    if paper is not None and (far := question.side * (paper - question.threshold)) > 0:
        bound = round(far, 6)
    return _Tested(answer, tested, exact, bound)


def _answer(family: list[_Tested]) -> None:
    """Answer the questions of a family, in place."""
    rest = []
    for tested, differs in zip(family, holm([of.answer["p"] for of in family]), strict=True):
        if differs:
            tested.answer["answer"] = YES if tested.distance.mean > 0 else NO
        elif tested.bound is not None:
            rest.append((tested, tested.bound))
    below = holm(
        [p_value(of.distance, b, of.exact) if of.distance.mean < b else 1.0 for of, b in rest]
    )
    for (tested, _), found in zip(rest, below, strict=True):
        if found:
            tested.answer["answer"] = LESS


def p_value(estimate: Estimate, at: float, exact: bool = False) -> float:
    """Two-sided p-value of "the effect is `at`"; 1 with too few seeds."""
    if exact:
        return float(estimate.mean == at)
    return estimate.p_value(at) if estimate.n >= LEAST_SEEDS else 1.0


def write_answers(path: Path, found: Iterable[Answer]) -> None:
    """Write answers as CSV, one per line."""
    lines = [[_rounded(answer[name]) for name in COLUMNS] for answer in found]
    write_atomic(path, csv_text([COLUMNS, *lines]))


def _rounded(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
