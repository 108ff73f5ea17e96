"""Who carries runs out: processes on this machine, a cluster through submitit, or Ray.

The contract between them and everybody else is the run folder. An executor is given runs, sees to
it that each is performed once, and says of each whether it failed; results are read from folders.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from locality.errors import UserError, unknown
from locality.runner.runs import Run
from locality.runner.worker import WorkerProcess, perform

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        run: which one.
        error: None if its folder holds a result, else one sentence saying why not.
    """

    run: Run
    error: str | None = None


class Executor(Protocol):
    """Anything that can carry out runs which do not depend on each other."""

    def map(self, runs: Sequence[Run]) -> Iterator[Outcome]:
        """Carry out all runs, yielding each outcome as it is known, in any order.

        A run that fails is an outcome like the others. Closing the iterator stops what is
        going on; a stopped run has saved and can be resumed.
        """
        ...


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def threads_per_run(jobs: int) -> int:
    """This process's share of the processor for each of `jobs` runs at a time, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // jobs)


class LocalExecutor:
    """Processes on this machine, a few at a time; each sees one GPU, in turn, if there are any.

    Args:
        jobs: runs at a time.
        threads: processor threads per run; the machine's divided by `jobs` unless given. Sums are
            rounded in another order with another number of threads, so repeat a run with the
            same one to repeat it to the last bit.
    """

    def __init__(self, jobs: int = 2, threads: int | None = None) -> None:
        self.jobs = jobs
        self.threads = threads or threads_per_run(jobs)

    def map(self, runs: Sequence[Run]) -> Iterator[Outcome]:
        """See `Executor.map`."""
        waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        stopping = threading.Event()
        workers: list[WorkerProcess] = []
        gpus = visible_gpus()
        for run in runs:
            waiting.put(run)

        def drive(number: int) -> None:
            gpu = gpus[number % len(gpus)] if gpus else None
            worker: WorkerProcess | None = None
            while not stopping.is_set():
                try:
                    run = waiting.get_nowait()
                except queue.Empty:
                    break
                if worker is None or not worker.alive:
                    worker = WorkerProcess(self.threads, gpu)
                    workers.append(worker)
                outcomes.put(Outcome(run, worker.perform(run)))
            if worker is not None:
                worker.close()

        drivers = [
            threading.Thread(target=drive, args=(number,), daemon=True)
            for number in range(min(self.jobs, len(runs)))
        ]
        for driver in drivers:
            driver.start()
        try:
            for _ in runs:
                yield outcomes.get()
        finally:
            stopping.set()
            # More than once: a driver may have been about to start a worker.
            while any(driver.is_alive() for driver in drivers):
                for worker in list(workers):
                    worker.stop()
                for driver in drivers:
                    driver.join(_POLL_SECONDS)


class SubmititExecutor:
    """Jobs of a cluster (SLURM), or processes here where there is none, through submitit.

    Args:
        jobs: jobs at a time; on a cluster the limit of the job array.
        threads: processor cores per job.
        logs: folder for submitit's own files; it has to be on a disk that all machines share.
        parameters: further ones of submitit's, such as `slurm_partition`, `gpus_per_node`,
            `timeout_min`.
    """

    def __init__(
        self, jobs: int, threads: int | None, logs: Path, parameters: dict[str, Any] | None = None
    ) -> None:
        try:
            import submitit
        except ImportError as error:
            raise UserError(
                "executor 'submitit' needs a package: pip install 'locality[slurm]'"
            ) from error
        self.jobs = jobs
        threads = threads or threads_per_run(jobs)
        self._executor = submitit.AutoExecutor(folder=logs)
        self._here = self._executor.cluster != "slurm"
        defaults: dict[str, Any] = {
            "name": "locality",
            "cpus_per_task": threads,
            "timeout_min": 60 * 72,
            "slurm_array_parallelism": jobs,
        }
        self._executor.update_parameters(**defaults | (parameters or {}))
        self._perform = functools.partial(perform_in, os.getcwd(), threads)

    def map(self, runs: Sequence[Run]) -> Iterator[Outcome]:
        """See `Executor.map`."""
        # SLURM queues; submitit's local executor starts everything it is given at once.
        window = self.jobs if self._here else len(runs)
        waiting = list(runs)
        jobs: list[tuple[Run, Any]] = []
        try:
            while waiting or jobs:
                batch, waiting = waiting[: window - len(jobs)], waiting[window - len(jobs) :]
                if batch:
                    submitted = self._executor.map_array(self._perform, batch)
                    jobs += list(zip(batch, submitted, strict=True))
                for run, job in [pair for pair in jobs if pair[1].done()]:
                    jobs.remove((run, job))
                    yield Outcome(run, _ended(job))
                time.sleep(_POLL_SECONDS)
        finally:
            for _, job in jobs:
                job.cancel(check=False)


def _ended(job: Any) -> str | None:
    """The error of a submitit job that is done."""
    problem = job.exception()
    if problem is None:
        return job.results()[0]  # of several tasks the first one speaks
    lines = str(problem).strip().splitlines()
    return f"job {job.job_id} failed: {lines[-1] if lines else type(problem).__name__}"


class RayExecutor:
    """Tasks of a Ray cluster; one is started here unless `RAY_ADDRESS` names another.

    Args:
        jobs: runs at a time.
        threads: processor cores per run.
        resources: further ones per run, such as `{"num_gpus": 1}`.
    """

    def __init__(
        self, jobs: int, threads: int | None, resources: dict[str, Any] | None = None
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise UserError(
                "executor 'ray' needs a package: pip install 'locality[ray]'"
            ) from error
        self._ray = ray
        self.jobs = jobs
        self.threads = threads or threads_per_run(jobs)
        self._resources = {"num_cpus": self.threads} | (resources or {})

    def map(self, runs: Sequence[Run]) -> Iterator[Outcome]:
        """See `Executor.map`."""
        ray = self._ray
        started_here = not ray.is_initialized()
        if started_here:
            here = None if os.environ.get("RAY_ADDRESS") else self.jobs * self.threads
            ray.init(num_cpus=here, include_dashboard=False, log_to_driver=False)
        # A failed run is to be looked at, not tried again in silence.
        task = ray.remote(max_retries=0, **self._resources)(perform_in)
        waiting = list(runs)
        going: dict[Any, Run] = {}
        try:
            while waiting or going:
                while waiting and len(going) < self.jobs:
                    run = waiting.pop(0)
                    going[task.remote(os.getcwd(), self.threads, run)] = run
                done, _ = ray.wait(list(going), num_returns=1)
                for reference in done:
                    run = going.pop(reference)
                    try:
                        yield Outcome(run, ray.get(reference))
                    except ray.exceptions.RayError as error:
                        yield Outcome(run, f"its Ray task failed: {str(error).splitlines()[0]}")
        finally:
            for reference in going:
                ray.cancel(reference)
            if started_here:
                ray.shutdown()


def perform_in(place: str, threads: int, run: Run) -> str | None:
    """`perform`, wherever a backend has put this process.

    Args:
        place: the folder that the run's relative paths start from.
        threads: of the arithmetic.
        run: what to do.
    """
    os.chdir(place)
    torch.set_num_threads(threads)
    return perform(run)


def make_executor(
    name: str, jobs: int, threads: int | None = None, logs: Path | None = None
) -> Executor:
    """The executor of this name.

    Args:
        name: "local", "submitit" or "ray".
        jobs: runs at a time.
        threads: processor threads per run; the machine's divided by `jobs` unless given.
        logs: where submitit keeps its files.

    Raises:
        UserError: for another name, less than one job, or a package that is not installed.
    """
    if jobs < 1:
        raise UserError(f"jobs is {jobs}; give at least 1")
    made: dict[str, Callable[[], Executor]] = {
        "local": lambda: LocalExecutor(jobs, threads),
        "submitit": lambda: SubmititExecutor(jobs, threads, logs or Path("runs/submitit")),
        "ray": lambda: RayExecutor(jobs, threads),
    }
    if name not in made:
        raise unknown("executor", name, made)
    return made[name]()
