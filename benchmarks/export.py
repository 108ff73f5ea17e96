"""Speed of exported graphs in ONNX Runtime (single precision) beside PyTorch.

Weights are random and the contenders take turns in one process. Ratios are medians over rounds with
their quartiles.

    python benchmarks/export.py
    python benchmarks/export.py --models cvt_13 --output benchmarks/results/export.json
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

import onnxruntime
import torch
from peers import Timing, inference, interleave, machine, randomise

from locality.checkpoints import export
from locality.checkpoints.onnx import INPUT
from locality.files import write_atomic
from locality.machine import commit
from locality.models import build


def main() -> None:
    """Measure, print, and write the record with `--output`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=["convit_tiny", "convit_small", "deit_small", "cvt_13"]
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    versions = {name: version(name) for name in ("onnx", "onnxruntime")}
    here = machine(torch.device("cpu")) | versions
    result: dict[str, object] = {"commit": commit(), "machine": here}
    for name in options.models:
        result[name] = measure(name, options.batch_size, options.rounds)
        print(name, result[name], flush=True)
    if options.output:
        write_atomic(options.output, json.dumps(result, indent=1) + "\n")


def measure(name: str, batch_size: int, rounds: int) -> dict[str, object]:
    """One model's images per second and ratios."""
    model = build(name).eval()
    randomise(model)
    images = torch.randn(batch_size, 3, *model.img_size)
    with tempfile.TemporaryDirectory() as folder:
        fp32 = runs(export(model, Path(folder) / "fp32.onnx"))
    timing = interleave(
        {
            "PyTorch": inference(model, images, nullcontext),
            "fp32": partial(fp32, images),
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
    }


def runs(graph: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Images → logits, with PyTorch's number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {INPUT: images.numpy()})[0])


def ratio(timing: Timing, label: str, reference: str) -> list[float]:
    """Speed over the reference's: lower quartile, median, upper quartile over rounds."""
    low, high = timing.middle_half(label, reference)
    return [round(value, 2) for value in (low, timing.times_as_fast(label, reference), high)]


if __name__ == "__main__":
    main()
