"""Curves over training: means over seeds, panels and lines as many as there is to show."""

import numpy as np
import pytest

from locality.errors import UserError
from locality.figures.over_training import Course, gates_over_training, nonlocality_over_training
from locality.figures.style import save


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
    course = Course("ConViT", [recorded([0, 5, 10]), recorded([0, 10], shift=0.2)])
    assert course.epochs.tolist() == [0, 1]
    assert course.nonlocality(0) == pytest.approx([0.1, 1.1])
    np.testing.assert_allclose(course.gates(0)[-1], [0.7, 0.6, 0.4])
    assert course.gated_layers() == [0] and course.depth == 2


def test_a_panel_per_course_and_a_line_per_layer(tmp_path):
    courses = [Course("DeiT", [recorded([0, 10], gated=False)]), Course("C", [recorded([0, 10])])]
    figure = nonlocality_over_training(courses)
    panels = [axes for axes in figure.axes if axes.lines]
    assert [len(axes.lines) for axes in panels] == [2, 2]
    assert panels[0].lines[0].get_ydata() == pytest.approx([0, 1])
    png, svg = save(figure, tmp_path / "nonlocality")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "nonlocality (patches)" in svg.read_text()


def test_gates_of_heads_and_their_mean():
    figure = gates_over_training(Course("ConViT", [recorded([0, 10])]))
    lines = figure.axes[0].lines
    values = [line.get_ydata()[-1] for line in lines[:4]]
    assert values == pytest.approx([0.7, 0.6, 0.5, 0.6])
    with pytest.raises(UserError, match="no gates"):
        gates_over_training(Course("DeiT", [recorded([0], gated=False)]))


def test_nothing_to_draw_is_said():
    with pytest.raises(UserError, match="no run to draw"):
        nonlocality_over_training([])
