"""Maps drawn from pictures: a panel per head, the right numbers in it, files that open."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from locality.analysis.maps import MapBlock, MapRow, draw_maps, layer_row, model_block
from locality.analysis.pictures import LayerPicture, Pictures
from locality.analysis.style import save


@pytest.fixture
def layer():
    mixed = np.random.default_rng(0).dirichlet(np.ones(16), size=(2, 3)).reshape(2, 3, 4, 4)
    return LayerPicture("blocks.0.attn", (8, 8), (4, 4), (5, 2), mixed, gates=np.array([0, 0.5, 1]))


def test_a_row_shows_one_image_or_their_mean_and_boxes_the_query_on_the_keys_grid(layer):
    one = layer_row(layer, 1, "layer 1", heads=2)
    assert np.array_equal(one.maps, layer.mixed[1, :2])
    assert one.query == (2, 1)
    assert one.gates is not None and one.gates.tolist() == [0, 0.5]
    assert np.allclose(layer_row(layer, None, "", 3).maps, layer.mixed.mean(axis=0))


def test_a_figure_has_an_input_and_a_panel_per_head(layer, tmp_path):
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    pictures = Pictures(image[None], ["a"], ["a"], (0.5, 0.5), [layer])
    blocks = [
        model_block("ours", pictures, [0], 3),
        MapBlock("two", [MapRow("x", layer.mixed[0], None)]),
    ]
    figure = draw_maps(blocks, image, ((5, 2), (8, 8)))
    assert len([axes for axes in figure.axes if axes.images]) == 1 + 3 + 3
    written = save(figure, tmp_path / "maps")
    with Image.open(written[0]) as opened:
        assert opened.width > opened.height
    assert "layer 1" in written[1].read_text()


def test_colours_reach_three_powers_of_ten_below_the_largest_value():
    row = MapRow("", np.array([[[1.0, 1e-9]]]), None)
    image = draw_maps([MapBlock("", [row])]).axes[0].images[0]
    assert image.get_array().min() == pytest.approx(1e-3)
    assert image.norm.vmax == 1.0
