"""Graphs in eight bits: what is rounded, what stays in float, and what the command says of both."""

from __future__ import annotations

import re

import onnx
import pytest
import torch
from PIL import Image

from locality.checkpoints import Preprocessing, export, open_model, quantise, save
from locality.cli import main
from locality.models import build

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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


def test_linear_layers_are_in_eight_bits_and_nothing_else(saved, tmp_path):
    classifier = open_model(saved)
    whole = export(classifier.module(), tmp_path / "float.onnx", classes=classifier.classes)
    quantise(whole, tmp_path / "int8.onnx")
    before, after = (onnx.load(path).graph for path in (whole, tmp_path / "int8.onnx"))
    weights = {tensor.name for tensor in before.initializer}
    linear = [n for n in before.node if n.op_type in ("MatMul", "Gemm")]
    layers = [n for n in linear if n.input[1] in weights]
    products = [n for n in linear if n.input[1] not in weights]
    assert layers and products
    count = {
        kind: sum(n.op_type == kind for n in after.node) for kind in ("MatMulInteger", "MatMul")
    }
    assert count == {"MatMulInteger": len(layers), "MatMul": len(products)}
    x = torch.randn(5, 3, 8, 8)
    expected = classifier.logits(x)
    opened = open_model(tmp_path / "int8.onnx")
    assert 0 < (opened.logits(x) - expected).abs().max() < 0.1 * expected.abs().max()
    assert opened.classes == classifier.classes


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
