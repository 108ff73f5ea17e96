"""Models by name: public and own weights, and allowed differences from the model."""

import logging
from pathlib import Path

import pytest
import timm
import torch
from timm.data import resolve_model_data_config

from locality.checkpoints import (
    SOURCES,
    Preprocessing,
    api,
    convert,
    create_model,
    load,
    load_weights,
    loading,
    open_model,
    save,
    source,
)
from locality.errors import UserError
from locality.models import VARIANTS

NANO = "convit_nano"


@pytest.fixture
def weights(tmp_path, randomise) -> tuple[Path, torch.nn.Module]:
    """A saved ConViT with random weights everywhere, and the model."""
    model = randomise(create_model(NANO))
    return save(model, tmp_path / "weights"), model


@pytest.mark.parametrize("channels", [1, 3])
def test_the_data_configuration_is_that_of_the_model(channels):
    model = create_model("convit_photo.tiny_in200", img_size=96, in_chans=channels)
    data = resolve_model_data_config(model)
    assert data["input_size"] == (channels, 96, 96) and len(data["mean"]) == channels
    assert data["crop_pct"] == SOURCES["convit_photo.tiny_in200"].preprocessing.crop_pct == 1.0


def test_every_source_names_a_model_and_a_tag():
    for row in SOURCES.values():
        assert row.model in VARIANTS and row.name.partition(".")[2]
        assert (70 if row.repo else 40) < row.top1 < 90
        # The model can be built at that size.
        with torch.device("meta"):
            assert create_model(row.name).img_size == row.preprocessing.size


def test_timms_own_description_of_its_weights_agrees_with_ours():
    for row in SOURCES.values():
        if not row.repo.startswith("timm/"):
            continue
        theirs = timm.get_pretrained_cfg(row.repo.removeprefix("timm/"), allow_unregistered=False)
        assert theirs.has_weights, row.repo
        ours = row.preprocessing
        assert theirs.input_size[1:] == ours.size
        assert (theirs.mean, theirs.std) == (ours.mean, ours.std)
        assert (theirs.crop_pct, theirs.interpolation) == (ours.crop_pct, ours.interpolation)
        assert theirs.license == row.licence


def test_a_models_name_means_its_first_weights_and_unknown_ones_the_nearest(weights):
    assert source("cvt_13").name == "cvt_13.ms_in1k"
    for name in ("convit_tiny.fb_in1", "convit_nano", "convit_tine"):
        with pytest.raises(UserError, match=r"convit_tiny\.fb_in1k"):
            create_model(name, pretrained=True)
    with pytest.raises(UserError, match="not both"):
        create_model(NANO, pretrained=True, weights=weights[0])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth"):
        create_model(NANO, weights="nowhere.pth")


@pytest.mark.parametrize("name", [name for name, row in SOURCES.items() if row.file])
def test_weights_of_this_package_need_no_network(name):
    """They are in half precision and have their classes, preprocessing and a card."""
    row = SOURCES[name]
    opened = open_model(name)
    assert opened.preprocessing == row.preprocessing
    assert opened.classes is not None and len(opened.classes) == opened.num_classes
    assert row.file is not None and row.file.with_suffix(".md").exists()
    model = create_model(row.model, pretrained=True)
    assert model.num_classes == opened.num_classes
    images = torch.rand(2, 3, *model.img_size)
    torch.testing.assert_close(model.eval()(images), opened.logits(images))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_of_this_package_are_small():
    """8 MB in all, so that the wheel stays small."""
    files = [row.file for row in SOURCES.values() if row.file]
    assert sum(file.stat().st_size for file in files) <= 8e6


def test_half_precision_is_half_the_file_and_reads_as_fp32(weights, tmp_path):
    folder, model = weights
    convert(folder, tmp_path / "full.safetensors")
    convert(folder, tmp_path / "half.safetensors", half=True)
    full, half = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("full", "half"))
    assert half < 0.6 * full
    read = load(tmp_path / "half.safetensors")
    for ours, theirs in zip(read.parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    next(model.parameters()).data.fill_(1e6)
    broken = save(model, tmp_path / "broken")
    with pytest.raises(UserError, match="infinity"):
        convert(broken, tmp_path / "half.safetensors", half=True, overwrite=True)
    assert (tmp_path / "half.safetensors").stat().st_size == half


# Finding the file.


def test_what_cannot_be_downloaded_is_named():
    with pytest.raises(UserError, match=r"https://huggingface\.co/timm/convit_tiny\.fb_in1k"):
        create_model("convit_tiny.fb_in1k", pretrained=True)
    with pytest.raises(UserError, match="timm/vit_tiny_patch16_224"):
        open_model("timm/vit_tiny_patch16_224")
    with pytest.raises(FileNotFoundError, match="nobody/nothing"):
        open_model("nobody/nothing")


def test_the_hubs_file_is_used(tmp_path, monkeypatch):
    reference = timm.create_model("convit_tiny").eval()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    asked = []

    def fetched(repo, allow_patterns):
        asked.append((repo, allow_patterns[0]))
        return str(tmp_path)

    monkeypatch.setattr(loading, "snapshot_download", fetched)
    opened = open_model("convit_tiny.fb_in1k")
    files = ("model.safetensors", "pytorch_model.bin")
    assert asked == [("timm/convit_tiny.fb_in1k", file) for file in files]
    assert opened.name == "convit_tiny.fb_in1k" and opened.preprocessing == Preprocessing(224)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(opened.logits(images), reference(images), atol=1e-5, rtol=0)
        model = create_model("convit_tiny", pretrained=True).eval()
        assert torch.equal(model(images), opened.logits(images))


# Allowed differences.


def test_another_number_of_classes_keeps_a_fresh_classifier_and_says_so(weights, caplog):
    path, source_model = weights
    torch.manual_seed(0)
    fresh = create_model(NANO, num_classes=3)
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO, logger="locality"):
        model = create_model(NANO, num_classes=3, weights=path)
    assert "10 classes" in caplog.text
    assert torch.equal(model.head.weight, fresh.head.weight)
    assert torch.equal(model.blocks[2].attn.v_pos, source_model.blocks[2].attn.v_pos)


def test_no_classifier_at_all(weights):
    model = create_model(NANO, num_classes=0, weights=weights[0]).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        features = weights[1].forward_head(weights[1].forward_features(images), pre_logits=True)
        torch.testing.assert_close(model(images), features, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["convit_nano", "deit_nano", "cvt_nano"])
@pytest.mark.parametrize("size", [16, (8, 24)])
def test_another_image_size_gives_what_resampling_at_run_time_gives(
    name, size, randomise, tmp_path
):
    fields = {"use_pos_embed": True}
    source_model = randomise(create_model(name, **fields))
    path = save(source_model, tmp_path)
    model = create_model(name, img_size=size, weights=path, **fields).eval()
    images = torch.randn(2, 3, *model.img_size)
    with torch.no_grad():
        torch.testing.assert_close(model(images), source_model(images), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "fields"), [(NANO, {}), ("cvt_13", {"depth": (1, 1, 1)})])
def test_one_channel_sees_grey_images_as_three_would(name, fields, randomise, tmp_path):
    source_model = randomise(create_model(name, **fields))
    model = create_model(name, in_chans=1, weights=save(source_model, tmp_path), **fields).eval()
    grey = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        expected = source_model(grey.expand(-1, 3, -1, -1))
        torch.testing.assert_close(model(grey), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "made_with", "given"),
    [
        ("deit_nano", {}, {"num_heads": 2}),
        ("cvt_nano", {}, {"attention_scale": "head"}),
        ("cvt_nano", {}, {"kv_stride": 1}),
        ("cvt_nano", {"activation": "gelu"}, {}),
        ("convit_nano", {}, {"patch_size": 4}),
        ("convit_nano", {"global_pool": "avg"}, {}),
    ],
)
def test_anything_else_has_to_agree(name, made_with, given, tmp_path):
    path = save(create_model(name, **made_with), tmp_path)
    with pytest.raises(UserError, match=next(iter(given or made_with))) as caught:
        create_model(name, weights=path, **given)
    assert str(path) in str(caught.value)
    with pytest.raises(UserError, match="a CvT"):
        create_model("deit_nano" if name == "cvt_nano" else "cvt_nano", weights=path)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (NANO, {"drop_rate": 0.1, "locality_strength": 0.5, "freeze_gating": True}),
        # The same network, with settings per block.
        ("cvt_nano", {"kv_stride": ((2,), (2,), (2,)), "mlp_ratio": ((4.0,), (4,), (4.0,))}),
    ],
)
def test_settings_of_training_alone_may_differ(name, fields, tmp_path):
    made = create_model(name)
    model = create_model(name, weights=save(made, tmp_path), **fields)
    torch.testing.assert_close(model.state_dict(), made.state_dict(), rtol=0, atol=0)


def test_load_weights_says_what_it_changed_and_more_channels_are_timms(weights):
    model = create_model(NANO, num_classes=4, img_size=16, in_chans=5)
    classes, channels, positions = load_weights(model, weights[0])
    assert "10 classes" in classes and "3 to 5 channels" in channels and "8×8" in positions
    expected = timm.models.adapt_input_conv(5, weights[1].patch_embed.weight)
    assert torch.equal(model.patch_embed.weight, expected)


def test_timms_weights_have_their_names(monkeypatch):
    assert create_model("timm/test_vit.r160_in1k").variant == "timm/test_vit.r160_in1k"
    asked = []
    monkeypatch.setattr(api, "load_weights", lambda model, what, entry: asked.append(what) or [])
    create_model("timm/test_vit", pretrained=True)
    assert asked == ["timm/test_vit"]


def test_a_model_with_weights_knows_what_they_know(tmp_path, randomise):
    input = Preprocessing(img_size=8, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, exif=True)
    names = [f"class {number}" for number in range(10)]
    saved = randomise(create_model(NANO, num_classes=10))
    saved.temperature = 2.0
    folder = save(saved, tmp_path / "saved", preprocessing=input, classes=names)
    model = create_model(NANO, num_classes=10, weights=folder)
    assert (model.preprocessing, [*model.classes], model.temperature) == (
        input.at((8, 8)),
        names,
        2.0,
    )
    other = create_model(NANO, num_classes=3, weights=folder, img_size=12)
    assert other.preprocessing == input.at((12, 12)) and other.classes is None
    assert other.temperature == 1.0
    grey = create_model(NANO, in_chans=1, weights=folder).preprocessing
    assert grey == Preprocessing((8, 8), (0.5,), (0.5,), crop_pct=1.0, exif=True)
    load_weights(torch.compile(model), folder, classes=names[::-1])
    assert (model.classes, model.temperature) == (tuple(names[::-1]), 1.0)


def test_what_only_training_uses_may_differ_in_timms_models(tmp_path):
    folder = save(create_model("timm/test_vit", num_classes=2), tmp_path / "saved")
    create_model("timm/test_vit", num_classes=2, weights=folder, settings={"drop_path_rate": 0.1})
    assert open_model(folder).preprocessing.crop_pct == 0.95  # timm's own


def test_timms_preprocessing_that_is_not_supported_is_said(caplog):
    with torch.device("meta"):
        assert create_model("timm/volo_d4_448").preprocessing is None
    assert "crop_pct is 1.15" in caplog.text
