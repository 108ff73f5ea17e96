"""Beyond the papers: why gates move little in short runs, and whether they depend on the images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

from locality.analysis.taps import content_off, position_off
from locality_papers.convit_attention import EMPTIED, reach, reducer
from locality_papers.measures import TOP1, TRAJECTORY, Quantity, masked_top1, summed_rate
from locality_papers.scales import Scale
from locality_papers.specs import Cells, Column, Table, experiment

FACTORS = (1.0, 10.0, 100.0)
"""Factors on the learning rate of positions. Adam moves a parameter by at most about the sum of its
learning rates: about 186 over the 300 epochs (1,251 steps each) of ConViT's recipe, and 0.5 to 1.5
in runs of a thousand steps."""
_REACHING = 100.0  # the factor at which runs of a thousand steps have about the paper's sum
_LONGER = 4


@experiment("beyond/position-rate", "Gates and nonlocality at higher rates of v_pos and λ")
def position_rate(s: Scale) -> Table:
    """ConViT's gated layers with a factor on the learning rate of their positions."""
    layers = range(s.architecture("ConViT-S").gpsa_layers)
    columns = {"sum": Column("Σ learning rate", "", 2), "top1": Column("top-1")}
    for n in layers:
        columns[f"gate {n}"] = Column(f"σ(λ), layer {n + 1}", "", 3)
        columns[f"left {n}"] = Column(f"nonlocality gained, layer {n + 1}", "", 2, signed=True)
    cells: Cells = {}
    asked = {}
    choices = [(factor, 1) for factor in FACTORS]
    if reach(s) < EMPTIED:  # otherwise the papers' rate moves gates far enough
        choices += [(1.0, _LONGER), (_REACHING, _LONGER)]
    for factor, longer in choices:
        chosen: dict[str, Any] = {"seeds": s.few_seeds, "keep_weights": True}
        chosen |= s.lasting("ConViT-S", longer)
        if factor != 1:
            chosen["optim__position_lr_factor"] = factor
        config = s.runs("ConViT-S", **chosen)[0].config
        trajectory = s.measured(TRAJECTORY, "ConViT-S", **chosen)
        number, gate = reducer(trajectory), reducer(trajectory, unit="of attention")
        label = f"×{factor:g}" + (f", {longer} times the steps" if longer > 1 else "")
        cells[label] = {"sum": summed_rate(config), "top1": s.measured(TOP1, "ConViT-S", **chosen)}
        for n in layers:
            cells[label][f"gate {n}"] = gate(lambda of, n=n: of.gates[n, -1])
            cells[label][f"left {n}"] = number(lambda of, n=n: of.growth[n])
        fall = gate(lambda of: fmean(of.gates[:, 0]) - fmean(of.gates[:, -1]))
        asked[f"With the rate of v_pos and λ {label}, do gates fall?"] = fall
    return Table(
        cells,
        columns,
        about="Not in the papers. The learning rate of v_pos and λ is multiplied by a factor. Its "
        "sum over the steps is about how far Adam can move them (186 in the paper). Gates are at "
        "the end, averaged over heads; nonlocality gained is from start to end. Prediction, stated "
        "before the first run with a sum that large: if gates stay only because the sum is small, "
        "they fall when it equals the paper's.",
        questions={"": asked},
    )


SHUFFLED = {
    "as they are": "",
    "one order for all": "permuted",
    "25% in their own": "shuffled_25",
    "50% in their own": "shuffled_50",
    "each in its own": "shuffled_100",
}
"""Order of an image's patches → suffix of the dataset (`locality.data.shuffled`)."""

_ADAMW = {"optim__name": "adamw", "optim__lr": 1e-3, "optim__weight_decay": 0.05}
_SHUFFLED_STEPS = 10  # snapshots of the weights, besides the first
_PREDICTED = 0.05

PREDICTIONS = f"""Stated on 2026-11-27, before the first recorded run, but after a trial of three
seeds with AdamW and v_pos and λ at ten times the rate: where each image's patches are in an order
of its own, (1) mean gates fall by at least {_PREDICTED}, (2) masking content costs more than
masking position, (3) each gated layer becomes less local. As they are, or in one order for all,
(4) gates do not fall and masking position costs more. (5) The larger the share of shuffled images,
the lower the gates. (6) At the usual rate, and with AdaMuon, effects have the same signs but are
smaller."""


def _shuffled(s: Scale, optim: Mapping[str, Any], prefix: str = "") -> tuple[Cells, Asked]:
    """Rows of the table of shuffled images for one optimiser, and their questions."""
    layers = range(s.architecture("ConViT-S").gpsa_layers)
    dataset = s.base("ConViT-S").data.dataset
    cells: Cells = {}
    falls, costs, growths, ends = {}, {}, {}, {}
    for label, suffix in SHUFFLED.items():
        chosen: dict[str, Any] = {
            # Crops and rotations of shuffled images would cut through patches.
            "augment__pad": 0,
            "augment__affine": 0.0,
            "augment__cutmix": 0.0,
            "schedule__snapshot_every": s.base("ConViT-S").schedule.length / _SHUFFLED_STEPS,
            **optim,
        }
        if suffix:
            chosen["data__dataset"] = f"{dataset}_{suffix}"
        trajectory = s.measured(TRAJECTORY, "ConViT-S", **chosen)
        number, gate = reducer(trajectory), reducer(trajectory, unit="of attention")
        row = {"top1": s.measured(TOP1, "ConViT-S", **chosen)}
        for part, mask in (("content", content_off), ("position", position_off)):
            masked = masked_top1(f"{part} masked", partial(mask, layers=len(layers)))
            row[part] = s.measured(masked, "ConViT-S", **chosen)
        for n in layers:
            row[f"gate {n}"] = gate(lambda of, n=n: of.gates[n, -1])
            row[f"left {n}"] = number(lambda of, n=n: of.growth[n])
        falls[label] = gate(lambda of: fmean(of.gates[:, 0]) - fmean(of.gates[:, -1]))
        ends[label] = gate(lambda of: fmean(of.gates[:, -1]))
        costs[label] = row["position"] - row["content"]
        growths[label] = [row[f"left {n}"] for n in layers]
        cells[prefix + label] = row
    asked = {f"Patches {label}: do gates fall?": fall for label, fall in falls.items()}
    asked |= {
        f"Patches {label}: does masking content cost more than masking position?": cost
        for label, cost in costs.items()
    }
    asked |= {
        f"Patches {label}: does layer {n + 1} become less local?": growths[label][n]
        for label in ("as they are", "each in its own")
        for n in layers
    }
    dial = [label for label, suffix in SHUFFLED.items() if suffix != "permuted"]
    asked |= {
        f"Are gates lower with patches {more} than {less}?": ends[less] - ends[more]
        for less, more in pairwise(dial)
    }
    return cells, {prefix + text: effect for text, effect in asked.items()}


Asked = dict[str, Quantity]


def _shuffled_table(s: Scale, choices: Mapping[str, Mapping[str, Any]]) -> Table:
    layers = range(s.architecture("ConViT-S").gpsa_layers)
    columns = {
        "top1": Column("top-1"),
        "content": Column("content masked"),
        "position": Column("position masked"),
    }
    for n in layers:
        columns[f"gate {n}"] = Column(f"σ(λ), layer {n + 1}", "", 3)
        columns[f"left {n}"] = Column(f"nonlocality gained, layer {n + 1}", "", 2, signed=True)
    cells: Cells = {}
    asked: Asked = {}
    for prefix, optim in choices.items():
        found, questions = _shuffled(s, optim, prefix)
        cells |= found
        asked |= questions
    about = "Not in the papers. The patches of every image, training and validation, are in "
    about += "another order. Masks are on in all gated layers. Predictions. "
    return Table(cells, columns, about=about + " ".join(PREDICTIONS.split()), questions={"": asked})


@experiment("beyond/shuffled", "Gates where position says nothing: shuffled patches")
def shuffled(s: Scale) -> Table:
    """AdamW with v_pos and λ at ten times the rate."""
    return _shuffled_table(s, {"": _ADAMW | {"optim__position_lr_factor": 10.0}})


@experiment("beyond/shuffled-rates", "Shuffled patches with other optimisers and rates")
def shuffled_rates(s: Scale) -> Table:
    """AdamW at the usual rate; the recipe's optimiser at the usual and ten times the rate."""
    choices: dict[str, dict[str, Any]] = {
        "AdamW ×1: ": _ADAMW,
        "AdaMuon ×1: ": {},
        "AdaMuon ×10: ": {"optim__position_lr_factor": 10.0},
    }
    return _shuffled_table(s, choices)
