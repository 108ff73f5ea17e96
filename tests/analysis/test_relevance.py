"""Rollout, relevance, heads and CKA against their definitions."""

import copy

import pytest
import timm
import torch

from locality.analysis import (
    capture,
    head_costs,
    head_off,
    layer_similarity,
    linear_cka,
    relevance,
    rollout,
)
from locality.errors import UserError
from locality.models import build

TIMM = {"timm": "test_vit", "registers": "test_vit2"}  # the latter has no class token
VARIANTS = {
    "psa": ("convit_nano", {"positional_attention": "psa"}),
    "pooled": ("deit_nano", {"class_token": True, "global_pool": "avg"}),
}


@pytest.fixture(params=["convit_nano", "psa", "deit_nano", "pooled", "timm", "registers"])
def any_model(request, shaken):
    if request.param in TIMM:
        model = timm.create_model(TIMM[request.param], img_size=32, num_classes=4)
        return shaken(model, scale=0.1).double(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    name, changes = VARIANTS.get(request.param, (request.param, {}))
    return shaken(build(name, **changes)).double(), torch.randn(3, 3, 8, 12, dtype=torch.float64)


def through_matrices(model, images):
    """The logits, and each layer's attention as a matrix that they are computed from."""
    model, matrices = copy.deepcopy(model), []

    def forward(module):
        def multiplied(x, grid, *_):
            matrix = module.attention_maps(x, grid).mixed
            matrices.append(matrix)
            v = module.split_heads(module.qkv(x).chunk(3, dim=-1)[2])
            return module.proj((matrix @ v).transpose(1, 2).flatten(2))

        return multiplied

    for module in list(model.modules()):
        if hasattr(module, "attention_maps"):
            module.forward = forward(module)
        elif hasattr(module, "fused_attn"):
            module.fused_attn = False
            module.attn_drop.register_forward_hook(lambda _, args, __: matrices.append(args[0]))
    return model(images), matrices


def test_relevance_is_that_of_autograd_through_the_matrices(any_model):
    model, images = any_model
    logits, matrices = through_matrices(model, images)
    torch.testing.assert_close(logits, model(images), rtol=0, atol=1e-6)
    classes = torch.tensor([2, 0, 1])
    score = sum(logits[image, label] for image, label in enumerate(classes))
    gradients = torch.autograd.grad(score, matrices)
    tokens = matrices[-1].shape[-1]
    expected = torch.eye(tokens).double().repeat(3, 1, 1)
    for matrix, gradient in zip(matrices, gradients, strict=True):
        step = (matrix * gradient).clamp(min=0).mean(dim=1).detach()
        late = tokens - step.shape[1]  # class tokens that have not joined yet
        step = torch.nn.functional.pad(step, (late, 0, late, 0))
        expected = expected + step @ expected
    found = relevance(model, images, classes)
    prefix = tokens % 2
    read = slice(1) if model.global_pool == "token" else slice(prefix, None)
    rows = (expected - torch.eye(tokens))[:, read, prefix:].mean(dim=1)
    torch.testing.assert_close(found.flatten(1), rows, rtol=0, atol=1e-6)
    assert not torch.equal(found, relevance(model, images, classes.flip(0)))
    assert all(p.grad is None for p in model.parameters())
    predicted = model(images).argmax(dim=-1)
    assert torch.equal(relevance(model, images), relevance(model, images, predicted))
    with torch.inference_mode():
        assert torch.equal(found, relevance(model, images.clone(), classes.clone()))


@torch.no_grad()
def test_rollout_is_the_product_of_attention_and_residual(any_model):
    model, images = any_model
    with capture(model) as views:
        model(images)
    found = rollout(views)
    tokens = found.shape[1]
    expected = torch.eye(tokens).double()
    for view in views:
        step = torch.eye(tokens).double().repeat(3, 1, 1)
        late = tokens - view.maps.mixed.shape[-1]
        step[:, late:, late:] = (step[:, late:, late:] + view.maps.mixed.mean(dim=1)) / 2
        expected = step @ expected
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(3, tokens).double())


@torch.no_grad()
def test_a_head_switched_off_is_a_head_of_zero_weights(any_model):
    model, images = any_model
    zeroed, logits = copy.deepcopy(model), model(images)
    layer = [part for part in zeroed.modules() if hasattr(part, "num_heads")][-1]
    width = layer.proj.in_features // layer.num_heads
    layer.proj.weight[:, width : 2 * width] = 0
    with head_off(model, -1, 1):
        found = model(images)
    torch.testing.assert_close(found, zeroed(images), rtol=0, atol=1e-6)
    assert not torch.allclose(found, logits) and torch.equal(model(images), logits)
    costs = head_costs(model, images, logits.argmax(dim=-1))
    assert costs[-1][1] == pytest.approx(
        100 - 100 * (found.argmax(dim=-1) == logits.argmax(dim=-1)).double().mean().item()
    )
    assert {len(layer_costs) for layer_costs in costs} == {layer.num_heads}
    with pytest.raises(UserError, match="head 9 is out of range"), head_off(model, 0, 9):
        pass
    with pytest.raises(UserError, match="needs images"):
        head_costs(model, images[:0], torch.tensor([]))


def test_cka_is_one_for_what_differs_by_a_rotation(any_model):
    x = torch.randn(20, 6)
    rotation, _ = torch.linalg.qr(torch.randn(6, 6))
    assert linear_cka(x, 3 * x @ rotation + 1) == pytest.approx(1)
    y = torch.randn(20, 4)
    centred_x, centred_y = x - x.mean(dim=0), y - y.mean(dim=0)
    between = (centred_y.T @ centred_x).norm() ** 2
    within = (centred_x.T @ centred_x).norm() * (centred_y.T @ centred_y).norm()
    assert linear_cka(x, y) == pytest.approx((between / within).item(), rel=1e-4)
    model, images = any_model
    similar = layer_similarity(model, images)
    torch.testing.assert_close(similar, similar.T)
    torch.testing.assert_close(similar.diagonal(), torch.ones(len(similar)))
    with pytest.raises(UserError, match="two images or more, and this is 1"):
        layer_similarity(model, images[:1])


def test_several_grids_convolutions_and_parallel_layers_are_refused():
    one_grid = {"kv_stride": 1, "embed_stride": (2, 1, 1)}
    parallel = {"embed_dim": 32, "num_heads": 2, "depth": 2, "img_size": 64, "num_classes": 4}
    for model, size in (
        (build("cvt_nano"), 8),
        (build("cvt_nano", **one_grid), 8),
        (timm.create_model("vit_small_patch16_18x2_224", **parallel), 64),
    ):
        with pytest.raises(UserError, match="one grid only"):
            relevance(model, torch.randn(1, 3, size, size))
