"""Graphs in eight bits: what is rounded, what stays in float, and what the command says of both."""

from __future__ import annotations

import functools
import re

import numpy as np
import onnx
import pytest
import torch
from integers import doubled, integer_product, logits_error
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from locality.checkpoints import Preprocessing, export, open_model, quantise, save
from locality.cli import main
from locality.models import build

# How far logits may lie from the model's, in units of their deviation.
BAR = 0.2

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def inputs(model):
    return torch.randn(2, 3, *model.img_size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twelve images in folders that are called like the first two classes."""
    folder = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        place = folder / f"class {number % 2}"
        place.mkdir(exist_ok=True)
        pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory, randomise):
    """A ConViT of two blocks, one of them with gates."""
    model = randomise(build("convit_nano", depth=2, gpsa_layers=1, num_classes=3))
    classes = [f"class {index}" for index in range(3)]
    folder = tmp_path_factory.mktemp("model") / "saved"
    return save(model, folder, preprocessing=Preprocessing(8), classes=classes)


@pytest.fixture(scope="module")
def doubled_graphs(tmp_path_factory):
    """Name → a model with random weights doubled, its graph, and the graph in eight bits."""

    @functools.cache
    def graphs(name):
        folder = tmp_path_factory.mktemp(name)
        model = doubled(name)
        classes = [f"class {index}" for index in range(model.num_classes)]
        whole = export(model, folder / "float.onnx", classes=classes)
        quantise(whole, folder / "int8.onnx")
        return model, whole, folder / "int8.onnx"

    return graphs


def test_linear_layers_are_in_eight_bits_and_nothing_else(doubled_graphs):
    _, *paths = doubled_graphs("convit_nano")
    before, after = (onnx.load(path).graph for path in paths)
    weights = {tensor.name for tensor in before.initializer}
    linear = [n for n in before.node if n.op_type in ("MatMul", "Gemm")]
    layers = [n for n in linear if n.input[1] in weights]
    products = [n for n in linear if n.input[1] not in weights]
    assert layers and products
    count = {
        kind: sum(n.op_type == kind for n in after.node) for kind in ("MatMulInteger", "MatMul")
    }
    assert count == {"MatMulInteger": len(layers), "MatMul": len(products)}


def test_onnx_runtime_computes_it_and_finds_the_classes(doubled_graphs):
    model, *paths = doubled_graphs("convit_nano")
    x = inputs(model)
    whole, eight = (open_model(path) for path in paths)
    with torch.no_grad():
        expected = model(x)
    assert 0 < (eight.logits(x) - expected).abs().max() <= BAR * expected.std()
    assert eight.classes == whole.classes is not None


@pytest.mark.parametrize(
    "name",
    ["convit_nano", *(pytest.param(n, marks=pytest.mark.slow) for n in ("convit_tiny", "cvt_13"))],
)
@pytest.mark.parametrize("saturating", [False, True], ids=["with VNNI", "without"])
def test_logits_stay_near_the_models_on_every_processor(name, saturating, doubled_graphs):
    model, _, graph = doubled_graphs(name)
    x = inputs(model)
    with torch.no_grad():
        assert 0 < logits_error(graph, x, model(x), saturating) <= BAR


def test_products_saturate_pair_by_pair():
    a = np.array([[255, 255, 255, 1, 255]], np.uint8)
    b = np.array([[127, -128], [127, -128], [127, 127], [127, 127], [127, 127]], np.int8)
    exact = a.astype(int) @ b.astype(int)
    assert (integer_product(a, b) == exact).all()
    # 255·127·2 and -255·128·2 do not fit in 16 bits; 256·127 and the fifth, alone, do.
    lost = [[255 * 127 * 2 - 32767, -255 * 128 * 2 + 32768]]
    assert (exact - integer_product(a, b, saturating=True) == lost).all()
    unsigned = b.view(np.uint8)
    assert (integer_product(a, unsigned, saturating=True) == a @ unsigned.astype(float)).all()


WEIGHTS = {
    "of one size": np.full((6, 3), 0.7),
    "an odd number of inputs": np.full((5, 3), -0.7),
    "zeros": np.zeros((4, 3)),
    "one large": np.diag([1e4, 1, 1e-4]),
    "random": np.random.default_rng(0).normal(size=(64, 48)),
}


@pytest.mark.parametrize("kind", ["MatMul", "Gemm"])
@pytest.mark.parametrize("case", WEIGHTS)
def test_no_pair_of_weights_leaves_16_bits(case, kind, tmp_path):
    weight = WEIGHTS[case].astype(np.float32)
    stored = weight.T.copy() if kind == "Gemm" else weight
    node = helper.make_node(kind, ["x", "w"], ["y"], **({"transB": 1} if kind == "Gemm" else {}))
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, len(weight)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, weight.shape[1]])],
        [numpy_helper.from_array(stored, "w")],
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "float.onnx")
    quantise(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    tensors = onnx.load(tmp_path / "int8.onnx").graph.initializer
    (found,) = (numpy_helper.to_array(t) for t in tensors if t.name.endswith("_quantized"))
    (scale,) = (numpy_helper.to_array(t) for t in tensors if t.name.endswith("_scale"))
    assert found.dtype == np.int8 and found.shape == weight.shape
    assert (abs(found * scale - weight) <= scale * 0.5001).all()
    # What is largest: activations of 255 wherever the weight has the one sign.
    for sign in (1, -1):
        largest = np.where(sign * found > 0, 255, 0).astype(np.uint8).T
        assert (integer_product(largest, found, True) == integer_product(largest, found)).all()


def test_the_command_says_what_it_loses_and_gains(saved, images, tmp_path, capsys):
    output = tmp_path / "int8.onnx"
    assert main(["export", str(saved), str(output), "--int8", str(images)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"12 images: top-1 [\d.]+% before and [\d.]+% after, and [\d.]+% get", said)
    assert "times as fast" in said and output.exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--int8", "nowhere"], "there is no file or folder nowhere"),
        (["--int8", ".", "--format", "torch-export"], "--int8 is for ONNX graphs"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    saved, tmp_path, capsys, monkeypatch, words, sentence
):
    monkeypatch.chdir(tmp_path)
    name = "g.pt2" if "torch-export" in words else "g.onnx"
    assert main(["export", str(saved), name, *words]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / name).exists()
