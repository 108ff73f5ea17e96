"""Both forms of positional attention on a GPU: `Fused` beside `Separable`, in the whole model.

    python benchmarks/position.py --output position.json
    python benchmarks/position.py --models convit_tiny --pixels 224 --compiled

Each form is the only one allowed for its model. `prefers_fused` in layers/position.py chooses by
these figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from locality.benchmark import inference, interleave, machine, training_step
from locality.layers import position
from locality.machine import commit
from locality.models import build
from locality.training.devices import autocast

FORMS = {"fused": {"cuda"}, "separable": set[str]()}


def only(form: str, work: Callable[[], object]) -> Callable[[], None]:
    """The work with one form of positional attention."""

    def run() -> None:
        position.FUSED_DEVICES = FORMS[form]
        work()

    return run


def compare(name: str, pixels: int, precision: str, task: str, options: Any) -> dict[str, Any]:
    """Median milliseconds of both forms and how many times as fast `Fused` is, in one setting."""
    device = torch.device("cuda")
    cast = partial(autocast, "cuda", precision)
    images = torch.randn(options.batch_size, 3, pixels, pixels, device=device)
    make = inference if task == "inference" else training_step
    work = {}
    for form in FORMS:
        model: Any = build(name, img_size=pixels).to(device).train(task == "training")
        model = torch.compile(model) if options.compiled else model
        work[form] = only(form, make(model, images, cast))
    timing = interleave(work, device, options.rounds, warmup=4)
    milliseconds = {form: round(1000 * timing.median(form), 3) for form in FORMS}
    return {
        "model": name,
        "task": task,
        "pixels": pixels,
        "precision": precision,
        "compiled": options.compiled,
        "batch_size": options.batch_size,
        **milliseconds,
        "fused_is_times_as_fast": round(timing.times_as_fast("fused", "separable"), 3),
        "middle_half": [round(v, 3) for v in timing.middle_half("fused", "separable")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["convit_tiny", "convit_small"])
    parser.add_argument("--pixels", nargs="+", type=int, default=[224, 384, 512])
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    # Otherwise the limits of `prefers_fused` decide for large grids.
    position._MOST_TOKENS = dict.fromkeys(position._MOST_TOKENS, 4096)
    rows = []
    tasks = ("inference", "training")
    for setting in product(options.models, options.pixels, options.precision, tasks):
        rows.append(compare(*setting, options))
        print(rows[-1], flush=True)
        if options.output:
            record = {"commit": commit(), "machine": machine(torch.device("cuda")), "rows": rows}
            options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
