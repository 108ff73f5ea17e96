"""Kill runs at random moments, resume them, and compare the results to the last bit.

    python benchmarks/faults.py --faults 100                  one process, 0 and 2 data workers
    python benchmarks/faults.py --faults 60 --signals SIGKILL --per_run 4
    python benchmarks/faults.py --faults 20 --processes 2     two under torchrun, on either or both

Each run is a small ConViT, DeiT or CvT on digits with all random and stateful features on. A fault
is SIGKILL or SIGTERM, sent a random time after the run enters a random phase: a step, an
evaluation, or writing a checkpoint. The run is resumed and hit again until it finishes or has had
its share of faults. Its weights, optimiser, counts and metrics file are then compared with an
undisturbed run's.

Single processes are forked from this one, which saves their imports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from locality.checkpoints.run_state import CheckpointFolder, DamagedCheckpoint, load_best_state
from locality.errors import Interrupted
from locality.files import write_atomic
from locality.machine import describe_environment
from locality.runs import Run
from locality.settings import from_yaml, to_yaml
from locality.training import RunConfig, recipe, replace, train
from locality.training.job import Job
from locality.training.loop import Loop

PHASES = ("step", "evaluate", "save")
SIGNALS = {each.name: each for each in (signal.SIGKILL, signal.SIGTERM)}
HANG_SECONDS = 120.0

# A CvT of two stages.
TINY_CVT = {
    "embed_dim": (8, 16),
    "num_heads": (1, 2),
    "depth": (1, 2),
    "embed_kernel": 3,
    "embed_stride": 2,
    "embed_padding": 1,
}
TINY = {"depth": 2, "embed_dim": 16, "drop_path_rate": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "convit_nano": TINY | {"gpsa_layers": 1},
    "deit_nano": TINY,
    "cvt_13": TINY_CVT | {"kv_stride": (2, 1), "drop_path_rate": 0.2},
}


def configuration(model: str, workers: int, accumulate: int) -> RunConfig:
    """A short run with all random and stateful features on."""
    return replace(
        recipe("digits"),
        {
            "model.name": model,
            "model.img_size": 8,
            **{f"model.{name}": value for name, value in MODELS[model].items()},
            "data.fraction": 0.1,
            "data.workers": workers,
            "augment.mixup": 0.8,
            "augment.cutmix": 1.0,
            "augment.random_erasing": 0.5,
            "augment.repeats": 3,
            "optim.clip_grad": 1.0,
            "schedule.steps": 30,
            "schedule.warmup": 5,
            "schedule.eval_every": 5,
            "schedule.save_every": 3,
            "engine.batch_size": 16,
            "engine.accumulate": accumulate,
            "engine.ema_decay": 0.9,
            "engine.precision": "fp32",
        },
    )


@dataclass
class Fault:
    """A signal sent to a run.

    Attributes:
        signum: the signal.
        phase: sent after the run enters this phase …
        count: … for the count-th time …
        delay: … plus this many seconds.
        victim: "only" process, "rank 0", "rank 1" or "both".
    """

    signum: int
    phase: str
    count: int
    delay: float
    victim: str = "only"

    @classmethod
    def drawn(cls, rng: random.Random, processes: int, signals: list[str]) -> Fault:
        victims = ["only"] if processes == 1 else ["rank 0", "rank 1", "both"]
        phase = rng.choice(PHASES)
        return cls(
            signum=SIGNALS[rng.choice(signals)],
            phase=phase,
            count=rng.randint(1, 8 if phase == "step" else 2),
            delay=rng.random() * 0.02,
            victim=rng.choice(victims),
        )


@dataclass
class Tally:
    """Outcomes of the faults."""

    faults: int = 0
    identical: int = 0
    runs: int = 0
    different: list[str] = field(default_factory=list)
    hangs: int = 0
    wrong_exits: list[str] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)
    runs_that_ended_before_the_fault: int = 0


# -- the process that trains ---------------------------------------------------------------------


def announce_phases(pipe: int) -> None:
    """Make this process write the phase it enters to a pipe."""

    def announce(number: int, rank: int) -> None:
        os.write(pipe, struct.pack("iii", number, os.getpid(), rank))

    def announcing(original: Any, number: int) -> Any:
        def wrapped(self: Any, *arguments: Any) -> Any:
            announce(number, getattr(getattr(self, "fabric", None), "global_rank", 0))
            return original(self, *arguments)

        return wrapped

    Loop.train_step = announcing(Loop.train_step, 0)  # type: ignore[method-assign]
    Loop._evaluate = announcing(Loop._evaluate, 1)  # type: ignore[method-assign]
    CheckpointFolder.save = announcing(CheckpointFolder.save, 2)  # type: ignore[method-assign]


def train_announcing(folder: Path) -> None:
    """Train as configured in FOLDER.yaml."""
    announce_phases(os.open(folder.parent / f"{folder.name}.pipe", os.O_WRONLY))
    config = folder.parent / f"{folder.name}.yaml"
    train(from_yaml(RunConfig, config.read_text()), folder, quiet=True)


def start(config: RunConfig, folder: Path, processes: int) -> tuple[int, int]:
    """Fork a process that trains in `folder`; return its id and the pipe of its phases."""
    pipe = folder.parent / f"{folder.name}.pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
        (folder.parent / f"{folder.name}.yaml").write_text(to_yaml(config))
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    child = os.fork()
    if child:
        return child, reading
    os.close(reading)
    code = 1
    try:
        # A separate process group, so leftovers can be found afterwards.
        os.setpgid(0, 0)
        errors = os.open(folder.parent / f"{folder.name}.log", os.O_CREAT | os.O_APPEND | os.O_RDWR)
        os.dup2(errors, 2)
        if processes == 2:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node=2", __file__, "--train", str(folder)]
            os.execv(sys.executable, command)
        train_announcing(folder)
        code = 0
    except Interrupted as interrupted:
        code = interrupted.exit_code
    except BaseException as error:
        import traceback

        traceback.print_exc()
        code = 1 if isinstance(error, Exception) else 99
    finally:
        os._exit(code)


# -- the process that disturbs -------------------------------------------------------------------


def strike(child: int, pipe: int, fault: Fault | None) -> bool:
    """Wait for the fault's moment and send its signal; False if the run ended first.

    Without a fault, read the pipe, so that it does not fill up, until the run has ended.
    """
    ranks: dict[int, int] = {}
    seen = 0
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        try:
            message = os.read(pipe, 12)
        except BlockingIOError:
            time.sleep(0.0005)
            continue
        if fault is None or not message:  # nobody has opened the pipe yet
            continue
        number, pid, rank = struct.unpack("iii", message)
        ranks[rank] = pid
        if rank == 0 and PHASES[number] == fault.phase:
            seen += 1
        everyone = fault.victim in ("only", "rank 0") or 1 in ranks
        if seen >= fault.count and everyone:
            time.sleep(fault.delay)
            victims = {
                "only": [child],
                "rank 0": [ranks[0]],
                "rank 1": [ranks.get(1, child)],
                "both": list(ranks.values()),
            }[fault.victim]
            for pid in victims:
                try:
                    os.kill(pid, fault.signum)
                except ProcessLookupError:
                    return False
            return True
    return False


def wait_for(child: int) -> int | None:
    """The exit code of a process, negative after a signal; None (after SIGKILL) if it hangs."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_once(
    config: RunConfig, folder: Path, processes: int, fault: Fault | None
) -> tuple[int | None, bool]:
    """Train until the end or the fault; return the exit code and whether the fault struck."""
    child, pipe = start(config, folder, processes)
    try:
        struck = strike(child, pipe, fault)
        return wait_for(child), struck
    finally:
        os.close(pipe)


def disturb(
    config: RunConfig,
    folder: Path,
    reference: Path,
    faults: int,
    processes: int,
    rng: random.Random,
    tally: Tally,
    signals: list[str],
) -> None:
    """Disturb a run with up to `faults` faults, finish it, and compare."""
    here = 0
    tally.runs += 1
    while here < faults:
        fault = Fault.drawn(rng, processes, signals)
        code, struck = run_once(config, folder, processes, fault)
        if code is None:
            tally.hangs += 1
        if not struck:
            tally.runs_that_ended_before_the_fault += 1
            if code == 0:
                break
            continue
        here += 1
        tally.faults += 1
        name = signal.Signals(fault.signum).name
        tally.by_kind[f"{name} {fault.victim} {fault.phase}"] += 1
        # torchrun's exit code for any failure is 1.
        if fault.signum == signal.SIGTERM and code not in (143 if processes == 1 else 1, 0):
            tally.wrong_exits.append(f"{fault}: exit code {code}")
        try:
            load_best_state(folder)
        except (ValueError, DamagedCheckpoint) as error:
            if "no checkpoint yet" not in str(error):
                tally.different.append(f"{folder.name}: {error}")
    code, _ = run_once(config, folder, processes, None)
    if code is None:
        tally.hangs += 1
    difference = f"exit code {code}" if code else compare(folder, reference)
    if difference:
        tally.different.append(f"{folder.name}: {difference}")
    else:
        tally.identical += here


def compare(run: Path, reference: Path) -> str:
    """The first difference between two finished runs, or ""."""
    if Run(run).read_result() is None:
        return "not finished"
    if (run / "metrics.csv").read_bytes() != (reference / "metrics.csv").read_bytes():
        return "metrics.csv differs"
    return first_difference(load_best_state(run), load_best_state(reference), "state")


def first_difference(one: Any, other: Any, where: str) -> str:
    """The name of the first entry that is not bitwise equal, or ""."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return "" if torch.equal(one, other) else f"{where} differs"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        found = (first_difference(one[key], other[key], f"{where}.{key}") for key in one)
        return next(filter(None, found), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        found = (first_difference(a, b, f"{where}[{number}]") for number, (a, b) in pairs)
        return next(filter(None, found), "")
    return "" if one == other else f"{where} differs"


def survey(
    faults: int, per_run: int, processes: int, seed: int, signals: list[str], folder: Path
) -> Tally:
    """Strike `faults` times, over models, workers and accumulations in turn."""
    torch.set_num_threads(1)
    # Probing for GPUs would keep forked processes from forking others.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Import lazy modules once here, not in every process.
    importlib.import_module("torch._dynamo")
    Job(configuration("convit_nano", 0, 1), "run").open()
    rng = random.Random(seed)
    cases = [
        (model, workers, accumulate)
        for accumulate in (1, 4)
        for workers in (0, 2)
        for model in MODELS
    ]
    tally = Tally()
    number = 0
    while tally.faults < faults:
        model, workers, accumulate = cases[number % len(cases)]
        config = configuration(model, workers, accumulate)
        reference = folder / f"reference-{model}-{workers}-{accumulate}"
        if not Run(reference).read_result():
            code, _ = run_once(config, reference, processes, None)
            if code != 0:  # None: it hung
                raise RuntimeError(f"the undisturbed run ended with exit code {code}: {reference}")
        here = min(per_run, faults - tally.faults)
        disturb(
            config, folder / f"run-{number:03d}", reference, here, processes, rng, tally, signals
        )
        number += 1
    return tally


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--per_run", type=int, default=5, help="maximum faults per run")
    parser.add_argument("--signals", nargs="+", choices=list(SIGNALS), default=list(SIGNALS))
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the outcome as JSON")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # one of two processes
    given = parser.parse_args(arguments)
    if given.train:
        train_announcing(given.train)
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tally = survey(
            given.faults, given.per_run, given.processes, given.seed, given.signals, folder
        )
    outcome = vars(tally) | {
        "by_kind": dict(sorted(tally.by_kind.items())),
        "processes": given.processes,
        "seed": given.seed,
        "seconds": round(time.monotonic() - started),
        "environment": describe_environment(),
    }
    text = json.dumps(outcome, indent=2) + "\n"
    if given.output:
        write_atomic(given.output, text)
    print(text, end="")
    return int(tally.identical < tally.faults or tally.hangs > 0 or bool(tally.wrong_exits))


if __name__ == "__main__":
    sys.exit(main())
