"""`make bench`: the speed and memory figures of the documentation.

Each model is measured in its own process, on a CPU or, if torch sees one, a CUDA device. Results go
to benchmarks/results/NAME.json and, as tables, NAME.md; NAME has device and date.

    python benchmarks/run.py            everything; about 20 minutes on two cores
    python benchmarks/run.py --only bf16 memory
    python benchmarks/run.py --only gpu gpu_cvt       with GPU-sized batches
    python benchmarks/run.py --only sizes sizes_cvt             nine models; hours
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import MODES, interleave, run_benchmark, to_table

from locality.files import write_atomic
from locality.machine import commit

RESULTS = Path(__file__).parent / "results"

Settings = list[dict[str, Any]]


def settings(**named: Any) -> Settings:
    """Arguments of `run_benchmark`: one dictionary per combination of listed values."""
    lists = [value if isinstance(value, list) else [value] for value in named.values()]
    return [dict(zip(named, values, strict=True)) for values in product(*lists)]


_PIXELS, _BOTH = [224, 384, 512], ["fp32", "bf16"]
_FORMS = ["eager", "compiled"]
_INFERENCE, _TRAINING = ("inference",), ("training",)
# name → (question, models, settings)
PLAN: dict[str, tuple[str, list[str], Settings]] = {
    "resolution": (
        "What separable positional attention saves as images grow: inference, fp32",
        ["convit_tiny"],
        settings(img_size=_PIXELS, tasks=_INFERENCE),
    ),
    "floor": (
        "Beside a plain ViT of the same width and heads: 224 px, fp32, eager and compiled",
        ["convit_tiny", "convit_small"],
        settings(mode=_FORMS),
    ),
    "bf16": (
        "bf16 autocast beside fp32: inference at 224 px",
        ["convit_tiny", "convit_small"],
        settings(precision=_BOTH, tasks=_INFERENCE),
    ),
    "memory": (
        "What the backward pass keeps: a training step at 224 and 384 px",
        ["convit_small"],
        settings(img_size=[224, 384], tasks=_TRAINING, batch_size=2),
    ),
    "deit": ("DeiT beside timm's: 224 px, fp32", ["deit_tiny"], settings()),
    "cvt": (
        "CvT beside transformers': 224 px, fp32",
        ["cvt_13"],
        settings(against="transformers"),
    ),
}
_SIZES = {"img_size": _PIXELS, "precision": _BOTH, "mode": _FORMS}
GPU_PLAN: dict[str, tuple[str, list[str], Settings]] = {
    "gpu": (
        "On a GPU: 224 px, batches of 64, bf16, eager, compiled and with CUDA graphs",
        ["convit_tiny", "convit_small", "convit_base", "deit_small"],
        settings(batch_size=64, precision="bf16", mode=[*MODES]),
    ),
    "gpu_cvt": (
        "CvT on a GPU beside transformers': 224 px, batches of 64, bf16, in the same modes",
        ["cvt_13", "cvt_21"],
        settings(batch_size=64, precision="bf16", mode=[*MODES], against="transformers"),
    ),
    "sizes": (
        "ConViT and DeiT: 224, 384 and 512 px, fp32 and bf16, eager and compiled",
        [f"{family}_{size}" for family in ("convit", "deit") for size in ("tiny", "small", "base")],
        settings(**_SIZES),
    ),
    "sizes_cvt": (
        "CvT beside transformers': 224, 384 and 512 px, fp32 and bf16, eager and compiled",
        ["cvt_13", "cvt_21", "cvt_w24"],
        settings(**_SIZES, against="transformers"),
    ),
}


def measure(model: str, asked: Settings, rounds: int) -> dict[str, Any]:
    """`run_benchmark` of a model under several settings, merged into one result."""
    results = [run_benchmark(model, rounds=rounds, **each) for each in asked]
    return {**results[0], "rows": [row for result in results for row in result["rows"]]}


def main() -> None:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    plan = PLAN | GPU_PLAN
    parser.add_argument("--only", nargs="+", choices=plan, default=list(PLAN))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--name", default=None, help="name of the two files, without suffix")
    options = parser.parse_args()
    measured, remarks = {}, []
    for question in options.only:
        about, models, asked = plan[question]
        rounds = 1 if question == "memory" else options.rounds
        print(f"{question}: {about} …", flush=True)
        # One process per model, so that none inherits another's memory or caches.
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
            work = partial(measure, asked=asked, rounds=rounds)
            measured[about] = list(pool.map(work, models))
        if question == "bf16":
            remarks += map(bf16_gain, measured[about])
    content = {"commit": commit() or "unknown", "measured": measured}
    if not torch.cuda.is_available():
        rate = content["matmul_gmacs_per_second"] = matmul_rate() / 1e9
        remarks.append(f"A large fp32 `F.linear` runs at {rate:.0f} GMAC/s here.")
    machine = next(iter(measured.values()))[0]["machine"]
    device = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    name = options.name or f"{device}-{machine['threads']}t-{machine['date']}"
    text = "\n".join([markdown(content, machine), *remarks, ""])
    RESULTS.mkdir(exist_ok=True)
    write_atomic(RESULTS / f"{name}.json", json.dumps(content, indent=1) + "\n")
    write_atomic(RESULTS / f"{name}.md", text)
    print(text)


def markdown(content: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """The measurements as tables."""
    lines = [
        f"# {machine['device']}, {machine['date']}",
        "",
        f"{machine['threads']} threads, {machine['instructions']}, torch {machine['torch']}, "
        f"timm {machine['timm']}, commit {content['commit'][:12]}. Contenders take turns in one "
        "process; *ours is* gives the median over rounds of our speed over theirs, with the middle "
        "half of the rounds beside it.",
    ]
    for question, results in content["measured"].items():
        lines += ["", f"## {question}"]
        for result in results:
            header, cells = to_table(result["rows"])
            rows = [header, ["---"] * len(header), *cells]
            lines += ["", f"`{result['model']}`", ""]
            lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def bf16_gain(result: dict) -> str:
    """Speed of our model under bf16 autocast over fp32."""
    speed = {
        row["precision"]: row["images_per_second"]
        for row in result["rows"]
        if row["contender"] == "locality"
    }
    return (
        f"{result['model']}: bf16 autocast is {speed['bf16'] / speed['fp32']:.2f}× as fast as fp32."
    )


def matmul_rate(tokens: int = 4096, width: int = 1024, rounds: int = 5) -> float:
    """Multiply-accumulates per second of a large fp32 `linear`, for comparison."""
    x, weight = torch.randn(tokens, width), torch.randn(width, width)
    timing = interleave({"linear": lambda: F.linear(x, weight)}, x.device, rounds, 2)
    return tokens * width * width / timing.median("linear")


if __name__ == "__main__":
    main()
