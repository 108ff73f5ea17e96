"""Many runs: their identity, folders, dependencies and cost, and their execution in parallel.

An executor executes each run once and reports errors. Results are read from the run folders.
"""

import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from locality import checks, training
from locality.errors import Interrupted, ProcessKilled, UserError, one_line
from locality.machine import processors
from locality.progress import format_duration
from locality.runs import Run, is_run_folder
from locality.settings import settings_of
from locality.training.config import RunConfig, identity, read_config
from locality.training.cost import STEP_FORWARDS, estimate_cost


@dataclass(frozen=True)
class Request:
    """A requested training run.

    Attributes:
        name: display name, such as "convit_nano 5% seed 0".
        config: the full configuration.
        folder: the run folder.
        needs: runs that must finish first (a teacher, initial weights).
        spent: how many seconds of a run of minutes have gone when it starts.
    """

    name: str
    config: RunConfig
    folder: Path
    needs: tuple["Request", ...] = ()
    spent: float = 0.0

    def result(self) -> dict[str, Any] | None:
        """The content of result.json, or None if the run has not finished.

        Raises:
            UserError: the file exists but cannot be read.
        """
        return Run(self.folder).read_result()

    def is_finished(self) -> bool:
        """Whether the folder holds the result of this configuration."""
        if self.result() is None:
            return False
        return digest(read_config(self.folder)) == digest(self.config)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        run: the run.
        error: why the run has no result; None if it has one.
    """

    run: Request
    error: str | None = None


def digest(config: RunConfig) -> str:
    """Twelve hexadecimal digits that identify what a run computes.

    Only settings that differ from the default of their field count, so that adding one keeps
    existing folders.
    """
    known = settings_of(config)
    values = {
        name: value
        for name, value in identity(config, "result").items()
        if name not in known or value != known[name].default
    }
    text = json.dumps(["locality.training:train", values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def content_folder(root: Path, config: RunConfig) -> Path:
    """The folder of a configuration under `root`: model, fraction, seed and digest."""
    name = config.model.name.replace("/", "-")
    return root / f"{name}-{config.data.percent}-s{config.seed}-{digest(config)}"


def with_needs(runs: Iterable[Request]) -> list[Request]:
    """Runs and their dependencies, each folder once, dependencies first."""
    ordered: dict[Path, Request] = {}
    for run in runs:
        for each in (*with_needs(run.needs), run):
            ordered.setdefault(each.folder, each)
    return list(ordered.values())


def threads_per_run(jobs: int) -> int:
    """CPU threads for each of `jobs` parallel runs, at least 1."""
    return max(1, processors() // jobs)


@dataclass(frozen=True)
class RunCost:
    """The cost of a run.

    Attributes:
        state: "finished", "resume" or "start".
        images: images seen in training, with repetition.
        macs: multiply-accumulates of training: three forward passes per image.
        seconds: recorded time of a finished run, else an estimate for this machine.
        problem: why the run cannot start, or None; with a problem, the cost is 0.
    """

    state: str
    images: int = 0
    macs: float = 0.0
    seconds: float = 0.0
    problem: str | None = None


def run_cost(run: Request, threads: int = 1) -> RunCost:
    """The cost of a run: recorded, or as by `estimate_cost`.

    Args:
        run: the run.
        threads: its CPU threads.
    """
    config, state = run.config, "resume" if is_run_folder(run.folder) else "start"
    if run.is_finished():
        state, result = "finished", run.result() or {}
        if {"steps", "macs", "seconds"} <= set(result):
            images = result["steps"] * config.engine.batch_size
            macs = STEP_FORWARDS * result["macs"] * images
            return RunCost(state, images, macs, result["seconds"])
    try:
        plan, macs, seconds = estimate_cost(config, threads)
        if config.schedule.minutes is not None:
            return RunCost(state, seconds=60 * config.schedule.minutes)
        return RunCost(state, plan.images, macs * plan.images, seconds)
    except (UserError, OSError) as error:
        return RunCost(state, problem=str(error))


def workload(
    runs: Iterable[Request],
    jobs: int = 2,
    threads: int | None = None,
    each: bool = False,
    expected: float | None = None,
) -> str:
    """The cost of runs and their dependencies, as text.

    Args:
        runs: the runs, in any order.
        jobs: number of parallel runs.
        threads: CPU threads per run; the machine's divided by `jobs` by default.
        each: add a table with name, state and cost of each run.
        expected: seconds in all; by default those of the runs.
    """
    threads = threads or threads_per_run(jobs)
    costs = [(run.name, run_cost(run, threads)) for run in with_needs(runs)]
    states = Counter(cost.state for _, cost in costs)
    waiting = [cost for _, cost in costs if cost.state != "finished"]
    lines = [
        f"{len(costs)} runs: {states['finished']} finished, {states['resume']} to resume, "
        f"{states['start']} to start"
    ]
    if problems := sum(cost.problem is not None for cost in waiting):
        lines.append(f"{problems} of them cannot start; see the table of runs")
    if waiting:
        seconds = expected or sum(cost.seconds for cost in waiting) / jobs
        images, macs = (sum(getattr(cost, n) for cost in waiting) for n in ("images", "macs"))
        # Runs of minutes have no number of images before they end.
        counted = f"{images:.3g} images, {macs:.3g} multiply-accumulates, " if images else ""
        lines.append(
            f"to do: {counted}about {format_duration(seconds)} with {jobs} at a time on this "
            f"machine"
        )
    if each:
        width = max((len(name) for name, _ in costs), default=4)
        lines += ["", f"{'run':{width}}  {'state':8}  {'images':>9}  {'MACs':>9}  {'time':>8}"]
        for name, cost in costs:
            shown = f"{cost.state:8}  {cost.images:9.3g}  {cost.macs:9.2e}  "
            shown += f"{format_duration(cost.seconds):>8}"
            problem = cost.problem and f"cannot start: {cost.problem}"
            lines.append(f"{name:{width}}  {problem or shown}")
    return "\n".join(lines)


_POLL_SECONDS = 0.2


def execute(run: Request) -> str | None:
    """Execute a run in this process, with its output redirected to `log_file`.

    Returns:
        None if the folder now has a result, else the reason.
    """
    log = log_file(run.folder)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with (
            log.open("a", encoding="utf-8") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            training.train(run.config, run.folder, started=time.perf_counter() - run.spent)
    except (UserError, FileNotFoundError, PermissionError, Interrupted, ProcessKilled) as error:
        return one_line(error)
    except (KeyboardInterrupt, SystemExit):
        return "stopped at once; the same command resumes the run"
    except Exception as error:
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        return f"{type(error).__name__}: {one_line(error)} (details in {log})"
    return None if run.is_finished() else f"it ended without a result.json (output in {log})"


def log_file(folder: Path) -> Path:
    """The log file of a run: FOLDER.log next to the run folder."""
    return folder.with_name(folder.name + ".log")


def visible_gpus() -> list[str]:
    """The GPUs of this process, named as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


class LocalExecutor:
    """Executes independent runs in processes on this machine, with one GPU each if available.

    Args:
        jobs: number of parallel runs.
        threads: CPU threads per run; the machine's divided by `jobs` by default. The number of
            threads affects the rounding of sums.
    """

    def __init__(self, jobs: int = 2, threads: int | None = None) -> None:
        checks.integer("jobs", jobs, 1)
        threads = threads or threads_per_run(jobs)
        gpus: list[str | None] = [*visible_gpus()] or [None]
        self._idle = [_Worker(threads, gpus[n % len(gpus)]) for n in reversed(range(jobs))]

    def map(self, runs: Sequence[Request]) -> Iterator[Outcome]:
        """Execute all runs and yield each outcome as the run ends, in any order.

        Closing the iterator stops the remaining runs, which save and can be resumed.
        """
        waiting, running = list(runs), dict[_Worker, Request]()
        try:
            while waiting or running:
                ended = [worker for worker in running if worker.done()]
                outcomes = [Outcome(running.pop(worker), worker.error()) for worker in ended]
                self._idle += ended
                # The next runs start before these are measured, which may take minutes.
                while waiting and self._idle:
                    worker = self._idle.pop()
                    running[worker] = waiting.pop(0)
                    worker.start(running[worker])
                yield from outcomes
                if not outcomes:
                    time.sleep(_POLL_SECONDS)
        finally:
            for worker in running:
                worker.stop()
            for worker in running:
                worker.error()  # waits until the run has saved
            for worker in (*self._idle, *running):
                worker.close()


class _Worker:
    """A process that executes runs one after the other, and is replaced if it dies.

    Args:
        threads: CPU threads.
        gpu: its GPU, named as in CUDA_VISIBLE_DEVICES; None keeps the environment.
    """

    def __init__(self, threads: int, gpu: str | None) -> None:
        self._settings = threads, gpu
        self._process: Any = None
        self._connection: Any = None

    def start(self, run: Request) -> None:
        if self._process is None or not self._process.is_alive():
            # A forked child would inherit locks of other threads.
            context = multiprocessing.get_context("spawn")
            self._connection, child = context.Pipe()
            # Not daemonic, so that training can start data loading processes.
            self._process = context.Process(target=_work, args=(child, *self._settings))
            self._process.start()
            child.close()
        self._connection.send(run)

    def done(self) -> bool:
        """Whether the run or the process has ended."""
        return self._connection.poll()

    def error(self) -> str | None:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            if code < 0:
                return str(ProcessKilled("its process", -code, resumes=True))
            return f"its process ended unexpectedly (exit code {code})"

    def stop(self) -> None:
        """Ask the run to save and stop after the current step."""
        self._process.terminate()

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.join()


def _work(connection: Connection, threads: int, gpu: str | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when CUDA is first used
    torch.set_num_threads(threads)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # Ctrl-C reaches all processes of a terminal. The parent handles it between runs, training
    # during a run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The connection breaks when the parent exits.
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(execute(connection.recv()))


def _exit_with_parent() -> None:
    """Send SIGTERM to this process when the parent exits, so that the run saves first."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def run_all(
    runs: Iterable[Request],
    jobs: int = 2,
    executor: Any = None,
    threads: int | None = None,
    quiet: bool = False,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Execute runs and their dependencies; finished runs are skipped, started ones resumed.

    A failed run does not stop the others.

    Args:
        runs: the runs, in any order; folders may repeat.
        jobs: number of parallel runs.
        executor: an object whose `map` takes runs and yields their outcomes; by default
            processes on this machine.
        threads: CPU threads per run; the machine's divided by `jobs` by default.
        quiet: print no progress.
        ended: called with the outcome of each executed run as it ends.

    Returns:
        the outcome of each given run, in the given order.
    """
    runs = list(runs)
    everything = with_needs(runs)
    outcomes = {run.folder: Outcome(run) for run in everything if run.is_finished()}
    waiting = [run for run in everything if run.folder not in outcomes]
    executor = executor or LocalExecutor(jobs, threads)
    count, total, started = 0, len(waiting), time.monotonic()
    while waiting:
        later = {run.folder for run in waiting}
        # Runs whose dependencies have finished run in parallel.
        wave = [run for run in waiting if not any(needed.folder in later for needed in run.needs)]
        waiting = [run for run in waiting if run not in wave]
        refused = [Outcome(run, why) for run in wave if (why := _failed(run, outcomes))]
        ready = [run for run in wave if not _failed(run, outcomes)]
        for outcome in itertools.chain(refused, executor.map(ready)):
            outcomes[outcome.run.folder] = outcome
            count += 1
            if not quiet:
                # In rounds of parallel runs.
                done, more = (math.ceil(n / jobs) for n in (count, total - count))
                left = (time.monotonic() - started) / done * more
                then = f"; about {format_duration(left)} left" if count < total else ""
                line = f"[{count}/{total}] {_outcome_line(outcome)}{then}"
                print(line, file=sys.stderr, flush=True)
            ended(outcome)
    return [Outcome(run, outcomes[run.folder].error) for run in runs]


def _failed(run: Request, outcomes: Mapping[Path, Outcome]) -> str | None:
    """Why a run cannot start because of a failed dependency, or None."""
    for needed in run.needs:
        if (error := outcomes[needed.folder].error) is not None:
            return f"it needs {needed.name}, which failed: {error}"
    return None


def _outcome_line(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"{outcome.run.name} failed: {outcome.error}"
    result = Run(outcome.run.folder).result
    took = format_duration(result["seconds"])
    return f"{outcome.run.name}: {result['top1']:.1f}% top-1 in {took}"
