"""Every family × option × format converts to the same function, or is refused.

The reference is the other library's code where installed (timm, transformers). For Microsoft's
format it is an implementation from the description of its files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CvtConfig, CvtForImageClassification

from locality.checkpoints import KEY_MAPS, read, save
from locality.checkpoints.safe_load import read_state
from locality.cli import main
from locality.models import build
from locality.models.config import CvTConfig

CVT = {
    "embed_dim": (16, 32, 48),
    "num_heads": (1, 2, 3),
    "depth": (1, 2, 3),
    "img_size": 56,
    "num_classes": 10,
    "embed_stride": (2, 2, 2),
    "embedding": "conv",
}
VIT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"qkv_bias": True},
    {"qkv_bias": False},
    {"use_pos_embed": False},
    {"img_size": (8, 16)},
    {"img_size": (4, 16)},  # 2×8 patches, as many as in a square of 4×4
    {"img_size": 12},
    {"patch_size": 4},
    {"mlp_ratio": 2.5},
    {"num_classes": 0},
    {"in_chans": 1},
    {"gpsa_layers": 0, "embed_class_token": False},
    {"gpsa_layers": 0, "embed_class_token": True},
    {"gpsa_layers": 0, "embed_class_token": True, "use_pos_embed": False},
    {"gpsa_layers": 1, "embed_class_token": False},
    {"gpsa_layers": 4, "class_token": False},
    {"gpsa_layers": 4, "global_pool": "avg"},
    {"global_pool": "avg"},
    {"global_pool": ""},
    {"class_token": False, "embed_class_token": False},
    {"class_token": False, "embed_class_token": False, "global_pool": "avg"},
    {"positional_attention": "psa"},
    {"num_heads": 2},
    {"freeze_gating": True, "locality_strength": 3.0, "conv_init": False},
]
CVT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"activation": "gelu"},
    {"attention_scale": "head"},
    {"global_pool": "avg"},
    {"global_pool": "avg", "class_token": True},
    {"global_pool": ""},
    {"class_token": False},
    {"projection": "linear"},
    {"projection": "avg"},
    {"projection_kernel": 5},
    {"kv_stride": 1},
    {"kv_stride": (1, 2, 3)},
    {"kv_stride": (2, (2, 1), 2)},
    {"kv_padding": 0},
    {"kv_padding": (0, 1, 1), "activation": "gelu"},
    {"mlp_ratio": (2.0, (2.0, 4.0), 4.0)},
    {"mlp_ratio": (2.0, 3.0, 4.0)},
    {"qkv_bias": False},
    {"position": "every"},
    {"position": "first"},
    {"embedding": "patch"},
    {"num_heads": 1},
    {"num_classes": 0},
    {"in_chans": 1},
    {"depth": (2, 2, 2)},
    {"img_size": (48, 64)},
]


def models(family: str):
    """The family's options, with the model of each."""
    if family == "cvt":
        for fields in CVT_OPTIONS:
            for activation in ("quick_gelu", "gelu"):
                options = {"activation": activation} | fields
                merged = CVT | options
                yield options, build("cvt_13", **merged)
    else:
        for fields in VIT_OPTIONS:
            if family == "deit" and ({"gpsa_layers", "positional_attention"} & fields.keys()):
                continue
            yield fields, build(f"{family}_nano", **fields)


def convit(state: dict[str, Tensor], images: Tensor, config: Any) -> Tensor:
    model = timm.models.ConVit(
        embed_dim=config.embed_dim // config.num_heads,
        local_up_to_layer=config.gpsa_layers,
        use_pos_embed=config.use_pos_embed,
        global_pool=config.global_pool,
        **_vit(config),
    )
    model.load_state_dict(state, strict=True)
    return model.eval()(images)


def deit(state: dict[str, Tensor], images: Tensor, config: Any) -> Tensor:
    model = timm.models.VisionTransformer(embed_dim=config.embed_dim, **_vit(config))
    model.load_state_dict(state, strict=True)
    return model.eval()(images)


def _vit(config: Any) -> dict[str, Any]:
    names = ("img_size", "patch_size", "in_chans", "num_classes", "depth", "num_heads")
    return {name: getattr(config, name) for name in (*names, "mlp_ratio", "qkv_bias")}


def transformers(state: dict[str, Tensor], images: Tensor, config: CvTConfig) -> Tensor:
    stages = config.stages
    model = CvtForImageClassification(
        CvtConfig(
            num_channels=config.in_chans,
            num_labels=config.num_classes,
            patch_sizes=[stage.embed_kernel for stage in stages],
            patch_stride=[stage.embed_stride for stage in stages],
            patch_padding=[stage.embed_padding for stage in stages],
            embed_dim=[stage.embed_dim for stage in stages],
            num_heads=[stage.num_heads for stage in stages],
            depth=[stage.depth for stage in stages],
            mlp_ratio=[stage.mlp_ratios[0] for stage in stages],
            qkv_bias=[stage.qkv_bias for stage in stages],
            kernel_qkv=[stage.projection_kernel for stage in stages],
            padding_q=[stage.projection_kernel // 2 for stage in stages],
            padding_kv=[stage.resolved_kv_padding for stage in stages],
            stride_kv=[stage.kv_strides[0] for stage in stages],
            drop_path_rate=[0.0] * len(stages),
        )
    )
    model.load_state_dict(state, strict=True)
    return model.eval()(images).logits


def microsoft(state: dict[str, Tensor], images: Tensor, config: CvTConfig) -> Tensor:
    """Reference for Microsoft's code, which has settings per stage, not per block.

    Fails if it lacks a tensor, or does not use one.
    """
    state, x = _Used(state), images
    for s, stage in enumerate(config.stages):
        layer = _Layers(state, f"stage{s}.")
        width, heads = stage.embed_dim, stage.num_heads
        weight, bias = layer["patch_embed.proj.weight"], layer["patch_embed.proj.bias"]
        x = F.conv2d(x, weight, bias, stage.embed_stride, stage.embed_padding)
        grid = x.shape[-2:]
        tokens = layer.norm("patch_embed.norm", x.flatten(2).mT)
        first = f"stage{s}.cls_token" in state
        if first:
            tokens = torch.cat((layer["cls_token"].expand(len(tokens), -1, -1), tokens), 1)
        for b in range(stage.depth):
            block = _Layers(state, f"stage{s}.blocks.{b}.")
            y = block.norm("norm1", tokens)
            token, image = y[:, : int(first)], y[:, int(first) :].mT.unflatten(2, grid)
            q, k, v = (
                block.linear(
                    f"attn.proj_{part}",
                    torch.cat((token, block.project(part, image, stage).flatten(2).mT), 1),
                )
                .unflatten(2, (heads, -1))
                .transpose(1, 2)
                for part in "qkv"
            )
            attention = (q @ k.mT / math.sqrt(width)).softmax(-1)
            tokens = tokens + block.linear("attn.proj", (attention @ v).transpose(1, 2).flatten(2))
            hidden = block.linear("mlp.fc1", block.norm("norm2", tokens))
            tokens = tokens + block.linear("mlp.fc2", hidden * torch.sigmoid(1.702 * hidden))
        x = tokens[:, int(first) :].mT.unflatten(2, grid)
    final = _Layers(state, "")
    features = final.norm("norm", tokens[:, :1] if first else tokens).mean(1)
    logits = final.linear("head", features) if config.num_classes else features
    assert {name for name in state if "num_batches" not in name} == state.names
    return logits


class _Used(dict[str, Tensor]):
    """A state dict that remembers which tensors it was asked for."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__(state)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)


class _Layers:
    """The tensors below a prefix, and their layers."""

    def __init__(self, state: dict[str, Tensor], prefix: str) -> None:
        self.state, self.prefix = state, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.state[self.prefix + name]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self[f"{name}.weight"], self[f"{name}.bias"], 1e-5)

    def linear(self, name: str, x: Tensor) -> Tensor:
        biased = f"{self.prefix}{name}.bias" in self.state
        return F.linear(x, self[f"{name}.weight"], self[f"{name}.bias"] if biased else None)

    def project(self, part: str, image: Tensor, stage: Any) -> Tensor:
        kernel = stage.projection_kernel
        stride, padding = (stage.kv_strides[0], stage.resolved_kv_padding)
        if part == "q":
            stride, padding = 1, kernel // 2
        name = f"attn.conv_proj_{part}."
        weight = self[f"{name}conv.weight"]
        mixed = F.conv2d(image, weight, None, stride, padding, groups=len(weight))
        mean, variance = self[f"{name}bn.running_mean"], self[f"{name}bn.running_var"]
        return F.batch_norm(mixed, mean, variance, self[f"{name}bn.weight"], self[f"{name}bn.bias"])


REFERENCES = {
    "convit": convit,
    "deit": deit,
    "cvt-microsoft": microsoft,
    "cvt-transformers": transformers,
}


def check(model, to: str, folder: Path, capsys, seen: dict[str, int]) -> None:
    """One case: convert, compare with the reference, read back."""
    source = save(model, folder / "ours")
    target = folder / ("again" if to == "locality" else f"{to}.pth")
    code = main(["convert", str(source), str(target), "--to", to, "--overwrite"])
    out, err = capsys.readouterr()
    if code:
        assert code == 2 and err.startswith("locality: ") and err.count("\n") == 1, err
        seen["refused"] += 1
        return
    images = torch.randn(2, model.in_chans, *model.img_size)
    expected = model(images)
    unspecified = KEY_MAPS[to].unspecified(model.config)
    assert all(f"{name}=" in out for name in unspecified), out
    if to in REFERENCES:
        state, _ = read_state(target)
        torch.testing.assert_close(
            REFERENCES[to](state, images, model.config), expected, atol=1e-5, rtol=1e-5
        )
    back = read(target, settings=json.loads(json.dumps(unspecified))).build()
    torch.testing.assert_close(back(images), expected, atol=1e-6, rtol=1e-6)
    seen["equal"] += 1


# Number of a family's options that a format can hold; others are refused.
EQUAL = {
    ("convit", "locality"): 25,
    ("convit", "convit"): 16,
    ("convit", "deit"): 1,
    ("deit", "locality"): 17,
    ("deit", "convit"): 1,
    ("deit", "deit"): 12,
    ("cvt", "locality"): 62,
    ("cvt", "cvt-microsoft"): 19,
    ("cvt", "cvt-transformers"): 16,
}


@pytest.mark.slow
@pytest.mark.parametrize("to", KEY_MAPS)
@pytest.mark.parametrize("family", ["convit", "deit", "cvt"])
def test_every_option_is_equal_or_refused(family, to, tmp_path, randomise, capsys):
    seen = {"equal": 0, "refused": 0}
    with torch.no_grad():
        for options, model in models(family):
            try:
                check(randomise(model), to, tmp_path, capsys, seen)
            except Exception as error:
                raise AssertionError(f"{family} with {options} → {to}") from error
    assert seen["equal"] == EQUAL.get((family, to), 0), seen


# The other direction: files written by the original code.


def written(folder: Path, state: dict[str, Tensor]) -> Path:
    torch.save(state, folder / "theirs.pth")
    return folder / "theirs.pth"


@pytest.mark.parametrize(("layers", "use_pos_embed"), [(0, True), (2, False), (3, True)])
def test_timms_convit_of_any_gated_layers_is_read(layers, use_pos_embed, randomise, tmp_path):
    """The authors' option `local_up_to_layer`. Without gated layers the number of heads is unknown;
    if all are gated, no class token joins and the classifier reads the first patch."""
    given = {"local_up_to_layer": layers, "use_pos_embed": use_pos_embed, "num_classes": 10}
    theirs = timm.models.ConVit(img_size=32, embed_dim=48, depth=3, num_heads=4, **given)
    randomise(theirs)
    settings = {"num_heads": 4, "img_size": 32}
    ours = read(written(tmp_path, theirs.state_dict()), settings=settings).build()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_padding": 0, "kv_stride": (1, 2, 1)},
        {"embed_stride": (3, 2, 1), "embed_padding": (1, 0, 1)},
    ],
)
def test_microsofts_weights_and_settings_give_microsofts_logits(
    options, randomise, tmp_path, capsys, caplog
):
    """Without settings, the assumptions are logged."""
    fields = {name: value for name, value in CVT.items() if name != "embedding"} | options
    model = randomise(build("cvt_13", **fields))
    images = torch.randn(2, 3, *model.img_size)
    state = KEY_MAPS["cvt-microsoft"].from_native(model.state_dict(), model.config)
    unspecified = KEY_MAPS["cvt-microsoft"].unspecified(model.config)
    words = [f"--set={name}={json.dumps(value)}" for name, value in unspecified.items()]
    source = str(written(tmp_path, state))
    assert main(["convert", source, str(tmp_path / "ours"), *words]) == 0
    assert not caplog.text
    with torch.no_grad():
        expected = microsoft(state, images, model.config)
        ours = read(tmp_path / "ours").build()
        torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=1e-5)
    assert main(["convert", source, str(tmp_path / "other"), words[0]]) == 0
    assert "kv_padding=1" in caplog.text and "num_heads" not in caplog.text


def test_settings_that_no_model_has_are_refused(tmp_path, capsys):
    model = build("cvt_nano")
    state = KEY_MAPS["cvt-microsoft"].from_native(model.state_dict(), model.config)
    words = ["convert", str(written(tmp_path, state)), str(tmp_path / "ours")]
    for setting in ("kv_stride", "kv_stride=two", "kv_padding=2", "num_heads=5", "activation=relu"):
        assert main([*words, "--set", "num_heads=1", "--set", setting]) == 2
        said = capsys.readouterr().err
        assert setting.partition("=")[0] in said and said.count("\n") == 1
        assert not (tmp_path / "ours").exists()
