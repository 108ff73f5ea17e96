"""Beyond the papers: what it does to the findings that runs here are shorter than the papers'.

Has the baseline converged, and do gates and attention move further where positions may? Adam moves
a parameter by at most about the sum of its learning rates, which is some 186 over the 300 epochs of
ConViT's recipe at 1,251 steps each, and 0.5 to 1.5 in runs of a thousand steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

from locality.papers.measures import TOP1, TRAJECTORY, Quantity, combined, computed
from locality.papers.scales import Scale
from locality.papers.specs import Column, Row, Table, experiment
from locality.runner.cost import train_images
from locality.training import RunConfig
from locality.training.plan import make_plan

FACTORS = (1.0, 3.0, 10.0, 30.0)


def twice_as_long(s: Scale, role: str) -> dict[str, Any]:
    """The setting that doubles the length of a role's runs; warm-up stays as long as it is."""
    schedule = s.runs(role, seeds=s.seeds[:1])[0].config.schedule
    return {f"schedule__{schedule.unit}": type(schedule.length)(2 * schedule.length)}


@experiment("beyond/converged", "DeiT and ConViT trained twice as long")
def converged(s: Scale) -> Table:
    """Top-1 on all data, as long as everywhere and twice as long."""
    rows = []
    for role in ("DeiT-S", "ConViT-S"):
        once = s.measured(TOP1, role)
        twice = s.measured(TOP1, role, **twice_as_long(s, role))
        rows.append(Row(role, {"once": once, "twice": twice, "more": twice - once}))
    columns = {
        "once": Column("as everywhere"),
        "twice": Column("twice as long"),
        "more": Column("difference", signed=True),
    }
    about = "Not in the papers. Top-1 with all training images, and after twice as many updates."
    return Table(about, columns, tuple(rows))


@experiment("beyond/position-rate", "Gates and nonlocality at higher rates of v_pos and λ")
def position_rate(s: Scale) -> Table:
    """What ConViT's gated layers become with a factor on the learning rate of their positions."""
    layers = range(s.architecture("ConViT-S").gpsa_layers)
    columns = {"sum": Column("Σ learning rate", "", 2), "top1": Column("top-1")}
    for n in layers:
        columns[f"gate {n}"] = Column(f"σ(λ), layer {n + 1}", "", 3)
        columns[f"left {n}"] = Column(f"nonlocality gained, layer {n + 1}", "", 2, signed=True)
    rows = []
    for factor in FACTORS:
        chosen: dict[str, Any] = {"seeds": s.few_seeds, "keep_weights": True}
        if factor != 1:
            chosen["optim__position_lr_factor"] = factor
        config = s.runs("ConViT-S", **chosen)[0].config
        course = s.measured(TRAJECTORY, "ConViT-S", **chosen)
        cells = {"sum": summed_rate(config), "top1": s.measured(TOP1, "ConViT-S", **chosen)}
        for n in layers:
            cells[f"gate {n}"] = _of_layer(course, n, lambda layer: fmean(layer["gates"][-1]))
            cells[f"left {n}"] = _of_layer(
                course, n, lambda layer: layer["nonlocality"][-1] - layer["nonlocality"][0]
            )
        rows.append(Row(f"×{factor:g}", cells))
    about = (
        "Not in the papers. The learning rate of v_pos and λ times a factor; its sum, about how "
        "far Adam can move them (186 in the paper); gates at the end, mean over heads; nonlocality "
        "at the end less that at the start."
    )
    return Table(about, columns, tuple(rows))


def summed_rate(config: RunConfig) -> Quantity:
    """The sum over a run's steps of the learning rate of v_pos and λ."""

    def value() -> float:
        plan = make_plan(config, train_images(config)[0])
        peak = config.optim.peak_lr(config.engine.batch_size)
        start, end = config.schedule.warmup_lr, config.schedule.min_lr
        # A line up; then a cosine over the whole length, from where the line has got to.
        warm, length = plan.warmup, plan.steps - plan.cooldown
        cosine = length - warm - length / math.pi * math.sin(math.pi * warm / length)
        rising, falling = warm * (start + peak) / 2, (peak - end) / 2 * cosine
        return config.optim.position_lr_factor * (rising + falling + end * (plan.steps - warm))

    return computed(value)


def _of_layer(course: Quantity, n: int, function: Callable[[Any], float]) -> Quantity:
    return combined(lambda found: function(found["layers"][n]), course)
