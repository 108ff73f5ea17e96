"""A CNN with attention instead of convolutions: the same function, an ordinary model."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import nn

from locality import load, save, transform
from locality.analysis import measure_model
from locality.analysis.measures import token_distances, uniform_nonlocality
from locality.checkpoints import export, load_weights, open_model
from locality.errors import UserError
from locality.layers import ImageAttention
from locality.models import build
from locality.models.initialisations import select_convolutions

SMALL = {"num_classes": 4, "img_size": 32}
NETWORKS = {
    "resnet18": ("conv1", "stage3", "stage4"),
    "resnet26d": ("conv1", "stage4"),
    "regnetx_002": ("stem", "s1", "stage2", "stage3", "stage4", "all"),
    "vgg11_bn": ("features.15,features.18", "features.22"),
    "torchvision": ("stage3", "stage4"),
}


def network(name):
    """A network with random weights and batch-norm statistics."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18() if name == "torchvision" else timm.create_model(name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)  # the last norm of a branch starts at zero
    return model.eval()


def small(**settings):
    torch.manual_seed(0)
    model = build("timm/test_resnet", **SMALL, **settings).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # the last norms of branches start at zero
    return model


def distance(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_it_computes_the_same(name):
    model = network(name)
    images = torch.randn(2, 3, 45, 66)
    expected, precise = model(images), model.double()(images.double())
    for layers in NETWORKS[name]:
        assert distance(transform(model, layers, 40.0)(images.double()), precise) < 1e-9
        assert distance(transform(model.float(), layers, "exact")(images), expected) < 1e-3
        assert distance(transform(model, layers)(images), expected) < 0.02
        model.double()


@torch.no_grad()
def test_stages_strides_and_both_precisions():
    model, images = small(), torch.randn(2, 3, 33, 47)
    for layers in ("conv1.0", "stage1", "stage2", "layer3,layer4.0.conv2", 3, "all"):
        changed = transform(model, layers, "exact")
        assert distance(changed(images), model(images)) < 1e-5
        changed = transform(model.double(), layers, 40.0)
        assert distance(changed(images.double()), model(images.double())) < 1e-12
        model.float()


def test_the_layers_chosen():
    model = small()
    kept = [f"model.layer{name}" for name in ("1.0.conv1", "1.0.conv2", "4.0.conv1", "4.0.conv2")]
    assert select_convolutions(model, "stage1,layer4") == kept
    assert select_convolutions(model, 2) == select_convolutions(model, "2") == kept[2:]
    assert select_convolutions(model, "conv1") == [f"model.conv1.{n}" for n in (0, 3, 6)]
    changed = transform(model, "stage1,layer4")
    found = [n for n, module in changed.named_modules() if isinstance(module, ImageAttention)]
    assert found == kept
    assert not any(isinstance(module, ImageAttention) for module in model.modules())


@pytest.mark.slow
def test_every_new_parameter_learns_and_the_first_losses_are_the_networks_own():
    model, images = small(), torch.randn(32, 3, 32, 32)
    labels = images.mean(dim=(1, 2, 3)).argsort().argsort() // 8
    losses = []
    for net in (model, transform(model, "stage1,stage2")):
        net.train()
        optimizer, own = torch.optim.AdamW(net.parameters(), lr=1e-3), []
        for _ in range(20):
            loss = nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            silent = [n for n, p in net.named_parameters() if not p.grad.abs().max() > 0]
            assert not silent, silent
            optimizer.step()
            own.append(loss.item())
        losses.append(torch.tensor(own))
    assert losses[0][-1] < 0.9 * losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.1, atol=0)


@pytest.mark.slow
def test_it_is_saved_loaded_and_exported(tmp_path):
    pytest.importorskip("onnxruntime")
    changed = transform(small(), "stage2", alpha=5.0, gating=2.0)
    images = torch.randn(2, 3, 32, 32)
    again = load(save(changed, tmp_path / "saved"))
    assert again.config == changed.config
    with torch.no_grad():
        torch.testing.assert_close(again(images), changed(images))
        graph = open_model(export(changed, tmp_path / "model.onnx"))
        torch.testing.assert_close(graph.logits(images), changed(images), rtol=1e-4, atol=1e-4)


def test_a_networks_weights_go_into_a_transformed_model(tmp_path):
    model = small()
    changed = small(gpsa="stage2", locality_strength=40.0)
    changes = load_weights(changed, save(model, tmp_path / "network"))
    assert changes == ["attention computes the convolutions of stage2"]
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert distance(changed(images), model(images)) < 1e-5
    other = small(gpsa="stage1")
    with pytest.raises(UserError, match="do not fit the model"):
        load_weights(other, save(changed, tmp_path / "changed"))


def test_gates_nonlocality_and_centres_are_measured():
    changed = transform(small(), "stage1,layer2.0.conv1", "exact", gating=1.0)
    layers = measure_model(changed, torch.randn(3, 3, 32, 32))["layers"]
    assert [layer["name"] for layer in layers] == [
        f"model.layer{name}.attn" for name in ("1.0.conv1", "1.0.conv2", "2.0.conv1")
    ]
    first, last = layers[0], layers[-1]
    assert (first["grid"], last["grid"], last["key_grid"]) == ([8, 8], [4, 4], [8, 8])
    assert first["heads"] == 10
    assert first["gates"] == pytest.approx([0.7311] * 9 + [0.2689], abs=1e-4)
    assert first["centres"][:9] == [[i, j] for i in (-1, 0, 1) for j in (-1, 0, 1)]
    # A head attends to one neighbour, 1 or √2 tokens away; with stride 2, half as far in queries.
    # At the border it attends to padding, which has no position.
    away = first["position_nonlocality"]
    assert away[4] == pytest.approx(0) and away[5] == pytest.approx(7 / 8)
    assert last["position_nonlocality"][5] == pytest.approx(1 / 2)
    assert last["position_nonlocality"][3] == pytest.approx(1 / 2 * 3 / 4)
    uniform = token_distances((4, 4), (8, 8), (1 / 2, 1 / 2)).mean()
    assert uniform_nonlocality(last) == pytest.approx(uniform.item())


@pytest.mark.parametrize(
    ("model", "layers", "complaint"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 1)), "all", "convolution"),
        (nn.Sequential(nn.Conv2d(3, 4, 4, padding=2)), "all", "padding"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding_mode="circular")), 1, "zero-padded"),
        (small(), "layer7", "layer7"),
        (small(), 11, "layers"),
        (small(gpsa="stage2"), "stage1", "once"),
        (build("convit_nano"), "all", "convolutional"),
    ],
)
def test_what_cannot_be_transformed_is_refused(model, layers, complaint):
    with pytest.raises(UserError, match=complaint):
        transform(model, layers)
    for settings in ({"alpha": 0}, {"gating": -1.0}):
        with pytest.raises(UserError, match=next(iter(settings))):
            transform(small(), "stage1", **settings)
