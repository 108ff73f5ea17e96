"""Measures of attention maps against closed forms, in double precision."""

import math

import pytest
import torch

from locality.analysis import measures
from locality.layers.position import attention_centres
from locality.models import build

GRIDS = [(14, 14), (7, 11), (1, 5)]


def uniform(queries: int, keys: int) -> torch.Tensor:
    return torch.full((2, 3, queries, keys), 1 / keys, dtype=torch.float64)


@pytest.mark.parametrize("grid", GRIDS)
def test_uniform_attention_looks_the_mean_distance_away(grid):
    height, width = grid
    n = height * width
    # (H − |a|)(W − |b|) pairs are a rows and b columns apart.
    expected = (
        math.fsum(
            (height - abs(a)) * (width - abs(b)) * math.hypot(a, b)
            for a in range(1 - height, height)
            for b in range(1 - width, width)
        )
        / n**2
    )
    measured = measures.nonlocality(uniform(n, n), grid)
    assert measured.shape == (2, 3)
    assert torch.allclose(measured, torch.full_like(measured, expected), rtol=0, atol=1e-9)


@pytest.mark.parametrize("grid", GRIDS)
def test_one_hot_attention_looks_as_far_as_its_offset(grid):
    height, width = grid
    n = height * width
    down, right = 1, 2
    attention = torch.zeros(1, 1, n, n, dtype=torch.float64)
    expected = 0.0
    for row in range(height):
        for column in range(width):
            # Outside positions fall on the last patch inside.
            to_row, to_column = min(row + down, height - 1), min(column + right, width - 1)
            attention[0, 0, row * width + column, to_row * width + to_column] = 1
            expected += math.hypot(to_row - row, to_column - column) / n
    assert measures.nonlocality(attention, grid).item() == pytest.approx(expected, abs=1e-9)


def test_class_token_is_left_out_and_rows_renormalised():
    torch.manual_seed(0)
    patches = torch.rand(2, 3, 20, 20, dtype=torch.float64).softmax(-1)
    # The class token takes a third of every row; its own row is random.
    with_token = torch.zeros(2, 3, 21, 21, dtype=torch.float64)
    with_token[..., 1:, 0] = 1 / 3
    with_token[..., 1:, 1:] = patches * 2 / 3
    with_token[..., 0, :] = torch.rand(21, dtype=torch.float64).softmax(-1)
    for measure in (
        lambda a, prefix: measures.nonlocality(a, (4, 5), prefix_tokens=prefix),
        measures.entropy,
    ):
        assert torch.allclose(measure(with_token, 1), measure(patches, 0), rtol=0, atol=1e-12)


def test_rows_given_to_the_class_token_alone_say_nothing():
    attention = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    attention[..., 0] = 1  # every patch attends to the class token,
    attention[0, 0, 1, 0], attention[0, 0, 1, 4] = 0.5, 0.5  # but one also attends across the grid
    measured = measures.nonlocality(attention, (2, 2), prefix_tokens=1)
    assert measured.item() == pytest.approx(math.sqrt(2), abs=1e-12)


def test_keys_on_a_coarser_grid_lie_where_their_convolution_is_centred():
    # 3×3, stride 2, padding 1 on a 5×6 grid: 3×3 keys, centred on every second token.
    away = measures.token_distances((5, 6), (3, 3), (2, 2))
    conv = torch.nn.Conv2d(2, 2, 3, stride=2, padding=1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[0, 0], conv.weight[1, 1] = 1 / 9, 1 / 9
    places = torch.stack(
        torch.meshgrid(torch.arange(5.0), torch.arange(6.0), indexing="ij")
    ).double()
    centres = conv(places[None])[0]
    # Where the border does not cut the kernel, the mean position is the centre.
    assert centres[:, 1, 1].tolist() == pytest.approx([2, 2])
    assert away[0, 4].item() == pytest.approx(math.hypot(2, 2))  # query (0, 0) to key (1, 1)
    assert away[3 * 6 + 5, 8].item() == pytest.approx(math.hypot(1, 1))  # (3, 5) to key at (4, 4)
    # Rows and columns of their own: key (1, 1) is centred on (2.5, 1).
    away = measures.token_distances((4, 6), (2, 6), (2, 1), (0.5, 0))
    assert away[0, 7].item() == pytest.approx(math.hypot(2.5, 1))


def test_uniform_attention_of_all_grids_is_one_value_in_the_common_unit():
    model = build("cvt_nano", num_classes=3, img_size=32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("attn.q.linear.weight", "attn.q.linear.bias")):
            torch.nn.init.zeros_(parameter)  # all scores are 0
    layers = measures.measure_model(model, torch.randn(2, 3, 32, 32))["layers"]
    unit, divisor, everywhere = measures.nonlocality_unit(layers)
    found = [layer["nonlocality"]["layer_mean"] / divisor(layer) for layer in layers]
    assert len({tuple(layer["grid"]) for layer in layers}) > 1
    assert found == pytest.approx([everywhere] * len(layers), rel=1e-5) and everywhere == 1
    assert "uniform" in unit
    # Half of the queries attend one token to the right: half a token on average.
    grid = (4, 4)
    local = torch.zeros(1, 1, 16, 16)
    for query in range(16):
        local[0, 0, query, query + (query % 2 == 0)] = 1
    share = measures.nonlocality(local, grid) / measures.uniform_nonlocality({"grid": grid})
    assert share.item() == pytest.approx(0.5 / measures.token_distances(grid).mean().item())


def test_entropy_of_uniform_and_one_hot_attention():
    assert torch.allclose(
        measures.entropy(uniform(10, 7)), torch.full((2, 3), math.log(7), dtype=torch.float64)
    )
    one_hot = torch.eye(12)[None, None]
    assert measures.entropy(one_hot).item() == measures.nonlocality(one_hot, (3, 4)).item() == 0
    with pytest.raises(ValueError, match="fit"):
        measures.nonlocality(one_hot, (4, 4))


def test_centre_strength_and_span_are_read_back():
    offsets = torch.tensor([[0.0, 0.0], [-1.5, 2.0], [3.0, -0.5]], dtype=torch.float64)
    focus = measures.positional_focus(attention_centres(offsets, 0.7))
    assert torch.allclose(focus.centre, offsets)
    assert torch.allclose(focus.strength, torch.full((3,), 0.7, dtype=torch.float64))
    assert torch.allclose(focus.span, torch.full((3,), (2 * 0.7) ** -0.5, dtype=torch.float64))


def test_a_head_that_looks_away_from_everything_has_no_centre():
    focus = measures.positional_focus(torch.tensor([[0.1, 1.0, 0.0], [-1.0, 0.0, 2.0]]))
    assert focus.centre[0].isnan().all() and focus.span[0].isinf()
    assert focus.centre[1].tolist() == [0.0, 1.0]
