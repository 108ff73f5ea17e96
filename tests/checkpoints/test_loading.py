"""Files and folders of any format are recognised, or refused with file and cause."""

import argparse
import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import locality
from locality.checkpoints import KEY_MAPS, convert, load_weights, open_model, read, save
from locality.checkpoints.formats import recognise
from locality.errors import UserError
from locality.models import build

# The smallest model per format.
MODELS = {
    "locality": ("convit_nano", {}),
    "timm": ("convit_nano", {}),
    "microsoft": ("cvt_nano", {}),
    "transformers": ("cvt_nano", {"depth": (1, 2, 3), "activation": "gelu"}),
}


@pytest.fixture(scope="module", params=KEY_MAPS)
def held(request, randomise):
    """A format's name, a model, and the model's state dict in that format."""
    name, fields = MODELS[request.param]
    model = randomise(build(name, **fields))
    key_map = KEY_MAPS[request.param]
    return request.param, model, key_map.from_native(model.state_dict(), model.config)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_any_layout_opens_as_the_model_it_is_named_after(held, suffix, tmp_path):
    _, model, state = held
    path = tmp_path / f"{MODELS[held[0]][0]}{suffix}"
    if suffix == ".pth":
        torch.save({"model": state, "args": argparse.Namespace(epochs=300)}, path)
    else:
        save_file(state, path)
    fields = {"depth": [1, 2, 3], "activation": "gelu"} if held[0] == "transformers" else {}
    checkpoint = read(path, settings=fields)
    torch.testing.assert_close(dict(checkpoint.state), dict(model.state_dict()), rtol=0, atol=0)
    images = torch.randn(2, model.in_chans, *model.img_size)
    with torch.no_grad():
        assert torch.equal(checkpoint.build()(images), model.eval()(images))
    other = build("deit_nano" if model.config.family == "cvt" else "cvt_nano")
    with pytest.raises(UserError, match=model.config.title):
        recognise(state, other.config)


WRAPPERS = ("module", "_orig_mod", "model", "net", "backbone", "student")
WRAPPED = [*(f"{name}." for name in WRAPPERS), "module._orig_mod.", "module.model.net."]


def test_what_wrappers_put_before_names_is_taken_off(held, tmp_path, caplog):
    _, model, state = held
    like, expected = model.config, None
    for prefix in ("", *WRAPPED):
        named = {f"{prefix}{name}": tensor for name, tensor in state.items()}
        if prefix:
            named["criterion.weight"] = torch.ones(3)
        torch.save({"epoch": 3, "state_dict": named}, tmp_path / "weights.pth")
        caplog.clear()
        found = read(tmp_path / "weights.pth", like=like).state
        expected = expected or found
        assert found.keys() == expected.keys(), prefix
        assert all(torch.equal(found[name], expected[name]) for name in found), prefix
        assert ("criterion.weight" in caplog.text) == bool(prefix)


def test_two_models_in_one_state_dict_are_an_error_until_one_is_named(held, tmp_path):
    _, model, state = held
    like = model.config
    both = {f"student.net.{name}": tensor for name, tensor in state.items()}
    both |= {f"teacher.{name}": 2 * tensor for name, tensor in state.items()}
    torch.save(both, tmp_path / "both.pth")
    with pytest.raises(UserError, match=r"student\.net, teacher"):
        read(tmp_path / "both.pth", like=like)
    torch.save(state, tmp_path / "one.pth")
    one = read(tmp_path / "one.pth", like=like).state
    for entry in ("student", "student.net"):
        found = read(tmp_path / "both.pth", like=like, entry=entry).state
        assert all(torch.equal(found[name], one[name]) for name in one)


# Faults of a file, made from a valid one, and words of the error.


def truncated(path, state):
    save_file(state, path)
    path.write_bytes(path.read_bytes()[:-100])


def wrong_architecture(path, state):
    torch.save({"layer1.0.conv1.weight": torch.zeros(3, 3)}, path)


def not_finite(path, state):
    broken = state["blocks.3.mlp.fc1.weight"].clone()
    broken[3, 4] = float("nan")
    torch.save(state | {"blocks.3.mlp.fc1.weight": broken}, path)


def integers(path, state):
    torch.save(state | {"norm.weight": torch.ones(64, dtype=torch.int64)}, path)


DAMAGE = [
    (truncated, "truncated"),
    (wrong_architecture, r"layer1\.0\.conv1\.weight.* timm/NAME"),
    (not_finite, r"blocks\.3\.mlp\.fc1\.weight"),
    (integers, r"norm\.weight is \(64,\) of integers"),
]


@pytest.mark.parametrize(("damage", "cause"), DAMAGE, ids=[f.__name__ for f, _ in DAMAGE])
def test_a_bad_file_is_one_clear_error_and_nothing_is_half_loaded(damage, cause, tmp_path):
    model, source = build("deit_nano"), build("deit_nano")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = tmp_path / "weights.pth"
    damage(path, KEY_MAPS["timm"].from_native(source.state_dict(), source.config))
    with pytest.raises(UserError, match=cause) as caught:
        load_weights(model, path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    with pytest.raises(UserError, match=cause):
        convert(path, tmp_path / "out", model="deit_nano")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "options", "named"),
    [
        ("out.npz", {}, "out.npz"),
        ("out.npz", {"to": "timm"}, ".safetensors"),
        ("out", {"to": "timm"}, ".safetensors or .pth"),
        ("out.pth", {"to": "timn"}, "timm"),
        ("out.pth", {"to": "microsoft"}, "this is a DeiT or ConViT"),
        ("there.safetensors", {}, "there.safetensors"),
        ("out", {"model": "convit_nan"}, "convit_nano"),
        ("out", {"model": "deit_nano"}, "qkv_bias"),
    ],
)
def test_conversions_that_cannot_be_write_nothing(target, options, named, tmp_path):
    save(build("convit_nano"), tmp_path / "in")
    (tmp_path / "there.safetensors").write_text("precious")
    with pytest.raises(UserError, match=named):
        convert(tmp_path / "in", tmp_path / target, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "there.safetensors"]
    assert (tmp_path / "there.safetensors").read_text() == "precious"


def test_the_description_travels_inside_the_file(tmp_path):
    save(build("convit_nano"), tmp_path, classes=[f"digit {i}" for i in range(10)])
    lone = tmp_path / "lone.safetensors"
    (tmp_path / "model.safetensors").rename(lone)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    checkpoint = read(lone)
    assert checkpoint.describe() == described
    assert checkpoint.classes == tuple(f"digit {i}" for i in range(10))


def test_classes_of_one_name_are_both_named(tmp_path):
    opened = open_model(save(build("convit_nano", num_classes=3), tmp_path, classes=[*"aab"]))
    shares = opened.top_classes(torch.tensor([0.1, 0.7, 0.2]), 3)
    assert [*shares] == ["a", "b", "a (0)"] and sum(shares.values()) == pytest.approx(1)


def test_classes_join_those_of_weights_in_half_precision(tmp_path, randomise):
    held = randomise(build("convit_nano", num_classes=2))
    convert(
        save(held, tmp_path / "held", classes=["a", "c"]), tmp_path / "h.safetensors", half=True
    )
    model = build("convit_nano", num_classes=3)
    load_weights(model, tmp_path / "h.safetensors", classes=["a", "b", "c"])
    assert torch.equal(model.head.weight[[0, 2]], held.head.weight.half().float())


def test_weights_of_no_name_need_one(tmp_path):
    model = build("convit_micro", num_classes=3, img_size=32, depth=5)
    torch.save(model.state_dict(), tmp_path / "own.pth")
    with pytest.raises(UserError, match="--variant NAME"):
        read(tmp_path / "own.pth")
    opened = read(tmp_path / "own.pth", "convit_micro", settings={"depth": 5})
    assert opened.config == model.config


@pytest.mark.parametrize("classes", [7, 0])
def test_a_state_dict_of_timms_is_read_for_its_network(classes, tmp_path):
    network, file = timm.create_model("test_resnet", num_classes=classes), tmp_path / "plain.pth"
    torch.save(network.state_dict(), file)
    model = locality.create_model("timm/test_resnet", weights=file, num_classes=7).eval()
    if not classes:  # a new one
        model.reset_classifier(0)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(images), network.eval()(images))
    with pytest.raises(UserError, match="timm/resnet18"):
        locality.create_model("resnet18")


def test_weights_of_code_with_another_activation_are_warned_of(tmp_path, caplog):
    file, (name, fields) = tmp_path / "weights.pth", MODELS["transformers"]
    source = build(name, **fields)
    torch.save(KEY_MAPS["transformers"].from_native(source.state_dict(), source.config), file)
    for activation in ("gelu", "quick_gelu"):
        locality.create_model(name, weights=file, **fields | {"activation": activation})
        assert ("activation='gelu'" in caplog.text) == (activation == "quick_gelu")


def test_timms_distilled_models_open_with_both_classifiers(tmp_path):
    name, file = "deit_tiny_distilled_patch16_224", tmp_path / "weights.pth"
    distilled = timm.create_model(name, num_classes=4).eval()
    torch.save(distilled.state_dict(), file)
    images = torch.randn(1, 3, 224, 224)
    model = read(file, f"timm/{name}").build().eval()
    assert model.config.num_classes == 4
    torch.testing.assert_close(model(images), distilled(images))
    other = build(f"timm/{name}", num_classes=3)
    load_weights(other, file)  # neither of the two classifiers is taken over
    assert other(images).shape == (1, 3)


@pytest.mark.parametrize("in_chans", [3, 1])
def test_timms_state_dicts_open_with_the_preprocessing_of_their_variant(in_chans, tmp_path):
    name, file = "vit_tiny_patch16_224", tmp_path / "weights.pth"
    torch.save(timm.create_model(name, num_classes=4, in_chans=in_chans).state_dict(), file)
    found = read(file, f"timm/{name}", settings={"in_chans": in_chans})
    assert (found.config.num_classes, found.config.in_chans) == (4, in_chans)
    data = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    statistics = data["mean"][:in_chans], data["std"][:in_chans]  # equal for all channels
    assert (found.preprocessing.mean, found.preprocessing.std) == statistics
    assert found.preprocessing.crop_pct == data["crop_pct"]
