"""Every family on a GPU: the CPU's numbers, one graph, little memory.

Tests that train use the GPU by default, so training needs no tests here.
"""

import copy

import pytest
import timm
import torch
from peers import peak_memory

from locality.analysis.measures import measure_model
from locality.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MODELS = {
    "convit_tiny": {"img_size": 96},
    "convit_micro": {},
    "deit_tiny": {"img_size": 96},
    "cvt_13": {"img_size": 96},
}


@pytest.fixture(
    params=[(name, shortcuts) for name in MODELS for shortcuts in (False, True)], ids=str
)
def model(request):
    name, shortcuts = request.param
    torch.manual_seed(0)
    built = build(name, num_classes=10, drop_path_rate=0.0, **MODELS[name])
    built.shortcuts = shortcuts
    return built


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    """Turn off TF32, PyTorch's default for convolutions on a GPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def images(model, count=4):
    torch.manual_seed(1)
    return torch.randn(count, 3, *model.img_size)


def test_logits_are_the_processors(model):
    x, there = images(model), copy.deepcopy(model).cuda().eval()
    with torch.no_grad():
        torch.testing.assert_close(there(x.cuda()).cpu(), model.eval()(x), rtol=1e-4, atol=1e-4)


def test_gradients_are_the_processors(model):
    # In double precision, since batch norm over few images amplifies rounding.
    there, x = copy.deepcopy(model).cuda().double(), images(model).double()
    for each, batch in ((model.double(), x), (there, x.cuda())):
        each(batch).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), there.parameters(), strict=True):
        if ours.grad is not None:
            scale = ours.grad.abs().max().clamp(min=1e-6).item()
            torch.testing.assert_close(
                theirs.grad.cpu(), ours.grad, rtol=0, atol=1e-5 * scale, msg=name
            )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(model, kind):
    model, x = model.cuda().eval(), images(model).cuda()
    with torch.no_grad():
        expected = model(x)
        with torch.autocast("cuda", dtype=kind):
            rough = model(x)
    assert rough.dtype == kind
    assert (rough - expected).abs().max() < 0.05 * expected.abs().max()


def test_in_half_precision_what_trains_is_finite(model):
    model, x = model.cuda(), images(model).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_cuda_graphs_hold_all_of_it(agrees_when_compiled):
    model = build("convit_nano", depth=2, gpsa_layers=1).cuda().eval()
    agrees_when_compiled(model, lambda model: images(model).cuda())


def test_what_is_measured_is_the_processors():
    model = build("convit_micro").eval()
    ours = measure_model(model, images(model))["layers"]
    theirs = measure_model(model.cuda(), images(model).cuda())["layers"]
    for one, other in zip(ours, theirs, strict=True):
        for part in ("nonlocality", "entropy"):
            assert other[part]["mean"] == pytest.approx(one[part]["mean"], rel=1e-4)
        assert other["gates"] == (one["gates"] and pytest.approx(one["gates"]))


def test_the_soft_bias_keeps_no_map_per_image():
    """Memory kept for the backward pass, beside timm's ConViT at 384 pixels."""
    ours = build("convit_tiny", img_size=384).cuda()
    theirs = timm.create_model("convit_tiny", img_size=384).cuda()
    x = torch.randn(8, 3, 384, 384, device="cuda")
    peaks = [peak_memory(lambda m=m: m(x).sum().backward(), x.device) for m in (ours, theirs)]
    assert peaks[0] < 0.5 * peaks[1]


@pytest.mark.parametrize("training", [False, True])
def test_positional_attention_reaches_a_fast_kernel(training):
    """Content attention of gated layers runs in a fused kernel."""
    model = build("convit_tiny", depth=3, gpsa_layers=2).cuda().train(training)
    x = images(model).cuda()
    with (
        torch.profiler.profile() as profile,
        torch.autocast("cuda", dtype=torch.bfloat16),
        torch.set_grad_enabled(training),
    ):
        logits = model(x)
        if training:
            logits.float().square().sum().backward()
    names = [event.key for event in profile.key_averages()]
    assert any("_flash_attention" in name or "_cudnn_attention" in name for name in names)
    assert not any("_attention_math" in name for name in names), names
