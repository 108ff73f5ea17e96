"""Trains five models of 0.2 to 0.4 M parameters on all 60,000 photographs of Fashion-MNIST.

    python benchmarks/photographs.py --steps 20000 --output photographs.json

One run each with the settings of the recipe `fashion_mnist`, in equal steps of equal batches,
evaluated once at the end on the 10,000 test images. All train at the same time, each in its own
process. CCT needs vit-pytorch.

Fixed on 2026-11-26, before the first run: batches of 256 at the learning rate tuned for 64, 5% of
the steps of warm-up, seed 0.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cct  # noqa: F401 (registers cct_2)
import torch
from peers import machine
from tune import OWN

from locality.machine import commit
from locality.models import count_parameters
from locality.runs import Run
from locality.training import train
from locality.training.devices import resolve_accelerator
from locality.training.recipes import recipe

MODELS = ("convit_nano", "deit_nano", "cvt_nano", "timm/test_resnet", "timm/cct_2")


def run(model: str, steps: int, threads: int) -> dict[str, Any]:
    """Train and evaluate a model."""
    config = recipe(
        "fashion_mnist",
        {
            "model.name": model,
            "schedule.steps": steps,
            "schedule.warmup": steps // 20,
            "schedule.eval_every": steps,
            "schedule.save_every": steps,
            "data.workers": threads - 1,
            "engine.batch_size": 256,
            "engine.precision": "fp32",
            "engine.threads": 1,
        }
        | OWN.get(("photographs", model), {}),
    )
    started = time.perf_counter()
    with TemporaryDirectory() as folder:
        result = train(config, folder, quiet=True)
        parameters = count_parameters(Run(folder).model)
    return {
        "model": model,
        "parameters": parameters,
        "steps": steps,
        "top1": result["top1"],
        "minutes": round((time.perf_counter() - started) / 60, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--models", nargs="+", default=MODELS)
    options = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // len(options.models))
    device = torch.device(resolve_accelerator("auto"))
    rows = []
    with ProcessPoolExecutor(len(options.models), get_context("spawn")) as pool:
        pending = [pool.submit(run, model, options.steps, threads) for model in options.models]
        for future in pending:
            rows.append(future.result())
            print(rows[-1], flush=True)
            record = {"commit": commit(), "machine": machine(device), "rows": rows}
            options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
