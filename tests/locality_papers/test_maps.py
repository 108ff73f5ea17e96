"""Maps: one panel per head, correct values, valid files."""

import numpy as np
import pytest

from locality.analysis.pictures import LayerPicture, Pictures
from locality.figures.style import REACH, map_to_rgb, uniform_colour
from locality_papers.maps import maps


@pytest.fixture
def layer():
    mixed = np.random.default_rng(0).dirichlet(np.ones(16), size=(2, 3)).reshape(2, 3, 4, 4)
    return LayerPicture((8, 8), (5, 2), mixed, gates=np.array([0, 0.5, 1]))


def pictures(*layers):
    images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    return Pictures(images, ["a", "b"], ["a", "b"], list(layers))


def panels(figure):
    return [axes for axes in figure.axes if axes.images]


def test_a_row_shows_one_image_or_their_mean_and_boxes_the_query_on_the_keys_grid(layer):
    _, first, second = panels(maps([("ours", pictures(layer))], [0], [1], range(2)))
    np.testing.assert_allclose(second.images[0].get_array(), layer.mixed[1, 1])
    assert first.patches[0].get_xy() == (1 - 0.5, 2 - 0.5) and first.patches[0].get_width() == 1
    assert [axes.get_title() for axes in (first, second)] == ["gate 0.00", "gate 0.50"]
    both = panels(maps([("ours", pictures(layer))], [0], [1, 0], range(2)))
    for axes, image in ((both[1], 1), (both[4], 0)):
        np.testing.assert_allclose(axes.images[0].get_array(), layer.mixed[image, 0], atol=1e-3)
    (mean, *_) = panels(maps([("ours", pictures(layer))], [0], None, range(2)))
    np.testing.assert_allclose(mean.images[0].get_array(), layer.mixed[:, 0].mean(0))


def test_the_query_is_boxed_where_images_are_not_square():
    wide = LayerPicture((2, 3), (1, 2), np.full((1, 1, 2, 3), 1 / 6))
    captured = Pictures(np.zeros((1, 8, 12, 3), dtype=np.uint8), ["a"], ["a"], [wide])
    box = panels(maps([("ours", captured)], [0]))[0].patches[0]
    assert box.get_bbox().extents.tolist() == [8 - 0.5, 4 - 0.5, 12 - 0.5, 8 - 0.5]


def test_colours_reach_three_powers_of_ten_below_the_largest_value():
    layer = LayerPicture((1, 2), (0, 0), np.array([[[[1.0, 1e-9]]]]))
    image = panels(maps([("", pictures(layer))], [0], None))[0].images[0]
    assert image.get_array().min() == pytest.approx(1e-3)
    assert image.norm.vmax == 1.0


def test_even_attention_has_the_middle_colour_whatever_the_number_of_patches():
    middle = tuple(bytes.fromhex(uniform_colour(1)[1:]))
    for side in (4, 14):
        even = np.full((side, side), 1 / side**2)
        assert set(map(tuple, map_to_rgb(even).reshape(-1, 3).tolist())) == {middle}
        one = np.zeros((side, side))
        one[1, 2] = 1
        drawn = map_to_rgb(one)
        brightest = uniform_colour(min(side**2, REACH))
        assert bytes(drawn[1, 2]).hex() == brightest[1:] != uniform_colour(1)[1:]
        assert bytes(drawn[0, 0]).hex() == uniform_colour(0)[1:] == uniform_colour(1 / REACH)[1:]
    assert uniform_colour(2 * REACH) == uniform_colour(REACH)
