"""Beyond the papers: attention that starts from a trained convolution, and other ways to start.

ConViT ends with a question: "if SA layers benefit from being initialized as random convolutions,
could one reduce even more drastically their sample complexity by initializing them as pre-trained
convolutions?" It is asked here twice, of the same images that the model is then trained on, so that
no further data comes in: of a ResNet whose convolutions become gated attention exactly
(`locality.models.transform`), and of a ConViT whose gated layers start as near as their heads allow
to those of a convolutional net, against other initialisations (`locality.models.initialisations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locality.analysis.measures import positional_focus
from locality.layers import ImageAttention
from locality.layers.conv_init import window_offsets
from locality.papers.convit import percent
from locality.papers.measures import TOP1, Measure, Quantity, masked_top1, measured
from locality.papers.scales import Scale
from locality.papers.specs import Claimed, Column, Row, Table, by_label, experiment, said
from locality.runner.runs import Run
from locality.training import load_run

_FINE_TUNING = 0.2  # of the steps


def _fractions(s: Scale) -> list[float]:
    return [fraction for fraction in (0.05, 0.1, 1.0) if fraction in s.fractions]


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
GATE = Measure("mean gate", lambda run: _ATTENTION(run)["gate"], kept=False)
LEFT = Measure("heads that left", lambda run: _ATTENTION(run)["left"], kept=False)


NET = "the ResNet"
ON = "the ResNet, trained on"
TRANSFORMED = "transformed (α = 7, λ = 1)"
FRESH = "ConViT from scratch, as long in all"
_CHOICES: dict[str, dict[str, Any]] = {
    TRANSFORMED: {},
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
    found = {NET: nets, ON: s.started("CNN", nets, label="trained on", **short)}
    for label, changes in _CHOICES.items():
        found[label] = s.started("T-CNN", nets, label=label, **short, **changes)
    whole = lasting(1 + _FINE_TUNING)
    return found | {FRESH: s.runs("ConViT-S", fraction=fraction, **whole)}


@experiment("beyond/transformed", "A trained ResNet whose convolutions become gated attention")
def transformed(s: Scale) -> Table:
    """Fine-tuned, against the ResNet trained on as long, and ConViT from scratch for the sum."""
    runs = {percent(fraction): _transformed_runs(s, fraction) for fraction in _fractions(s)}
    whole = list(runs.values())[-1]
    columns = {part: Column(f"{part} of the data") for part in runs}
    columns |= {name: Column(name) for name in ROBUSTNESS}
    columns |= {"gate": Column("mean gate"), "left": Column("heads that left")}
    rows = []
    claims: Claimed = {}
    for label in whole:
        cells = {part: measured(found[label], TOP1) for part, found in runs.items()}
        cells |= {name: measured(whole[label], taken) for name, taken in ROBUSTNESS.items()}
        if label in _CHOICES:
            cells |= {"gate": measured(whole[label], GATE), "left": measured(whole[label], LEFT)}
        rows.append(Row(label, cells))
    by_label = {row.label: row.cells for row in rows}
    for column in (*runs, *ROBUSTNESS):
        for label, other in ((TRANSFORMED, ON), (TRANSFORMED, FRESH)):
            text = f"{columns[column].name}: {label} is above {other}"
            claims[text] = by_label[label][column] - by_label[other][column]
    about = (
        f"Not in the papers here: d'Ascoli et al. 2021 did it with ImageNet. The net is trained, "
        f"transformed and fine-tuned for {_FINE_TUNING:.0%} of its steps, on the same images. "
        f"Shifts, noise and contrast are those of the evaluated images, of models of the last "
        f"column before them. A head has left if it looks half a token or more beside its place."
    )
    return Table(about, columns, tuple(rows), said("", claims))


PLAIN, EQ_5, TRAINED = "ConViT, default", "ConViT, conv (Eq. 5)", "ConViT, trained_conv"


def _initialised(s: Scale, fraction: float) -> dict[str, Quantity]:
    """Top-1 by initialisation on a fraction of the data."""
    role = "ConViT-3×3"
    conv = {"positional_attention": "conv"}
    nets = s.runs(role, fraction=fraction, keep_weights=False, fields=conv)
    found: dict[str, tuple[Run, ...]] = {
        "DeiT, default": s.runs("DeiT-3×3", fraction=fraction),
        PLAIN: s.runs(role, fraction=fraction, fields={"conv_init": False}),
        EQ_5: s.runs(role, fraction=fraction),
    }
    for init in ("mimetic", "impulse"):
        found[f"DeiT, {init}"] = s.runs("DeiT-3×3", fraction=fraction, fields={"init": init})
        fields = {"init": init, "conv_init": False}
        found[f"ConViT, {init}"] = s.runs(role, fraction=fraction, fields=fields)
    start = {"label": "trained_conv", "fields": {"init": "trained_conv"}}
    found[TRAINED] = s.started(role, nets, fraction=fraction, **start)
    found |= {"the convolutional net of trained_conv": nets}
    return {label: measured(runs, TOP1) for label, runs in found.items()}


@experiment("beyond/initialisations", "How attention starts")
def initialisations(s: Scale) -> Table:
    """Five ways to start a ConViT, and three to start a DeiT, on parts of the data."""
    found = {percent(fraction): _initialised(s, fraction) for fraction in _fractions(s)}
    claims: Claimed = {
        f"{part}: {label} is above {other}": top1[label] - top1[other]
        for part, top1 in found.items()
        for label, other in (
            ("DeiT, mimetic", "DeiT, default"),
            ("DeiT, impulse", "DeiT, default"),
            ("ConViT, mimetic", PLAIN),
            ("ConViT, impulse", PLAIN),
            (EQ_5, PLAIN),
            (TRAINED, EQ_5),
        )
    }
    about = (
        "Not in the papers. Mimetic: Trockman & Kolter 2023; impulse: Zheng et al. 2025, in closed "
        "form. For trained_conv the net of the last row is trained for as many steps on the same "
        "images first."
    )
    columns = {part: Column(f"{part} of the data") for part in found}
    return Table(about, columns, by_label(found), said("", claims))
