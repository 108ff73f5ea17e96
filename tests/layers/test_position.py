"""Positional attention is separable, local, and rotates with the grid."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from locality.layers import position as P


@st.composite
def heads_on_a_grid(draw):
    """Any v_pos of one to three heads, and any grid: (h, 3) float64, (H, W)."""
    coefficient = st.floats(-100, 100, allow_subnormal=False)
    v_pos = draw(st.lists(st.tuples(*3 * [coefficient]), min_size=1, max_size=3))
    grid = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    return torch.tensor(v_pos, dtype=torch.float64), grid


@given(heads_on_a_grid())
@example((P.attention_centres(P.kernel_offsets(3).double(), 1.0), (14, 14)))
def test_separable_equals_dense(case):
    v_pos, grid = case
    scores = P.positional_scores(v_pos, grid)
    dense = scores.softmax(dim=-1)
    # Scores, and so log-attention, are accurate relative to the largest score.
    tolerance = 1e-14 + 4e-15 * float(scores.abs().max())
    separable = P.positional_attention(v_pos, grid)
    torch.testing.assert_close(separable, dense, rtol=0, atol=tolerance)
    torch.testing.assert_close(separable.sum(-1), torch.ones_like(separable.sum(-1)))

    generator = torch.Generator().manual_seed(0)
    shape = (2, len(v_pos), grid[0] * grid[1], 5)
    values = torch.randn(shape, dtype=torch.float64, generator=generator)
    attended = P.positional_factors(v_pos, grid).attend(values)
    assert attended.shape == values.shape
    torch.testing.assert_close(attended, dense @ values, rtol=0, atol=200 * tolerance)


@pytest.mark.parametrize("grid", [(5, 5), (3, 7)])
def test_separable_has_the_gradients_of_dense(grid):
    v_pos = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(3, 4, grid[0] * grid[1], 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(values)
    dense = P.positional_scores(v_pos, grid).softmax(dim=-1) @ values
    separable = P.positional_factors(v_pos, grid).attend(values)
    theirs, ours = (
        torch.autograd.grad((attended * weights).sum(), (v_pos, values))
        for attended in (dense, separable)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_large_locality_strength_is_one_hot_at_the_offset():
    """α → ∞: head h attends only to i + Δ_h (Eq. 5)."""
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
    # The discrete variance differs from ½ by 0.1%.
    assert (columns[0, 10] * places.square()).sum().item() == pytest.approx(0.5, abs=2e-3)


@given(heads_on_a_grid())
def test_rotating_the_grid_rotates_the_attention(case):
    """Rotating both scores and grid by 90° leaves the attention unchanged."""
    v_pos, (height, width) = case
    turned = torch.stack((v_pos[:, 0], v_pos[:, 2], -v_pos[:, 1]), dim=1)  # (δ₁, δ₂) → (δ₂, −δ₁)
    before = P.positional_attention(v_pos, (height, width))
    after = P.positional_attention(turned, (width, height))
    # Token (i, j) of an H×W grid becomes token (j, H − 1 − i) of a W×H grid.
    place = torch.tensor(
        [j * height + (height - 1 - i) for i in range(height) for j in range(width)]
    )
    torch.testing.assert_close(after[:, place][:, :, place], before)


def test_even_kernels_have_half_integer_centres():
    assert P.kernel_offsets(2).tolist() == [[-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]]
    for kernel in (1, 2, 3, 4):
        assert P.kernel_offsets(kernel).shape == (kernel**2, 2)
        assert P.kernel_offsets(kernel).mean(dim=0).abs().max() == 0


# The dot-product form


GRIDS = [(1, 1), (1, 6), (2, 2), (14, 14), (16, 9), (24, 24), (32, 20)]


def heads_of_all_kinds(strength):
    """Centres on, between and off patches, and trained heads."""
    offsets = torch.tensor([[0.0, 0.0], [0.5, -0.5], [0.3, -0.7], [-3.0, 40.0]])
    centred = P.attention_centres(offsets, strength)
    moved = centred[:2] + 0.3 * torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    return torch.cat((centred, moved))


def attend_by_products(v_pos, grid, values):
    queries, keys = P.dot_product_form(P.axis_scores(v_pos.float(), grid), values.dtype)
    batch, heads = values.shape[:2]
    return P.attend_widely(
        queries.expand(batch, heads, -1, -1), keys.expand(batch, -1, -1, -1), values
    )


@pytest.mark.parametrize("strength", [0.001, 0.1, 1.0, 9.7, 37.7, 100.0])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_dot_product_form_equals_dense(grid, strength):
    """To 1e-5 in single precision; in half, to the rounding of the map itself."""
    v_pos = heads_of_all_kinds(strength)
    dense = P.positional_scores(v_pos.double(), grid).softmax(dim=-1)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((2, len(v_pos), len(dense[0]), 48), generator=generator)
    single = attend_by_products(v_pos, grid, values)
    assert (single - dense @ values.double()).abs().max() <= 1e-5
    for dtype, bar in ((torch.bfloat16, 3e-3), (torch.float16, 4e-4)):
        rough = values.to(dtype)
        exact = dense @ rough.double()
        error = (attend_by_products(v_pos, grid, rough).double() - exact).square().mean().sqrt()
        rounded = (dense.to(dtype).double() @ rough.double()).to(dtype) - exact
        assert error <= bar * exact.square().mean().sqrt()
        assert error <= 1.5 * rounded.square().mean().sqrt()


@pytest.mark.parametrize("grid", [(5, 7), (14, 14)])
@pytest.mark.parametrize("strength", [0.1, 1.0, 2.5])
def test_the_dot_product_form_has_the_gradients_of_dense(grid, strength):
    """Gradients of v_pos and values, in single precision and in bf16.

    v_pos's gradient sums rounding errors over all pairs. Without full-precision softmaxes per axis
    it would be off by up to a fifth here.
    """
    v_pos = heads_of_all_kinds(strength).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    shape = (4, len(v_pos), grid[0] * grid[1], 16)
    values, weights = (torch.randn(shape, generator=generator) for _ in range(2))
    values.requires_grad_()

    def gradients(attend, dtype=torch.float32):
        loss = (attend(v_pos, grid, values.to(dtype)) * weights.to(dtype)).sum()
        return torch.autograd.grad(loss, (v_pos, values))

    def dense(v_pos, grid, values):
        return P.positional_scores(v_pos.double(), grid).softmax(dim=-1) @ values.double()

    def errors(found):
        pairs = zip(found, exact, strict=True)
        return [((a - b).norm() / b.norm()).item() for a, b in pairs]

    exact = gradients(dense)
    assert max(errors(gradients(attend_by_products))) <= 1e-5
    of_v_pos, of_values = errors(gradients(attend_by_products, torch.bfloat16))
    assert of_v_pos <= 1e-2 and of_values <= 5e-3


def test_half_precision_has_no_infinities():
    """Scores of 10⁵ and more stay within fp16, where e⁻¹⁰⁰⁰ is zero as well."""
    scores = P.axis_scores(torch.tensor([[-1e4, 3e5, 0.0]]), (9, 9))
    queries, keys = P.dot_product_form(scores, torch.half)
    assert keys.isfinite().all() and keys.shape[-1] == queries.shape[-1] == 24
