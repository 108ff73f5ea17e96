"""Processor time of optimiser steps (AdamW, Muon, AdaMuon) beside forward and backward.

    python benchmarks/optimizers.py --output benchmarks/results/optimizers.json

`timm` is timm's AdaMuon, which orthogonalises in bfloat16 on every device. Each round takes one
step with every optimiser; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import timm.optim.muon
import torch
import torch.nn.functional as F
from peers import interleave

from locality.files import write_atomic
from locality.machine import describe_environment
from locality.models import build
from locality.training import OptimConfig
from locality.training.optim import create_optimizer, parameter_groups

BATCHES = {"convit_nano": 64, "convit_micro": 64, "convit_tiny": 64}


def measure(name: str, batch: int, rounds: int) -> dict[str, float]:
    """Milliseconds of processor time by part."""
    model = build(name)
    optimizers: dict[str, torch.optim.Optimizer] = {
        each: create_optimizer(model, OptimConfig(each), batch)
        for each in ("adamw", "muon", "adamuon")
    }
    groups = parameter_groups(model, OptimConfig("adamuon"))
    optimizers["timm"] = timm.optim.muon.Muon(groups, lr=1e-3, algo="adamuon")
    images = torch.randn(batch, 3, *model.img_size)
    labels = torch.arange(batch) % model.num_classes

    def forward_and_backward() -> None:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()

    work = {"forward and backward": forward_and_backward}
    work |= {each: optimizer.step for each, optimizer in optimizers.items()}
    timing = interleave(work, images.device, rounds, warmup=1, clock=time.process_time)
    return {what: 1000 * timing.median(what) for what in work}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(name, batch, options.rounds) for name, batch in BATCHES.items()}
    for name, times in found.items():
        whole = times["forward and backward"]
        shares = ", ".join(f"{each} {ms:.1f} ({ms / whole:.2f})" for each, ms in times.items())
        print(f"{name}: {shares}")
    if options.output:
        record = {"environment": describe_environment(), "milliseconds": found, "batch": BATCHES}
        write_atomic(options.output, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
