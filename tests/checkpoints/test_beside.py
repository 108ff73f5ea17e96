"""Configuration files of timm and transformers are read; results equal their library's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models import save_for_hf
from transformers import (
    CLIPImageProcessor,
    ConvNextImageProcessor,
    CvtConfig,
    CvtForImageClassification,
    DeiTImageProcessor,
    ViTImageProcessor,
)

import locality
from locality.checkpoints import Preprocessing, open_model, resolve
from locality.errors import UserError

NAMES = ["fox", "cat", "dog"]
PREPARED = {
    "mean": (0.4, 0.5, 0.6),
    "std": (0.2, 0.3, 0.4),
    "crop_pct": 0.8,
    "interpolation": "bilinear",
}
SMALL = {"img_size": 32, "depth": 2}
CONVITS = {
    "plain": {"local_up_to_layer": 1},
    "avg": {"local_up_to_layer": 1, "global_pool": "avg"},
    "wider": {"local_up_to_layer": 1, "embed_dim": 8, "num_heads": 9},
    "ungated": {"local_up_to_layer": 0, "qkv_bias": True, "mlp_ratio": 2.0},
    "all gated": {"local_up_to_layer": 5},
    "positions": {"local_up_to_layer": 1, "use_pos_embed": False, "drop_path_rate": 0.1},
    "grey": {"local_up_to_layer": 1, "in_chans": 1},
}
DEITS = {
    "plain": {},
    "avg": {"global_pool": "avg"},
    "wider": {"embed_dim": 96, "num_heads": 4},
    "size": {"img_size": (32, 64), "patch_size": 8},
    "no class token": {"class_token": False, "global_pool": "avg", "fc_norm": False},
    "no class token, normalised": {"class_token": False, "global_pool": "avg"},
    "scaled": {"init_values": 0.1},
    "without biases": {"proj_bias": False},
    "not normalised": {"final_norm": False},
    "largest": {"global_pool": "max"},
}
CVTS = {
    "plain": {},
    "strides": {"stride_kv": [1, 2, 1], "patch_stride": [4, 2, 1]},
    "depth": {"depth": [2, 2, 4], "embed_dim": [16, 16, 32]},
    "kernels": {"kernel_qkv": [5, 3, 3], "padding_q": [2, 1, 1], "padding_kv": [2, 1, 0]},
    "patches": {"patch_sizes": [7, 2, 2], "patch_padding": [3, 0, 0], "mlp_ratio": [2.0, 4.0, 3.0]},
    "bias": {"qkv_bias": [True, False, True]},
}


@pytest.fixture(scope="module")
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))


def saved_by_timm(folder, randomise, name, **arguments):
    model = randomise(timm.create_model(name, num_classes=3, **SMALL | arguments))
    change = PREPARED if arguments.get("in_chans", 3) == 3 else {}
    model.pretrained_cfg = {**model.pretrained_cfg, **change}
    save_for_hf(model, folder, model_config={"label_names": NAMES})
    return model


def same_as_timm(model, folder, image):
    cfg = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    data = timm.data.resolve_data_config({}, pretrained_cfg=cfg)
    given = image.convert("L") if data["input_size"][0] == 1 else image
    with torch.no_grad():
        logits = model(timm.data.create_transform(**data, is_training=False)(given)[None])
    opened = open_model(folder)
    assert opened.classes == tuple(NAMES)
    assert opened.preprocessing.size == tuple(data["input_size"][1:])
    torch.testing.assert_close(opened([image]), logits.softmax(-1), atol=1e-5, rtol=0)
    return opened


@pytest.mark.parametrize("variant", CONVITS)
def test_a_convit_of_timms(variant, tmp_path, randomise, image, caplog):
    model = saved_by_timm(tmp_path, randomise, "convit_tiny", **CONVITS[variant])
    opened = same_as_timm(model, tmp_path, image)
    assert opened.model.config.family == "vit"
    assert "locality" not in {record.name for record in caplog.records}


def test_a_repository_of_timms_opens_as_its_folder(tmp_path, randomise, image, monkeypatch):
    saved_by_timm(tmp_path, randomise, "convit_tiny", local_up_to_layer=1)
    monkeypatch.setattr(resolve, "snapshot_download", lambda name, **_: tmp_path)
    assert torch.equal(open_model("me/model")([image]), open_model(tmp_path)([image]))


def test_a_repository_without_a_description_takes_the_models_name(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "snapshot_download", lambda name, **_: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"^me/model holds no weights"):
        open_model("me/model")
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "model.safetensors")
    assert open_model("me/model", "timm/test_resnet").model is not None
    with pytest.raises(UserError, match=r"^me/model/model\.safetensors: "):
        open_model("me/model")


def test_our_description_beside_several_state_dicts(tmp_path):
    model, file = locality.create_model("deit_nano"), tmp_path / "pytorch_model.bin"
    locality.save(model, tmp_path / "saved")
    with pytest.raises(UserError, match="holds one set of weights"):
        open_model(tmp_path / "saved", entry="zz")
    (tmp_path / "saved" / "config.json").rename(tmp_path / "config.json")
    torch.save({"model": model.state_dict(), "ema": model.state_dict()}, file)
    with pytest.raises(UserError, match="choose one"):
        open_model(tmp_path)
    assert open_model(tmp_path, entry="ema").model is not None


@pytest.mark.parametrize("variant", DEITS)
def test_a_deit_of_timms(variant, tmp_path, randomise, image, caplog):
    model = saved_by_timm(tmp_path, randomise, "deit_tiny_patch16_224", **DEITS[variant])
    opened = same_as_timm(model, tmp_path, image)
    own = {"plain", "wider", "size", "no class token"}
    assert opened.model.config.family == ("vit" if variant in own else "timm")
    assert not caplog.records


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "test_vit", "test_resnet"])
def test_any_other_model_of_timms(name, tmp_path, randomise, image):
    model = randomise(timm.create_model(name, num_classes=3))
    save_for_hf(model, tmp_path, model_config={"label_names": NAMES})
    same_as_timm(model, tmp_path, image)


def test_a_description_of_earlier_timm(tmp_path, randomise):
    model = saved_by_timm(tmp_path, randomise, "convit_tiny", local_up_to_layer=1)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    labels = {"labels": content.pop("label_names")}
    file.write_text(json.dumps(content | labels | content.pop("pretrained_cfg")))
    opened, expected = open_model(tmp_path), Preprocessing((32, 32), **PREPARED)
    assert opened.preprocessing == expected and opened.classes == tuple(NAMES)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(opened.logits(x), model(x), atol=1e-5, rtol=0, check_stride=False)


def saved_by_transformers(folder, randomise, processor=None, **arguments):
    small = {"embed_dim": [16, 16, 16], "num_heads": [1, 1, 1], "depth": [1, 2, 3]}
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {n: i for i, n in enumerate(NAMES)}}
    model = randomise(CvtForImageClassification(CvtConfig(**labels, **small | arguments)))
    model.save_pretrained(folder)
    processor = processor or ConvNextImageProcessor(
        size={"shortest_edge": 64}, image_mean=[0.4] * 3
    )
    processor.save_pretrained(folder)
    return model, processor


def same_as_transformers(model, processor, folder, image):
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    opened = open_model(folder)
    assert opened.classes == tuple(NAMES)
    # transformers resizes tensors with torchvision, which may round to a neighbouring level.
    step = 2.01 / 255 / min(opened.preprocessing.std)
    torch.testing.assert_close(opened.prepare([image]), pixels, atol=step, rtol=0)
    with torch.no_grad():
        theirs, ours = model(pixels).logits, opened.logits(pixels)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", CVTS)
def test_a_cvt_of_transformers(variant, tmp_path, randomise, image, caplog):
    saved = saved_by_transformers(tmp_path, randomise, **CVTS[variant])
    same_as_transformers(*saved, tmp_path, image)
    assert not caplog.records


PROCESSORS = {
    "cropped": ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=0.8, resample=2),
    "squashed, large": ConvNextImageProcessor(size={"shortest_edge": 384}),
    "squashed": ViTImageProcessor(size={"height": 64, "width": 48}),
    "not normalised": ViTImageProcessor(size={"height": 64, "width": 64}, do_normalize=False),
    "squashed, cropped": DeiTImageProcessor(
        size={"height": 80, "width": 80}, crop_size={"height": 64, "width": 64}
    ),
    "CLIP's": CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 48, "width": 48}),
    # 56 / (56 / 100) is below 100.
    "rounded": CLIPImageProcessor(
        size={"shortest_edge": 100}, crop_size={"height": 56, "width": 56}
    ),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_of_transformers(processor, tmp_path, randomise, image):
    saved = saved_by_transformers(tmp_path, randomise, PROCESSORS[processor])
    same_as_transformers(*saved, tmp_path, image)


def refused_with(fields, named, folder):
    content = json.loads((folder / "config.json").read_text()) | fields
    beside = ("label_names", "architecture", "pretrained_cfg")
    args = {name: value for name, value in fields.items() if name not in beside}
    content["model_args"] = content.get("model_args", {}) | args
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=named) as caught:
        open_model(folder)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"depth": 3}, "blocks.2"),
        ({"num_classes": 4}, "3 class names"),
        ({"label_names": NAMES[:2]}, "2 class names"),
        ({"label_names": {"7": "owl"}}, "class 7"),
        ({"depth": 10**9}, "depth"),
        ({"global_pool": "map"}, "global_pool"),
        ({"architecture": "convit_huge"}, "convit_huge"),
        ({"pretrained_cfg": {"crop_mode": "border"}}, "border"),
    ],
)
def test_what_contradicts_timms_weights_is_refused(fields, named, tmp_path, randomise):
    saved_by_timm(tmp_path, randomise, "convit_tiny", local_up_to_layer=1)
    refused_with(fields, named, tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"depth": [1, 2, 4]}, "missing"),
        ({"depth": [1, 2]}, "shorter"),
        ({"embed_dim": [16, 16, "16"]}, "embed_dim"),
        ({"cls_token": [True, False, True]}, "cls_token"),
        ({"qkv_projection_method": ["avg"] * 3}, "qkv_projection_method"),
        ({"stride_q": [2, 1, 1]}, "stride_q"),
        ({"model_type": "vit"}, "type 'vit'"),
    ],
)
def test_what_cannot_be_read_of_transformers_is_refused(fields, named, tmp_path, randomise):
    saved_by_transformers(tmp_path, randomise)
    refused_with(fields, named, tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"do_resize": False}, "resize"),
        ({"size": {"longest_edge": 3}}, "img_size"),
        ({"resample": 9}, "interpolation"),
        ({"image_processor_type": "LevitImageProcessor"}, "Levit"),
        (
            {
                "image_processor_type": "DeiTImageProcessor",
                "size": {"height": 72, "width": 90},
                "do_center_crop": True,
                "crop_size": {"height": 64, "width": 48},
            },
            "same share",
        ),
    ],
)
def test_a_processor_that_cannot_be_read_is_refused(fields, named, tmp_path, randomise):
    saved_by_transformers(tmp_path, randomise)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UserError, match=f"preprocessor_config.json: .*{named}"):
        open_model(tmp_path)


def test_weights_by_themselves_say_what_is_assumed(tmp_path, randomise, caplog):
    saved_by_timm(tmp_path, randomise, "convit_tiny", local_up_to_layer=1, global_pool="avg")
    (tmp_path / "config.json").unlink()
    assert open_model(tmp_path).model.config.global_pool == "token"
    assert "global_pool=token" in caplog.text and "ImageNet's mean" in caplog.text


def test_a_model_for_other_pooling_than_the_weights_is_refused(tmp_path, randomise):
    arguments = {"local_up_to_layer": 1, "global_pool": "avg"}
    saved_by_timm(tmp_path, randomise, "convit_tiny", **arguments)
    fields = {"num_classes": 5, "gpsa_layers": 1, **SMALL}
    with pytest.raises(UserError, match="global_pool='avg'"):
        locality.create_model("convit_tiny", weights=tmp_path, **fields)
    locality.create_model("convit_tiny", weights=tmp_path, global_pool="avg", **fields)
