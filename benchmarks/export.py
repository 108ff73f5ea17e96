"""How fast exported graphs are: ONNX Runtime in single precision and in eight bits, beside PyTorch.

Weights are random, the three take turns in one process, and a ratio is the median over rounds,
with the middle half of the rounds beside it.

    python benchmarks/export.py
    python benchmarks/export.py --models cvt_13 --output benchmarks/results/export.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from locality.benchmark.measure import Timing, inference, interleave
from locality.benchmark.run import machine, randomise
from locality.checkpoints import export, open_model, quantise
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
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, object] = {"commit": commit(), "machine": machine(torch.device("cpu"))}
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
        whole, eighth = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        export(model, whole)
        quantise(whole, eighth)
        fp32, int8 = open_model(whole), open_model(eighth)
    timing = interleave(
        {
            "PyTorch": inference(model, images, nullcontext),
            "fp32": partial(fp32.logits, images),
            "int8": partial(int8.logits, images),
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


def ratio(timing: Timing, label: str, reference: str) -> list[float]:
    """How many times as fast: lower quartile, median, upper quartile over rounds."""
    low, high = timing.middle_half(label, reference)
    return [round(value, 2) for value in (low, timing.times_as_fast(label, reference), high)]


if __name__ == "__main__":
    main()
