"""ConViT's figures of what its attention does: nonlocality and gates over training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from locality.figures.curves import Line, gate_lines, nonlocality_lines
from locality_papers.convit_tables import with_teacher
from locality_papers.measures import TRAJECTORY, Quantity, absent, combined, summed_rate
from locality_papers.scales import FAMILIES, Scale
from locality_papers.specs import (
    Claims,
    Expect,
    Figure,
    Panel,
    Series,
    claims_at,
    experiment,
    stated,
)

GATES_FALL = 0.731
"""From σ(1), where gates start, to 0, which their mean reaches in layers 6 to 10 (§4, p. 8)."""
A_GATES_MOVE = GATES_FALL / 10
"""The smallest effect that counts in claims about gates, of which the text says no size."""


class Trajectory:
    """What `TRAJECTORY` measures of a run's attention over its snapshots, as arrays.

    Attributes:
        nonlocality: (layers, snapshots).
        growth: of each layer's from before the first step to the end, (layers,).
        early_drop: how much it has fallen early in training, (layers,).
        by_head: nonlocality, (layers, snapshots, heads).
        gates: σ(λ), (gated layers, snapshots, heads).
        mean_gates: over heads, (gated layers, snapshots).
        early: which snapshot is early in training.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        layers = found["layers"]
        gates = [layer["gates"] for layer in layers if layer["gates"] is not None]
        self.nonlocality = np.array([layer["nonlocality"] for layer in layers])
        self.growth = self.nonlocality[:, -1] - self.nonlocality[:, 0]
        self.by_head = np.array([layer["nonlocality_per_head"] for layer in layers])
        self.gates = np.array(gates)
        self.mean_gates = np.array([[fmean(heads) for heads in layer] for layer in gates])
        self.early = found["early"]
        self.early_drop = self.nonlocality[:, 0] - self.nonlocality[:, self.early]

    def above_deeper(self, values: Sequence[float]) -> float:
        """How much the mean over the first half of the gated layers is above the deeper half's."""
        half = _half(len(self.gates))
        return fmean(values[:half]) - fmean(values[-half:])


def _half(gated: int) -> int:
    """Of so many gated layers; an odd one in the middle belongs to none."""
    return max(1, gated // 2)


def reducer(*trajectories: Quantity, unit: str = "tokens") -> Callable[..., Quantity]:
    """A function that reduces trajectories to a number → the quantity."""

    def reduced(function: Callable[..., float]) -> Quantity:
        return combined(lambda *found: function(*map(Trajectory, found)), *trajectories, unit=unit)

    return reduced


def _by_layer(
    number: Callable[..., Quantity],
    layers: Iterable[int],
    of_all: Callable[[Trajectory], np.ndarray],
) -> dict[str, Quantity]:
    """The numbers of some layers, of a function that has one for each, by name."""
    return {f"layer {n + 1}": number(lambda w, n=n: of_all(w)[n]) for n in layers}


EMPTIED = 3.2
"""How far λ has to fall for a gate near 0: σ(1 − 3.2) = 0.1."""


def reach(s: Scale) -> float:
    """How far λ can move in a run, about: the sum of its learning rates."""
    return summed_rate(s.runs("ConViT-S", seeds=s.seeds[:1])[0].config).evaluate({}).at(0)


def _unless_out_of_reach(s: Scale, parts: dict[str, Quantity]) -> dict[str, Quantity]:
    """Quantities that need gates near 0, where training is long enough for one to get there."""
    if (far := reach(s)) > EMPTIED:
        return parts
    reason = absent(
        f"λ moves by at most about the sum of the learning rates, {far:.2g} here, and starts "
        f"{EMPTIED} away from σ(λ) = 0.1"
    )
    return dict.fromkeys(parts, reason)


def _over_training(title: str, y_label: str, lines: list[Line], trajectory: Quantity) -> Panel:
    series = tuple(
        Series(each.label, combined(each.curve, trajectory), each.colour, each.dashed, each.band)
        for each in lines
    )
    return Panel(title, "epochs", y_label, series)


def _nonlocality_panel(s: Scale, role: str, trajectory: Quantity, title: str = "") -> Panel:
    lines = nonlocality_lines(s.architecture(role).depth)
    return _over_training(title or s.called(role), "nonlocality (tokens)", lines, trajectory)


def _gate_panels(s: Scale, size: str) -> tuple[Panel, ...]:
    """Layer by layer."""
    role = f"ConViT-{size}"
    trajectory = s.measured(TRAJECTORY, role, seeds=s.seeds_of(size))
    model = s.architecture(role)
    return tuple(
        _over_training(
            f"{s.called(role)}\nlayer {n + 1}",
            "gate σ(λ)",
            gate_lines(n, model.num_heads),
            trajectory,
        )
        for n in range(model.gpsa_layers)
    )


@experiment("convit/figure-5", "Nonlocality over training, DeiT-S and ConViT-S")
def figure_5(s: Scale) -> Figure:
    """Eq. 8 by layer, from snapshots."""
    layers, gated = s.architecture("DeiT-S").depth, s.architecture("ConViT-S").gpsa_layers
    found = {role: s.measured(TRAJECTORY, role) for role in ("DeiT-S", "ConViT-S")}
    deit, convit = map(reducer, found.values())

    def above_middle(of: Trajectory, layer: int) -> float:
        """How much further a gated layer leaves locality than those between first and last."""
        return of.growth[layer] - fmean(of.growth[1 : gated - 1])

    def end(number: Callable[..., Quantity]) -> Quantity:
        return number(lambda of: fmean(of.nonlocality[:gated, -1]))

    others = (0, *range(2, gated))
    claims: Claims = {
        "early in training, every layer of DeiT becomes more local": _by_layer(
            deit, range(layers), lambda of: of.early_drop
        ),
        "DeiT's first layer stays more local than it started": deit(lambda of: -of.growth[0]),
        "DeiT's last layer climbs back after that": deit(
            lambda of: of.nonlocality[-1, -1] - of.nonlocality[-1, of.early]
        ),
        "DeiT's last layer ends less local than its first": deit(
            lambda of: of.nonlocality[-1, -1] - of.nonlocality[0, -1]
        ),
        "DeiT ends less local from each layer to the next": _by_layer(
            deit, range(1, layers), lambda of: np.diff(of.nonlocality[:, -1], prepend=0)
        ),
        "every gated layer of ConViT leaves locality": _by_layer(
            convit, range(gated), lambda of: of.growth
        ),
        "ConViT's gated layers end more local than DeiT's": (
            end(deit) - end(convit)
            if s.comparable
            else absent("the initialisation decides it in runs of this length")
        ),
        "the first gated layer leaves it further than those between": convit(
            lambda of: above_middle(of, 0)
        ),
        "the last gated layer leaves it further than those between": convit(
            lambda of: above_middle(of, gated - 1)
        ),
        "the second gated layer leaves it least": (
            _by_layer(convit, others, lambda of: of.growth - of.growth[1])
            if gated > 3
            else absent("of three gated layers only the second is between the first and the last")
        ),
    }
    return Figure(
        tuple(_nonlocality_panel(s, *each) for each in found.items()),
        about="Nonlocality (Eq. 8) of every layer on its own inputs, over training.",
        claims=claims_at("§4, p. 7, Fig. 5", claims),
    )


@experiment("convit/figure-6", "Gates over training, ConViT-S")
def figure_6(s: Scale) -> Figure:
    """σ(λ) of every head, layer by layer."""
    gate = reducer(s.measured(TRAJECTORY, "ConViT-S"), unit="of attention")
    gated = s.architecture("ConViT-S").gpsa_layers
    deeper = range(gated - _half(gated), gated)
    falls = _by_layer(gate, range(gated), lambda of: of.mean_gates[:, 0] - of.mean_gates[:, -1])
    claims: Claims = {
        "the mean gate of every layer falls over training": Expect(
            {
                layer: stated(fall, GATES_FALL) if n in deeper else fall
                for n, (layer, fall) in enumerate(falls.items())
            },
            least=A_GATES_MOVE,
        ),
        "the deeper half's mean gates end near 0: below 0.1": Expect(
            _unless_out_of_reach(s, _by_layer(gate, deeper, lambda of: 0.1 - of.mean_gates[:, -1])),
            least=0,
        ),
        "the deeper half ends with less positional attention than the first": Expect(
            gate(lambda of: of.above_deeper(of.mean_gates[:, -1])), least=A_GATES_MOVE
        ),
        "the gates of the first half end further apart than the deeper ones'": Expect(
            gate(lambda of: of.above_deeper([stdev(heads) for heads in of.gates[:, -1]])),
            least=A_GATES_MOVE,
        ),
    }
    return Figure(
        _gate_panels(s, "S"),
        about="The gate σ(λ) of positional attention, per head; black: mean over heads.",
        claims=claims_at("§4, pp. 7–8, Fig. 6", claims),
    )


@experiment("convit/figure-10", "Nonlocality of DeiT-S with and without distillation")
def figure_10(s: Scale) -> Figure:
    """The two trajectories, and where they end."""
    layers = s.architecture("DeiT-S").depth
    found = {"no": s.measured(TRAJECTORY, "DeiT-S"), "hard": with_teacher(s, TRAJECTORY, "DeiT-S")}
    alone, distilled = map(reducer, found.values())

    def late(number: Callable[..., Quantity]) -> Quantity:
        return number(lambda of: fmean(of.nonlocality[:, -1] - of.nonlocality[:, of.early]))

    def end(number: Callable[..., Quantity]) -> Quantity:
        return number(lambda of: fmean(of.nonlocality[:, -1]))

    claims: Claims = {
        "with a teacher every layer becomes more local early": _by_layer(
            distilled, range(layers), lambda of: of.early_drop
        ),
        "with a teacher nonlocality grows less late": late(alone) - late(distilled),
        "a convolutional teacher leaves DeiT more local": end(alone) - end(distilled),
    }
    panels = tuple(
        _nonlocality_panel(s, "DeiT-S", trajectory, f"{label} distillation")
        for label, trajectory in found.items()
    )
    return Figure(
        panels,
        about="Nonlocality (Eq. 8) of every layer of DeiT.",
        claims=claims_at("app. B, Fig. 10", claims),
    )


@experiment("convit/figure-13", "Nonlocality of the tiny and base models")
def figure_13(s: Scale) -> Figure:
    """As Fig. 5."""
    roles = [f"{family}-{size}" for size in ("Ti", "B") for family in FAMILIES[::-1]]
    found = {role: s.measured(TRAJECTORY, role, seeds=s.few_seeds) for role in roles}
    first = {role: reducer(of)(lambda of: of.growth[0]) for role, of in found.items()}
    mean = {role: reducer(of)(lambda of: fmean(of.growth)) for role, of in found.items()}
    gated = {
        f"{role}, {layer}": number
        for role in ("ConViT-Ti", "ConViT-B")
        for layer, number in _by_layer(
            reducer(found[role]),
            range(s.architecture(role).gpsa_layers),
            lambda of: of.growth,
        ).items()
    }
    claims: Claims = {}
    for family in FAMILIES:
        small, large = f"{family}-Ti", f"{family}-B"
        claims |= {
            f"the first layer of the larger {family} grows less local": first[large] - first[small],
            f"the larger {family} grows less local on average": mean[large] - mean[small],
        }
    claims["every gated layer of ConViT-Ti and of ConViT-B leaves locality"] = gated
    return Figure(
        tuple(_nonlocality_panel(s, *each) for each in found.items()),
        about="Nonlocality (Eq. 8) of every layer; sizes are compared by how much it has grown.",
        claims=claims_at("app. D, Fig. 13", claims),
    )


@experiment("convit/figure-14", "Gates of the tiny and base models")
def figure_14(s: Scale) -> Figure:
    """As Fig. 6."""
    found = {
        size: s.measured(TRAJECTORY, f"ConViT-{size}", seeds=s.few_seeds)
        for size in ("Ti", "S", "B")
    }
    # Of ten gated layers all but the first 4 in Ti, 5 in S and 6 in B end near 0 (app. D).
    fall = {
        f"ConViT-{size}": stated(
            reducer(found[size], unit="of attention")(
                lambda of: fmean(of.mean_gates[:, 0]) - fmean(of.mean_gates[:, -1])
            ),
            GATES_FALL * emptied / 10,
        )
        for size, emptied in (("Ti", 6), ("B", 4))
    }
    # How many still use position.
    using = {
        size: reducer(of, unit="layers")(lambda of: int(sum(of.mean_gates[:, -1] > 0.1)))
        for size, of in found.items()
    }
    using = {
        size: stated(layers, 4 + n)
        for n, (size, layers) in enumerate(_unless_out_of_reach(s, using).items())
    }
    claims: Claims = {
        "in ConViT-Ti and ConViT-B the mean gate falls over training": fall,
        "ConViT-S uses position in more layers than ConViT-Ti": using["S"] - using["Ti"],
        "ConViT-B uses position in more layers than ConViT-S": using["B"] - using["S"],
    }
    return Figure(
        (*_gate_panels(s, "Ti"), *_gate_panels(s, "B")),
        about="The gate σ(λ) of positional attention, per head.",
        claims=claims_at("§4, p. 8, and app. D, Fig. 14", claims),
    )
