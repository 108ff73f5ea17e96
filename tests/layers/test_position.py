"""Positional attention is separable, local, and rotates with the grid."""

import pytest
import torch

from locality.layers import position as P

GRIDS = [(14, 14), (7, 11), (1, 5), (6, 1), (1, 1)]


@pytest.mark.parametrize("grid", GRIDS)
def test_separable_equals_dense(grid):
    generator = torch.Generator().manual_seed(0)
    v_pos = torch.randn(9, 3, dtype=torch.float64, generator=generator)
    dense = P.positional_scores(v_pos, grid).softmax(dim=-1)
    assert (P.positional_attention(v_pos, grid) - dense).abs().max() <= 1e-12

    values = torch.randn(2, 9, grid[0] * grid[1], 5, dtype=torch.float64, generator=generator)
    separable = P.attend_to_positions(*P.positional_factors(v_pos, grid), values)
    assert separable.shape == values.shape
    assert (separable - dense @ values).abs().max() <= 1e-12


@pytest.mark.parametrize("grid", [(5, 5), (3, 7)])
def test_separable_has_the_gradients_of_dense(grid):
    v_pos = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(3, 4, grid[0] * grid[1], 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(values)
    results = []
    for attended in (
        P.positional_scores(v_pos, grid).softmax(dim=-1) @ values,
        P.attend_to_positions(*P.positional_factors(v_pos, grid), values),
    ):
        results.append(torch.autograd.grad((attended * weights).sum(), (v_pos, values)))
    for dense, separable in zip(*results, strict=True):
        torch.testing.assert_close(separable, dense, rtol=1e-10, atol=1e-10)


def test_encodings_are_squared_distance_then_rows_then_columns():
    encodings = P.relative_encodings((3, 4))
    query, key = 1 * 4 + 3, 2 * 4 + 1  # (row 1, column 3) looks at (row 2, column 1)
    assert encodings[query, key].tolist() == [1 + 4, 1, -2]


def test_large_locality_strength_is_one_hot_at_the_offset():
    """α → ∞: head h looks at i + Δ_h and nowhere else (Eq. 5)."""
    offsets = P.kernel_offsets(3)
    attention = P.positional_attention(P.attention_centres(offsets, 200.0), (5, 6))
    middle = 2 * 6 + 3
    for head, (down, right) in enumerate(offsets.int().tolist()):
        expected = torch.zeros(30)
        expected[(2 + down) * 6 + 3 + right] = 1
        torch.testing.assert_close(attention[head, middle], expected)


def test_unit_strength_is_a_gaussian_of_variance_one_half():
    """α = 1, Δ = 0: a discrete Gaussian of variance ½ per axis."""
    centre = P.attention_centres(torch.zeros(1, 2, dtype=torch.float64), 1.0)
    rows, columns = P.positional_factors(centre, (21, 21))
    places = torch.arange(21, dtype=torch.float64) - 10
    gaussian = torch.exp(-places.square() / (2 * 0.5))
    for factor in (rows, columns):
        torch.testing.assert_close(factor[0, 10], gaussian / gaussian.sum())
    # The discrete variance differs from the continuous ½ by a tenth of a per cent.
    assert (columns[0, 10] * places.square()).sum().item() == pytest.approx(0.5, abs=2e-3)


def test_rotating_the_grid_rotates_the_attention():
    """A quarter turn of the centres and of the grid leaves the attention as it was."""
    offsets = P.kernel_offsets(3)
    turned = torch.stack((offsets[:, 1], -offsets[:, 0]), dim=1)  # (down, right) → (right, −down)
    grid = (4, 6)
    before = P.positional_attention(P.attention_centres(offsets, 0.7), grid)
    after = P.positional_attention(P.attention_centres(turned, 0.7), (6, 4))
    # Token (i, j) of a 4×6 grid becomes token (j, 3 − i) of a 6×4 grid.
    place = torch.tensor([j * 4 + (3 - i) for i in range(4) for j in range(6)])
    torch.testing.assert_close(after[:, place][:, :, place], before)


@pytest.mark.parametrize(("heads", "side"), [(1, 1), (3, 1), (4, 2), (9, 3), (15, 3), (16, 4)])
def test_kernel_side_is_the_floor_of_the_root(heads, side):
    assert P.kernel_size(heads) == side


def test_even_kernels_have_half_integer_centres():
    assert P.kernel_offsets(2).tolist() == [[-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]]
    for kernel in (1, 2, 3, 4):
        assert P.kernel_offsets(kernel).shape == (kernel**2, 2)
        assert P.kernel_offsets(kernel).mean(dim=0).abs().max() == 0
