"""How two-process runs exit under torchrun.

    python benchmarks/launches.py --runs 50
    python benchmarks/launches.py --runs 50 --busy
    python benchmarks/launches.py --runs 20 --delay 600 --output benchmarks/results/launches.json

--busy keeps both cores busy. --delay loads a library (built with `cc`) that makes the process
group's threads wait up to that many milliseconds at every lock they take after result.json exists,
so they still hold the last broadcast while the interpreter exits. Unless the process group is
destroyed first, this aborts the process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from locality.files import write_atomic
from locality.machine import describe_environment
from locality.settings import to_yaml
from locality.training import recipe, replace

RANK = Path(__file__).parents[1] / "tests/training/rank.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SETTINGS = {
    "model.depth": 2,
    "model.gpsa_layers": 1,
    "model.embed_dim": 16,
    "data.fraction": 0.1,
    "engine.batch_size": 16,
    "engine.precision": "fp32",
    "schedule.steps": 8,
    "schedule.warmup": 2,
    "schedule.eval_every": 8,
}
DELAY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static int (*lock)(pthread_mutex_t *);

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    static __thread unsigned seed;
    const char *thread = "pt_gloo_runloop", *file = getenv("DELAY_AFTER");
    char name[16];
    if (!lock) lock = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    if (file && !prctl(PR_GET_NAME, name) && !strcmp(name, thread) && !access(file, F_OK)) {
        if (!seed) seed = getpid() ^ (unsigned)(size_t)&seed;
        usleep(20000 + rand_r(&seed) % (1000 * atoi(getenv("DELAY_MS"))));
    }
    return lock(mutex);
}
"""


def built(folder: Path) -> Path:
    """Build the delaying library."""
    source, library = folder / "delay.c", folder / "delay.so"
    source.write_text(DELAY)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep cores busy inside the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while 1: 1"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def launched(folder: Path, library: Path | None, delay: int) -> str:
    """Train once in two processes; return the failure, or ""."""
    (folder / "config.yaml").write_text(to_yaml(replace(recipe("digits"), SETTINGS)))
    reports, run = folder / "reports", folder / "run"
    reports.mkdir()
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if library is not None:
        environment |= {"LD_PRELOAD": str(library), "DELAY_AFTER": str(run / "result.json")}
        environment |= {"DELAY_MS": str(delay)}
    words = ["train", "digits", "--config", str(folder / "config.yaml"), "--output", str(run)]
    command = [sys.executable, *TORCHRUN, str(RANK), str(reports), "end", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    found = [json.loads(report.read_text()) for report in sorted(reports.iterdir())]
    left = [report[what] for report in found for what in ("threads", "children", "shared memory")]
    if not done.returncode and len(found) == 2 and not any(left) and "finished in" in done.stderr:
        return ""
    aborted = "terminate called" in done.stderr
    return f"exit code {done.returncode}, aborted: {aborted}, left behind: {left}"


def survey(runs: int, delay: int, cores: int) -> dict[str, Any]:
    """Launch `runs` times and summarise the failures."""
    failures: list[str] = []
    load = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, busy(cores):
        library = built(Path(temporary)) if delay else None
        for number in range(runs):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            if wrong := launched(folder, library, delay):
                failures.append(wrong)
            load.append(os.getloadavg()[0])
            print(f"{number + 1} of {runs}, {len(failures)} failures", file=sys.stderr, flush=True)
    return {
        "runs": runs,
        "busy_cores": cores,
        "load_average": round(sum(load) / len(load), 1),
        "delay_ms": delay,
        "failures": failures,
        "seconds": round(time.monotonic() - started),
        "environment": describe_environment(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--busy", action="store_true", help="keep the cores busy")
    parser.add_argument("--delay", type=int, default=0, help="maximum milliseconds per lock")
    parser.add_argument("--output", type=Path, help="append the outcome to this JSON file")
    given = parser.parse_args(arguments)
    outcome = survey(given.runs, given.delay, (os.cpu_count() or 2) if given.busy else 0)
    if given.output:
        before = json.loads(given.output.read_text()) if given.output.exists() else []
        write_atomic(given.output, json.dumps([*before, outcome], indent=2) + "\n")
    print(json.dumps(outcome, indent=2))
    return int(bool(outcome["failures"]))


if __name__ == "__main__":
    sys.exit(main())
