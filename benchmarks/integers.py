"""What a graph in eight bits computes on a processor with VNNI and on one without, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from locality.checkpoints.trial import INPUT
from locality.models import ImageClassifier, build

INT16 = np.iinfo(np.int16)


def integer_product(
    a: npt.NDArray[np.uint8], b: npt.NDArray[Any], saturating: bool = False
) -> npt.NDArray[np.float64]:
    """a @ b as the kernels of ONNX Runtime add it up, in whole numbers.

    Args:
        a: (..., inputs) activations.
        b: (inputs, outputs) weights. Only of signed ones do kernels without VNNI saturate:
            unsigned ones are widened to 16 bits first, and pairs added in 32.
        saturating: whether products 2k and 2k + 1 are added in 16 bits, which end at ±2¹⁵.
    """
    # Of sums below 2**53 float64 loses nothing, and NumPy multiplies it faster than integers.
    product = a.astype(np.float64) @ b.astype(np.float64)
    if not (saturating and b.dtype == np.int8):
        return product
    for k in range(0, len(b) - 1, 2):
        pair = b[k : k + 2].astype(np.int64)
        reach = [255 * np.maximum(sign * pair, 0).sum(0) for sign in (1, -1)]
        outputs = np.flatnonzero(np.maximum(*reach) > INT16.max)
        added = a[..., k : k + 2].astype(np.int64) @ pair[:, outputs]
        product[..., outputs] += added.clip(INT16.min, INT16.max) - added
    return product


def logits_error(graph: Path | str, images: Tensor, logits: Tensor, saturating: bool) -> float:
    """The largest difference of a graph's logits from others, in units of these others' deviation.

    The graph is computed by ONNX's own reference, its integer products by `integer_product`, so
    that the processor makes no difference beyond the rounding of what stays in float.

    Args:
        graph: as `quantise` wrote it.
        images: (B, C, H, W).
        logits: (B, classes), of the model.
        saturating: as a processor without VNNI computes the graph.
    """
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class MatMulInteger(OpRun):
        """A product of eight-bit numbers less their zero points."""

        def _run(self, a: Any, b: Any, a_zero: Any = 0, b_zero: Any = 0) -> tuple[Any]:
            product = integer_product(a, b, saturating)
            # The kernels multiply what is stored and subtract the zero points' share afterwards.
            a_zero, b_zero = np.asarray(a_zero, np.float64), np.asarray(b_zero, np.float64)
            product -= a_zero * (b.astype(np.float64) - b_zero).sum(0)
            product -= b_zero * a.astype(np.float64).sum(-1, keepdims=True)
            return (product.astype(np.int32),)

    class Erf(OpRun):
        """The reference's own takes numbers one by one."""

        def _run(self, x: Any) -> tuple[Any]:
            return (torch.erf(torch.from_numpy(x)).numpy(),)

    evaluator = ReferenceEvaluator(str(graph), new_ops=[MatMulInteger, Erf])
    outputs: Any = evaluator.run(None, {INPUT: images.numpy()})
    computed = torch.from_numpy(outputs[0])
    return ((computed - logits).abs().max() / logits.std()).item()


def doubled(name: str) -> ImageClassifier:
    """A model as it starts, with its matrices and kernels doubled: its logits vary as a trained
    model's do, not by a few hundredths.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = build(name).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return model
