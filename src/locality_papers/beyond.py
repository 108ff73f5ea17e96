"""Beyond the papers: initialisation from trained convolutions and other initialisations, and
fine-tuning to new classes with few images.

ConViT ends with a question: "if SA layers benefit from being initialized as random convolutions,
could one reduce even more drastically their sample complexity by initializing them as pre-trained
convolutions?" Here the convolutions are trained on the same images as the model, so that no further
data is used: for a ConViT whose gated layers approximate those of a convolutional net, compared
with other initialisations, and for a ResNet whose convolutions become gated attention exactly
(`locality.models.initialisations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from locality.analysis.measures import positional_focus
from locality.checkpoints import load
from locality.errors import UserError
from locality.figures.charts import percent
from locality.layers import ImageAttention
from locality.layers.conv_init import window_offsets
from locality.runner.runs import Run
from locality.training.cost import image_counts
from locality_papers.measures import (
    TOP1,
    Measure,
    Quantity,
    combined,
    masked_top1,
    measured,
)
from locality_papers.scales import FAMILIES, Scale, variation
from locality_papers.specs import Cells, Column, Table, experiment

FRACTIONS = (0.05, 0.2, 1.0)


def _top1(found: Mapping[str, Mapping[str, tuple[Run, ...]]]) -> Cells:
    """Top-1 of runs (column → label → runs), in the order of the last column's labels."""
    *_, labels = found.values()
    return {
        label: {column: measured(runs[label], TOP1) for column, runs in found.items()}
        for label in labels
    }


def _parts(found: Iterable[str]) -> dict[str, Column]:
    return {part: Column(f"{part} of the data") for part in found}


def _questions(
    cells: Cells, pairs: Mapping[str, tuple[str, str]], names: Mapping[str, str] = {}
) -> dict[str, dict[str, Quantity]]:
    """Our own questions for each column with both rows: is the first above the second?

    Args:
        cells: the table.
        pairs: question → labels of the two rows.
        names: metric of a column → prefix of its questions; the metric by default.
    """
    asked = {
        f"{names.get(metric, metric)}: {text}": cells[first][metric] - cells[second][metric]
        for metric in dict.fromkeys(metric for of in cells.values() for metric in of)
        for text, (first, second) in pairs.items()
        if metric in cells[first] and metric in cells[second]
    }
    return {"": asked}


def _above(*pairs: tuple[str, str]) -> dict[str, tuple[str, str]]:
    return {f"is {first} above {second}?": (first, second) for first, second in pairs}


# Positional attention of e⁻⁴ on each neighbour of a head's centre, 2% content; both are trained.
_AS_CONVOLUTIONS = {"locality_strength": 4.0, "gating_init": 4.0}


def _from_convolutions(s: Scale, fraction: float) -> tuple[tuple[Run, ...], ...]:
    """Convolutional nets, and ConViTs whose gated layers, or all weights, start from them."""
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


@experiment("beyond/trained-convolutions", "Gated layers initialised from trained convolutions")
def trained_convolutions(s: Scale) -> Table:
    """Compared with random convolutions, twice the training, the net itself, and DeiT."""
    cells = _top1({percent(fraction): _with_convolutions(s, fraction) for fraction in FRACTIONS})
    random, longer = (
        "ConViT, random convolutions (the paper's)",
        "ConViT, random convolutions, trained twice as long",
    )
    gated, whole = "ConViT, gated layers from it", "ConViT, everything from it"
    pairs = {
        "are gated layers from trained convolutions above random ones?": (gated, random),
        "is a whole trained start above random convolutions?": (whole, random),
        "is it above random ones trained as long in all?": (whole, longer),
    }
    return Table(
        cells,
        _parts(cells["DeiT"]),
        about="Not in the papers. The net is trained on the same images for the same number of "
        "steps; `init_from_conv2d_` then keeps as much of each kernel as the heads can represent.",
        questions=_questions(cells, pairs),
    )


_FEW = FRACTIONS[0]
_LAYERWISE = "from weights, rates falling by a quarter with each layer below the classifier"


def _transferred(s: Scale, role: str) -> dict[str, tuple[Run, ...]]:
    """Runs on the second half of the classes with few images each, by initial weights."""
    half = image_counts(s.runs(role, seeds=(0,))[0].config)[2] // 2
    nets = s.runs(role, data__first_classes=half, keep_weights=False)
    new: dict[str, Any] = {"fraction": _FEW, "data__skip_classes": half}
    tuned = new | {"label": "fine-tuned to other classes"}
    layerwise = {"label": f"{tuned['label']}, layer by layer", "optim__layer_decay": 0.75}
    return {
        "from scratch": s.runs(role, **new),
        "from weights": s.started(role, nets, **tuned),
        _LAYERWISE: s.started(role, nets, **tuned | layerwise),
    }


@experiment("beyond/finetuning", "Fine-tuning to new classes with few images")
def finetuning(s: Scale) -> Table:
    """Compared with training from scratch for as many steps."""
    cells = _top1({family: _transferred(s, f"{family}-S") for family in FAMILIES})
    pairs = _above(("from weights", "from scratch"), (_LAYERWISE, "from scratch"))
    return Table(
        cells,
        {family: Column(family) for family in FAMILIES},
        about=f"Not in the papers. Pre-trained on all images of the first half of the classes, "
        f"then fine-tuned on {percent(_FEW)} of the images of the other half for as many steps; "
        f"accuracy on the validation images of the other half.",
        questions=_questions(cells, pairs),
    )


def _fractions(s: Scale) -> list[float]:
    found = [fraction for fraction in (0.05, 0.1, 1.0) if fraction in s.fractions]
    if not found:
        raise UserError("this experiment has fractions 0.05, 0.1 and 1; give at least one of them")
    return found


def _on_changed_images(change: Callable[[Tensor], Tensor], model: nn.Module) -> RemovableHandle:
    """Context manager: apply `change` to the model's input images."""
    return model.register_forward_pre_hook(lambda _, given: (change(given[0]),))


def _shifted(images: Tensor) -> Tensor:
    return images.roll((images.shape[2] // 8, images.shape[3] // 8), (2, 3))


def _noisy(images: Tensor) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return images + 0.5 * noise.to(images)


def _low_contrast(images: Tensor) -> Tensor:
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return mean + 0.3 * (images - mean)


ROBUSTNESS = {
    "shifted by ⅛": masked_top1("shifted by 1/8", partial(_on_changed_images, _shifted)),
    "noise, σ = ¼": masked_top1("noise of 1/4", partial(_on_changed_images, _noisy)),
    "30% contrast": masked_top1("30% contrast", partial(_on_changed_images, _low_contrast)),
}


@torch.no_grad()
def _gates_and_moves(run: Run) -> dict[str, float]:
    """Mean gate, and share of heads that left their place, of heads that replaced a kernel cell."""
    layers = [m.attn for m in load(run.folder).modules() if isinstance(m, ImageAttention)]
    gates = torch.cat([layer.gating[:-1].sigmoid() for layer in layers])
    moves = torch.cat(
        [positional_focus(a.v_pos).centre[:-1] - window_offsets(a.window) for a in layers]
    )
    # Includes heads without a centre (nan).
    left = ~(moves.norm(dim=1) < 0.5)
    return {"gate": 100 * float(gates.mean()), "left": 100 * float(left.float().mean())}


_ATTENTION = Measure("gates and moves of a transformed network", _gates_and_moves)


_FINE_TUNING = 0.2  # of the steps
_TRANSFORMED: dict[str, dict[str, Any]] = {
    "transformed (α = 7, λ = 1)": {},
    "transformed, α = 4": {"fields": {"locality_strength": 4.0}},
    "transformed, α = 20": {"fields": {"locality_strength": 20.0}},
    "transformed, α = 20, v_pos and λ at 10 times the rate": {
        "fields": {"locality_strength": 20.0},
        "optim__position_lr_factor": 10.0,
    },
    "transformed, λ = 6": {"fields": {"gating_init": 6.0}},
}


def _transformed_runs(s: Scale, fraction: float) -> dict[str, tuple[Run, ...]]:
    nets = s.runs("CNN", fraction=fraction, keep_weights=False)
    schedule = nets[0].config.schedule

    def lasting(part: float) -> dict[str, Any]:
        return schedule.lasting(part) | {"schedule.warmup": part * schedule.warmup}

    short = {"fraction": fraction, **lasting(_FINE_TUNING)}
    trained_on = s.started("CNN", nets, label="trained on", **short)
    found = {"the ResNet": nets, "the ResNet, trained on": trained_on}
    for label, changes in _TRANSFORMED.items():
        found[label] = s.started("T-CNN", nets, label=label, **short, **changes)
    whole = s.runs("ConViT-S", fraction=fraction, **lasting(1 + _FINE_TUNING))
    return found | {"ConViT from scratch, as long in all": whole}


@experiment("beyond/transformed", "A trained ResNet whose convolutions become gated attention")
def transformed(s: Scale) -> Table:
    """Fine-tuned, compared with the ResNet trained as long, and ConViT from scratch."""
    found = {percent(fraction): _transformed_runs(s, fraction) for fraction in _fractions(s)}
    cells, columns = _top1(found), _parts(found) | {name: Column(name) for name in ROBUSTNESS}
    *_, last = found.values()
    for label, runs in last.items():
        cells[label] |= {name: measured(runs, measure) for name, measure in ROBUSTNESS.items()}
        if label in _TRANSFORMED:
            heads = measured(runs, _ATTENTION)
            cells[label] |= {name: combined(itemgetter(name), heads) for name in ("gate", "left")}
    first = next(iter(_TRANSFORMED))
    others = ("the ResNet, trained on", "ConViT from scratch, as long in all")
    names = {name: column.name for name, column in columns.items()}
    return Table(
        cells,
        columns | {"gate": Column("mean gate"), "left": Column("heads that left")},
        about=f"Not in the two papers; d'Ascoli et al. 2021 did it on ImageNet. The net is "
        f"trained, transformed and fine-tuned for {_FINE_TUNING:.0%} of its steps on the same "
        f"images. Shift, noise and contrast change the evaluated images, for the models of the "
        f"last column before them. A head has left if its centre is half a token or more away from "
        f"its initial place.",
        questions=_questions(cells, _above(*((first, other) for other in others)), names),
    )


_STARTS: dict[str, dict[str, Any]] = {
    "DeiT, default": variation("DeiT-3×3"),
    "ConViT, default": variation("ConViT-3×3", conv_init=False),
    "ConViT, conv (Eq. 5)": variation("ConViT-3×3"),
    "DeiT, mimetic": variation("DeiT-3×3", init="mimetic"),
    "ConViT, mimetic": variation("ConViT-3×3", init="mimetic", conv_init=False),
    "DeiT, impulse": variation("DeiT-3×3", init="impulse"),
    "ConViT, impulse": variation("ConViT-3×3", init="impulse", conv_init=False),
}


def _initialised(s: Scale, fraction: float) -> dict[str, tuple[Run, ...]]:
    """Runs by initialisation on a fraction of the data."""
    found = {label: s.runs(**row, fraction=fraction) for label, row in _STARTS.items()}
    nets, gated, _ = _from_convolutions(s, fraction)
    return found | {"ConViT, trained_conv": gated, "the convolutional net of trained_conv": nets}


@experiment("beyond/initialisations", "Initialisations of attention")
def initialisations(s: Scale) -> Table:
    """Five initialisations of ConViT and three of DeiT, on fractions of the data."""
    found = {percent(fraction): _initialised(s, fraction) for fraction in _fractions(s)}
    cells = _top1(found)
    pairs = _above(
        ("DeiT, mimetic", "DeiT, default"),
        ("DeiT, impulse", "DeiT, default"),
        ("ConViT, mimetic", "ConViT, default"),
        ("ConViT, impulse", "ConViT, default"),
        ("ConViT, conv (Eq. 5)", "ConViT, default"),
        ("ConViT, trained_conv", "ConViT, conv (Eq. 5)"),
    )
    return Table(
        cells,
        _parts(found),
        about="Not in the papers. Mimetic: Trockman & Kolter 2023; impulse: Zheng et al. 2025, in "
        "closed form. trained_conv starts from the net of the last row, trained for as many steps "
        "on the same images.",
        questions=_questions(cells, pairs),
    )
