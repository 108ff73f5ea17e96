"""Beyond the papers: attention that starts from trained convolutions, and other ways to start; few
images of new classes for models that know others; what it does to findings that runs are short.

ConViT ends with a question: "if SA layers benefit from being initialized as random convolutions,
could one reduce even more drastically their sample complexity by initializing them as pre-trained
convolutions?" It is asked here of the same images that the model is then trained on, so that no
further data comes in: of a ConViT whose gated layers start as near as their heads allow to those of
a convolutional net, against other initialisations (`locality.models.initialisations`), and of a
ResNet whose convolutions become gated attention exactly (`locality.models.initialisations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from locality.analysis.measures import positional_focus
from locality.errors import UserError
from locality.figures.charts import percent
from locality.layers import ImageAttention
from locality.layers.conv_init import window_offsets
from locality.papers.measures import (
    TOP1,
    TRAJECTORY,
    Measure,
    Quantity,
    combined,
    masked_top1,
    measured,
    summed_rate,
)
from locality.papers.specs import FAMILIES, REGISTRY, Column, Row, Scale, Table, experiment
from locality.runner.costs import image_counts
from locality.runner.runs import Run
from locality.training import load_run

FRACTIONS = (0.05, 0.2, 1.0)


def _rows(found: Mapping[str, Mapping[str, tuple[Run, ...]]]) -> tuple[Row, ...]:
    """Top-1 of runs: column → label → runs, in the order of the last column's labels."""
    *_, labels = found.values()
    return tuple(
        Row(label, {column: measured(runs[label], TOP1) for column, runs in found.items()})
        for label in labels
    )


def _by_fraction(of: Callable[[float], dict[str, tuple[Run, ...]]], *fractions: float) -> Table:
    """Top-1 on parts of the data of the runs that each asks for, by label."""
    found = {percent(fraction): of(fraction) for fraction in fractions}
    return Table(_rows(found), {part: Column(f"{part} of the data") for part in found})


# e⁻⁴ of positional attention on each neighbour of a head's centre, 2% of content; both may move.
_AS_CONVOLUTIONS = {"locality_strength": 4.0, "gating_init": 4.0}


def _from_convolutions(s: Scale, fraction: float) -> tuple[tuple[Run, ...], ...]:
    """Convolutional nets, ConViTs whose gated layers start from them, and whole ones that do."""
    part: dict[str, Any] = {"role": "ConViT-3×3", "fraction": fraction}
    nets = s.runs(**part, fields={"positional_attention": "conv"})
    gated = s.started(nets=nets, **part, label="trained_conv", fields={"init": "trained_conv"})
    label = "from a trained convolutional net"
    return nets, gated, s.started(nets=nets, **part, label=label, fields=_AS_CONVOLUTIONS)


def _with_convolutions(s: Scale, fraction: float) -> dict[str, tuple[Run, ...]]:
    """Runs by row on a fraction of the data."""
    part: dict[str, Any] = {"role": "ConViT-3×3", "fraction": fraction}
    random, (nets, gated, whole) = s.runs(**part), _from_convolutions(s, fraction)
    twice: dict[str, Any] = random[0].config.schedule.lasting(2)
    return {
        "DeiT": s.runs("DeiT-3×3", fraction=fraction),
        "ConViT, random convolutions (the paper's)": random,
        "ConViT, random convolutions, trained twice as long": s.runs(**part, **twice),
        "the convolutional net itself": nets,
        "ConViT, gated layers from it": gated,
        "ConViT, everything from it": whole,
    }


@experiment("beyond/trained-convolutions")
def trained_convolutions(s: Scale) -> Table:
    """Against random convolutions, twice the training, the net itself, and DeiT."""
    return _by_fraction(partial(_with_convolutions, s), *FRACTIONS)


_FEW = FRACTIONS[0]


def _transferred(s: Scale, role: str) -> dict[str, tuple[Run, ...]]:
    """Runs on the second half of the classes, few images each, by where training starts."""
    half = image_counts(s.runs(role, seeds=(0,))[0].config)[2] // 2
    nets = s.runs(role, data__first_classes=half, keep_weights=False)
    new: dict[str, Any] = {"fraction": _FEW, "data__skip_classes": half}
    tuned = new | {"label": "fine-tuned to other classes"}
    layerwise = {"label": f"{tuned['label']}, layer by layer", "optim__layer_decay": 0.75}
    return {
        "from scratch": s.runs(role, **new),
        "from weights": s.started(role, nets, **tuned),
        "from weights, rates falling by a quarter with each layer below the classifier": s.started(
            role, nets, **tuned | layerwise
        ),
    }


@experiment("beyond/finetuning")
def finetuning(s: Scale) -> Table:
    """Against training from scratch, at equal length."""
    rows = _rows({family: _transferred(s, f"{family}-S") for family in FAMILIES})
    return Table(rows, values={"few": percent(_FEW)})


@experiment("beyond/converged")
def converged(s: Scale) -> Table:
    """Top-1 on all data, as long as everywhere and twice as long."""
    rows = []
    for role in ("DeiT-S", "ConViT-S"):
        once, (run, *_) = s.measured(TOP1, role), s.runs(role)
        twice = s.measured(TOP1, role, **run.config.schedule.lasting(2))
        rows.append(Row(role, {"once": once, "twice": twice, "more": twice - once}))
    return Table(tuple(rows))


def _fractions(s: Scale) -> list[float]:
    found = [fraction for fraction in (0.05, 0.1, 1.0) if fraction in s.fractions]
    if not found:
        raise UserError("this experiment is on 0.05, 0.1 and 1 of the data; give one of these")
    return found


@contextmanager
def _fed(change: Callable[[Tensor], Tensor], model: nn.Module) -> Iterator[None]:
    """A model that gets to see other images than it is given."""
    handle = model.register_forward_pre_hook(lambda _, given: (change(given[0]),))
    try:
        yield
    finally:
        handle.remove()


def _shifted(images: Tensor) -> Tensor:
    return images.roll((images.shape[2] // 8, images.shape[3] // 8), (2, 3))


def _noisy(images: Tensor) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return images + 0.5 * noise.to(images)


def _pale(images: Tensor) -> Tensor:
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return mean + 0.3 * (images - mean)


ROBUSTNESS = {
    "shifted by ⅛": masked_top1("shifted by 1/8", partial(_fed, _shifted)),
    "noise, σ = ¼": masked_top1("noise of 1/4", partial(_fed, _noisy)),
    "30% contrast": masked_top1("30% contrast", partial(_fed, _pale)),
}


@torch.no_grad()
def _gates_and_moves(run: Run) -> dict[str, float]:
    """Of the heads that took over a kernel: their mean gate, and how many look elsewhere now."""
    layers = [m.attn for m in load_run(run.folder)[0].modules() if isinstance(m, ImageAttention)]
    gates = torch.cat([layer.gating[:-1].sigmoid() for layer in layers])
    moves = torch.cat(
        [positional_focus(a.v_pos).centre[:-1] - window_offsets(a.window) for a in layers]
    )
    # A head without a centre (nan) has left it too.
    left = ~(moves.norm(dim=1) < 0.5)
    return {"gate": 100 * float(gates.mean()), "left": 100 * float(left.float().mean())}


_ATTENTION = Measure("gates and moves of a transformed network", _gates_and_moves)


_FINE_TUNING = 0.2  # of the steps


def _transformed_runs(s: Scale, fraction: float) -> dict[str, tuple[Run, ...]]:
    nets = s.runs("CNN", fraction=fraction, keep_weights=False)
    schedule = nets[0].config.schedule

    def lasting(part: float) -> dict[str, Any]:
        return schedule.lasting(part) | {"schedule.warmup": part * schedule.warmup}

    short = {"fraction": fraction, **lasting(_FINE_TUNING)}
    trained_on = s.started("CNN", nets, label="trained on", **short)
    found = {"the ResNet": nets, "the ResNet, trained on": trained_on}
    for label, changes in REGISTRY["beyond/transformed"].rows.items():
        found[label] = s.started("T-CNN", nets, label=label, **short, **changes)
    whole = s.runs("ConViT-S", fraction=fraction, **lasting(1 + _FINE_TUNING))
    return found | {"ConViT from scratch, as long in all": whole}


@experiment("beyond/transformed")
def transformed(s: Scale) -> Table:
    """Fine-tuned, against the ResNet trained on as long, and ConViT from scratch for the sum."""
    fractions = _fractions(s)
    table = _by_fraction(partial(_transformed_runs, s), *fractions)
    whole = _transformed_runs(s, fractions[-1])
    rows = []
    for row in table.rows:
        runs = whole[row.label]
        cells = {name: measured(runs, measure) for name, measure in ROBUSTNESS.items()}
        if row.label in REGISTRY["beyond/transformed"].rows:
            heads = measured(runs, _ATTENTION)
            cells |= {name: combined(itemgetter(name), heads) for name in ("gate", "left")}
        rows.append(Row(row.label, {**row.cells, **cells}))
    values = {"part": f"{_FINE_TUNING:.0%}"}
    return Table(tuple(rows), table.columns, values=values)


def _initialised(s: Scale, fraction: float) -> dict[str, tuple[Run, ...]]:
    """Runs by initialisation on a fraction of the data."""
    rows = REGISTRY["beyond/initialisations"].rows
    nets, gated, _ = _from_convolutions(s, fraction)
    return {label: s.runs(**row, fraction=fraction) for label, row in rows.items()} | {
        "ConViT, trained_conv": gated,
        "the convolutional net of trained_conv": nets,
    }


@experiment("beyond/initialisations")
def initialisations(s: Scale) -> Table:
    """Five ways to start a ConViT, and three to start a DeiT, on parts of the data."""
    return _by_fraction(partial(_initialised, s), *_fractions(s))


FACTORS = (1.0, 3.0, 10.0, 30.0)
"""Of the learning rate of positions: Adam moves a parameter by at most about the sum of its rates,
some 186 over the 300 epochs of ConViT's recipe, 1,251 steps each, and 0.5 to 1.5 in runs of a
thousand steps."""


@experiment("beyond/position-rate")
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
        trajectory = s.measured(TRAJECTORY, "ConViT-S", **chosen)
        cells = {"sum": summed_rate(config), "top1": s.measured(TOP1, "ConViT-S", **chosen)}
        for n in layers:
            cells[f"gate {n}"] = _of_layer(trajectory, n, lambda layer: fmean(layer["gates"][-1]))
            cells[f"left {n}"] = _of_layer(
                trajectory, n, lambda layer: layer["nonlocality"][-1] - layer["nonlocality"][0]
            )
        rows.append(Row(f"×{factor:g}", cells))
    return Table(tuple(rows), columns)


def _of_layer(trajectory: Quantity, n: int, function: Callable[[Any], float]) -> Quantity:
    return combined(lambda found: function(found["layers"][n]), trajectory)
