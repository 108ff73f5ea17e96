"""Our models in timm's registry, factory, training and feature tools."""

import copy
import inspect

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import resolve_data_config
from timm.models import load_checkpoint, save_for_hf
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver

TIMMS_OWN = set(timm.list_models())

import locality.timm  # noqa: E402 (registers the models)
from locality.checkpoints import (  # noqa: E402
    SOURCES,
    Preprocessing,
    create_model,
    loading,
    open_model,
)
from locality.errors import UserError  # noqa: E402
from locality.models import VARIANTS, build  # noqa: E402

# One small model per kind, with its overrides.
SMALL_CVT = {"depth": (1, 1, 2), "embed_dim": (16, 32, 64), "num_heads": (1, 2, 4), "img_size": 48}
MODELS = {
    "locality_convit_nano": {},
    "locality_deit_nano": {},
    "locality_cvt_13": SMALL_CVT,
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return timm.create_model(request.param, num_classes=10, **MODELS[request.param])


def images(model, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, model.in_chans, *model.img_size)


def test_every_model_is_registered_and_none_of_timms_is_touched():
    ours = {f"locality_{name}" for name in VARIANTS}
    assert set(timm.list_models()) == TIMMS_OWN | ours
    assert not TIMMS_OWN & ours
    assert set(timm.list_models("locality_*")) == ours
    assert set(timm.list_pretrained("locality_*")) == {f"locality_{name}" for name in SOURCES}
    assert type(timm.create_model("convit_tiny")).__module__ == "timm.models.convit"


def test_timms_model_is_our_model(model):
    name = model.pretrained_cfg["architecture"].removeprefix("locality_")
    ours = build(name, num_classes=10, **MODELS[f"locality_{name}"])
    ours.load_state_dict(model.state_dict())
    x = images(model)
    assert model.config == ours.config and model.variant == name
    with torch.no_grad():
        assert torch.equal(model.eval()(x), ours.eval()(x))


def test_classifier_reset_and_headless_features(model):
    x = images(model.eval())
    model.reset_classifier(0)
    features = model.forward_features(x)
    torch.testing.assert_close(model(x), model.forward_head(features, pre_logits=True))
    assert model(x).shape == (2, model.num_features) == (2, model.head_hidden_size)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7) and model.num_classes == model.get_classifier().out_features
    model.reset_classifier(7, "avg")
    model.reset_classifier(3)  # keeps the pooling
    patches = model.forward_features(x)[:, model.num_prefix_tokens :]
    torch.testing.assert_close(model(x), model.head(patches.mean(dim=1)))
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(x), model.forward_features(x))
    with pytest.raises(ValueError, match="'max'"):
        model.reset_classifier(7, "max")
    model.to("meta", torch.float64).requires_grad_(False)
    model.reset_classifier(2)  # keeps device, dtype, mode and frozen parameters
    assert model.head.weight.is_meta and model.head.weight.dtype == torch.float64
    assert not any(module.training for module in model.modules())
    model.reset_classifier(0)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_cfg_names_real_modules_and_the_last_grid(model):
    cfg, state = model.default_cfg, model.state_dict()
    assert f"{cfg['classifier']}.weight" in state and f"{cfg['first_conv']}.weight" in state
    built = timm.create_model(model.pretrained_cfg["architecture"])
    maps = built.forward_intermediates(images(built, 1), intermediates_only=True)
    assert tuple(maps[-1].shape[2:]) == cfg["pool_size"]


# What timm's ViT has and our models, like timm's ConViT, do not: a call names it in its error.
NO_METHODS = {"fix_init_weight", "get_intermediate_layers", "init_weights", "load_pretrained"}
NO_METHODS |= {"pool", "set_input_size"}
NO_ARGUMENTS = {"attn_mask", "is_causal", "output_dict"}


def test_methods_take_the_arguments_of_timms_vit(model):
    public = inspect.getmembers(VisionTransformer, inspect.isfunction)
    theirs = {name: each for name, each in public if name in vars(VisionTransformer)}
    theirs = {name: each for name, each in theirs.items() if not name.startswith("_")}
    assert {name for name in theirs if not hasattr(model, name)} == NO_METHODS
    for name in theirs.keys() - NO_METHODS:
        own = inspect.signature(getattr(model, name))
        for argument, given in inspect.signature(theirs[name]).parameters.items():
            if argument in NO_ARGUMENTS:
                with pytest.raises(TypeError, match=f"'{argument}'"):
                    getattr(model, name)(images(model), **{argument: None})
            elif argument != "self":
                assert own.parameters[argument].default == given.default, (name, argument)


def test_class_tokens_are_returned_beside_the_maps(tmp_path):
    theirs = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=2).eval()
    save_file(theirs.state_dict(), tmp_path / "deit.safetensors")
    ours = create_model("deit_tiny", img_size=32, depth=2, weights=tmp_path / "deit.safetensors")
    x = torch.randn(2, 3, 32, 32)
    for options in ({}, {"norm": True, "output_fmt": "NLC"}):
        options |= {"return_prefix_tokens": True, "intermediates_only": True}
        pairs = [model.forward_intermediates(x, **options) for model in (ours.eval(), theirs)]
        torch.testing.assert_close(*pairs)
    convit = timm.create_model("locality_convit_nano")
    maps = convit.forward_intermediates(images(convit), return_prefix_tokens=True)[1]
    assert [tokens.shape[1] for _, tokens in maps] == [0, 0, 0, 1]


def test_pruned_models_give_the_same_maps_and_train_whole(model):
    x = images(model)
    model.eval()
    with torch.no_grad():
        logits, taps = model(x), model.forward_intermediates(x, intermediates_only=True)
        whole = copy.deepcopy(model)
        whole.prune_intermediate_layers([len(taps) - 1], prune_head=False)
        assert torch.equal(whole(x), logits)
    for index, tap in enumerate(taps):
        pruned = copy.deepcopy(model)
        assert pruned.prune_intermediate_layers([index], prune_norm=True) == [index]
        (found,) = pruned.forward_intermediates(x, [index], intermediates_only=True)
        torch.testing.assert_close(found, tap)
        features = pruned.train().forward_features(x)
        tokens = tap.shape[2] * tap.shape[3] + pruned.num_prefix_tokens
        assert features.shape[1:] == (tokens, pruned.num_features)
        (features.sum() + found.sum()).backward()
        assert all(parameter.grad is not None for parameter in pruned.parameters())
        assert len(pruned.feature_info) == index + 1
        torch.testing.assert_close(pruned.eval()(x), pruned.forward_features(x))
        again = build(pruned.config)  # the configuration has the remaining blocks
        assert set(again.state_dict()) - {"norm.weight", "norm.bias"} == set(pruned.state_dict())


def test_features_only_gives_maps_at_the_strides_it_states(model):
    name = model.pretrained_cfg["architecture"]
    extractor = timm.create_model(name, features_only=True, **MODELS[name])
    x = images(model)
    maps = extractor(x)
    channels, strides = extractor.feature_info.channels(), extractor.feature_info.reduction()
    assert len(maps) == len(channels) == 3
    for tensor, width, stride in zip(maps, channels, strides, strict=True):
        assert tensor.shape == (2, width, x.shape[2] // stride, x.shape[3] // stride)
    last = timm.create_model(name, features_only=True, out_indices=[-1], **MODELS[name])
    assert len(last(x)) == 1


def test_timms_names_for_settings_are_taken():
    model = timm.create_model(
        "locality_deit_nano",
        num_classes=5,
        in_chans=1,
        img_size=(8, 16),
        drop_rate=0.1,
        drop_path_rate=0.2,
        proj_drop_rate=0.1,
        global_pool="token",
        drop_block_rate=None,
        bn_eps=None,
    )
    assert (model.config.drop_rate, model.config.drop_path_rate) == (0.1, 0.2)
    assert model(torch.randn(2, 1, 8, 16)).shape == (2, 5)
    for name, sizes in MODELS.items():
        assert timm.create_model(name, global_pool="avg", **sizes).config.global_pool == "avg"
    half = timm.create_model("locality_deit_nano", device="cpu", dtype=torch.bfloat16)
    assert half.norm.weight.dtype == torch.bfloat16


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match="global_pool"):
        timm.create_model("locality_cvt_13", global_pool="max")
    with pytest.raises(UserError, match="drop_rate") as caught:
        timm.create_model("locality_deit_nano", drop_rte=0.1)
    assert isinstance(caught.value, TypeError)  # as in timm


def test_data_configuration_comes_from_the_model(tmp_path):
    given = Preprocessing(mean=(0.1,) * 3, std=(0.2,) * 3, crop_pct=1.0)
    locality.save(locality.create_model("convit_nano"), tmp_path, preprocessing=given)
    own = locality.create_model("convit_nano", weights=tmp_path, img_size=16)
    for each, size in ((own, 16), (locality.load(tmp_path), 8)):
        config = resolve_data_config({}, model=each)
        assert (config["input_size"], config["crop_pct"]) == ((3, size, size), 1.0)
        assert (config["mean"], config["std"]) == (given.mean, given.std)
    config = resolve_data_config({}, model=timm.create_model("locality_convit_nano"))
    assert config["input_size"] == (3, 8, 8)
    with torch.device("meta"):
        large = timm.create_model("locality_cvt_13.ms_in1k_384")
    config = resolve_data_config({}, model=large)
    assert config["input_size"] == (3, 384, 384)
    assert (config["crop_pct"], config["crop_mode"]) == (1.0, "squash")
    overridden = resolve_data_config({"img_size": 128}, model=large)
    assert overridden["input_size"] == (3, 128, 128)


def test_a_training_step_with_timms_tools(model, tmp_path):
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    scales = {group["lr_scale"] for group in optimizer.param_groups}
    assert len(scales) >= 4 and max(scales) == 1
    light = [group for group in optimizer.param_groups if group["weight_decay"] == 0]
    undecayed = {id(p) for group in light for p in group["params"]}
    named = dict(model.named_parameters())
    assert {id(named[name]) for name in model.no_weight_decay()} <= undecayed
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=2)
    before = model.head.weight.clone()
    loss = torch.nn.functional.cross_entropy(model(images(model)), torch.tensor([1, 2]))
    loss.backward()
    optimizer.step()
    scheduler.step(1)
    assert not torch.equal(model.head.weight, before)
    folders = {"checkpoint_dir": str(tmp_path), "recovery_dir": str(tmp_path)}
    CheckpointSaver(model, optimizer, **folders).save_checkpoint(0, metric=1.0)
    name = model.pretrained_cfg["architecture"]
    again = timm.create_model(name, num_classes=10, **MODELS[name])
    load_checkpoint(again, str(tmp_path / "last.pth.tar"), use_ema=False)
    assert torch.equal(again.head.weight, model.head.weight)


def test_a_folder_of_timms_is_read_as_our_model(tmp_path):
    arguments = {"num_classes": 5, "img_size": 16, "gpsa_layers": 1, "drop_path_rate": 0.1}
    model = timm.create_model("locality_convit_nano", **arguments).eval()
    model.reset_classifier(2, "avg")
    save_for_hf(model, tmp_path, model_config={"label_names": ["cat", "dog"]})
    ours = open_model(tmp_path)
    assert ours.classes == ("cat", "dog") and type(ours.model) is type(model)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        for each in (ours.model, theirs):
            assert torch.equal(each(x), model(x))


def test_a_model_created_by_name_is_saved_by_timm(tmp_path):
    model, x = create_model("convit_nano", num_classes=3).eval(), torch.randn(2, 3, 8, 8)
    save_for_hf(model, tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(theirs(x), model(x))


# Public weights, from substitute files.


def test_timm_loads_its_own_weights_and_adapts_head_channels_and_size(tmp_path, monkeypatch):
    reference = timm.create_model("convit_tiny").eval()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    overlay = {"file": str(tmp_path / "model.safetensors")}
    public = {"pretrained": True, "pretrained_cfg_overlay": overlay}
    model = timm.create_model("locality_convit_tiny", **public).eval()
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), atol=1e-5, rtol=0)
    ends = {"num_classes": 5, "in_chans": 1, "img_size": 96}
    model = timm.create_model("locality_convit_tiny.fb_in1k", **public, **ends).eval()
    assert model(torch.randn(1, 1, 96, 96)).shape == (1, 5)
    expected = reference.patch_embed.proj.weight.sum(dim=1, keepdim=True)
    torch.testing.assert_close(model.patch_embed.weight.data, expected.data)
    assert model.pos_embed.shape == (1, 36, 192)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"https://huggingface\.co/timm/convit_tiny\.fb_in1k"):
        timm.create_model("locality_convit_tiny", pretrained=True)  # not in the hub's cache
    monkeypatch.setattr(loading, "snapshot_download", lambda *_, **__: str(tmp_path))
    again = timm.create_model("locality_convit_tiny", pretrained=True, num_classes=5).eval()
    with torch.no_grad():
        features = again.forward_features(x), reference.forward_features(x)
        torch.testing.assert_close(*features, atol=1e-5, rtol=0)


def test_maps_of_a_stem_can_be_chosen():
    model = timm.create_model("locality_cvt_photo", features_only=True, out_indices=(0, 1))
    assert [map.shape[2] for map in model(torch.randn(1, 3, 64, 64))] == [32, 32]
