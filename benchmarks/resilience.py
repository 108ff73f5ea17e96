"""Cost of a checkpoint per epoch, beside training without checkpoints.

    python benchmarks/resilience.py --output benchmarks/results/resilience.json

Epochs of the digits recipe with and without a checkpoint alternate in one process and are compared
pair by pair. The script also times the step loop beside forward, backward and update, and loading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from peers import interleave

from locality.files import write_atomic
from locality.machine import describe_environment
from locality.training import recipe, replace
from locality.training.devices import SignalHandler, create_fabric
from locality.training.job import Job
from locality.training.loop import Loop
from locality.training.model import build_model
from locality.training.recorder import Recorder
from locality.training.state import Components, TrainState


def make_loop(fabric: Fabric, model: str, folder: Path, steps: int) -> Loop:
    """A run of the digits recipe without evaluations or checkpoints."""
    changes: dict[str, Any] = {"schedule.steps": steps, "schedule.eval_every": steps}
    config = replace(recipe("digits", {"model.name": model}), changes)
    job = Job(config, folder).open()
    job.folder.checkpoints.mkdir(parents=True)
    parts = Components(fabric, job, build_model(config, len(job.splits.classes)))
    state = TrainState()
    recorder = Recorder(job, state, quiet=True)
    return Loop(fabric, job, parts, recorder, SignalHandler(), state, time.perf_counter())


def measure(fabric: Fabric, model: str, pairs: int, folder: Path) -> dict[str, Any]:
    """Epochs with and without a checkpoint, and the parts of a step."""
    loop = make_loop(fabric, model, folder, steps=10**6)
    epoch = round(len(loop.splits.train) / loop.plan.batch_size)
    batches = loop.train_batches()
    images, labels = (batch := next(batches)).images, batch.targets
    parts = loop.parts

    def steps(number: int) -> None:
        for _ in range(number):
            loop.train_step(batches)

    def epoch_with_checkpoint() -> None:
        # As in a run, writing to disk overlaps with the next steps.
        loop._save()
        steps(epoch)

    def bare() -> None:
        for _ in range(epoch):
            F.cross_entropy(parts.model(images), labels).backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad(set_to_none=True)

    def load() -> None:
        for _ in range(epoch):
            next(batches)

    work = {
        "without": lambda: steps(epoch),
        "with": epoch_with_checkpoint,
        "waiting": loop.recorder.wait_until_saved,
        "bare": bare,
        "load": load,
    }
    timing = interleave(work, torch.device("cpu"), pairs, warmup=1)
    loop.recorder.close()
    times = (timing.seconds[label] for label in ("without", "bare", "load"))
    rest = [(a - b - c) / a for a, b, c in zip(*times, strict=True)]
    low, high = timing.middle_half("with", "without")
    return {
        "model": model,
        "steps_per_epoch": epoch,
        "pairs": pairs,
        "throughput_with_a_checkpoint_every_epoch": round(
            timing.times_as_fast("with", "without"), 4
        ),
        "middle_half": [round(low, 4), round(high, 4)],
        "step_ms": round(1e3 * timing.median("without") / epoch, 3),
        "bare_step_ms": round(1e3 * timing.median("bare") / epoch, 3),
        "loading_ms": round(1e3 * timing.median("load") / epoch, 3),
        "share_of_the_loop_itself": round(statistics.median(rest), 4),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--models", nargs="+", default=["convit_nano", "deit_nano"])
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args(arguments)
    fabric = create_fabric(recipe("digits").engine)
    fabric.launch()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        rows = [measure(fabric, model, given.pairs, Path(folder) / model) for model in given.models]
    text = json.dumps({"results": rows, "environment": describe_environment()}, indent=2) + "\n"
    if given.output:
        write_atomic(given.output, text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
