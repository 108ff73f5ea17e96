"""Tampered ONNX graphs are refused within seconds."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import locality
from locality.checkpoints import Checkpoint, open_model
from locality.errors import UserError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

WEIGHT = np.random.default_rng(0).standard_normal((3 * 8 * 8, 10)).astype(np.float32)


def linear() -> onnx.ModelProto:
    """A linear classifier of 8×8 images, described as a model of the same number of classes."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
        ],
        "linear",
        [value("images", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [value("logits", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(WEIGHT, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    described = Checkpoint.of(locality.create_model("convit_nano")).describe()
    helper.set_model_props(model, {"locality": json.dumps(described)})
    return model


def constants(model, **values):
    named = [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]
    model.graph.initializer.extend(named)


def after(model, *nodes):
    """Nodes after the classifier, whose output is their input "before"."""
    model.graph.node[-1].output[0] = "before"
    model.graph.node.extend(helper.make_node(*node[:3], **dict(node[3:])) for node in nodes)


def loop(model):
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["on"], ["on2"]),
            helper.make_node("Identity", ["x"], ["x2"]),
        ],
        "body",
        [value("i", TensorProto.INT64, []), value("on", TensorProto.BOOL, []), value("x", 1, None)],
        [value("on2", TensorProto.BOOL, []), value("x2", 1, None)],
    )
    constants(model, count=np.int64(2**62), true=np.bool_(True))
    after(model, ("Loop", ["count", "true", "before"], ["logits"], ("body", body)))


def function(model):
    node = helper.make_node("Identity", ["x"], ["y"])
    opset = [helper.make_opsetid("", 18)]
    model.functions.append(helper.make_function("mine", "F", ["x"], ["y"], [node], opset))


def outside(model):
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/dev/zero")


def expand(model):
    constants(model, shape=np.array([10**6, 10**6], np.int64), row=np.int64([0]))
    after(
        model,
        ("ReduceSum", ["before"], ["sum"], ("keepdims", 1)),
        ("Expand", ["sum", "shape"], ["large"]),
        ("ReduceSum", ["large"], ["logits"], ("keepdims", 1)),
    )


def resize(model):
    constants(model, scales=np.array([1, 1, 10**4, 10**4], np.float32))
    model.graph.node[0].input[0] = "larger"
    node = helper.make_node("Resize", ["images", "", "scales"], ["larger"])
    model.graph.node.insert(0, node)


def products(model):
    side = 3000
    constants(model, shape=np.array([side, side], np.int64), zero=np.float32(1e-9))
    after(
        model,
        ("ReduceSum", ["before"], ["sum"], ("keepdims", 1)),
        ("Expand", ["sum", "shape"], ["p0"]),
        *(("MatMul", [f"p{n}", "p0"], [f"p{n + 1}"]) for n in range(500)),
        ("ReduceSum", ["p500"], ["total"], ("keepdims", 1)),
        ("Mul", ["total", "zero"], ["small"]),
        ("Add", ["before", "small"], ["logits"]),
    )


def one_logit(model):
    constants(model, axes=np.int64([1]))
    after(model, ("ReduceSum", ["before", "axes"], ["logits"], ("keepdims", 1)))


def no_input(model):
    model.graph.input[0].name = model.graph.node[0].input[0] = "pixels"


def undescribed(model):
    del model.metadata_props[:]


def deeply_described(model):
    helper.set_model_props(model, {"locality": "[" * 100_000})


def larger(model):
    content = json.loads(model.metadata_props[0].value)
    content["architecture"]["img_size"] = content["input"] = None
    content["input"] = {"img_size": [64, 64]}
    helper.set_model_props(model, {"locality": json.dumps(content)})


TAMPERED = {
    "a loop": (loop, "control flow"),
    "a function": (function, "functions"),
    "weights elsewhere": (outside, "weights are external or sparse"),
    "an expansion of 4 TB": (expand, "a.onnx"),
    "images of 80,000 pixels": (resize, "a.onnx"),
    "products for minutes": (products, "takes more than"),
    "one logit": (one_logit, r"shape \(1, 1\), not \(1, 10\)"),
    "another input": (no_input, "images"),
    "no description": (undescribed, "was not exported by this library"),
    "a deep description": (deeply_described, "a.onnx"),
    "another size": (larger, "dimensions"),
}


def test_a_sound_graph_is_run(tmp_path):
    onnx.save(linear(), tmp_path / "a.onnx")
    opened = open_model(tmp_path / "a.onnx")
    images = torch.randn(3, 3, 8, 8)
    expected = images.flatten(1) @ torch.from_numpy(WEIGHT)
    torch.testing.assert_close(opened.logits(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow if "minutes" in k else ()) for k in TAMPERED],
)
def test_a_graph_that_was_tampered_with_is_refused(kind, tmp_path):
    tamper, named = TAMPERED[kind]
    model = linear()
    tamper(model)
    path = tmp_path / "a.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=named) as caught:
        open_model(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
