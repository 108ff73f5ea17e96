"""Curves over training: means over seeds, panels and lines."""

import pytest

from locality.analysis.measures import token_distances
from locality.figures.curves import gate_panels, nonlocality_panels
from locality_papers.panels import draw


def recorded(steps, shift=0.0, gated=True):
    """A trajectory of two layers and three heads, the first layer gated."""
    gates = [[0.7, 0.6, 0.5 - shift] for _ in steps] if gated else None
    return {
        "steps": steps,
        "epochs": [step / 10 for step in steps],
        "layers": [
            {"grid": [4, 4], "nonlocality": [shift + 0.1 * n for n in steps], "gates": gates},
            {"grid": [4, 4], "nonlocality": [2.0] * len(steps), "gates": None},
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
    panels = [axes for axes in draw(nonlocality_panels(measured)).axes if axes.lines]
    uniform = token_distances((4, 4)).mean().item()
    for axes in panels:
        ends = [line.get_ydata()[-1] for line in axes.lines]
        assert ends == pytest.approx([1, 2, uniform])
        assert axes.get_ylim() == (0, pytest.approx(1.05 * uniform))
    assert len(panels) == 2
    several = recorded([0, 10])
    several["layers"][1]["grid"] = [2, 2]
    one, other = nonlocality_panels([("C", [recorded([0, 10])]), ("CvT", [several])])
    assert other["y_range"] == (0, pytest.approx(1.05 * 2 / token_distances((2, 2)).mean().item()))
    assert one["y_range"] == axes.get_ylim()


def test_gates_of_heads_and_their_mean():
    figure = draw(gate_panels([recorded([0, 10])]))
    values = [line.get_ydata()[-1] for line in figure.axes[0].lines]
    assert values == pytest.approx([0.7, 0.6, 0.5, 0.6])
    assert gate_panels([recorded([0], gated=False)]) == []
