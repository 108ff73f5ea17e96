"""Beyond the papers: gated layers that start as *trained* convolutions, few images of new classes
for models that know others, and what it does to the findings that runs here are short.

ConViT ends with a question: "if SA layers benefit from being initialized as random convolutions,
could one reduce even more drastically their sample complexity by initializing them as pre-trained
convolutions?" Here it is asked of the same images that the model is then trained on, so that no
further data comes in: first a net with 3×3 convolutions in the place of its gated layers is
trained, then a ConViT starts from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from locality.checkpoints import save
from locality.checkpoints.format import WEIGHTS
from locality.errors import UserError
from locality.layers import GatedPositionalSelfAttention, LocalConvolution
from locality.models import ImageClassifier
from locality.papers.convit import percent
from locality.papers.measures import TOP1, TRAJECTORY, Quantity, combined, measured, summed_rate
from locality.papers.scales import FAMILIES, Scale
from locality.papers.specs import Claimed, Column, Row, Table, by_label, experiment, said
from locality.runner.cost import train_images
from locality.training import RunConfig, load_run, train
from locality.training.load import build_model
from locality.training.runs import RunFolder

FRACTIONS = (0.05, 0.2, 1.0)

FROM_ATTENTION = "locality.papers.beyond:train_with_convolutions"
FROM_EVERYTHING = "locality.papers.beyond:train_from_convolutional_net"

# Where a ConViT starts that is to compute what the convolutional net computes: e⁻⁴ of positional
# attention on each neighbour of a head's centre, 2% of content, and both free to move.
_STRENGTH, _GATING = 4.0, 4.0


def train_with_convolutions(config: RunConfig, folder: Path | str) -> dict[str, Any]:
    """Train a ConViT whose gated layers start from the convolutions of a trained net.

    Everything else starts from the seed; strength and gates start where the paper has them.

    Args:
        config: of the ConViT; `model.weights` is the run folder of the convolutional net.
        folder: of the run. The weights it starts from lie beside it.
    """
    return _train(config, Path(folder), whole=False)


def train_from_convolutional_net(config: RunConfig, folder: Path | str) -> dict[str, Any]:
    """Train a ConViT that starts as nearly as it can as a trained convolutional net.

    Everything but the gated layers is copied, these look at one neighbour per head.

    Args: as `train_with_convolutions`.
    """
    return _train(config, Path(folder), whole=True)


def _train(config: RunConfig, folder: Path, whole: bool) -> dict[str, Any]:
    assert config.model.weights is not None
    start = folder.with_name(folder.name + ".start")
    if not (start / WEIGHTS).exists():  # what `save` writes last
        net, _ = load_run(config.model.weights)
        fresh = dataclasses.replace(config, model=dataclasses.replace(config.model, weights=None))
        model = build_model(fresh, len(RunFolder(config.model.weights).classes()))
        start_from_convolutions(model, net, whole)
        save(model, start)
    model_config = dataclasses.replace(config.model, weights=str(start))
    return train(dataclasses.replace(config, model=model_config), folder)


def start_from_convolutions(
    model: ImageClassifier, net: ImageClassifier, whole: bool
) -> list[float]:
    """Initialise the gated layers of `model` from the convolutions of `net`, in place.

    Args:
        model: a ConViT.
        net: the same with `positional_attention="conv"`.
        whole: copy everything else too, and start as the convolution rather than softly.

    Returns:
        for each layer, the fraction of the kernel's energy (squared Frobenius norm) that its heads
        could carry.

    Raises:
        UserError: if the two do not fit.
    """
    if whole:
        theirs, ours = net.state_dict(), model.state_dict()
        shared = {name: value for name, value in theirs.items() if name in ours}
        model.load_state_dict(ours | shared)
    carried = []
    for mine, other in zip(model.blocks, net.blocks, strict=True):  # type: ignore[arg-type]
        if not isinstance(mine.attn, GatedPositionalSelfAttention):
            continue
        if not isinstance(other.attn, LocalConvolution):
            raise UserError("the net to start from has no convolution in a gated layer's place")
        strength, gating = (_STRENGTH, _GATING) if whole else (None, None)
        lost = mine.attn.init_from_conv2d_(other.attn.conv, strength, gating)
        total = other.attn.conv.weight.detach().square().sum()
        carried.append(1 - float(lost.square().sum() / total))
    return carried


RANDOM = "ConViT, random convolutions (the paper's)"
LONGER = "ConViT, random convolutions, trained twice as long"
GATED = "ConViT, gated layers from it"
EVERYTHING = "ConViT, everything from it"


def _cells(s: Scale, fraction: float) -> dict[str, Quantity]:
    """Top-1 by row on a fraction of the data."""
    nets = s.runs("ConViT-3×3", fraction=fraction, fields={"positional_attention": "conv"})
    twice = nets[0].config.schedule.lasting(2)

    def started(task: str, label: str) -> Quantity:
        runs = s.started("ConViT-3×3", nets, fraction=fraction, task=task, label=label)
        return measured(runs, TOP1)

    return {
        "DeiT": s.measured(TOP1, "DeiT-3×3", fraction=fraction),
        RANDOM: s.measured(TOP1, "ConViT-3×3", fraction=fraction),
        LONGER: s.measured(TOP1, "ConViT-3×3", fraction=fraction, **twice),
        "the convolutional net itself": measured(nets, TOP1),
        GATED: started(FROM_ATTENTION, "gated layers from trained convolutions"),
        EVERYTHING: started(FROM_EVERYTHING, "from a trained convolutional net"),
    }


@experiment("beyond/trained-convolutions", "Gated layers that start as trained convolutions")
def trained_convolutions(s: Scale) -> Table:
    """Against random convolutions, twice the training, the net itself, and DeiT."""
    found = {percent(fraction): _cells(s, fraction) for fraction in FRACTIONS}
    claims: Claimed = {}
    for part, top1 in found.items():
        claims |= {
            f"{part}: gated layers from trained convolutions are above random ones": (
                top1[GATED] - top1[RANDOM]
            ),
            f"{part}: a whole trained start is above random convolutions": (
                top1[EVERYTHING] - top1[RANDOM]
            ),
            f"{part}: … and above random ones trained as long in all": (
                top1[EVERYTHING] - top1[LONGER]
            ),
        }
    about = (
        "Not in the papers. The net is trained on the same images for the same number of steps; "
        "`init_from_conv2d_` then keeps as much of each kernel as the heads can carry."
    )
    shown = {part: Column(f"{part} of the data") for part in found}
    return Table(about, shown, by_label(found), said("", claims))


SCRATCH = "from scratch"
TUNED = "from weights"
LAYERWISE = "from weights, rates falling by a quarter with each layer below the classifier"
_LAYER_DECAY = 0.75
_FEW = FRACTIONS[0]


def _transferred(s: Scale, role: str) -> dict[str, Quantity]:
    """Top-1 on the second half of the classes, few images each, by where training starts."""
    half = train_images(s.runs(role, seeds=(0,))[0].config)[1] // 2
    nets = s.runs(role, data__first_classes=half, keep_weights=False)
    new: dict[str, Any] = {"fraction": _FEW, "data__skip_classes": half}
    tuned = new | {"label": "fine-tuned to other classes"}
    layerwise = {"label": f"{tuned['label']}, layer by layer", "optim__layer_decay": _LAYER_DECAY}
    return {
        SCRATCH: s.measured(TOP1, role, **new),
        TUNED: measured(s.started(role, nets, **tuned), TOP1),
        LAYERWISE: measured(s.started(role, nets, **tuned | layerwise), TOP1),
    }


@experiment("beyond/finetuning", "Few images of new classes, from weights that know others")
def finetuning(s: Scale) -> Table:
    """Against training from scratch, at equal length."""
    found = {family: _transferred(s, f"{family}-S") for family in FAMILIES}
    claims: Claimed = {
        f"{family}: {start} is above {SCRATCH}": top1[start] - top1[SCRATCH]
        for family, top1 in found.items()
        for start in (TUNED, LAYERWISE)
    }
    about = (
        f"Not in the papers. Weights come from all images of the first half of the classes; then "
        f"{percent(_FEW)} of the images of the other half are trained on, for as many steps, and "
        f"accuracy is that on the validation images of these."
    )
    shown = {family: Column(family) for family in found}
    return Table(about, shown, by_label(found), said("", claims))


FACTORS = (1.0, 3.0, 10.0, 30.0)
"""Of the learning rate of positions: Adam moves a parameter by at most about the sum of its rates,
some 186 over the 300 epochs of ConViT's recipe, 1,251 steps each, and 0.5 to 1.5 in runs of a
thousand steps."""


@experiment("beyond/converged", "DeiT and ConViT trained twice as long")
def converged(s: Scale) -> Table:
    """Top-1 on all data, as long as everywhere and twice as long."""
    rows = []
    for role in ("DeiT-S", "ConViT-S"):
        once, (run, *_) = s.measured(TOP1, role), s.runs(role)
        twice = s.measured(TOP1, role, **run.config.schedule.lasting(2))
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
        trajectory = s.measured(TRAJECTORY, "ConViT-S", **chosen)
        cells = {"sum": summed_rate(config), "top1": s.measured(TOP1, "ConViT-S", **chosen)}
        for n in layers:
            cells[f"gate {n}"] = _of_layer(trajectory, n, lambda layer: fmean(layer["gates"][-1]))
            cells[f"left {n}"] = _of_layer(
                trajectory, n, lambda layer: layer["nonlocality"][-1] - layer["nonlocality"][0]
            )
        rows.append(Row(f"×{factor:g}", cells))
    about = (
        "Not in the papers. The learning rate of v_pos and λ times a factor; its sum, about how "
        "far Adam can move them (186 in the paper); gates at the end, mean over heads; nonlocality "
        "at the end less that at the start."
    )
    return Table(about, columns, tuple(rows))


def _of_layer(trajectory: Quantity, n: int, function: Callable[[Any], float]) -> Quantity:
    return combined(lambda found: function(found["layers"][n]), trajectory)
