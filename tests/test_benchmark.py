"""The benchmark's measurements, and its refusal to time models whose logits differ."""

import json
import weakref
from contextlib import nullcontext

import pytest
import torch
from loader import run_loading
from peers import (
    Timing,
    interleave,
    peers,
    randomise,
    run_benchmark,
    timed_rows,
    to_table,
)
from torch import nn

from locality.errors import UserError
from locality.models import build
from locality.training.model import saved_activations

QUICK = {"rounds": 2, "batch_size": 2}


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("name", ["convit_tiny", "deit_tiny"])
def test_timm_peer_has_our_logits(name, in_chans):
    model = build(name, img_size=32, in_chans=in_chans).eval()
    randomise(model)
    found = peers(model, "timm")
    assert list(found) == ["timm", "plain ViT"]
    images = torch.randn(2, in_chans, 32, 32)
    assert found["plain ViT"](images).shape == (2, 1000)
    with torch.no_grad():
        difference = (model(images) - found["timm"].eval()(images)).abs().max()
    assert difference <= 1e-5


def test_a_model_of_other_depth_than_its_names_has_no_timm_peer():
    model = build("convit_tiny", img_size=32, depth=2)
    model.variant = "convit_tiny"  # as of a run with this setting
    assert list(peers(model, "timm")) == ["plain ViT"]


def test_saved_activations_of_a_linear_layer_are_its_inputs():
    """y = W₂ relu(W₁ x): relu's output is kept once; input and weights exist anyway."""
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    images = torch.randn(8, 10)
    loss_input = 8 * 5 * 4  # square() keeps the logits
    assert saved_activations(model, images, nullcontext) == 8 * 20 * 4 + loss_input


def test_what_has_been_counted_is_let_go():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())  # saves its output
    outputs = []
    model.register_forward_hook(lambda *given: outputs.append(weakref.ref(given[2])))
    saved_activations(model, torch.randn(2, 4), nullcontext)
    assert outputs[0]() is None


def test_contenders_take_turns():
    order = []
    work = {name: (lambda name=name: order.append(name)) for name in "ab"}
    timing = interleave(work, torch.device("cpu"), rounds=3, warmup=1)
    assert order == list("ab" * 4)
    assert len(timing.seconds["a"]) == 3


def test_ratios_are_taken_within_a_round():
    timing = Timing({"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 4.0, 4.0]})
    assert timing.ratios("ours", "theirs") == [2.0, 2.0, 1.0]
    assert timing.median("theirs") == 4.0


def test_the_speed_beside_a_peer_is_ours_over_its_own():
    timing = Timing({"locality": [1.0, 2.0, 4.0], "timm": [2.0, 4.0, 4.0]})
    ours, theirs = timed_rows(timing, 8, {})
    assert (ours["images_per_second"], theirs["images_per_second"]) == (4, 2)
    assert ours["locality_is_times_as_fast"] is None
    assert (theirs["locality_is_times_as_fast"], theirs["middle_half"]) == (2, (1, 2))


@pytest.mark.slow
def test_a_whole_benchmark():
    result = run_benchmark("convit_tiny", img_size=32, precision="bf16", **QUICK)
    trained = ["locality", "timm", "plain ViT"]
    contenders = [row["contender"] for row in result["rows"]]
    assert contenders == ["locality", "locality (fused)", *trained[1:], *trained]
    assert all(row["images_per_second"] > 0 for row in result["rows"])
    assert all(row["max_abs_logit_difference_fp32"] <= 1e-5 for row in result["rows"])
    json.dumps(result)
    header, cells = to_table(result["rows"])
    assert all(len(line) == len(header) for line in cells)


@pytest.mark.slow
def test_the_loader_is_measured(tmp_path):
    result = run_loading(rounds=2, files=8, batch_size=4)
    ours, timm, torchvision = result["rows"]
    assert ours["contender"] == "locality"
    assert all(row["images_per_second"] > 0 for row in result["rows"])
    assert timm["locality_is_times_as_fast"] > 0 and torchvision["middle_half"]
    json.dumps(result)


def test_models_that_disagree_are_not_timed(monkeypatch):
    def other_weights(model, against):
        found = peers(model, against)
        randomise(found["timm"], seed=1)
        return found

    monkeypatch.setattr("peers.peers", other_weights)
    with pytest.raises(ValueError, match="timed"):
        run_benchmark("convit_tiny", img_size=32, **QUICK)


def test_what_transformers_cvt_can_say_is_compared_and_the_rest_refused():
    said = {"kv_stride": 1, "mlp_ratio": 2.0, "qkv_bias": False}
    peers(build("cvt_micro", **said), "transformers")
    refused = {
        "kv_stride": {"kv_stride": (2, 2, (1, 2, 2))},
        "mlp_ratio": {"mlp_ratio": (2.0, 2.0, (4.0, 2.0, 2.0))},
        "depth": {"depth": (1, 2, 2)},
        "projection": {"projection": "linear"},
        "class_token": {"global_pool": "avg"},
    }
    for field, settings in refused.items():
        with pytest.raises(UserError, match=field):
            peers(build("cvt_micro", **settings), "transformers")
    wrong = [("convit_nano", "transformers", "timm"), ("convit_nano", "tim", "timm")]
    for name, given, right in (*wrong, ("cvt_micro", "timm", "transformers")):
        with pytest.raises(ValueError, match=right):
            peers(build(name), given)
