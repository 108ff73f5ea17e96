"""Tools that watch or replace modules work as on timm's ViT; others: benchmarks/tools.py."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune, weight_norm
from torchvision.models.feature_extraction import create_feature_extractor

import locality
from locality.errors import UserError
from locality.layers.block import Block
from locality.models import factory, list_models
from locality.models.config import CvTConfig

OURS = ("convit_nano", "deit_nano", "cvt_nano")
LABELS = torch.tensor([0, 1, 2, 0])


def build(name):
    torch.manual_seed(0)
    if name == "test_vit":
        return timm.create_model(name, num_classes=3, img_size=32, patch_size=4)
    return locality.create_model(name, num_classes=3, img_size=32)


@pytest.fixture(params=OURS)
def model(request):
    return build(request.param)


@pytest.fixture(params=[*OURS, "test_vit"])
def any_model(request):
    return build(request.param)


@pytest.fixture
def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def last_block(model):
    return (model.stages[-1] if hasattr(model, "stages") else model).blocks[-1]


def linear_layers(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("name", list_models())
def test_models_are_made_of_ordinary_modules(name):
    with torch.device("meta"):
        model = locality.create_model(name)
    for module in model.modules():
        kind = type(module)
        if not kind.__module__.startswith(("torch.nn.", "timm.layers.")):
            # Ours have a forward of their own and are not a variant of an ordinary layer.
            assert kind.__module__.startswith("locality.") and "forward" in dir(kind)
            assert not isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d | nn.LayerNorm)


def test_every_module_is_called_with_all_tokens(model, images):
    seen = {}
    parts = {n: m for n, m in model.named_modules() if not isinstance(m, nn.ModuleList)}
    for name, module in parts.items():
        module.register_forward_hook(lambda _, args, out, n=name: seen.update({n: out.shape}))
    with torch.no_grad():
        model.eval()(images)
    assert seen.keys() == parts.keys()
    block = next(name for name, module in parts.items() if module is last_block(model))
    attention = "attn.q" if "stages" in block else "attn.qkv"
    for name in (block, f"{block}.attn", f"{block}.{attention}", f"{block}.mlp", "norm"):
        assert seen[name][:2] == (4, 1 + 16 * 16), name


def test_low_rank_adapters_train_and_merge(any_model, images):
    import peft

    names = [name for name, m in any_model.named_modules() if isinstance(m, nn.Linear)]
    config = peft.LoraConfig(target_modules=names, r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(any_model, config)
    F.cross_entropy(adapted(images), LABELS).backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(names)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained.values())
    logits = adapted.eval()(images)
    if hasattr(any_model, "shortcuts"):
        any_model.shortcuts = True
        torch.testing.assert_close(adapted(images), logits, rtol=1e-5, atol=1e-5)
        any_model.shortcuts = False
    torch.testing.assert_close(adapted.merge_and_unload()(images), logits, rtol=0, atol=1e-5)


def test_torchvision_extracts_features(model, images):
    last = next(name for name, module in model.named_modules() if module is last_block(model))
    extract = create_feature_extractor(model, [last, "head"])
    for batch in (images, images[:2]):  # the graph takes any batch size
        found = extract.eval()(batch)
        torch.testing.assert_close(found["head"], model.eval()(batch))
        assert found[last].ndim == 3
    extract.train()(images)["head"].mean().backward()
    assert all(parameter.grad is not None for parameter in extract.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_dynamic_quantisation_takes_every_linear_layer(any_model, images):
    quantised = torch.ao.quantization.quantize_dynamic(any_model.eval(), {nn.Linear}, torch.qint8)
    small = [m for m in quantised.modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)]
    assert len(small) == len(linear_layers(any_model)) and not linear_layers(quantised)
    assert (quantised(images) - any_model(images)).abs().max() < 0.1


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("change", [lambda m: prune.l1_unstructured(m, "weight", 0.3), weight_norm])
def test_pruned_and_weight_normed_models_train(any_model, images, change):
    for layer in linear_layers(any_model):
        change(layer)
    optimizer = torch.optim.SGD(any_model.parameters(), 0.01)
    for _ in range(3):
        loss = F.cross_entropy(any_model(images), LABELS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.isfinite()
    assert all(p.grad is not None for p in any_model.parameters())


def test_offloaded_weights_give_the_same_logits(any_model, images):
    accelerate = pytest.importorskip("accelerate")
    expected = any_model.eval()(images)
    offloaded = accelerate.cpu_offload(copy.deepcopy(any_model), execution_device="cpu")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    torch.testing.assert_close(offloaded(images), expected)  # hooked layers are called


def train_sharded(rank, names, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        model = build(name)
        whole = copy.deepcopy(model)
        for module in model.modules():
            if isinstance(module, Block | timm.models.vision_transformer.Block):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(0)
        images = torch.randn(4, 3, 32, 32)
        for each in (model, whole):
            optimizer = torch.optim.SGD(each.parameters(), 0.1)
            for _ in range(2):
                loss = F.cross_entropy(each(images), LABELS)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        torch.testing.assert_close(model(images), whole(images), rtol=1e-4, atol=1e-4)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_models_train_as_whole_ones(tmp_path):
    """FSDP2 on every block, in two processes."""
    multiprocessing.spawn(train_sharded, ([*OURS, "test_vit"], tmp_path), nprocs=2)


def small_cvt(**fields):
    """A CvT of two stages, with every parameter changed."""
    small = {"embed_dim": (8, 16), "num_heads": (1, 2), "depth": 1, "num_classes": 3}
    small |= {"embed_kernel": (7, 3), "embed_stride": (4, 2), "embed_padding": (2, 1)}
    torch.manual_seed(0)
    model = factory.build(CvTConfig(**(small | {"img_size": 32} | fields))).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def adapted(model):
    import peft

    config = peft.LoraConfig(target_modules=["fc1", "fc2"], r=4, init_lora_weights=False)
    return peft.get_peft_model(model, config).base_model.model.eval()


def normed(model):
    for part in [part for part in model.modules() if hasattr(part, "fc2")]:
        parametrizations.weight_norm(part.fc2)
    return model


@pytest.mark.parametrize("change", [adapted, normed])
def test_replaced_layers_are_not_folded(change, images):
    model = change(small_cvt())
    with torch.no_grad():
        torch.testing.assert_close(model.fuse()(images), model(images), rtol=1e-4, atol=1e-4)


def test_checkpointed_blocks_go_back_twice_and_count_statistics_once(images):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(small_cvt()).train()
    model.set_grad_checkpointing()
    loss = model(images).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert model.stages[0].blocks[0].attn.q.norm.num_batches_tracked == 1


def test_maps_of_a_stem_are_those_of_the_whole_model():
    model, x = factory.build("cvt_photo").eval(), torch.randn(1, 3, 64, 64)
    whole = model.forward_intermediates(x, [0], intermediates_only=True)
    model.prune_intermediate_layers([0], prune_norm=True)
    torch.testing.assert_close(model.forward_intermediates(x, [0], intermediates_only=True), whole)
    with pytest.raises(UserError, match="class_token"):
        small_cvt(depth=(1, 0), class_token=True, global_pool="token")


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 3, 3, 8, 8)])
def test_images_that_are_no_batch_are_refused(shape):
    with pytest.raises(UserError, match=r"\(B, C, H, W\)"):
        factory.build("convit_nano")(torch.zeros(shape))


def test_shapes_are_known_without_memory():
    model = factory.build("convit_nano").fuse().to("meta")
    assert model(torch.zeros(1, 3, 8, 8, device="meta")).shape == (1, 10)


def test_a_timm_models_features_have_the_width_it_states():
    model = factory.build("timm/mobilenetv3_small_050", num_classes=3).eval()
    assert model.features(torch.randn(1, 3, 64, 64)).shape == (1, model.head_hidden_size)
    assert factory.build("timm/test_vit").num_prefix_tokens == 1
