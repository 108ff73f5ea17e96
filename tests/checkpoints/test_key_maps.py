"""The formats of timm, the authors, Microsoft and transformers: both directions, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import timm
import torch
from transformers import CvtConfig, CvtForImageClassification

from locality.checkpoints.foreign import CONVIT, DEIT, MICROSOFT, TRANSFORMERS
from locality.errors import UserError
from locality.models import build, list_models, variant

VITS = {"convit": CONVIT, "deit": DEIT}
SMALL_CVT = {"depth": (1, 2, 3), "num_classes": 10, "img_size": 64}
HELD = {
    "cvt_13": (MICROSOFT, {}),
    "cvt_w24": (MICROSOFT, {}),
    "cvt_13, avg": (MICROSOFT, {"global_pool": "avg"}),
    "cvt_13, patches": (MICROSOFT, {"embedding": "patch", "num_classes": 5, "in_chans": 4}),
    "cvt_13, transformers": (TRANSFORMERS, {"activation": "gelu"}),
    "cvt_w24, transformers": (TRANSFORMERS, {"activation": "gelu", "in_chans": 4}),
    **{
        name: (key_map, {})
        for family, key_map in VITS.items()
        for name in list_models(family=family)
        if name != f"{family}_base_plus"  # takes seconds
    },
    "convit_nano, biases": (CONVIT, {"qkv_bias": True}),
    "deit_nano, one head": (DEIT, {"num_heads": 1}),
}
QUICK = ("nano", "micro", "tiny", "cvt_13")
CASES = [
    pytest.param(
        name.partition(",")[0],
        *each,
        marks=() if any(word in name for word in QUICK) else pytest.mark.slow,
        id=name,
    )
    for name, each in HELD.items()
]


@pytest.mark.parametrize(("name", "key_map", "fields"), CASES)
def test_there_and_back_is_bitwise_equal(name, key_map, fields, randomise, assert_bitwise):
    smaller = {"depth": (1, 2, 3)} if name.startswith("cvt") else {}
    ours = randomise(build(name, **smaller, **fields))
    state = ours.state_dict()
    theirs = key_map.from_native(state, ours.config)
    assert_bitwise(key_map.to_native(theirs, ours.config), state)


# A DeiT's weights do not give its number of heads; width / 64 is assumed.
TOLD = [case for case in CASES if case.values[1] is not DEIT or case.id == "deit_tiny"]


@pytest.mark.parametrize(("name", "key_map", "fields"), TOLD)
def test_the_architecture_is_read_from_the_shapes(name, key_map, fields):
    with torch.device("meta"):
        ours = build(name, **fields | ({"drop_path_rate": 0.0} if "cvt" in name else {}))
    found = key_map.configuration(key_map.from_native(ours.state_dict(), ours.config))
    told = {"activation": ours.config.activation} if "cvt" in name else {}
    assert replace(found, **told) == ours.config


@pytest.mark.parametrize("name", VITS)
def test_timms_weights_give_timms_logits_in_both_directions(name, randomise, assert_bitwise):
    key_map, sizes = VITS[name], {"img_size": 64, "num_classes": 10, "depth": 4}
    if name == "convit":
        theirs = timm.create_model("convit_tiny", local_up_to_layer=3, **sizes)
        config = replace(variant("convit_tiny").config, gpsa_layers=3, **sizes)
    else:
        theirs = timm.create_model("deit_tiny_patch16_224", **sizes)
        config = replace(variant("deit_tiny").config, **sizes)
    ours, state = build(config).eval(), randomise(theirs).state_dict()
    ours.load_state_dict(key_map.to_native(state, config))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=0)
    back = key_map.from_native(ours.state_dict(), config)
    # Only the bias that the softmax cancels is lost.
    biases = [f"blocks.{index}.attn.pos_proj.bias" for index in range(3)]
    assert list(key_map.dropped(config)) == (biases if name == "convit" else [])
    for dropped in key_map.dropped(config):
        assert state[dropped].any() and not back[dropped].any()
        back[dropped] = state[dropped]
    assert_bitwise(back, state)


def test_every_tensor_of_transformers_has_its_place(randomise, assert_bitwise):
    theirs = randomise(CvtForImageClassification(CvtConfig(num_labels=10))).state_dict()
    config = replace(TRANSFORMERS.configuration(theirs), activation="gelu")
    assert_bitwise(TRANSFORMERS.from_native(TRANSFORMERS.to_native(theirs, config), config), theirs)


def test_ratios_that_differ_between_blocks_are_read_too():
    ratios = [2, 4, 3, 2, 4, 4]
    with torch.device("meta"):
        ours = build("cvt_13", mlp_ratio=ratios, **SMALL_CVT)
    state = {MICROSOFT.rename(name): tensor for name, tensor in ours.state_dict().items()}
    found = MICROSOFT.configuration(state)
    assert [ratio for stage in found.stages for ratio in stage.mlp_ratios] == ratios


def test_a_hidden_width_that_a_rounded_ratio_falls_short_of_is_read():
    assert int(112 * (230 / 112)) == 229
    with torch.device("meta"):
        ours = build("convit_nano", embed_dim=112, mlp_ratio=math.nextafter(230 / 112, 3))
    state = CONVIT.from_native(ours.state_dict(), ours.config)
    assert len(state["blocks.0.mlp.fc1.weight"]) == 230
    assert CONVIT.configuration(state) == ours.config


@pytest.mark.parametrize("key_map", [CONVIT, DEIT, MICROSOFT, TRANSFORMERS], ids=lambda m: m.name)
def test_missing_unknown_and_misshapen_tensors_are_named(key_map):
    name, fields = {CONVIT: ("convit_nano", {}), DEIT: ("deit_nano", {})}.get(
        key_map, ("cvt_13", SMALL_CVT)
    )
    fields = fields | ({"activation": "gelu"} if key_map is TRANSFORMERS else {})
    ours = build(name, **fields)
    theirs = key_map.from_native(ours.state_dict(), ours.config)
    names = list(theirs)
    del theirs[names[3]]
    theirs |= {"extra": torch.zeros(1), names[-1]: torch.zeros(3)}
    with pytest.raises(UserError) as caught:
        key_map.to_native(theirs, ours.config)
    for words in (f"missing: {names[3]}", "unknown: extra", f"{names[-1]} is (3,)"):
        assert words in str(caught.value)


def test_what_a_format_cannot_hold_is_refused_by_its_name():
    convit, deit = build("convit_nano"), build("deit_nano")
    psa = build("convit_nano", positional_attention="psa")
    refused = [(CONVIT, deit, "embed_class_token"), (DEIT, convit, "gpsa_layers")]
    for key_map, model, named in (*refused, (CONVIT, psa, "psa")):
        with pytest.raises(UserError, match=named):
            key_map.from_native(model.state_dict(), model.config)
    distilled = DEIT.from_native(deit.state_dict(), deit.config) | {"dist_token": torch.zeros(1)}
    with pytest.raises(UserError, match="dist_token"):
        DEIT.to_native(distilled, deit.config)
    heads = build("cvt_13", embed_dim=(48, 96, 192), num_heads=(1, 2, 4), **SMALL_CVT)
    theirs = MICROSOFT.from_native(heads.state_dict(), heads.config)
    with pytest.raises(UserError, match="heads"):
        MICROSOFT.configuration(theirs)
    assert MICROSOFT.configuration(theirs, settings={"num_heads": 1})
    with torch.device("meta"):
        pooled = build("cvt_13", projection="avg")
    theirs = {TRANSFORMERS.rename(name): tensor for name, tensor in pooled.state_dict().items()}
    with pytest.raises(UserError, match="transformers"):
        TRANSFORMERS.configuration(theirs)
