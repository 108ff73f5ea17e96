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
def test_separable_equals_dense(positional_scores, case):
    v_pos, grid = case
    scores = positional_scores(v_pos, grid)
    dense = scores.softmax(dim=-1)
    # Scores, and so log-attention, are accurate relative to the largest score.
    tolerance = 1e-14 + 4e-15 * float(scores.abs().max())
    separable = P.positional_attention(v_pos, grid)
    torch.testing.assert_close(separable, dense, rtol=0, atol=tolerance)
    torch.testing.assert_close(separable.sum(-1), torch.ones_like(separable.sum(-1)))

    generator = torch.Generator().manual_seed(0)
    shape = (2, len(v_pos), grid[0] * grid[1], 5)
    values = torch.randn(shape, dtype=torch.float64, generator=generator)
    attended = P.Separable.of(v_pos, grid, v_pos.dtype).attend(values)
    assert attended.shape == values.shape
    torch.testing.assert_close(attended, dense @ values, rtol=0, atol=200 * tolerance)


@pytest.mark.parametrize("grid", [(5, 5), (3, 7)])
def test_separable_has_the_gradients_of_dense(positional_scores, grid):
    v_pos = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(3, 4, grid[0] * grid[1], 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(values)
    dense = positional_scores(v_pos, grid).softmax(dim=-1) @ values
    separable = P.Separable.of(v_pos, grid, v_pos.dtype).attend(values)
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
    rows, columns = P.Separable.of(centre, (21, 21), centre.dtype)
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


# One softmax over content and position (Eq. 4)


@pytest.fixture(name="exactly")
def joint_attention(positional_scores):
    def attend(q, k, v, v_pos, grid):
        scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
        scores = scores + positional_scores(v_pos.double(), grid)
        return scores.softmax(dim=-1) @ v.double()

    return attend


@pytest.mark.parametrize("grid", [(1, 6), (5, 7), (14, 14)])
@pytest.mark.parametrize("strength", [0.1, 1.0, 2.5, 100.0])
@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_joint_attention_and_its_gradients_are_the_definitions(exactly, grid, strength, dtype, bar):
    """Centres on, between and off patches, and trained heads.

    v_pos's gradient sums rounding errors over all pairs. Without full-precision softmaxes per axis
    it would be off by 5% in bf16.
    """
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([[0.0, 0.0], [0.5, -0.5], [0.3, -0.7], [-3.0, 40.0]])
    centred = P.attention_centres(offsets, strength)
    moved = centred[:2] + 0.3 * torch.randn(2, 3, generator=generator)
    v_pos = torch.cat((centred, moved)).requires_grad_()
    shape = (4, len(v_pos), grid[0] * grid[1], 16)
    q, k, v, weights = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    v.requires_grad_()
    found = []
    for attend in (P.attend_jointly, exactly):
        out = attend(q, k, v, v_pos, grid).double()
        found.append((out, *torch.autograd.grad((out * weights).sum(), (v_pos, v))))
    for ours, theirs in zip(*found, strict=True):
        assert ours.isfinite().all() and (ours - theirs).norm() <= bar * theirs.norm()


def test_scores_beyond_half_precision_are_no_attention():
    v_pos, q = torch.tensor([[-1e4, 3e5, 0.0]]), torch.zeros(1, 1, 81, 8, dtype=torch.half)
    v = torch.randn(1, 1, 81, 8).half()
    expected = P.positional_attention(v_pos, (9, 9)).half() @ v
    torch.testing.assert_close(P.attend_jointly(q, q, v, v_pos, (9, 9)), expected)


def test_maps_of_half_precision_models_are_computed_in_full():
    v_pos = torch.tensor([[-0.37, 4.1, -5.3]]).bfloat16()
    exact = P.positional_attention(v_pos.float(), (16, 16))
    found = P.positional_attention(v_pos, (16, 16)).float()
    torch.testing.assert_close(found, exact, rtol=0.02, atol=1e-3)
