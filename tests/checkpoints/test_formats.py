"""The tensor names of timm, Microsoft and transformers: the same function in both directions.

The references are timm's and transformers' own code. Microsoft's is transformers' with another
activation, under the names in the description of its files.
"""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import CvtConfig, CvtForImageClassification

from locality.checkpoints import KEY_MAPS, convert, read, save
from locality.checkpoints.formats import CVT_STAGES, MICROSOFT, TIMM, TIMM_NAMES, TRANSFORMERS
from locality.checkpoints.native import read_state
from locality.errors import UserError
from locality.models import VARIANTS, build
from locality.models.cvt import QuickGELU

CVT = {
    "embed_dim": (16, 32, 48),
    "num_heads": (1, 2, 3),
    "depth": (1, 2, 3),
    "img_size": 56,
    "num_classes": 10,
    "embed_stride": (2, 2, 2),
    "embed_kernel": 3,
    "embed_padding": 1,
}
# Options of each family, and the foreign formats that hold them.
VIT_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("convit", {}, "timm"),
    ("convit", {"qkv_bias": True, "img_size": 12, "in_chans": 1}, "timm"),
    ("convit", {"use_pos_embed": False, "patch_size": 4, "mlp_ratio": 2.5}, "timm"),
    ("convit", {"gpsa_layers": 0, "num_classes": 0}, "timm"),
    ("convit", {"gpsa_layers": 1, "num_heads": 2, "global_pool": "avg"}, "timm"),
    ("convit", {"gpsa_layers": 4, "class_token": False, "freeze_gating": True}, "timm"),
    ("convit", {"locality_strength": 3.0, "conv_init": False}, "timm"),
    ("convit", {"img_size": (8, 16)}, ""),
    ("convit", {"gpsa_layers": 4, "global_pool": "avg"}, ""),
    ("convit", {"class_token": False}, ""),
    ("convit", {"positional_attention": "psa"}, ""),
    ("convit", {"global_pool": ""}, ""),
    ("deit", {}, "timm"),
    # 2×8 patches, as many as in a square of 4×4
    ("deit", {"qkv_bias": False, "num_heads": 2, "img_size": (4, 16)}, "timm"),
    ("deit", {"img_size": (8, 16), "mlp_ratio": 2.5, "num_classes": 0, "in_chans": 1}, "timm"),
    ("deit", {"use_pos_embed": False}, ""),
    ("deit", {"global_pool": "avg"}, ""),
]
GELU = {"activation": "gelu"}
CVT_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("cvt", {}, "microsoft"),
    ("cvt", {"kv_stride": (1, 2, 3), "qkv_bias": False, "img_size": (48, 64)}, "microsoft"),
    ("cvt", {"num_classes": 0, "in_chans": 1} | GELU, "transformers"),
    ("cvt", {"kv_padding": (0, 1, 1), "mlp_ratio": (2.0, 3.0, 4.0)} | GELU, "transformers"),
    ("cvt", {"projection_kernel": 5, "kv_padding": 1} | GELU, "transformers"),
    ("cvt", {"embed_kernel": (4, 2, 2), "embed_padding": 0, "num_heads": 1} | GELU, "transformers"),
    ("cvt", {"depth": (2, 2, 2)} | GELU, ""),
    ("cvt", {"depth": (0, 1, 1)}, ""),
    ("cvt", {"global_pool": "avg"} | GELU, ""),
    ("cvt", {"global_pool": "avg", "class_token": True}, ""),
    ("cvt", {"attention_scale": "head"}, ""),
    ("cvt", {"class_token": False}, ""),
    ("cvt", {"projection": "linear"}, ""),
    ("cvt", {"kv_stride": (2, (2, 1), 2)}, ""),
    ("cvt", {"mlp_ratio": (2.0, (2.0, 4.0), 4.0)}, ""),
    ("cvt", {"use_pos_embed": True}, ""),
]


def reference(key_map: str, state: dict[str, Tensor], config: Any) -> nn.Module:
    """The model of timm or transformers with these weights."""
    if key_map == "timm":
        same = ("img_size", "patch_size", "in_chans", "num_classes", "depth", "num_heads")
        fields = {name: getattr(config, name) for name in (*same, "mlp_ratio", "qkv_bias")}
        if config.embed_class_token:
            model = timm.models.VisionTransformer(embed_dim=config.embed_dim, **fields)
        else:
            model = timm.models.ConVit(
                embed_dim=config.embed_dim // config.num_heads,
                local_up_to_layer=config.gpsa_layers,
                use_pos_embed=config.use_pos_embed,
                global_pool=config.global_pool,
                **fields,
            )
    else:
        fields = {theirs: list(config.per_stage(ours)) for theirs, ours in CVT_STAGES.items()}
        fields["padding_kv"] = [stage.kv_padding for stage in config.stages]
        fields["padding_q"] = [stage.projection_kernel // 2 for stage in config.stages]
        sizes = {"num_channels": config.in_chans, "num_labels": config.num_classes}
        model = CvtForImageClassification(CvtConfig(**fields, **sizes))
        if key_map == "microsoft":
            assert state.keys() == microsoft_names(config)
            gelu = replace(config, activation="gelu")
            state = TRANSFORMERS.from_native(MICROSOFT.to_native(state, config), gelu)
            for module in model.modules():
                if hasattr(module, "activation"):
                    module.activation = QuickGELU()
    model.load_state_dict(state, strict=True)
    return model.eval()


def microsoft_names(config: Any) -> set[str]:
    """The names of Microsoft's files."""
    pair = ("weight", "bias")
    last = len(config.stages) - 1
    names = {f"{layer}.{kind}" for layer in ("norm", "head") for kind in pair}
    names.add(f"stage{last}.cls_token")
    statistics = (*pair, "running_mean", "running_var", "num_batches_tracked")
    for s, stage in enumerate(config.stages):
        names |= {
            f"stage{s}.patch_embed.{part}.{kind}" for part in ("proj", "norm") for kind in pair
        }
        for b in range(stage.depth):
            block = f"stage{s}.blocks.{b}."
            layers = ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2")
            names |= {f"{block}{layer}.{kind}" for layer in layers for kind in pair}
            for x in "qkv":
                names |= {f"{block}attn.proj_{x}.{kind}" for kind in pair[: 1 + stage.qkv_bias]}
                names |= {f"{block}attn.conv_proj_{x}.bn.{name}" for name in statistics}
                names.add(f"{block}attn.conv_proj_{x}.conv.weight")
    return names


@pytest.mark.parametrize(
    ("family", "options", "holds"),
    [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in VIT_OPTIONS + CVT_OPTIONS],
)
@torch.no_grad()
def test_every_option_is_equal_or_refused(family, options, holds, tmp_path, randomise):
    fields = CVT | options if family == "cvt" else options
    model = randomise(build("cvt_13" if family == "cvt" else f"{family}_nano", **fields)).eval()
    images = torch.randn(2, model.in_chans, *model.img_size)
    expected = model(images)
    source = save(model, tmp_path / "ours")
    for to in KEY_MAPS:
        target = tmp_path / ("again" if to == "locality" else f"{to}.pth")
        if to not in ("locality", holds):
            with pytest.raises(UserError):
                convert(source, target, to)
            continue
        said = convert(source, target, to)
        if to != "locality":
            theirs = reference(to, read_state(target)[0], model.config)(images)
            logits = getattr(theirs, "logits", theirs)
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            variant, settings = re.search(r"--variant (\S+)(.*)", said).groups()
            settings = {n: json.loads(x) for n, x in re.findall(r"--set (\w+)=(\S+)", settings)}
            advised = read(target, variant, settings=settings).build()
            torch.testing.assert_close(advised(images), expected, atol=1e-6, rtol=1e-6)
        back = read(target, like=model.config).build()
        torch.testing.assert_close(back(images), expected, atol=1e-6, rtol=1e-6)


NAMED = {name: "microsoft" if row.family == "cvt" else "timm" for name, row in VARIANTS.items()}
# The first differs within a stage; the others have stages without blocks.
del NAMED["cvt_13_nas"], NAMED["cvt_photo"], NAMED["cvt_photo_plus"]
QUICK = ("nano", "micro", "tiny", "pico")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if any(w in name for w in QUICK) else pytest.mark.slow)
        for name in NAMED
        if "plus" not in name
    ],
)
def test_named_models_come_back(name, randomise, tmp_path):
    ours = randomise(build(name, img_size=(64 if name.startswith("cvt") else None)))
    state, key_map = ours.state_dict(), KEY_MAPS[NAMED[name]]
    theirs = key_map.from_native(state, ours.config)
    torch.testing.assert_close(key_map.to_native(theirs, ours.config), state, rtol=0, atol=0)
    torch.save(theirs, tmp_path / f"{name}.pth")
    torch.testing.assert_close(
        dict(read(tmp_path / f"{name}.pth").state), dict(state), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("name", "layers", "size"),
    [("convit_tiny", 0, 64), ("convit_tiny", 2, 48), ("deit_tiny", 0, 64)],
)
@torch.no_grad()
def test_classes_and_image_size_are_those_of_the_weights(name, layers, size, randomise, tmp_path):
    options = {"img_size": size, "depth": 3, "num_classes": 5}
    options |= {"local_up_to_layer": layers} if name == "convit_tiny" else {}
    theirs = randomise(timm.create_model(TIMM_NAMES[name], **options)).eval()
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    settings = {"depth": 3, "gpsa_layers": layers}
    model = read(tmp_path / "theirs.pth", name, settings=settings).build()
    images = torch.randn(2, 3, size, size)
    torch.testing.assert_close(model(images), theirs(images), atol=1e-5, rtol=0)


def test_only_the_bias_that_the_softmax_cancels_is_lost(randomise):
    sizes = {"img_size": 64, "num_classes": 10, "depth": 4}
    state = randomise(timm.create_model("convit_tiny", local_up_to_layer=3, **sizes)).state_dict()
    config = replace(VARIANTS["convit_tiny"].config, gpsa_layers=3, **sizes)
    back = TIMM.from_native(TIMM.to_native(state, config), config)
    for dropped in [f"blocks.{i}.attn.pos_proj.bias" for i in range(3)]:
        assert state[dropped].any() and not back[dropped].any()
        back[dropped] = state[dropped]
    torch.testing.assert_close(back, state, rtol=0, atol=0)


@pytest.mark.parametrize("key_map", [TIMM, MICROSOFT, TRANSFORMERS], ids=lambda m: m.name)
def test_missing_unknown_and_misshapen_tensors_are_named(key_map):
    fields = CVT | {"activation": getattr(key_map, "activation", "")}
    ours = build("convit_nano") if key_map is TIMM else build("cvt_13", **fields)
    theirs = key_map.from_native(ours.state_dict(), ours.config)
    names = list(theirs)
    del theirs[names[3]]
    theirs |= {"extra": torch.zeros(1), names[-1]: torch.zeros(3)}
    with pytest.raises(UserError) as caught:
        key_map.to_native(theirs, ours.config)
    for words in (f"missing: {names[3]}", "unknown: extra", f"{names[-1]} is (3,)"):
        assert words in str(caught.value)
