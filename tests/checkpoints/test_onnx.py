"""Exported graphs match the model, and every source opens the same way."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

import locality.checkpoints.onnx as graphs
from locality.checkpoints import (
    Classifier,
    Preprocessing,
    export,
    load,
    open_model,
    save,
)
from locality.cli import main
from locality.errors import UserError
from locality.models import VARIANTS, build
from locality.models.config import CvTConfig

INT64, BOOL, FLOAT = (getattr(onnx.TensorProto, n) for n in ("INT64", "BOOL", "FLOAT"))

# A small model of each kind, and the sizes its graph must take.
CVT = CvTConfig(
    embed_dim=(16, 24),
    num_heads=2,
    depth=1,
    embed_kernel=(7, 3),
    embed_stride=(4, 2),
    embed_padding=(2, 1),
    img_size=32,
    num_classes=10,
)
MODELS = {
    "convit": (replace(VARIANTS["convit_nano"].config, depth=2, gpsa_layers=1), [(8, 8)]),
    "deit": (replace(VARIANTS["deit_nano"].config, depth=1), [(8, 8)]),
    "cvt": (CVT, [(32, 32), (40, 56), (33, 35)]),
    "psa": (
        replace(VARIANTS["convit_nano"].config, depth=2, gpsa_layers=1, positional_attention="psa"),
        [(8, 8)],
    ),
    "cvt with positions": (CVT.with_overrides(use_pos_embed=(True, False)), [(32, 32)]),
    "cvt with a stem": (VARIANTS["cvt_photo"].config.with_overrides(img_size=28), [(28, 28)]),
    "cvt, every position": (CVT.with_overrides(use_pos_embed=True), [(32, 32)]),
}
CLASSES = [f"class {index}" for index in range(10)]


# Exporting convolutions is slow.
SLOW = ("convit", "cvt", "psa", "cvt with positions", "cvt with a stem", "cvt, every position")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS],
)
def exported(request, tmp_path_factory, randomise):
    """A model in evaluation mode, its graph, and the sizes it takes."""
    config, sizes = MODELS[request.param]
    model = randomise(build(config)).train()
    folder = tmp_path_factory.mktemp("graphs")
    extra = {"preprocessing": Preprocessing(model.img_size, crop_pct=1.0), "classes": CLASSES}
    graph = export(model, folder / "model.onnx", **extra)
    assert model.training
    return model.eval(), graph, sizes


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7])
@torch.no_grad()
def test_the_graph_computes_the_models_logits(exported, batch):
    model, graph, sizes = exported
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    for size in sizes:
        images = torch.randn(batch, 3, *size)
        expected = model(images)
        (logits,) = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4, rtol=0)


def test_only_cvt_without_position_embeddings_leaves_height_and_width_open(exported):
    _, graph, sizes = exported
    (images,) = onnx.load(graph).graph.input
    axes = [axis.dim_param or axis.dim_value for axis in images.type.tensor_type.shape.dim]
    size = ["height", "width"] if len(sizes) > 1 else list(sizes[0])
    assert axes == ["batch", 3, *size]


@pytest.mark.parametrize(("path", "named"), [("a.pt2", ".onnx"), ("nowhere/a.onnx", "nowhere")])
def test_what_cannot_be_exported_is_said_before_any_work(path, named, tmp_path):
    with pytest.raises(UserError, match=named):
        export(build("deit_nano"), tmp_path / path)
    with pytest.raises(UserError, match="img_size=16"):
        export(build("deit_nano"), tmp_path / "a.onnx", preprocessing=Preprocessing(16))
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"pip install 'locality\[export\]'"):
        export(build("deit_nano"), tmp_path / "a.onnx")


@pytest.mark.slow
def test_a_graph_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "TOLERANCE", 0.0)
    with pytest.raises(UserError, match="logits differ"):
        export(build("deit_nano", depth=1), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def after(model, op, more=(), **attributes):
    """Let a node compute the graph's output from its former one."""
    end = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["before" if name == end else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node(op, [*more, "before"], [end], **attributes))


def other_size(model):
    described = json.loads(model.metadata_props[0].value)
    described["input"]["img_size"] = [64, 64]
    model.metadata_props[0].value = json.dumps(described)


def endless(model):
    """Let a loop of 2^62 rounds copy the graph's output."""
    info, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    inputs = [info("i", INT64, []), info("c", BOOL, []), info("x", FLOAT, None)]
    steps = [node("Identity", ["c"], ["c2"]), node("Identity", ["x"], ["x2"])]
    outputs = [info("c2", BOOL, []), info("x2", FLOAT, None)]
    body = onnx.helper.make_graph(steps, "body", inputs, outputs)
    model.graph.initializer.append(onnx.helper.make_tensor("n", INT64, [], [2**62]))
    model.graph.initializer.append(onnx.helper.make_tensor("yes", BOOL, [], [True]))
    after(model, "Loop", ["n", "yes"], body=body)


TAMPERED = {
    "a loop": (endless, "stopped after 1 s"),
    "another size": (other_size, "dimensions"),
    "one logit": (lambda model: after(model, "ReduceSum", keepdims=1), r"shape \(1, 1\)"),
    "no description": (lambda model: model.metadata_props.pop(), "exported"),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_a_graph_that_was_tampered_with_is_refused(kind, exported, tmp_path, monkeypatch):
    tamper, named = TAMPERED[kind]
    if kind == "another size" and len(exported[2]) > 1:
        pytest.skip("the graph takes images of any size")
    model, path = onnx.load(exported[1]), tmp_path / "a.onnx"
    tamper(model)
    path.write_bytes(model.SerializeToString())
    monkeypatch.setattr(graphs, "_SECONDS_PER_IMAGE", 1)
    with pytest.raises(UserError, match=named) as caught:
        open_model(path)(pictures(1))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# Opening.


def pictures(count: int) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [
        Image.fromarray(random.integers(0, 256, (60, 80, 3), dtype=np.uint8)) for _ in range(count)
    ]


def test_everything_opened_classifies_alike(exported, tmp_path):
    model, graph, _ = exported
    extra = {"preprocessing": Preprocessing(model.img_size, crop_pct=1.0), "classes": CLASSES}
    folder = save(model, tmp_path / "saved", **extra)
    expected = Classifier.of(model, **extra)(pictures(3))
    assert [path.name for path in graph.parent.iterdir()] == ["model.onnx"]
    for path in (folder, folder / "model.safetensors", graph):
        opened = open_model(path)
        assert opened.classes == tuple(CLASSES)
        assert opened.preprocessing == extra["preprocessing"]
        torch.testing.assert_close(opened(pictures(3)), expected, atol=1e-5, rtol=0)


def test_a_model_of_one_channel_takes_grey_pictures():
    opened = Classifier.of(build("convit_nano", in_chans=1))
    assert opened.prepare(pictures(2)).shape == (2, 1, 8, 8)
    assert opened(pictures(2)).shape == (2, 10)
    assert opened.label(3) == "3"
    with pytest.raises(UserError, match="3 channels"):
        Classifier.of(opened.model, preprocessing=Preprocessing(8))
    with pytest.raises(UserError, match="5 channels"):
        Classifier.of(build("convit_nano", in_chans=5)).prepare(pictures(1))


# Heads: what the logits mean travels with the model.

HEADS = {"single_label_classification": 3, "multi_label_classification": 3, "": 1, "regression": 1}


@pytest.mark.parametrize("kind", HEADS)
def test_a_heads_numbers_are_those_of_transformers_pipeline(kind, tmp_path, randomise, capsys):
    transformers = pytest.importorskip("locality.transformers")
    from transformers import pipeline

    names = ["sky", "tree", "car"][: HEADS[kind]]
    ours = randomise(build("deit_nano", num_classes=len(names), depth=1)).eval()
    ours.problem_type = kind or None
    model, processor = transformers.from_locality(ours, classes=names)
    assert model.config.problem_type == (kind or None)
    model.save_pretrained(tmp_path / "theirs")
    processor.save_pretrained(tmp_path / "theirs")
    save(ours, tmp_path / "ours", classes=names)
    exported = kind == "multi_label_classification"
    if exported:
        export(load(tmp_path / "theirs"), tmp_path / "a.onnx", classes=names)
    image, page = tmp_path / "sky" / "a.png", tmp_path / "a.html"
    image.parent.mkdir()
    pictures(1)[0].save(image)
    expected = {row["label"]: row["score"] for row in pipeline(model=str(tmp_path / "theirs"),
        task="image-classification")(str(image))}  # fmt: skip
    for source in ("theirs", "ours", *["a.onnx"] * exported):
        model = str(tmp_path / source)
        words = ["predict", str(image), "--model", model, "--json"]
        explore = ["explore", model, "--images", str(image), "--output", str(page), "--overwrite"]
        evaluate = ["eval", model, str(tmp_path), "--data.allow_outside", "true"]
        if kind == "regression":
            for command in (words, explore, evaluate, ["serve", model]):
                assert main(command) == 2 and "regression" in capsys.readouterr().err
            continue
        assert main(words) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["classes"] == pytest.approx(expected, abs=1e-6)
        if not source.endswith(".onnx"):
            assert main(explore) == 0 and capsys.readouterr().out
            data = json.loads(re.search(r'id="data">(.*)</script>', page.read_text())[1])
            assert dict(data["models"][0]["answers"][0]) == pytest.approx(expected, abs=1e-6)
        if kind == "multi_label_classification":
            assert main(evaluate) == 2 and "several labels" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [
        {"embed_kernel": 3, "embed_stride": (1, 2), "embed_padding": 0},
        {"projection_kernel": 7, "kv_padding": 0, "img_size": 64},
    ],
)
def test_axes_are_dynamic_only_where_their_bound_is_proved(fields):
    model = build(replace(CVT, **fields)).eval()
    example = torch.randn(2, 3, *model.img_size)
    torch.export.export(model, (example,), dynamic_shapes=(graphs._dynamic_axes(model),))


def test_a_graph_without_a_classifier_is_refused(tmp_path):
    export(build("convit_nano", num_classes=0), tmp_path / "a.onnx")
    with pytest.raises(UserError, match="without a classifier"):
        open_model(tmp_path / "a.onnx")
