"""Speed of this checkout relative to another: the engine's gradients, fused and plain inference.

    python benchmarks/against.py ../other-checkout

Each runs on one thread in a process of its own; they take turns, and processor time is measured, so
that other load counts little. The allocator returns no memory, since page faults differ by chance.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

MODELS = {"deit_nano": 64, "convit_nano": 64, "cvt_nano": 64, "convit_tiny": 2, "cvt_13": 2}
SETUPS, ROUNDS = 3, 7
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}

WORKER = """
import sys, time, torch
from locality.models import build
torch.set_num_threads(1)
def prepare(name, batch, task):
    torch.manual_seed(0)
    model = build(name, num_classes=10)
    images = torch.randn(int(batch), 3, *model.img_size)
    if task == "training":
        model.shortcuts = True
        return lambda: model(images).square().mean().backward()
    model = model.eval().fuse() if task == "fused" else model.eval()
    return torch.inference_mode()(lambda: model(images))
for line in sys.stdin:
    if len(words := line.split()) > 1:
        run = prepare(*words)
        run()
        repeats = 1
    else:
        repeats = int(words[0])
    start = time.process_time()
    for _ in range(repeats): run()
    print((time.process_time() - start) / repeats, flush=True)
"""


def start(checkout: Path) -> subprocess.Popen[str]:
    settings = {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"} | KEEP_MEMORY
    command, pipe = [sys.executable, "-c", WORKER], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | settings)


def ask(worker: subprocess.Popen[str], words: object) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    print(words, file=worker.stdin, flush=True)
    return float(worker.stdout.readline())


def main() -> None:
    theirs, ours = start(Path(sys.argv[1])), start(Path(__file__).parents[1])
    for task in ("training", "fused", "plain"):
        for name, batch in MODELS.items():
            ratios = []
            for turn in range(SETUPS * ROUNDS):
                order = (theirs, ours) if turn % 2 else (ours, theirs)
                if turn % ROUNDS == 0:
                    first = [ask(worker, f"{name} {batch} {task}") for worker in order]
                    repeats = max(1, int(0.15 / min(first)))
                seconds = {worker: ask(worker, repeats) for worker in order}
                ratios.append(seconds[theirs] / seconds[ours])
            print(f"{task:9} {name:12} {statistics.median(ratios):.3f}", flush=True)


if __name__ == "__main__":
    main()
