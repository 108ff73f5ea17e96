"""Beyond the papers: gated layers that start as *trained* convolutions.

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
from locality.checkpoints.native import WEIGHTS
from locality.errors import UserError
from locality.layers import GatedPositionalSelfAttention, LocalConvolution
from locality.models import ImageClassifier
from locality.papers.measures import TOP1
from locality.papers.quantities import Absent, Measured, Quantity, difference
from locality.papers.scales import Scale
from locality.papers.specs import Cell, Claim, Column, Row, Table, experiment
from locality.runner.runs import Run
from locality.training import RunConfig, load_run, train
from locality.training.runs import RunFolder
from locality.training.setup import build_model

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
        for each layer, the share of the kernel's energy (squared Frobenius norm) that its heads
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


def _continued(s: Scale, nets: tuple[Run, ...], task: str, fraction: float, label: str) -> Quantity:
    """Top-1 of ConViTs that each start from the net of their own seed."""
    runs: list[Run] = []
    for net in nets:
        runs += s.runs(
            "ConViT-3×3",
            fraction=fraction,
            seeds=(net.config.seed,),
            needs=(net,),
            task=task,
            label=label,
            model__weights=str(net.folder),
        )
    return Measured(tuple(runs), TOP1)


def _twice_as_long(s: Scale, fraction: float) -> Quantity:
    config = s.config("ConViT-3×3", fraction=fraction)
    schedule = config.schedule
    length = {f"schedule__{schedule.unit}": type(schedule.length)(2 * schedule.length)}
    return s.measured(TOP1, "ConViT-3×3", fraction=fraction, **length)


@experiment("beyond/trained-convolutions", "Gated layers that start as trained convolutions")
def trained_convolutions(s: Scale) -> Table:
    """Against random convolutions, twice the training, the net itself, and DeiT."""
    conv: dict[str, Any] = {"model__overrides__positional_attention": "conv"}
    rows: dict[str, list[Quantity]] = {}
    for fraction in FRACTIONS:
        try:
            nets = s.runs("ConViT-3×3", fraction=fraction, **conv)
        except UserError as error:
            nets = ()
            reason = Absent(str(error))
        cells: dict[str, Quantity] = {
            "DeiT": s.measured(TOP1, "DeiT-3×3", fraction=fraction),
            "ConViT, random convolutions (the paper's)": s.measured(
                TOP1, "ConViT-3×3", fraction=fraction
            ),
            "ConViT, random convolutions, trained twice as long": _twice_as_long(s, fraction),
            "the convolutional net itself": Measured(nets, TOP1) if nets else reason,
            "ConViT, gated layers from it": _continued(
                s, nets, FROM_ATTENTION, fraction, "gated layers from trained convolutions"
            ),
            "ConViT, everything from it": _continued(
                s, nets, FROM_EVERYTHING, fraction, "from a trained convolutional net"
            ),
        }
        for row, quantity in cells.items():
            rows.setdefault(row, []).append(quantity)
    columns = tuple(Column(f"{100 * fraction:g}% of the data") for fraction in FRACTIONS)
    names = list(rows)
    random, longer, attention, everything = (rows[names[index]] for index in (1, 2, 4, 5))
    claims = []
    for index, fraction in enumerate(FRACTIONS):
        percent = f"{100 * fraction:g}%"
        claims += [
            Claim(f"{percent}: gated layers from trained convolutions are above random ones",
                  difference(attention[index], random[index])),
            Claim(f"{percent}: a whole trained start is above random convolutions",
                  difference(everything[index], random[index])),
            Claim(f"{percent}: … and above random ones trained as long in all",
                  difference(everything[index], longer[index])),
        ]  # fmt: skip
    about = (
        "Not in the papers. The net is trained on the same images for the same number of steps; "
        "`init_from_conv2d_` then keeps as much of each kernel as the heads can carry."
    )
    return Table(
        about,
        columns,
        tuple(Row(row, tuple(Cell(quantity) for quantity in cells)) for row, cells in rows.items()),
        tuple(claims),
    )
