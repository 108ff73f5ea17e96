"""ConViT's figures of attention: nonlocality and gates over training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import numpy as np

from locality.figures.curves import Line, gate_lines, nonlocality_lines
from locality_papers.convit_tables import with_teacher
from locality_papers.measures import TRAJECTORY, Quantity, combined, summed_rate
from locality_papers.scales import FAMILIES, Scale
from locality_papers.specs import Figure, Panel, Series, experiment

GATES_FALL = 0.731
"""From σ(1), the initial gate, to 0, reached by the mean gate of layers 6 to 10 (§4, p. 8)."""


class Trajectory:
    """The values of `TRAJECTORY` as arrays.

    Attributes:
        nonlocality: (layers, snapshots).
        growth: nonlocality at the end − before the first step, (layers,).
        early_drop: nonlocality before the first step − early in training, (layers,).
        gates: σ(λ), mean over heads, (gated layers, snapshots).
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        gates = [each["gates"] for each in found["layers"] if each["gates"] is not None]
        self.nonlocality = np.array([each["nonlocality"] for each in found["layers"]])
        self.growth = self.nonlocality[:, -1] - self.nonlocality[:, 0]
        self.early_drop = self.nonlocality[:, 0] - self.nonlocality[:, found["early"]]
        self.gates = np.array([[fmean(heads) for heads in layer] for layer in gates])


def reducer(
    trajectory: Quantity, unit: str = "tokens"
) -> Callable[[Callable[..., float]], Quantity]:
    """A function that turns a reduction (trajectory → number) into a quantity."""
    return lambda number: combined(lambda found: number(Trajectory(found)), trajectory, unit=unit)


EMPTIED = 3.2
"""Decrease of λ that brings a gate near 0: σ(1 − 3.2) = 0.1."""


def reach(s: Scale) -> float:
    """About how far λ can move in a run: the sum of its learning rates."""
    return summed_rate(s.runs("ConViT-S", seeds=s.seeds[:1])[0].config).evaluate({}).at(0)


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
    """One panel per gated layer."""
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
    gated = s.architecture("ConViT-S").gpsa_layers
    found = {role: s.measured(TRAJECTORY, role) for role in ("DeiT-S", "ConViT-S")}
    deit, convit = map(reducer, found.values())

    def end(number: Callable[..., Quantity]) -> Quantity:
        return number(lambda of: fmean(of.nonlocality[:gated, -1]))

    asked = {
        "Does DeiT become more local early in training?": deit(lambda of: fmean(of.early_drop)),
        "Does DeiT's first layer stay more local than it started?": deit(lambda of: -of.growth[0]),
        "Does DeiT's last layer end less local than its first?": deit(
            lambda of: of.nonlocality[-1, -1] - of.nonlocality[0, -1]
        ),
        "Do ConViT's gated layers leave locality?": convit(lambda of: fmean(of.growth[:gated])),
        "Do ConViT's gated layers end more local than DeiT's?": end(deit) - end(convit),
    }
    return Figure(
        tuple(_nonlocality_panel(s, *each) for each in found.items()),
        about="Nonlocality (Eq. 8) of each layer over training.",
        questions={"§4, p. 7, Fig. 5": asked},
    )


@experiment("convit/figure-6", "Gates over training, ConViT-S")
def figure_6(s: Scale) -> Figure:
    """σ(λ) of each head, layer by layer."""
    gate = reducer(s.measured(TRAJECTORY, "ConViT-S"), unit="of attention")
    # An odd layer in the middle belongs to neither half.
    half = max(1, s.architecture("ConViT-S").gpsa_layers // 2)
    fall = gate(lambda of: fmean(of.gates[-half:, 0] - of.gates[-half:, -1]))
    asked = {
        "Do gates of the deeper half fall?": fall.stated(GATES_FALL),
        "Does the deeper half end with less positional attention than the first?": gate(
            lambda of: fmean(of.gates[:half, -1]) - fmean(of.gates[-half:, -1])
        ),
    }
    return Figure(
        _gate_panels(s, "S"),
        about="Gate σ(λ) of each head; black: mean over heads. In the paper the mean gate of the "
        "deeper half falls from σ(1) = 0.731 to 0; here the deeper half is the last "
        f"{half} of {s.architecture('ConViT-S').gpsa_layers} gated layers.",
        questions={"§4, pp. 7–8, Fig. 6": asked},
    )


@experiment("convit/figure-10", "Nonlocality of DeiT-S with and without distillation")
def figure_10(s: Scale) -> Figure:
    """Trajectories with and without distillation."""
    found = {"no": s.measured(TRAJECTORY, "DeiT-S"), "hard": with_teacher(s, TRAJECTORY, "DeiT-S")}
    alone, distilled = map(reducer, found.values())

    def end(number: Callable[..., Quantity]) -> Quantity:
        return number(lambda of: fmean(of.nonlocality[:, -1]))

    asked = {"Does a convolutional teacher leave DeiT more local?": end(alone) - end(distilled)}
    panels = tuple(
        _nonlocality_panel(s, "DeiT-S", trajectory, f"{label} distillation")
        for label, trajectory in found.items()
    )
    return Figure(
        panels,
        about="Nonlocality (Eq. 8) of each layer of DeiT.",
        questions={"app. B, Fig. 10": asked},
    )


@experiment("convit/figure-13", "Nonlocality of the tiny and base models")
def figure_13(s: Scale) -> Figure:
    """As Fig. 5."""
    roles = [f"{family}-{size}" for size in ("Ti", "B") for family in FAMILIES[::-1]]
    found = {role: s.measured(TRAJECTORY, role, seeds=s.few_seeds) for role in roles}
    mean = {role: reducer(of)(lambda of: fmean(of.growth)) for role, of in found.items()}
    asked = {
        f"Does the larger {family} become less local?": mean[f"{family}-B"] - mean[f"{family}-Ti"]
        for family in FAMILIES
    }
    return Figure(
        tuple(_nonlocality_panel(s, *each) for each in found.items()),
        about="Nonlocality (Eq. 8) of each layer; sizes are compared by its increase.",
        questions={"app. D, Fig. 13": asked},
    )


@experiment("convit/figure-14", "Gates of the tiny and base models")
def figure_14(s: Scale) -> Figure:
    """As Fig. 6."""
    found = {
        size: s.measured(TRAJECTORY, f"ConViT-{size}", seeds=s.few_seeds)
        for size in ("Ti", "S", "B")
    }
    # Of ten gated layers all but the first 4 in Ti, 5 in S and 6 in B end near 0 (app. D).
    ends = {
        size: reducer(of, unit="of attention")(lambda of: fmean(of.gates[:, -1])).stated(
            GATES_FALL * (4 + n) / 10
        )
        for n, (size, of) in enumerate(found.items())
    }
    asked = {"Does the larger ConViT keep more positional attention?": ends["B"] - ends["Ti"]}
    return Figure(
        (*_gate_panels(s, "Ti"), *_gate_panels(s, "B")),
        about="Gate σ(λ) of each head.",
        questions={"§4, p. 8, and app. D, Fig. 14": asked},
    )
