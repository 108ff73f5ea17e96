"""CvT's architectures and ablations."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from locality.layers import Projection
from locality.models import build
from locality.training.config import ModelConfig
from locality_papers import diagrams, published
from locality_papers.measures import TOP1, Quantity, computed
from locality_papers.scales import PAPERS_MODELS, Scale, counted, variation
from locality_papers.specs import (
    Cells,
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


def _changed(s: Scale, place: str, models: dict[str, dict[str, Any]]) -> Cells:
    """Parameters, MACs and accuracy of models with changed fields, by row."""
    cells = {
        label: s.counted(**row) | {"top1": s.measured(TOP1, **row)} for label, row in models.items()
    }
    return as_printed(place, cells)


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
    cells = _changed(s, "cvt/table-5", models)
    a, b, c, _, _, f = (of["top1"] for of in cells.values())
    asked = {
        "Does DeiT need its position embedding?": a - b,
        "Does DeiT need its position embedding more than CvT?": (a - b) - (c - f),
    }
    return Table(
        cells,
        standard_columns("parameters", "top1"),
        about="Trained with or without position embeddings.",
        questions={"§4.4, Table 5": asked},
    )


@experiment("cvt/table-6", "Convolutional token embedding")
def table_6(s: Scale) -> Table:
    """Convolutions or patches."""
    models = {
        "a: patches": variation("CvT-13", embedding="patch"),
        "b: patches, position embedding": variation("CvT-13", embedding="patch", position="every"),
        "c: convolutions, position embedding": variation("CvT-13", position="every"),
        "d: convolutions": variation("CvT-13"),
    }
    cells = _changed(s, "cvt/table-6", models)
    a, b, c, d = (of["top1"] for of in cells.values())
    asked = {
        "Is convolutional embedding above patches (d, a)?": d - a,
        "Do position embeddings bring more to patches than to convolutions?": (b - a) - (c - d),
    }
    return Table(
        cells,
        standard_columns("parameters", "top1"),
        about="Token embeddings by convolutions or patches; position embeddings in every stage, as "
        "the paper's parameter counts imply.",
        questions={"§4.4, Table 6": asked},
    )


@experiment("cvt/table-7", "Stride of the key and value projections")
def table_7(s: Scale) -> Table:
    """Keys and values squeezed or not."""
    models = {
        "a: stride 1": variation("CvT-13", kv_stride=1),
        "b: stride 2": variation("CvT-13"),
    }
    cells = _changed(s, "cvt/table-7", models)
    a, b = (of["top1"] for of in cells.values())
    asked = {"Does squeezing keys and values cost accuracy?": a - b}
    return Table(
        cells,
        standard_columns("parameters", "flops", "top1"),
        about="Keys and values on the full grid, or on a quarter of it.",
        questions={"§4.4, Table 7": asked},
    )


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
    cells = _changed(s, "cvt/table-8", models)
    linear, *_, every = (of["top1"] for of in cells.values())
    asked = {"Is convolutional projection above linear?": every - linear}
    return Table(
        cells,
        standard_columns("top1"),
        about="Stages with convolutional projection.",
        questions={"§4.4, Table 8": asked},
    )
