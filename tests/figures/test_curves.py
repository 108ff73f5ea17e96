"""Curves over training: means over seeds, panels and lines."""

import pytest

from locality.analysis.measures import token_distances
from locality.figures.curves import draw, gate_panels, nonlocality_panels
from locality.figures.style import figure_bytes


def recorded(steps, shift=0.0, gated=True):
    """A trajectory of two layers and three heads, the first layer gated."""
    rising = [shift + 0.1 * step for step in steps]
    return {
        "images": 4,
        "steps": steps,
        "epochs": [step / 10 for step in steps],
        "layers": [
            {
                "name": "blocks.0.attn",
                "kind": "gpsa" if gated else "sa",
                "grid": [4, 4],
                "nonlocality": rising,
                "nonlocality_per_head": [[value] * 3 for value in rising],
                "gates": [[0.7, 0.6, 0.5 - shift] for _ in steps] if gated else None,
            },
            {
                "name": "blocks.1.attn",
                "kind": "sa",
                "grid": [4, 4],
                "nonlocality": [2.0] * len(steps),
                "nonlocality_per_head": [[2.0] * 3 for _ in steps],
                "gates": None,
            },
        ],
    }


def test_seeds_are_averaged_where_all_of_them_were_measured():
    seeds = [recorded([0, 5, 10]), recorded([0, 10], shift=0.2)]
    figure = draw(nonlocality_panels([("ConViT", seeds)]))
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == [0, 1]
    assert line.get_ydata() == pytest.approx([0.1, 1.1])
    heads = draw(gate_panels(seeds)).axes[0].lines[:3]
    assert [head.get_ydata()[-1] for head in heads] == pytest.approx([0.7, 0.6, 0.4])


def test_a_panel_per_group_of_runs_and_a_line_per_layer():
    measured = [("DeiT", [recorded([0, 10], gated=False)]), ("C", [recorded([0, 10])])]
    figure = draw(nonlocality_panels(measured))
    panels = [axes for axes in figure.axes if axes.lines]
    assert [len(axes.lines) for axes in panels] == [3, 3]
    uniform = token_distances((4, 4)).mean().item()
    assert panels[0].lines[2].get_ydata() == pytest.approx([uniform] * 2)
    assert [axes.get_ylim() for axes in panels] == [(0, pytest.approx(1.05 * uniform))] * 2
    assert panels[0].lines[0].get_ydata() == pytest.approx([0, 1])
    # Both panels share one legend.
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *("layer 1", "layer 2"),
        "uniform attention",
    ]
    assert figure_bytes(figure).startswith(b"\x89PNG")
    assert "nonlocality (patches)" in figure_bytes(figure, "svg").decode()


def test_gates_of_heads_and_their_mean():
    figure = draw(gate_panels([recorded([0, 10])]))
    values = [line.get_ydata()[-1] for line in figure.axes[0].lines]
    assert values == pytest.approx([0.7, 0.6, 0.5, 0.6])
    assert gate_panels([recorded([0], gated=False)]) == []
