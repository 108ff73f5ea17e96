"""CvT's architectures and ablations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from locality.models import build
from locality.models.cvt import Projection
from locality.training.config import ModelConfig
from locality_papers import diagrams, published
from locality_papers.measures import TOP1, Quantity, computed
from locality_papers.scales import PAPERS_MODELS, Scale, counted, variation
from locality_papers.specs import (
    Column,
    Figure,
    Table,
    as_printed,
    experiment,
    standard_columns,
)


def built(name: str, img_size: int | None = None) -> dict[str, Quantity]:
    """Size and cost of one of the paper's models, at its own or another image size."""
    return counted(lambda: (ModelConfig(name, img_size=img_size), 1000))


# -- architectures ---------------------------------------------------------------------------------


@experiment("cvt/table-1", "Components of the architectures")
def table_1(s: Scale) -> Table:
    """Counted on the models; independent of the scale."""
    columns = {
        "positions": Column("position embedding (thousands)", ""),
        "overlap": Column("overlap of embedded patches (pixels)", "", 0),
        "projections": Column("convolutional projections", "", 0),
        "grids": Column("token grids", "", 0),
    }

    def need(row: str, metric: str) -> Quantity:
        return computed(lambda: _needs(PAPERS_MODELS[row])[metric])

    rows = ("DeiT-S", "ConViT-S", "CvT-13")
    cells = {row: {metric: need(row, metric) for metric in columns} for row in rows}
    return Table(cells, columns, about="Counted on our implementation of the paper's models.")


@cache
def _needs(name: str) -> dict[str, float]:
    with torch.device("meta"):
        model = build(name)
    modules = list(model.modules())
    embed = next(each for each in modules if isinstance(each, nn.Conv2d))
    positions = [t.numel() for path, t in model.named_parameters() if path.endswith("pos_embed")]
    projections = [each.projection for each in modules if isinstance(each, Projection)]
    return {
        "positions": sum(positions) / 1e3,
        "overlap": embed.kernel_size[0] - embed.stride[0],
        "projections": projections.count("conv"),
        "grids": len(set(model.config.grids(model.img_size))),
    }


@experiment("cvt/table-2", "The architectures: parameters and cost")
def table_2(s: Scale) -> Table:
    """Counted on the models; needs no runs or data."""
    return Table(
        {row: built(PAPERS_MODELS[row]) for row in published.rows("cvt/table-2")},
        standard_columns("parameters") | {"flops": Column("GMACs", "G", 2)},
        about="The paper's models at 224 pixels; independent of the scale.",
    )


@experiment("cvt/figure-2", "The pipeline of CvT")
def figure_2(s: Scale) -> Figure:
    """Drawn from CvT-13; independent of the scale."""

    def draw() -> Any:
        model = build("cvt_13")
        layer, grid = _last_attention(model)
        columns = {"(a) CvT-13": diagrams.outline(model)}
        return diagrams.draw_columns(
            columns | {"(b) attention of stage 3": diagrams.projections(layer, grid)}
        )

    return Figure(draw=draw, about="Layers, tokens and widths of CvT-13.")


def _last_attention(model: Any) -> tuple[Any, Any]:
    """The first attention layer of the last stage, and its grid."""
    return model.stages[-1].blocks[0].attn, model.config.grids(model.img_size)[-1]


_PROJECTIONS: dict[str, dict[str, Any]] = {
    "(a) linear": {"projection": ["linear", "linear", "linear"]},
    "(b) convolutional": {"kv_stride": 1},
    "(c) squeezed": {},
}


@experiment("cvt/figure-3", "Linear, convolutional and squeezed projection")
def figure_3(s: Scale) -> Figure:
    """Drawn from CvT-13; independent of the scale."""

    def draw() -> Any:
        models = {title: build("cvt_13", **fields) for title, fields in _PROJECTIONS.items()}
        return diagrams.draw_columns(
            {title: diagrams.projections(*_last_attention(m)) for title, m in models.items()}
        )

    return Figure(draw=draw, about="Queries, keys and values of a layer of stage 3.")


# -- ablations -------------------------------------------------------------------------------------


def _ablation(
    s: Scale,
    place: str,
    models: Mapping[str, Mapping[str, Any]],
    asked: Mapping[str, Callable[..., Quantity]],
    *metrics: str,
    about: str,
) -> Table:
    """Models with changed fields, by row: their parameters, MACs and accuracy.

    Args:
        s: the scale.
        place: the table of §4.4, such as "cvt/table-5".
        models: label → see `variation`.
        asked: question → effect, computed from the accuracies of all rows.
        metrics: the columns.
        about: see `Spec`.
    """
    cells = as_printed(
        place,
        {
            label: s.counted(**row) | {"top1": s.measured(TOP1, **row)}
            for label, row in models.items()
        },
    )
    top1 = [of["top1"] for of in cells.values()]
    questions = {text: effect(*top1) for text, effect in asked.items()}
    where = f"§4.4, Table {place[-1]}"
    return Table(cells, standard_columns(*metrics), about=about, questions={where: questions})


@experiment("cvt/table-5", "Position embeddings")
def table_5(s: Scale) -> Table:
    """With and without."""
    models = {
        "a: DeiT-S": variation("DeiT-S"),
        "b: DeiT-S, none": variation("DeiT-S", use_pos_embed=False),
        "c: CvT-13, every stage": variation("CvT-13", position="every"),
        "d: CvT-13, first stage": variation("CvT-13", position="first"),
        "e: CvT-13, last stage": variation("CvT-13", position="last"),
        "f: CvT-13, none": variation("CvT-13"),
    }
    asked = {
        "Does DeiT need its position embedding?": lambda a, b, *_: a - b,
        "Does DeiT need its position embedding more than CvT?": (
            lambda a, b, c, d, e, f: (a - b) - (c - f)
        ),
    }
    about = "Trained with or without position embeddings."
    return _ablation(s, "cvt/table-5", models, asked, "parameters", "top1", about=about)


@experiment("cvt/table-6", "Convolutional token embedding")
def table_6(s: Scale) -> Table:
    """Convolutions or patches."""
    models = {
        "a: patches": variation("CvT-13", embedding="patch"),
        "b: patches, position embedding": variation("CvT-13", embedding="patch", position="every"),
        "c: convolutions, position embedding": variation("CvT-13", position="every"),
        "d: convolutions": variation("CvT-13"),
    }
    asked = {
        "Is convolutional embedding above patches (d, a)?": lambda a, b, c, d: d - a,
        "Do position embeddings bring more to patches than to convolutions?": (
            lambda a, b, c, d: (b - a) - (c - d)
        ),
    }
    about = (
        "Token embeddings by convolutions or patches; position embeddings in every stage, as the "
        "paper's parameter counts imply."
    )
    return _ablation(s, "cvt/table-6", models, asked, "parameters", "top1", about=about)


@experiment("cvt/table-7", "Stride of the key and value projections")
def table_7(s: Scale) -> Table:
    """Keys and values squeezed or not."""
    models = {
        "a: stride 1": variation("CvT-13", kv_stride=1),
        "b: stride 2": variation("CvT-13"),
    }
    asked = {"Does squeezing keys and values cost accuracy?": lambda a, b: a - b}
    about = "Keys and values on the full grid, or on a quarter of it."
    return _ablation(s, "cvt/table-7", models, asked, "parameters", "flops", "top1", about=about)


@experiment("cvt/table-8", "Convolutional or linear projection, stage by stage")
def table_8(s: Scale) -> Table:
    """Convolutional projection in an increasing number of stages."""

    def conv_until(stage: int) -> dict[str, Any]:
        projection = ["conv"] * stage + ["linear"] * (3 - stage)
        return variation("CvT-13", projection=projection)

    models = {
        "a: no stage": conv_until(0),
        "b: stage 1": conv_until(1),
        "c: stages 1 and 2": conv_until(2),
        "d: all stages": variation("CvT-13"),
    }
    asked = {"Is convolutional projection above linear?": lambda a, b, c, d: d - a}
    about = "Stages with convolutional projection."
    return _ablation(s, "cvt/table-8", models, asked, "top1", about=about)
