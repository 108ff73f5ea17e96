"""The benchmark's measurements, and its refusal to time models whose logits differ."""

import json
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
    to_table,
)
from torch import nn

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


def test_saved_activations_of_a_linear_layer_are_its_inputs():
    """y = W₂ relu(W₁ x): relu's output is kept once; input and weights exist anyway."""
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    images = torch.randn(8, 10)
    loss_input = 8 * 5 * 4  # square() keeps the logits
    assert saved_activations(model, images, nullcontext) == 8 * 20 * 4 + loss_input


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


@pytest.mark.slow
def test_a_whole_benchmark():
    result = run_benchmark("convit_tiny", img_size=32, precision="bf16", **QUICK)
    contenders = [row["contender"] for row in result["rows"]]
    peers = ["timm", "plain ViT"]
    ours = [["locality", f"locality ({how})"] for how in ("fused", "shortcuts")]
    assert contenders == [*ours[0], *peers, *ours[1], *peers]
    assert all(row["images_per_second"] > 0 for row in result["rows"])
    assert all(row["max_abs_logit_difference_fp32"] <= 1e-5 for row in result["rows"])
    json.dumps(result)
    header, cells = to_table(result["rows"])
    assert all(len(line) == len(header) for line in cells)


@pytest.mark.slow
def test_the_loader_is_measured():
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
