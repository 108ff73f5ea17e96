"""Diagrams of architectures as columns of boxes, recorded in a model's forward pass.

As in ConViT's Fig. 4 and CvT's Figs. 2 and 3, with the actual shapes and sizes of the model.
"""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from locality.figures.style import CONVIT, CVT, DEIT, FAINT, INK, settings
from locality.layers.block import Block
from locality.models.base import ImageClassifier
from locality.models.convit import GatedPositionalSelfAttention, SelfAttention
from locality.models.cvt import ConvolutionalAttention, ConvolutionalEmbedding

_WIDTH, _STEP = 2.9, 0.66  # inches of a column, and from box to box
Row = str | tuple[str, ...]
"""A box, or several side by side."""
_COLOURS = {"gated": CONVIT, "self-": DEIT, "conv": CVT}


def outline(model: ImageClassifier) -> list[str]:
    """A model's layers with tokens and widths; equal consecutive layers are counted."""
    seen: list[str] = []

    def note(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        if output.ndim == 4:
            output = output.flatten(2).transpose(1, 2)
        tokens, width = output.shape[1:]
        seen.append(f"{_described(module)}\n{tokens} tokens × {width}")

    hooks = [
        module.register_forward_hook(note)
        for module in model.modules()
        if isinstance(module, (Block, ConvolutionalEmbedding))
        or module is getattr(model, "patch_embed", None)
    ]
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, *model.img_size))
    for hook in hooks:
        hook.remove()
    counted = [(text, len(list(alike))) for text, alike in groupby(seen)]
    return [
        f"image {model.img_size[0]}×{model.img_size[1]}",
        *(text if count == 1 else f"{count} × {text}" for text, count in counted),
        f"LayerNorm, linear: {model.num_classes} classes",
    ]


def _described(module: nn.Module) -> str:
    if isinstance(module, Block):
        return f"{_attention(module.attn)} + FFN"
    conv = module.conv if isinstance(module, ConvolutionalEmbedding) else module
    assert isinstance(conv, nn.Conv2d)
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    kind = "patches" if kernel == stride else "convolutional token embedding"
    return f"{kind} {kernel}×{kernel}, stride {stride}"


def _attention(layer: nn.Module) -> str:
    if isinstance(layer, ConvolutionalAttention):
        stride = layer.k.stride
        return f"attention over {layer.k.projection} projections, keys and values stride {stride}"
    names: dict[type, str] = {
        GatedPositionalSelfAttention: "gated positional self-attention",
        SelfAttention: "self-attention",
    }
    return names.get(type(layer), type(layer).__name__)


def gated_layer(layer: GatedPositionalSelfAttention) -> list[str]:
    """The parts of a gated layer (Eq. 6–7) with the shapes of its parameters."""
    heads, width = layer.num_heads, layer.dim // layer.num_heads
    return [
        f"queries, keys: {layer.dim} → {heads} heads × {width}\nW_qry, W_key trained",
        "content: softmax(QKᵀ/√d)",
        f"position: softmax(v_pos·r), r fixed\nv_pos {heads}×3 trained",
        f"(1 − σ(λ)) content + σ(λ) position\nλ: {heads}, trained from {layer.gating[0]:g}",
        f"values: {layer.dim} → {heads} × {width}, W_out {layer.dim} → {layer.dim}",
    ]


def projections(layer: ConvolutionalAttention, grid: tuple[int, int]) -> list[Row]:
    """An attention layer's projections of a token grid to queries, keys and values."""
    parts = []
    for name, part in (("queries", layer.q), ("keys", layer.k), ("values", layer.v)):
        rows, columns = part.grid(grid)
        before = (
            f"{part.window[0]}×{part.window[0]} conv\nstride {part.stride}\n"
            if part.projection == "conv"
            else ""
        )
        parts.append(f"{name}\n{before}linear\n{rows}×{columns}")
    tokens = grid[0] * grid[1]
    return [
        f"{grid[0]}×{grid[1]} tokens × {layer.dim}",
        tuple(parts),
        f"attention: {tokens} × {rows * columns} per head",
    ]


def draw_columns(columns: Mapping[str, Sequence[Row]]) -> Figure:
    """Draw titled columns of boxes, with consecutive rows joined by lines."""
    tallest = max(map(len, columns.values()))
    with settings():
        figure = Figure(figsize=(_WIDTH * len(columns), _STEP * tallest + 0.4))
        grid = figure.subplots(1, len(columns), squeeze=False)[0]
        for axes, (title, boxes) in zip(grid, columns.items(), strict=True):
            axes.set(xlim=(0, 1), ylim=(tallest - 0.4, -0.6))
            axes.set_axis_off()
            axes.set_title(title)
            before = [0.5]
            for place, row in enumerate(boxes):
                beside = (row,) if isinstance(row, str) else row
                here = [(n + 0.5) / len(beside) for n in range(len(beside))]
                for start in before if place else ():
                    for end in here:
                        axes.plot([start, end], [place - 1, place], color=FAINT, linewidth=0.8,
                                  zorder=1)  # fmt: skip
                before = here
                for x, text in zip(here, beside, strict=True):
                    colour = next((c for word, c in _COLOURS.items() if word in text), FAINT)
                    lines = [textwrap.fill(line, 40) for line in text.split("\n")]
                    box = {"boxstyle": "round,pad=0.35", "edgecolor": colour, "facecolor": "white"}
                    axes.text(x, place, "\n".join(lines), ha="center", va="center", fontsize=6.5,
                              color=INK, bbox=box, zorder=2)  # fmt: skip
    return figure
