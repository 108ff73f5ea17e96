"""Eight-bit ONNX graphs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from locality.checkpoints.exporting import suppress_warnings
from locality.errors import require
from locality.files import write_atomic


def quantise(graph: Path | str, target: Path | str) -> None:
    """Write an exported ONNX graph with its linear layers in eight bits, by ONNX Runtime's tools.

    Weights are rounded once, per output channel; what goes into a layer is scaled to its own range
    in every call, so that no images are needed beforehand. The products within attention, softmax,
    gates, positional factors, convolutions and normalisation stay in float.

    The graph means the same on every processor: one without VNNI adds neighbouring products in 16
    bits, which no pair of these weights can leave (`_weight_ranges`).

    Args:
        graph: as `export` wrote it; it is not changed.
        target: the file to write, ending in .onnx.

    Raises:
        UserError: if a package for ONNX is missing, with the line that installs it.
    """
    require("eight bits", "locality[export]", "onnx", "onnxruntime")
    import onnx
    from onnxruntime import quantization

    proto = onnx.load(graph)
    # The exporter's shapes of values between the layers stop ONNX's own inference of them.
    del proto.graph.value_info[:]
    # As ONNX Runtime does first, so that the weights below have their last shapes and names.
    quantization.onnx_model.ONNXModel(proto).replace_gemm_with_matmul()
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer
    }
    linear = [node.input[1] for node in proto.graph.node if node.op_type == "MatMul"]
    with tempfile.TemporaryDirectory() as folder, suppress_warnings():
        written = Path(folder) / "int8.onnx"
        quantization.quantize_dynamic(
            proto,
            written,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            extra_options={
                # Not products of two things that are computed: attention's.
                "MatMulConstBOnly": True,
                "TensorQuantOverrides": {
                    name: _weight_ranges(weights[name]) for name in linear if name in weights
                },
            },
        )
        quantised = onnx.load(written)
    quantised.ClearField("metadata_props")
    quantised.metadata_props.extend(proto.metadata_props)
    write_atomic(target, quantised.SerializeToString())


def _weight_ranges(weight: npt.NDArray[np.float32]) -> list[dict[str, Any]]:
    """The range that a linear layer's weights are rounded in, by output channel.

    Without VNNI, x86 multiplies activations of 0…255 with weights of -127…127 and adds products 2k
    and 2k + 1 in 16 bits, where 255·127·2 does not fit. So the range ends at the largest sum of
    such a pair, as far as its signs agree: in steps of range/127 the sum is at most 127, after
    rounding 128, and 255·128 < 2¹⁵. Random weights lose 0.4 bits, weights of one size a whole one.

    Args:
        weight: (..., inputs, outputs).
    """
    inputs, outputs = weight.shape[-2:]
    padding = ((0, 0), (0, inputs % 2), (0, 0))
    pairs = np.pad(weight.reshape(-1, inputs, outputs), padding).reshape(-1, 2, outputs)
    sums = [np.maximum(sign * pairs, 0).sum(1).max(0) for sign in (1, -1)]
    return [{"axis": weight.ndim - 1, "rmin": -m, "rmax": m} for m in np.maximum(*sums)]
