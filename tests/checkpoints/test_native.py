"""Our format round-trips; inconsistent folders are refused."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import ExifTags, Image

import locality.checkpoints.native as native
from locality.checkpoints import Classifier, Preprocessing, load, open_model, save
from locality.checkpoints.native import Checkpoint
from locality.data.folder import read_image
from locality.errors import UserError
from locality.models import VARIANTS, build

SMALL_CVT = {"depth": (1, 1, 1), "num_classes": 10, "img_size": 64}
PICTURE = Image.new("RGB", (12, 9), "teal")
RESULT = {"fraction": 0.5, "top1": 97.25, "top5": None, "private": "not for cards"}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("convit_nano", {"freeze_gating": True, "positional_attention": "psa"}),
        ("deit_nano", {"img_size": (8, 16), "num_classes": 3}),
        ("cvt_13", SMALL_CVT | {"kv_stride": (1, 2, (2,)), "use_pos_embed": (True, False, False)}),
    ],
)
def test_a_saved_model_comes_back_bit_for_bit(name, fields, tmp_path, randomise):
    model = randomise(build(name, **fields))
    before = torch.get_rng_state()
    loaded = load(save(model, tmp_path / "saved"))
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.config == model.config and loaded.variant == name and not loaded.training
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    half = load(save(copy.deepcopy(model).to(torch.bfloat16), tmp_path / "half"))
    assert all(p.dtype == torch.float32 for p in half.parameters())
    trained = {n: p.requires_grad for n, p in model.named_parameters()}
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == trained
    images = torch.randn(2, 3, *model.img_size)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_configuration_survives_json(name):
    config = VARIANTS[name].config
    description = json.loads(json.dumps(Checkpoint(config, {}).describe()))
    assert Checkpoint.from_description(description).config == config


def test_a_timm_model_is_saved_with_another_classifier_but_the_same_pooling(tmp_path):
    model = build("timm/test_vit", num_classes=10).eval()
    with pytest.raises(UserError, match="pooling"):
        model.reset_classifier(4, "avg")
    model.reset_classifier(4)
    save(model, tmp_path / "saved")
    images = torch.randn(2, 3, *model.img_size)
    assert torch.equal(load(tmp_path / "saved").eval()(images), model(images))


def test_timms_convolutions_are_as_fast_loaded_as_built(tmp_path):
    model = build("timm/test_resnet", num_classes=2)
    loaded = load(save(model, tmp_path)).state_dict()
    assert all(loaded[name].stride() == was.stride() for name, was in model.state_dict().items())


def test_another_image_size_is_also_that_of_the_preprocessing(tmp_path):
    model = build("cvt_nano")
    save(model, tmp_path / "saved", preprocessing=Preprocessing(8, (0.5,) * 3, (0.5,) * 3))
    assert open_model(tmp_path / "saved", settings={"img_size": 16}).preprocessing.size == (16, 16)


def test_a_loaded_model_is_saved_with_what_its_file_knew(tmp_path):
    own = Preprocessing(8, (0.5,) * 3, (0.5,) * 3, crop_pct=1.0, exif=True)
    model = build("convit_nano", num_classes=2)
    save(model, tmp_path / "a", preprocessing=own, classes=["cat", "dog"])
    model = load(tmp_path / "a")
    again = open_model(save(model, tmp_path / "b"))
    assert (again.preprocessing, again.classes) == (own, ("cat", "dog"))
    assert Classifier.of(model).preprocessing == own
    model.reset_classifier(2)  # other classes
    again = open_model(save(model, tmp_path / "c"))
    assert (again.preprocessing, again.classes) == (own, None)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("swin_tiny_patch4_window7_224", {"embed_dim": 24, "img_size": 64, "window_size": 4}),
        ("eva02_tiny_patch14_224", {"img_size": 28, "depth": 1}),
    ],
)
def test_timms_tables_that_no_file_holds_are_computed(name, fields, tmp_path, randomise):
    # As initialised, or with all patches alike, other tables give nearly the same logits.
    model = randomise(build(f"timm/{name}", num_classes=3, **fields))
    images, before = torch.randn(1, 3, *model.img_size), torch.get_rng_state()
    loaded = load(save(model, tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), model(images))


# Without BatchNorm, tensors keep their names.
@pytest.mark.parametrize("fields", [{}, {"projection": "linear"}])
def test_a_fused_model_is_not_saved(fields, tmp_path):
    with pytest.raises(UserError, match="fused from"):
        save(build("cvt_13", **SMALL_CVT | fields).fuse(), tmp_path)


def test_a_model_pruned_without_its_norm_is_not_saved(tmp_path):
    model = build("convit_nano")
    model.prune_intermediate_layers(1, prune_norm=True)
    with pytest.raises(UserError, match=r"^a model pruned without its norm.*norm\.weight"):
        save(model, tmp_path)


def test_models_of_one_checkpoint_share_no_memory():
    held = Checkpoint.of(build("convit_nano"))
    one, two = held.build(), held.build()
    one.norm.weight.data.zero_()
    assert two.norm.weight.all() and held.state["norm.weight"].all()


def test_another_classifier_is_not_calibrated(tmp_path):
    model = build("convit_nano")
    model.temperature, model.problem_type = 2.5, "multi_label_classification"
    again = load(save(model, tmp_path))
    again.reset_classifier(3)
    held = open_model(save(again, tmp_path))
    assert (held.temperature, held.problem_type) == (1.0, None)


@pytest.mark.parametrize("fields", [{"num_classes": 0}, {"global_pool": ""}])
def test_features_are_no_probabilities(fields):
    with pytest.raises(UserError, match="no classifier"):
        Classifier.of(build("convit_nano", **fields)).predict(PICTURE)


def test_a_classifier_needs_a_name_for_each_class():
    with pytest.raises(UserError, match="2 class names given for 10 classes"):
        Classifier.of(build("convit_nano"), classes=["cat", "dog"])


def test_a_classifier_is_cast_copied_and_pickled():
    model = build("convit_nano").eval()
    one = Classifier.of(model)
    expected = one([PICTURE])
    torch.testing.assert_close(pickle.loads(pickle.dumps(one))([PICTURE]), expected)
    other = copy.deepcopy(one).flipped()
    for parameter in other.model.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(other([PICTURE]), torch.full((1, 10), 0.1))
    assert not one.logits(torch.zeros(1, 3, 8, 8)).requires_grad
    half = Classifier.of(model.bfloat16())
    torch.testing.assert_close(half([PICTURE]), expected, atol=0.01, rtol=0)


def test_pictures_are_converted_as_files_are_read(tmp_path):
    own = Preprocessing(8, (0.5,) * 3, (0.5,) * 3, exif=True, grey_bits=15)
    save(build("convit_nano"), tmp_path / "saved", preprocessing=own)
    subject = open_model(tmp_path / "saved")
    assert subject.preprocessing == own
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    grey = Image.fromarray(np.full((8, 8), 15_000, np.uint16))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    lying = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    Image.fromarray(lying).save(tmp_path / "lying.png", exif=turned)
    file = Image.open(tmp_path / "lying.png")
    white = Image.new("RGB", (8, 8), "white")
    expected = [white, Image.new("RGB", (8, 8), (117,) * 3), Image.fromarray(np.rot90(lying, -1))]
    assert torch.equal(subject.prepare([clear, grey, file]), subject.prepare(expected))
    plain = Classifier.of(build("convit_nano"))
    plain.prepare([file])
    assert torch.equal(subject.prepare([file]), subject.prepare([expected[2]]))  # unchanged
    # An image that was read from a file is not turned again.
    assert torch.equal(
        subject.prepare([read_image(tmp_path / "lying.png")]),
        subject.prepare([Image.fromarray(lying)]),
    )


def test_the_card_states_what_was_measured_and_nothing_else(tmp_path):
    save(build("convit_nano"), tmp_path, card=RESULT, preprocessing=Preprocessing(8))
    text = (tmp_path / "README.md").read_text()
    assert "97.25" in text and "50%" in text and "3×8×8" in text
    assert "private" not in text and "None" not in text and "Top-5" not in text
    data = ModelCard(text).data
    assert data.library_name == "locality" and data.datasets is None
    save(build("convit_nano", depth=5), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "%" not in text  # no unmeasured figures
    assert "# convit_nano with other settings" in text


# Faults of a folder.


def change_config(folder, **changes):
    content = json.loads((folder / "config.json").read_text())
    architecture = content["architecture"] | changes.pop("architecture", {})
    (folder / "config.json").write_text(
        json.dumps(content | changes | {"architecture": architecture})
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 99}, "version"),
        ({"architecture": {"family": "vti"}}, "vit"),
        ({"architecture": {"gsa_layers": 3}}, "gpsa_layers"),
        ({"architecture": {"depth": "four"}}, "depth"),
        ({"architecture": {"qkv_bias": 1}}, "qkv_bias"),
        ({"architecture": {"positional_attention": "spa"}}, "positional_attention"),
        ({"architecture": {"num_heads": 5}}, "num_heads"),
        ({"architecture": {"depth": 5}}, "blocks.4"),
        ({"architecture": {"embed_dim": 128}}, r"attn\.proj\.bias is \(64,\)"),
        ({"labels": ["a", "b"]}, "2 class names"),
        ({"labels": "abc"}, "labels"),
        ({"input": {"img_size": 8, "crop": 1}}, "crop_pct"),
        ({"input": {"crop_pct": 1.5}}, "crop_pct"),
    ],
)
def test_a_wrong_description_is_refused_by_name(tmp_path, changes, named):
    save(build("convit_nano"), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=named) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["convit_nano", "cvt_nano"])
def test_files_of_earlier_versions_open(name, tmp_path):
    model = build(name)
    save(model, tmp_path)
    fields: dict = {"init": "default"}
    if name == "cvt_nano":  # by stage
        names = ("embed_dim", "num_heads", "depth", "embed_stride", "embed_padding")
        columns = zip(*(model.config.per_stage(field) for field in names), strict=True)
        fields["stages"] = [dict(zip(names, column, strict=True)) for column in columns]
    change_config(tmp_path, architecture=fields)
    assert load(tmp_path).config == model.config


def test_damaged_or_missing_files_are_named(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=place.name):
            load(place)
    save(build("convit_nano"), tmp_path)
    (tmp_path / "config.json").write_text("{'format'")
    with pytest.raises(UserError, match=r"config\.json"):
        load(tmp_path)


def test_weights_that_are_not_numbers_are_not_saved(tmp_path):
    model = build("convit_nano")
    model.norm.bias.data[0] = float("nan")
    for refused, named in ((model, r"norm\.bias"), (torch.nn.Linear(2, 2), "Linear")):
        with pytest.raises(UserError, match=named):
            save(refused, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_saving_over_a_model_replaces_it_and_an_interruption_leaves_no_mixture(
    tmp_path, monkeypatch
):
    save(build("convit_nano"), tmp_path)
    save(build("deit_nano"), tmp_path)
    assert load(tmp_path).variant == "deit_nano"

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "model_card", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(build("convit_nano"), tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert load(tmp_path).variant == "convit_nano"  # as the weights' own description says


@pytest.mark.slow
def test_compiled_models_are_saved_without_their_wrapper(tmp_path):
    model = build("convit_nano")
    assert load(save(torch.compile(model), tmp_path)).config == model.config
