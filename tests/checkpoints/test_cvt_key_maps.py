"""CvT weights: microsoft's and transformers' formats, both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import CvtConfig, CvtForImageClassification

from locality.checkpoints.foreign import MICROSOFT, TRANSFORMERS
from locality.errors import UserError
from locality.models import build

KEY_MAPS = {"microsoft": MICROSOFT, "transformers": TRANSFORMERS}
SMALL = {"depth": (1, 2, 3), "num_classes": 10, "img_size": 64}


def reference(randomise, **config) -> CvtForImageClassification:
    return randomise(CvtForImageClassification(CvtConfig(num_labels=10, **config)))


def test_from_transformers_gives_the_same_logits(randomise):
    theirs = reference(randomise, depth=[1, 2, 3])
    # Their port computes the exact GELU.
    ours = build("cvt_13", activation="gelu", **SMALL).eval()
    ours.load_state_dict(TRANSFORMERS.to_native(theirs.state_dict(), ours.config))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)


def test_to_transformers_loads_strictly_and_gives_the_same_logits(randomise):
    ours = randomise(build("cvt_13", activation="gelu", **SMALL))
    theirs = reference(randomise, depth=[1, 2, 3])
    theirs.load_state_dict(TRANSFORMERS.from_native(ours.state_dict(), ours.config), strict=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(theirs(images).logits, ours(images), atol=1e-5, rtol=0)


def test_every_tensor_of_transformers_has_its_place(randomise, assert_bitwise):
    theirs = reference(randomise).state_dict()
    config = replace(TRANSFORMERS.infer(theirs, {}), activation="gelu")
    assert_bitwise(TRANSFORMERS.from_native(TRANSFORMERS.to_native(theirs, config), config), theirs)


def microsoft_shapes() -> dict[str, tuple[int, ...]]:
    """The names and shapes of microsoft's CvT-13, written out from the description of its files."""
    shapes: dict[str, tuple[int, ...]] = {}

    def layer(name: str, *weight: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = weight, weight[:1]

    inputs = 3
    for stage, (width, depth, kernel) in enumerate([(64, 1, 7), (192, 2, 3), (384, 10, 3)]):
        layer(f"stage{stage}.patch_embed.proj", width, inputs, kernel, kernel)
        layer(f"stage{stage}.patch_embed.norm", width)
        for index in range(depth):
            block = f"stage{stage}.blocks.{index}"
            for part in "qkv":
                projection = f"{block}.attn.conv_proj_{part}"
                shapes[f"{projection}.conv.weight"] = (width, 1, 3, 3)
                layer(f"{projection}.bn", width)
                shapes[f"{projection}.bn.running_mean"] = (width,)
                shapes[f"{projection}.bn.running_var"] = (width,)
                shapes[f"{projection}.bn.num_batches_tracked"] = ()
                layer(f"{block}.attn.proj_{part}", width, width)
            layer(f"{block}.attn.proj", width, width)
            layer(f"{block}.norm1", width)
            layer(f"{block}.norm2", width)
            layer(f"{block}.mlp.fc1", 4 * width, width)
            layer(f"{block}.mlp.fc2", width, 4 * width)
        inputs = width
    shapes["stage2.cls_token"] = (1, 1, 384)
    layer("norm", 384)
    layer("head", 1000, 384)
    return shapes


def test_microsofts_names_and_shapes_are_those_of_its_files():
    with torch.device("meta"):
        ours = build("cvt_13")
    theirs = MICROSOFT.from_native(ours.state_dict(), ours.config)
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == microsoft_shapes()


HELD = [
    ("microsoft", "cvt_13", {}),
    pytest.param("microsoft", "cvt_w24", {}, marks=pytest.mark.slow),
    ("microsoft", "cvt_13", {"global_pool": "avg"}),
    ("microsoft", "cvt_13", {"projection": "microsoft_avg", "qkv_bias": False}),
    ("microsoft", "cvt_13", {"embedding": "patch", "num_classes": 5, "in_chans": 4}),
    ("transformers", "cvt_13", {"activation": "gelu"}),
    pytest.param(
        *("transformers", "cvt_w24", {"activation": "gelu", "num_classes": 5, "in_chans": 4}),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("key_map", "name", "fields"), HELD)
def test_there_and_back_is_bitwise_equal(key_map, name, fields, randomise, assert_bitwise):
    ours = randomise(build(name, depth=(1, 2, 3), **fields))
    state = ours.state_dict()
    assert_bitwise(
        KEY_MAPS[key_map].to_native(KEY_MAPS[key_map].from_native(state, ours.config), ours.config),
        state,
    )


@pytest.mark.parametrize(("key_map", "name", "fields"), HELD)
def test_the_architecture_is_read_from_the_shapes(key_map, name, fields):
    with torch.device("meta"):
        ours = build(name, drop_path_rate=0.0, **fields)
    found = KEY_MAPS[key_map].infer(
        KEY_MAPS[key_map].from_native(ours.state_dict(), ours.config), {}
    )
    assert replace(found, activation=ours.config.activation) == ours.config


def test_ratios_that_differ_between_blocks_are_read_too():
    ratios = [2, 4, 3, 2, 4, 4]
    with torch.device("meta"):
        ours = build("cvt_13", mlp_ratio=ratios, **SMALL)
    state = {MICROSOFT.rename(name): tensor for name, tensor in ours.state_dict().items()}
    found = MICROSOFT.infer(state, {})
    assert [ratio for stage in found.stages for ratio in stage.mlp_ratios] == ratios


@pytest.mark.parametrize(
    ("key_map", "activation"), [("microsoft", "quick_gelu"), ("transformers", "gelu")]
)
def test_missing_unknown_and_misshapen_tensors_are_named_on_both_sides(key_map, activation):
    ours = build("cvt_13", activation=activation, **SMALL)
    theirs = KEY_MAPS[key_map].from_native(ours.state_dict(), ours.config)
    names = list(theirs)
    removed, reshaped = names[3], names[-1]
    del theirs[removed]
    theirs["extra"] = torch.zeros(1)
    theirs[reshaped] = torch.zeros(3)
    with pytest.raises(UserError) as caught:
        KEY_MAPS[key_map].to_native(theirs, ours.config)
    message = str(caught.value)
    assert f"missing: {removed}" in message
    assert "unknown: extra" in message
    assert f"{reshaped} is (3,) instead of (10,)" in message


def test_widths_that_hide_the_number_of_heads_are_said_to():
    ours = build("cvt_13", embed_dim=(48, 96, 192), num_heads=(1, 2, 4), **SMALL)
    theirs = MICROSOFT.from_native(ours.state_dict(), ours.config)
    with pytest.raises(UserError, match="number of heads cannot be inferred"):
        MICROSOFT.infer(theirs, {})
    MICROSOFT.infer(theirs, {"num_heads": 1})


def test_transformers_cannot_run_without_convolutions():
    with torch.device("meta"):
        ours = build("cvt_13", projection="microsoft_avg")
    theirs = {TRANSFORMERS.rename(name): tensor for name, tensor in ours.state_dict().items()}
    with pytest.raises(UserError, match="transformers' CvT code cannot run without"):
        TRANSFORMERS.infer(theirs, {})
