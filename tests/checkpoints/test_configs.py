"""config.json of timm and transformers: every field gives what their own code gives, or is said."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models import save_for_hf
from transformers import (
    ConvNextImageProcessorPil,
    CvtConfig,
    CvtForImageClassification,
)

from locality.checkpoints import loading, open_model
from locality.errors import UserError

NAMES = ["fox", "cat", "dog"]
SMALL = {"img_size": 32, "depth": 2}
DATA = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4), "crop_pct": 0.8}
DATA |= {"interpolation": "bilinear"}
CONVIT, DEIT = "convit_tiny", "deit_tiny_patch16_224"
OURS = {f"locality_{family}_nano": {"img_size": 8} for family in ("convit", "deit", "cvt")}
# Model of timm, its arguments, its data configuration.
TIMM = [
    *((CONVIT, SMALL | {"local_up_to_layer": 1} | fields, DATA) for fields in (
        {},
        {"global_pool": "avg"},
        {"embed_dim": 8, "num_heads": 9},
        {"num_heads": 3},
        {"patch_size": 8},
        {"local_up_to_layer": 0, "qkv_bias": True, "mlp_ratio": 2.0},
        {"local_up_to_layer": 5},
        {"use_pos_embed": False, "locality_strength": 2.0},
        {"in_chans": 1},
    )),
    *((DEIT, SMALL | fields, DATA) for fields in (
        {},
        {"embed_dim": 96, "num_heads": 4},
        {"img_size": (32, 64), "patch_size": 8, "mlp_ratio": 2.0},
        {"qkv_bias": False, "in_chans": 1},
        # Only timm's own code computes these.
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        {"no_embed_class": True},
        {"global_pool": "avg"},
        {"class_token": False, "global_pool": "avg"},
        {"init_values": 0.1},
        {"proj_bias": False},
        {"final_norm": False},
        {"global_pool": "max"},
        {"fc_norm": True},
    )),
    *((name, size | fields, DATA) for name, size in OURS.items() for fields in (
        {},
        {"global_pool": "avg", "in_chans": 1},
    )),
    *((name, SMALL if name == DEIT else OURS[name], data) for name in (DEIT, *OURS) for data in (
        {"mean": (0.1, 0.2, 0.3)},
        {"std": (0.1, 0.2, 0.3)},
        {"crop_pct": 0.7},
        {"crop_pct": 0.7, "crop_mode": "squash"},
        {"interpolation": "nearest"},
    )),
    ("deit_tiny_distilled_patch16_224", {}, {}),
    ("test_vit", {}, DATA),
    ("test_resnet", {}, DATA),
]  # fmt: skip
BY_TIMM = {"global_pool", "fc_norm", "init_values", "proj_bias", "final_norm", "no_embed_class"}
CVTS = {
    "plain": {},
    "strides": {"stride_kv": [1, 2, 1], "patch_stride": [4, 2, 1]},
    "depth": {"depth": [2, 2, 4], "embed_dim": [16, 16, 32], "num_heads": [2, 1, 4]},
    "kernels": {"kernel_qkv": [5, 3, 3], "padding_q": [2, 1, 1], "padding_kv": [2, 1, 0]},
    "patches": {"patch_sizes": [7, 2, 2], "patch_padding": [3, 0, 0], "mlp_ratio": [2.0, 4.0, 3.0]},
    "bias": {"qkv_bias": [True, False, True]},
    "paths": {"drop_path_rate": [0.0, 0.2, 0.3]},
    "labels": {"problem_type": "multi_label_classification"},
}


@pytest.fixture(scope="module")
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))


def saved_by_timm(folder, randomise, name, data=DATA, **arguments):
    model = randomise(timm.create_model(name, num_classes=3, **arguments))
    data = data if arguments.get("in_chans", 3) == 3 else {}
    model.pretrained_cfg = {**model.pretrained_cfg, **data}
    save_for_hf(model, folder, model_config={"label_names": NAMES})
    return model


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Our models in timm's registry; other modules list timm's own when they are imported."""
    import locality.timm  # noqa: F401


@pytest.mark.parametrize(
    ("name", "arguments", "data"), [pytest.param(*row, id=f"{row[0]} {row[1:]}") for row in TIMM]
)
def test_a_model_of_timms(name, arguments, data, tmp_path, randomise, image, caplog):
    model = saved_by_timm(tmp_path, randomise, name, data, **arguments)
    cfg = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    theirs = timm.data.resolve_data_config({}, pretrained_cfg=cfg)
    given = image.convert("L") if theirs["input_size"][0] == 1 else image
    pixels = timm.data.create_transform(**theirs, is_training=False)(given)[None]
    with torch.no_grad():
        logits = model(pixels)
    opened = open_model(tmp_path)
    assert opened.classes == tuple(NAMES) and opened.num_classes == 3
    torch.testing.assert_close(opened.prepare([image]), pixels, atol=1e-5, rtol=0)
    torch.testing.assert_close(opened.logits(pixels), logits, atol=1e-5, rtol=1e-5)
    assert "locality" not in {record.name for record in caplog.records}
    if name == DEIT:
        assert opened.model.config.family == ("timm" if BY_TIMM & arguments.keys() else "vit")


@pytest.mark.parametrize("name", [CONVIT, DEIT, *OURS])
def test_another_image_size_of_timms_is_read(name, tmp_path, randomise):
    """timm leaves that of the data as it was, if a model takes any."""
    size = {"img_size": 16} if name in OURS else SMALL | {"img_size": 48}
    saved_by_timm(tmp_path, randomise, name, **size)
    content = json.loads((tmp_path / "config.json").read_text())
    opened = [open_model(tmp_path)]
    # Or the data alone have it.
    del content["model_args"]["img_size"]
    content["pretrained_cfg"]["input_size"] = [3, size["img_size"], size["img_size"]]
    (tmp_path / "config.json").write_text(json.dumps(content))
    for model in (*opened, open_model(tmp_path)):
        assert model.preprocessing.size == model.model.img_size == (size["img_size"],) * 2


def test_classes_without_a_name_have_their_number(tmp_path, randomise):
    saved_by_timm(tmp_path, randomise, DEIT, **SMALL)
    content = json.loads((tmp_path / "config.json").read_text())
    content["label_names"] = {"0": "fox", "2": "dog"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert open_model(tmp_path).classes == ("fox", "1", "dog")


def test_a_repository_without_a_description_takes_the_models_name(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "snapshot_download", lambda name, **_: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        open_model("me/model")
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "model.safetensors")
    assert open_model("me/model", "timm/test_resnet").model is not None
    with pytest.raises(UserError, match="--variant"):
        open_model("me/model")


def saved_by_transformers(folder, randomise, processor=None, **arguments):
    small = {"embed_dim": [16, 16, 16], "num_heads": [1, 1, 1], "depth": [1, 2, 3]}
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {n: i for i, n in enumerate(NAMES)}}
    model = randomise(CvtForImageClassification(CvtConfig(**labels, **small | arguments)))
    model.save_pretrained(folder)
    processor = processor or ConvNextImageProcessorPil(
        size={"shortest_edge": 64}, image_mean=[0.4] * 3
    )
    processor.save_pretrained(folder)
    return model, processor


def same_as_transformers(model, processor, folder, image):
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    opened = open_model(folder)
    assert opened.classes == tuple(NAMES) and opened.problem_type == model.config.problem_type
    torch.testing.assert_close(opened.prepare([image]), pixels, atol=1e-5, rtol=0)
    with torch.no_grad():
        theirs = model(pixels).logits
    torch.testing.assert_close(opened.logits(pixels), theirs, atol=1e-5, rtol=1e-5)
    return opened


@pytest.mark.parametrize("variant", CVTS)
def test_a_cvt_of_transformers(variant, tmp_path, randomise, image, caplog):
    saved = saved_by_transformers(tmp_path, randomise, **CVTS[variant])
    opened = same_as_transformers(*saved, tmp_path, image)
    assert not caplog.records
    rates = CVTS[variant].get("drop_path_rate", [0.0, 0.0, 0.1])
    assert [stage.drop_path_rate for stage in opened.model.config.stages] == rates


def test_rates_of_transformers_without_a_place_here_are_named(tmp_path, randomise, caplog):
    saved_by_transformers(tmp_path, randomise, attention_drop_rate=[0.0, 0.1, 0.0])
    open_model(tmp_path)
    assert "attention_drop_rate=[0.0, 0.1, 0.0]" in caplog.text


CONVNEXT = {"size": {"shortest_edge": 64}}
PROCESSORS = {
    "cropped": ConvNextImageProcessorPil(**CONVNEXT, crop_pct=0.8, resample=2),
    "rounded": ConvNextImageProcessorPil(size={"shortest_edge": 56}, crop_pct=0.7),
    "squashed, large": ConvNextImageProcessorPil(size={"shortest_edge": 384}),
    "not normalised": ConvNextImageProcessorPil(**CONVNEXT, do_normalize=False),
    "nearest": ConvNextImageProcessorPil(**CONVNEXT, resample=0, image_std=[0.1, 0.2, 0.3]),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_of_transformers(processor, tmp_path, randomise, image):
    saved = saved_by_transformers(tmp_path, randomise, PROCESSORS[processor])
    same_as_transformers(*saved, tmp_path, image)


def test_a_processor_as_microsofts_repositories_have_it(tmp_path, randomise, image):
    model, processor = saved_by_transformers(tmp_path, randomise)
    content = {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 64, "resample": 3}
    content |= {"image_mean": [0.4] * 3, "image_std": processor.image_std}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    same_as_transformers(model, processor, tmp_path, image)


# Who wrote the folder, fields that contradict the weights or cannot be read, a word of the error.
REFUSED = [
    *(("timm", *row) for row in (
        ({"model_args": {"depth": 3}}, "blocks.2"),
        ({"model_args": {"num_classes": 4}}, "3 class names"),
        ({"label_names": NAMES[:2]}, "2 class names"),
        ({"label_names": {"7": "owl"}}, "class 7"),
        ({"model_args": {"depth": 10**9}}, "depth"),
        ({"model_args": {"global_pool": "map"}}, "global_pool"),
        ({"architecture": "convit_huge"}, "convit_huge"),
        ({"pretrained_cfg": {"crop_mode": "border"}}, "border"),
    )),
    *(("config", *row) for row in (
        ({"depth": [1, 2, 4]}, "missing"),
        ({"depth": [1, 2]}, "depth"),
        ({"embed_dim": [16, 16, "16"]}, "embed_dim"),
        ({"cls_token": [True, False, True]}, "cls_token"),
        ({"qkv_projection_method": ["avg"] * 3}, "qkv_projection_method"),
        ({"stride_q": [2, 1, 1]}, "stride_q"),
        ({"model_type": "vit"}, "type 'vit'"),
    )),
    *(("preprocessor_config", *row) for row in (
        ({"do_resize": False}, "resize"),
        ({"size": {"longest_edge": 3}}, "img_size"),
        ({"resample": 9}, "interpolation"),
        ({"image_processor_type": "ViTImageProcessor"}, "ViT"),
        ({"do_center_crop": True}, "ConvNext"),
        ({"rescale_factor": 1.0}, "scale"),
        ({"image_mean": [0.5]}, "mean"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("file", "fields", "named"), REFUSED)
def test_what_contradicts_or_cannot_be_read_is_refused(file, fields, named, tmp_path, randomise):
    if file == "timm":
        saved_by_timm(tmp_path, randomise, CONVIT, local_up_to_layer=1, **SMALL)
    else:
        saved_by_transformers(tmp_path, randomise)
    path = tmp_path / f"{file.replace('timm', 'config')}.json"
    content = json.loads(path.read_text())
    fields = {
        name: content[name] | value if name == "model_args" else value
        for name, value in fields.items()
    }
    path.write_text(json.dumps(content | fields))
    with pytest.raises(UserError, match=named) as caught:
        open_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_weights_by_themselves_say_what_is_assumed(tmp_path, randomise, caplog):
    saved_by_timm(tmp_path, randomise, CONVIT, local_up_to_layer=1, global_pool="avg", **SMALL)
    (tmp_path / "config.json").unlink()
    settings = {"gpsa_layers": 1, "depth": 2}
    opened = open_model(tmp_path / "pytorch_model.bin", CONVIT, None, settings)
    assert opened.model.config.global_pool == "token" and "ImageNet's mean" in caplog.text
