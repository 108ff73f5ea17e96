"""How fast exported graphs are: ONNX Runtime in single precision and in eight bits, beside PyTorch.

Weights are random, the contenders take turns in one process, and a ratio is the median over rounds,
with the middle half of the rounds beside it. `--schemes` compares ways to round weights to eight
bits instead: how fast, and how far logits move, on processors with VNNI and without.

    python benchmarks/export.py
    python benchmarks/export.py --models cvt_13 --output benchmarks/results/export.json
    python benchmarks/export.py --schemes --models convit_tiny cvt_13 --threads 1 --batch-size 2
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path

import onnx
import onnxruntime
import torch
from integers import doubled, logits_error
from onnxruntime import quantization
from onnxruntime.quantization import QuantType

from locality.benchmark import Timing, inference, interleave, machine, randomise
from locality.checkpoints import export, quantise
from locality.checkpoints.trial import INPUT
from locality.files import write_atomic
from locality.machine import commit
from locality.models import build


def main() -> None:
    """Measure, print, and write what was measured if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=["convit_tiny", "convit_small", "deit_small", "cvt_13"]
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schemes", action="store_true")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    versions = {name: version(name) for name in ("onnx", "onnxruntime")}
    here = machine(torch.device("cpu")) | versions
    result: dict[str, object] = {"commit": commit(), "machine": here}
    for name in options.models:
        work = compare_schemes if options.schemes else measure
        result[name] = work(name, options.batch_size, options.rounds)
        print(name, result[name], flush=True)
    if options.output:
        write_atomic(options.output, json.dumps(result, indent=1) + "\n")


def measure(name: str, batch_size: int, rounds: int) -> dict[str, object]:
    """One model's images per second and ratios."""
    model = build(name).eval()
    randomise(model)
    images = torch.randn(batch_size, 3, *model.img_size)
    with tempfile.TemporaryDirectory() as folder:
        whole, eighth = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        export(model, whole)
        quantise(whole, eighth)
        fp32, int8 = runs(whole), runs(eighth)
    timing = interleave(
        {
            "PyTorch": inference(model, images, nullcontext),
            "fp32": partial(fp32, images),
            "int8": partial(int8, images),
        },
        images.device,
        rounds,
        warmup=2,
    )
    return {
        "images/s": {
            label: round(batch_size / timing.median(label), 1) for label in timing.seconds
        },
        "fp32 over PyTorch": ratio(timing, "fp32", "PyTorch"),
        "int8 over fp32": ratio(timing, "int8", "fp32"),
    }


def compare_schemes(name: str, batch_size: int, rounds: int) -> dict[str, object]:
    """Speed and error of each way to round one model's weights, doubled as in the tests.

    Speeds are of fp32's; errors the largest difference of two images' logits from fp32's in units
    of the deviation of these, with products added in 32 bits and with pairs added in 16.
    """
    model = doubled(name)
    images = torch.randn(batch_size, 3, *model.img_size, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        graphs = {"fp32": export(model, Path(folder) / "fp32.onnx")}
        for label, scheme in SCHEMES.items():
            graphs[label] = Path(folder) / f"{label}.onnx"
            scheme(graphs["fp32"], graphs[label])
        opened = {label: runs(graph) for label, graph in graphs.items()}
        logits = opened["fp32"](images[:2])
        errors = {
            label: [
                round(logits_error(graphs[label], images[:2], logits, saturating), 3)
                for saturating in (False, True)
            ]
            for label in SCHEMES
        }
    timing = interleave(
        {label: partial(graph, images) for label, graph in opened.items()},
        images.device,
        rounds,
        warmup=2,
    )
    return {
        label: {
            "error with 32 bits, with 16": error,
            "over fp32": ratio(timing, label, "fp32"),
        }
        for label, error in errors.items()
    }


def runs(graph: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Images → logits, on as many threads as PyTorch has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {INPUT: images.numpy()})[0])


def onnxruntimes_own(whole: Path, target: Path, **settings: object) -> None:
    """ONNX Runtime's dynamic quantisation of linear layers, per output channel."""
    proto = onnx.load(whole)
    del proto.graph.value_info[:]
    quantization.quantize_dynamic(
        proto,
        target,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        extra_options={"MatMulConstBOnly": True},
        **settings,
    )


SCHEMES: dict[str, Callable[[Path, Path], None]] = {
    "signed, range of the largest weight": partial(onnxruntimes_own, weight_type=QuantType.QInt8),
    "signed, 7 bits": partial(onnxruntimes_own, weight_type=QuantType.QInt8, reduce_range=True),
    "unsigned": partial(onnxruntimes_own, weight_type=QuantType.QUInt8),
    "signed, range of the largest pair": quantise,
}


def ratio(timing: Timing, label: str, reference: str) -> list[float]:
    """How many times as fast: lower quartile, median, upper quartile over rounds."""
    low, high = timing.middle_half(label, reference)
    return [round(value, 2) for value in (low, timing.times_as_fast(label, reference), high)]


if __name__ == "__main__":
    main()
