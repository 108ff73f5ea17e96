"""Beyond the papers: gated layers that start as *trained* convolutions, and few images of new
classes for models that know others.

ConViT ends with a question: "if SA layers benefit from being initialized as random convolutions,
could one reduce even more drastically their sample complexity by initializing them as pre-trained
convolutions?" Here it is asked of the same images that the model is then trained on, so that no
further data comes in: first a net with 3×3 convolutions in the place of its gated layers is
trained, then a ConViT starts from it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from locality.checkpoints import save
from locality.checkpoints.format import WEIGHTS
from locality.errors import UserError
from locality.layers import GatedPositionalSelfAttention, LocalConvolution
from locality.models import ImageClassifier
from locality.papers.convit import percent
from locality.papers.measures import TOP1, Quantity, measured
from locality.papers.scales import FAMILIES, Scale
from locality.papers.specs import Claimed, Column, Row, Table, experiment, said
from locality.runner.cost import train_images
from locality.runner.runs import Run
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


def _started(s: Scale, role: str, nets: tuple[Run, ...], **choices: Any) -> Quantity:
    """Top-1 of runs that each start from the net of their own seed."""
    runs: list[Run] = []
    for net in nets:
        start: dict[str, Any] = {"needs": (net,), "model__weights": str(net.folder)}
        runs += s.runs(role, seeds=(net.config.seed,), **start, **choices)
    return measured(tuple(runs), TOP1)


def _cells(s: Scale, fraction: float) -> dict[str, Quantity]:
    """Top-1 by row on a fraction of the data."""
    nets = s.runs("ConViT-3×3", fraction=fraction, fields={"positional_attention": "conv"})
    schedule = nets[0].config.schedule
    twice = {f"schedule__{schedule.unit}": type(schedule.length)(2 * schedule.length)}

    def started(task: str, label: str) -> Quantity:
        return _started(s, "ConViT-3×3", nets, fraction=fraction, task=task, label=label)

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
    rows = tuple(
        Row(label, {part: top1[label] for part, top1 in found.items()})
        for label in next(iter(found.values()))
    )
    about = (
        "Not in the papers. The net is trained on the same images for the same number of steps; "
        "`init_from_conv2d_` then keeps as much of each kernel as the heads can carry."
    )
    shown = {part: Column(f"{part} of the data") for part in found}
    return Table(about, shown, rows, said("", claims))


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
        TUNED: _started(s, role, nets, **tuned),
        LAYERWISE: _started(s, role, nets, **tuned | layerwise),
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
    rows = tuple(
        Row(start, {family: top1[start] for family, top1 in found.items()})
        for start in (SCRATCH, TUNED, LAYERWISE)
    )
    about = (
        f"Not in the papers. Weights come from all images of the first half of the classes; then "
        f"{percent(_FEW)} of the images of the other half are trained on, for as many steps, and "
        f"accuracy is that on the validation images of these."
    )
    return Table(about, {family: Column(family) for family in found}, rows, said("", claims))
