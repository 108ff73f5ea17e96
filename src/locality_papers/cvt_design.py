"""CvT's architectures and ablations."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from locality.models import build
from locality.models.cvt import Projection
from locality.models.variants import named
from locality.training.cost import cost
from locality_papers import diagrams, published
from locality_papers.experiment import A_POINT, STANDARD, Column, Experiment, experiment
from locality_papers.measures import TOP1, ask_fewer, count, count_role, percent_saved
from locality_papers.runs import PAPERS_MODELS, Scale, variation


@experiment("cvt/table-1", "Components of the architectures")
def table_1(t: Experiment, s: Scale) -> None:
    """Counted on the models; independent of the scale."""
    t.about = "Counted on our implementation of the paper's models."
    t.columns = {
        "positions": Column("position embedding (thousands)", ""),
        "overlap": Column("overlap of embedded patches (pixels)", "", 0),
        "projections": Column("convolutional projections", "", 0),
        "grids": Column("token grids", "", 0),
    }
    for row in ("DeiT-S", "ConViT-S", "CvT-13"):
        for column, value in _needs(PAPERS_MODELS[row]).items():
            t.fixed(row, column, value)


@cache
def _needs(name: str) -> dict[str, float]:
    with torch.device("meta"):
        model = build(name)
    modules = list(model.modules())
    embed = next(each for each in modules if isinstance(each, nn.Conv2d))
    positions = [p.numel() for path, p in model.named_parameters() if path.endswith("pos_embed")]
    projections = [each.projection for each in modules if isinstance(each, Projection)]
    return {
        "positions": sum(positions) / 1e3,
        "overlap": embed.kernel_size[0] - embed.stride[0],
        "projections": projections.count("conv"),
        "grids": len(set(model.config.grids(model.img_size))),
    }


@experiment("cvt/table-2", "The architectures: parameters and cost")
def table_2(t: Experiment, s: Scale) -> None:
    """Counted on the models; needs no runs or data."""
    t.about = "At 224 pixels, ViT-L/16 at 384 and BiT-M at 480; independent of the scale."
    t.columns = {"parameters": STANDARD["parameters"], "flops": Column("GMACs", "G", 2)}
    for row in (*published.rows("cvt/table-2"), "DeiT-S", "DeiT-B", *_OTHERS):
        config = named((PAPERS_MODELS | _OTHERS)[row])
        count(t, row, partial(tuple, (config, 1000)))
    for small, large, column, percent in (
        ("CvT-13", "DeiT-S", "parameters", 9.0),
        ("CvT-13", "DeiT-S", "flops", 2.0),
        ("CvT-21", "DeiT-B", "parameters", 63.0),
        ("CvT-21", "DeiT-B", "flops", 60.0),
        ("CvT-13", "ResNet-152", "parameters", 67.0),
        ("CvT-W24", "ViT-L/16", "parameters", 10.0),
        ("CvT-W24", "BiT-M", "parameters", 70.0),
    ):
        where = "§4.2" if large != "BiT-M" else "§4.3"
        ask_fewer(t, small, large, column, percent, where=where)


_OTHERS = {
    "ResNet-152": "timm/resnet152",
    "ViT-L/16": "timm/vit_large_patch16_384",
    "BiT-M": "timm/resnetv2_152x4_bit",
}
"""Larger models that CvT is compared with."""


@experiment("cvt/figure-2", "The pipeline of CvT")
def figure_2(t: Experiment, s: Scale) -> None:
    """Drawn from CvT-13; independent of the scale."""
    t.about = "Layers, tokens and widths of CvT-13."

    def draw() -> Any:
        model = build("cvt_13")
        columns = {"(a) CvT-13": diagrams.outline(model)}
        return diagrams.draw_columns(
            columns | {"(b) attention of stage 3": diagrams.projections(*_last_attention(model))}
        )

    t.draw = draw


def _added(more: str, less: str, column: str, v: Any) -> Any:
    return 100 * (v[more, column] / v[less, column] - 1)


def _last_attention(model: Any) -> tuple[Any, Any]:
    """The first attention layer of the last stage, and its grid."""
    return model.stages[-1].blocks[0].attn, model.config.grids(model.img_size)[-1]


def _counted(config: Any, field: str) -> float:
    """`parameters` or `macs` of a model for ImageNet."""
    return float(getattr(cost(config, 1000), field))


@experiment("cvt/figure-3", "Linear, convolutional and squeezed projection")
def figure_3(t: Experiment, s: Scale) -> None:
    """Drawn from CvT-13; independent of the scale."""
    t.about = "Queries, keys and values of a layer of stage 3."
    projections: dict[str, dict[str, Any]] = {
        "(a) linear": {"projection": ["linear", "linear", "linear"]},
        "(b) convolutional": {"kv_stride": 1},
        "(c) squeezed": {},
    }
    linear, convolutional, _ = projections
    for column, what, field in (
        ("parameters", "parameters", "parameters"),
        ("flops", "MACs", "macs"),
    ):
        for row in (linear, convolutional):
            config = named("cvt_13", **projections[row])
            t.fixed(row, column, partial(_counted, config, field))
        text = f"Does convolutional projection add a negligible part of {what} (below 1%)?"
        effect = partial(_added, convolutional, linear, column)
        t.ask(text, effect, where="§3.2.2", unit="%", threshold=1.0, side=-1)

    def draw() -> Any:
        models = {title: build("cvt_13", **fields) for title, fields in projections.items()}
        return diagrams.draw_columns(
            {title: diagrams.projections(*_last_attention(m)) for title, m in models.items()}
        )

    t.draw = draw


# -- ablations -------------------------------------------------------------------------------------


def _ablate(t: Experiment, s: Scale, models: Mapping[str, Mapping[str, Any]], *counts: str) -> None:
    """Rows of models with changed fields: their size and cost, and accuracy."""
    t.where = f"§4.4, Table {t.name[-1]}"
    t.columns = {name: STANDARD[name] for name in (*counts, "top1")}
    for label, row in models.items():
        count_role(t, s, label, **row)
        t.run(label, "top1", TOP1, **row)


def _ask(t: Experiment, text: str, first: str, second: str, margin: float = 0.0) -> None:
    """Is the first row above the second, or less than a margin below it?"""
    t.ask(text, (first, "top1"), (second, "top1"), threshold=-margin)


@experiment("cvt/table-5", "Position embeddings")
def table_5(t: Experiment, s: Scale) -> None:
    """With and without."""
    t.about = "Trained with or without position embeddings."
    models = {
        "a: DeiT-S": variation("DeiT-S"),
        "b: DeiT-S, none": variation("DeiT-S", use_pos_embed=False),
        "c: CvT-13, every stage": variation("CvT-13", use_pos_embed=True),
        "d: CvT-13, first stage": variation("CvT-13", use_pos_embed=(True, False, False)),
        "e: CvT-13, last stage": variation("CvT-13", use_pos_embed=(False, False, True)),
        "f: CvT-13, none": variation("CvT-13"),
    }
    _ablate(t, s, models, "parameters")
    a, b, c, d, e, f = models
    _ask(t, "Trained without position embedding, does DeiT lose (a, b)?", a, b)
    for row, where in ((c, "every stage"), (d, "the first stage"), (e, "the last stage")):
        text = f"Does CvT lose less than a point without position embeddings in {where}"
        _ask(t, f"{text} ({f[0]}, {row[0]})?", f, row, A_POINT)
    t.ask(
        "Trained without position embedding, does DeiT lose more than CvT?",
        lambda v: v[a, "top1"] - v[b, "top1"] - (v[c, "top1"] - v[f, "top1"]),
    )


@experiment("cvt/table-6", "Convolutional token embedding")
def table_6(t: Experiment, s: Scale) -> None:
    """Convolutions or patches."""
    t.about = (
        "Token embeddings by convolutions or patches; position embeddings in every stage, as the "
        "paper's parameter counts imply."
    )
    # Kernel = stride without padding: patches that do not overlap.
    strides = s.architecture("CvT-13").embed_stride if "CvT-13" in s.models else ()
    patches = {"embed_kernel": strides, "embed_padding": 0}
    models = {
        "a: patches": variation("CvT-13", **patches),
        "b: patches, position embedding": variation("CvT-13", **patches, use_pos_embed=True),
        "c: convolutions, position embedding": variation("CvT-13", use_pos_embed=True),
        "d: convolutions": variation("CvT-13"),
    }
    _ablate(t, s, models, "parameters")
    a, b, c, d = models
    _ask(t, "Is convolutional embedding above patches (d, a)?", d, a)
    _ask(t, "With position embeddings, is convolutional embedding above patches (c, b)?", c, b)
    _ask(t, "Do patches gain from position embeddings (b, a)?", b, a)
    t.ask(
        "Do position embeddings bring more to patches than to convolutions?",
        lambda v: v[b, "top1"] - v[a, "top1"] - (v[c, "top1"] - v[d, "top1"]),
    )


@experiment("cvt/table-7", "Stride of the key and value projections")
def table_7(t: Experiment, s: Scale) -> None:
    """Keys and values squeezed or not."""
    t.about = "Keys and values on the full grid, or on a quarter of it."
    models = {
        "a: stride 1": variation("CvT-13", kv_stride=1),
        "b: stride 2": variation("CvT-13"),
    }
    _ablate(t, s, models, "parameters", "flops")
    a, b = models
    _ask(t, "Does squeezing keys and values cost less than a point (b, a)?", b, a, A_POINT)
    text = "Does squeezing keys and values save MACs?"
    t.ask(text, percent_saved((b, "flops"), (a, "flops")), unit="%")


@experiment("cvt/table-8", "Convolutional or linear projection, stage by stage")
def table_8(t: Experiment, s: Scale) -> None:
    """Convolutional projection in an increasing number of stages."""
    t.about = "Stages with convolutional projection."

    def conv_until(stage: int) -> dict[str, Any]:
        projection = ["conv"] * stage + ["linear"] * (3 - stage)
        return variation("CvT-13", projection=projection)

    models = {
        "a: no stage": conv_until(0),
        "b: stage 1": conv_until(1),
        "c: stages 1 and 2": conv_until(2),
        "d: all stages": variation("CvT-13"),
    }
    _ablate(t, s, models)
    a, b, c, d = models
    _ask(t, "Is convolutional projection above linear (d, a)?", d, a)
    _ask(t, "Does convolutional projection help in stage 1 (b, a)?", b, a)
    _ask(t, "Does it help in stage 2 too (c, b)?", c, b)
    _ask(t, "Does it help in stage 3 too (d, c)?", d, c)
